"""The serving experiment against running servers: the traces of ``traffic``, over HTTP, streamed.

    python -m benchmarks.traffic_http plain=http://127.0.0.1:8101@0 auto=http://127.0.0.1:8100 --requests 40

A server has its own length policy; each request may lower it (``num_speculative_tokens``, 0 turns speculation off).
One server with ``--num-speculative-tokens 8`` can run every fixed length up to 8, and each other policy needs a server
of its own. Start them with ``--lookup-tokens 0``: the same prompts come to each policy, and a later one would copy the
answers of an earlier. Latency counts from the moment a request is due until its last token has arrived.
The last line is one JSON document.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from benchmarks.options import PlottedDocument, words
from benchmarks.traffic import (
    ALL_TRACES,
    DEFAULT_CV,
    DEFAULT_INTERVAL,
    DEFAULT_REQUESTS,
    DEFAULT_TOKENS,
    PROMPTS,
    TRACES,
    AnswerTokens,
    Interval,
    Load,
    PolicyResult,
    Requests,
    Traces,
    Variation,
    arrivals,
    check_intervals,
    draw_latencies,
    median_of,
    show,
    summed,
)

from paceline.cli.console import bars, note
from paceline.cli.document import checked_plot, command_line, end
from paceline.cli.options import Repeats
from paceline.core.outputs import Latency, Metrics
from paceline.errors import PacelineError, ParameterError
from paceline.tools.bench.measure import turns
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.plots import new_figure, save

MAX_DRAFT_TOKENS: dict[str, int | None] = {"plain": 0, "at most 2": 2, "at most 4": 4, "the server's": None}
_ADDRESS = re.compile(r"(?:(?P<name>[^=]*)=)?(?P<url>https?://[^@]+)(?:@(?P<most>\d+))?")
_TIMEOUT = 600.0  # seconds without a byte


@dataclass(frozen=True)
class Served:
    """A policy, and the server that runs it with at most ``most`` draft tokens per request; None: any number."""

    name: str
    url: str
    most: int | None = None


def served(addresses: Sequence[str]) -> list[Served]:
    """The policies for a list of addresses.

    ``NAME=URL`` is a server's own policy, ``NAME=URL@2`` the same with at most 2 draft tokens. ``URL`` gives four
    policies, with the limits of ``MAX_DRAFT_TOKENS``. Raises ParameterError for an invalid address, or if two policies
    have the same name.
    """
    policies = [policy for address in addresses for policy in _served_at(address)]
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise ParameterError("servers", names, "a name of its own for each policy: NAME=URL")
    return policies


def _served_at(address: str) -> list[Served]:
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise ParameterError("servers", address, "URL, NAME=URL or NAME=URL@MOST, with http:// or https://")
    name, url, most = parts.group("name", "url", "most")
    if name is None and most is None:
        return [Served(limit, url, most) for limit, most in MAX_DRAFT_TOKENS.items()]
    return [Served(name or f"at most {most}", url, None if most is None else int(most))]


@dataclass(frozen=True)
class Answered:
    """One request. Seconds from its due time to its first and to its last token; and the clock's time at its end."""

    first: float
    latency: float
    tokens: int
    ended: float

    @property
    def metrics(self) -> Metrics:
        """The request's metrics as the engine would report them, measured here."""
        return Metrics(first_token=self.first, finished=self.latency, output_tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class HttpResult(PolicyResult):
    """A policy's result over HTTP. mean_ttft: mean time to the first token in seconds."""

    mean_ttft: float


async def ask(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> Answered:
    """Send one completion and read its stream.

    Raises PacelineError with the server's message if it refuses, and if the stream breaks off or has no usage.
    """
    try:
        return await _ask(client, body, due)
    except (httpx.HTTPError, ValueError) as error:  # ValueError: a chunk that was cut off
        raise PacelineError(f"the connection to {client.base_url} broke: {error or type(error).__name__}") from error


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> Answered:
    first, tokens, done = 0.0, None, False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            detail = (await reply.aread()).decode(errors="replace")
            raise PacelineError(f"the server answered {reply.status_code}: {detail}")
        async for line in reply.aiter_lines():
            done = done or line == "data: [DONE]"
            if not line.startswith("data: ") or done:
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise PacelineError(f"the server broke off: {chunk['error']}")
            if chunk["choices"] and not first:
                first = time.perf_counter() - due
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    ended = time.perf_counter()
    if not done or tokens is None:
        raise PacelineError(f"{client.base_url} ended a stream without {'usage' if done else '[DONE]'}")
    return Answered(first or ended - due, ended - due, tokens, ended)


async def _ask_when_due(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> Answered:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return await ask(client, body, due)


async def replay(
    client: httpx.AsyncClient, model: str, load: Load, times: Sequence[float], most: int | None
) -> list[Answered]:
    """Send requests at ``times``, seconds from now, with at most ``most`` draft tokens (None: the server's choice)."""
    started = time.perf_counter()
    asked = []
    for number, arrival in enumerate(times):
        body = {
            "model": model,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": load.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if most is not None:
            body["num_speculative_tokens"] = most
        asked.append(_ask_when_due(client, body, started + arrival))
    async with asyncio.TaskGroup() as group:  # a failure cancels the others
        tasks = [group.create_task(each) for each in asked]
    return [task.result() for task in tasks]


async def run_policy(client: httpx.AsyncClient, model: str, trace: str, policy: Served, load: Load) -> HttpResult:
    """Run one policy under one trace."""
    started = time.perf_counter()
    answers = await replay(client, model, load, arrivals(trace, load), policy.most)
    seconds = max(answer.ended for answer in answers) - started
    return HttpResult(
        trace=trace,
        policy=policy.name,
        **summed([answer.latency for answer in answers]),
        mean_ttft=statistics.fmean(answer.first for answer in answers),
        tokens_per_second=sum(answer.tokens for answer in answers) / seconds,
        seconds=seconds,
        latency=Latency.of(answer.metrics for answer in answers),
    )


def make_client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """An HTTP client for the server."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits)


async def served_model(client: httpx.AsyncClient) -> str:
    """The server's name of its model. Raises PacelineError if there is no such server."""
    try:
        reply = await client.get("/v1/models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise PacelineError(f"no OpenAI-compatible server at {client.base_url}: {error}") from error


def measure(
    policies: Sequence[Served],
    traces: Sequence[str],
    load: Load,
    repeats: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    api_key: str | None = None,
) -> Iterator[HttpResult]:
    """Run every policy under every trace, taking turns as in ``traffic``.

    For each pair the repeat with the median mean latency is returned.
    """
    steps = [(trace, policy) for trace in traces for turn in turns(policies, repeats) for policy in turn]
    results: dict[tuple[str, Served], list[HttpResult]] = {}

    async def run(trace: str, policy: Served) -> HttpResult:
        async with make_client(policy.url, api_key) as client:
            return await run_policy(client, await served_model(client), trace, policy, load)

    for step in progress(steps):
        try:
            results.setdefault(step, []).append(asyncio.run(run(*step)))
        except* PacelineError as group:
            raise PacelineError(str(_first(group))) from group
    yield from map(median_of, results.values())


def compared(results: Sequence[HttpResult], last: str) -> dict[str, dict[str, float]]:
    """By trace and policy: the mean latency of the policy named ``last``, over the policy's own."""
    means = {(result.trace, result.policy): result.mean for result in results}
    return {
        trace: {name: means[trace, last] / mean for (of, name), mean in means.items() if of == trace}
        for trace in dict.fromkeys(result.trace for result in results)
    }


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def draw(results: Sequence[HttpResult], path: Path, title: str) -> None:
    """Plot mean and p99 latency by trace and policy."""
    traces = list(dict.fromkeys(result.trace for result in results))
    figure, axes = new_figure(columns=len(traces))
    for here, trace in zip(np.atleast_1d(axes), traces, strict=True):
        draw_latencies(here, trace, [result for result in results if result.trace == trace])
    save(figure, path, title)


def main(
    servers: Annotated[
        list[str],
        typer.Argument(
            help="Running servers: URL (such as http://127.0.0.1:8000), or a policy each: NAME=URL, or NAME=URL@2 for "
            "at most 2 draft tokens a round."
        ),
    ],
    traces: Traces = ALL_TRACES,
    requests: Requests = DEFAULT_REQUESTS,
    interval: Interval = DEFAULT_INTERVAL,
    cv: Variation = DEFAULT_CV,
    max_tokens: AnswerTokens = DEFAULT_TOKENS,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="PACELINE_API_KEY", help="The servers' API key.")
    ] = None,
    repeats: Repeats = 1,
    output: PlottedDocument = Path("traffic-http.json"),
) -> None:
    """Send the traffic of benchmarks.traffic to running servers, each with its policy or a limit on draft tokens."""
    plot, chosen = checked_plot(output), words("--traces", traces, TRACES)
    check_intervals(interval, cv)
    load = Load(requests, interval, cv, max_tokens, max_batch_size=0)  # the server's own
    policies = served(servers)
    results = list(measure(policies, chosen, load, repeats, bars(quiet=False), api_key))
    show(f"latency over HTTP, {requests} requests, median of {repeats}", results, _COLUMNS)
    urls = ", ".join(dict.fromkeys(policy.url for policy in policies))
    draw(results, plot, urls)
    last = policies[-1].name
    document = {
        "command": command_line("python -m benchmarks.traffic_http"),
        "engine": urls,
        "plot": str(plot),
        "load": {name: value for name, value in asdict(load).items() if name != "max_batch_size"},
        "policies": [asdict(policy) for policy in policies],
        "results": [*map(asdict, results)],
        "compared": {"policy": last, "mean_latency_over": compared(results, last)},
        "machine": machine(),
        "versions": versions(),
    }
    end(document, output)
    note(f"written: {output}, {plot}")


_COLUMNS = {
    "mean s": "mean:.3f",
    "p50 s": "p50:.3f",
    "p99 s": "p99:.3f",
    "first token s": "mean_ttft:.3f",
    "tokens/s": "tokens_per_second:.1f",
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
