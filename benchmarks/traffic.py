"""The serving experiment of Synergy (2310.18813): requests arrive by themselves, and every policy gets the same trace.

    python -m benchmarks.traffic smollm2-135m --drafter ngram --quantization int8 --requests 40 --interval 0.25

Intervals between arrivals are Gamma distributed (shape 1 / CV^2); latency is finish - arrival, waiting included.
Requests join and leave the batch at any time (continuous batching). Nothing is simulated: the engine runs in real time.
The last line is one JSON document.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from benchmarks.options import PlottedDocument, words

from paceline.cli.console import Sheet, bars, latency_table, note, stderr
from paceline.cli.document import checked_plot, command_line, end
from paceline.cli.flags import with_flags
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Repeats, check_draft_tokens
from paceline.config import EngineConfig, Length, SamplingParams
from paceline.core.outputs import Latency, Metrics
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.tools.bench.measure import turns
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.plots import Axes, new_figure, save
from paceline.tools.bench.prompts import COPYING, OPEN
from paceline.tools.bench.recording import Recorder, Round

PROMPTS = tuple(prompt for pair in zip(COPYING[1::2], OPEN[1::2], strict=True) for prompt in pair)
"""The built-in prompts that ``paceline profile`` does not use."""

POLICIES: dict[str, Length] = {
    "plain": 0,
    "fixed 2": 2,
    "fixed 4": 4,
    "fixed 8": 8,
    "bass": "bass",
    "profiled": "profiled",
    "auto": "auto",
}
FIXED = tuple(name for name, length in POLICIES.items() if isinstance(length, int))
TRACES = ("steady", "busy", "varying")
_BUSY, _CALM = 0.25, 2.0  # fractions of the mean interval
_TURNS = 6  # number of changes between the two in the varying trace
_SERIES = 400  # points of k over time in the JSON


@dataclass(frozen=True)
class Load:
    """The traffic: ``requests`` requests, ``interval`` seconds apart on average. tokens: of every answer."""

    requests: int
    interval: float
    cv: float
    tokens: int
    max_batch_size: int
    seed: int = 0


def arrivals(trace: str, load: Load) -> list[float]:
    """Seconds from the start, one per request, of "steady", "busy" or "varying" traffic. Deterministic."""
    generator = np.random.default_rng(load.seed)
    shape = 1 / load.cv**2
    unit = generator.gamma(shape, 1 / shape, load.requests)  # mean 1
    if trace == "steady":
        pace = np.ones(load.requests)
    elif trace == "busy":
        pace = np.full(load.requests, _BUSY)
    else:
        turn = np.arange(load.requests) * _TURNS // load.requests
        pace = np.where(turn % 2 == 0, _CALM, _BUSY)
    return (unit * pace * load.interval).cumsum().tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy under one trace. mean, p50, p99: latencies in seconds.

    latency: milliseconds per token of the trace's first, last and all sequences. means_of_all: ``mean`` of each repeat.
    """

    trace: str
    policy: str
    mean: float
    p50: float
    p99: float
    tokens_per_second: float
    seconds: float
    latency: Latency | None
    means_of_all: list[float] = field(default_factory=list)


Result = TypeVar("Result", bound=PolicyResult)


def median_of(repeated: Sequence[Result]) -> Result:
    """The repeat with the median mean latency."""
    ordered = sorted(repeated, key=lambda result: result.mean)
    return replace(ordered[(len(ordered) - 1) // 2], means_of_all=[result.mean for result in repeated])


def summed(latencies: Sequence[float]) -> dict[str, Any]:
    """The latencies of ``PolicyResult``, in seconds."""
    p99 = float(np.percentile(latencies, 99))
    return {"mean": statistics.fmean(latencies), "p50": statistics.median(latencies), "p99": p99}


@dataclass(frozen=True, kw_only=True)
class TrafficResult(PolicyResult):
    """A policy's result in an engine.

    mean_rows: mean number of decoding rows. mean_k: draft tokens verified per row. Both are means over the time in
    which rows decoded. series: (seconds from the start, draft tokens per row, rows) of rounds.
    """

    mean_rows: float
    mean_k: float
    series: list[tuple[float, float, int]]


def replay(
    engine: Engine, prompts: Sequence[list[int]], times: Sequence[float], tokens: int
) -> tuple[list[float], float, Latency | None]:
    """Run requests that arrive at ``times``, in seconds.

    Returns their latencies in seconds, the seconds until the last one ended, and the milliseconds per token of the
    first, last and all sequences.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    arrived: dict[str, float] = {}
    latencies: list[float] = []
    ended: list[Metrics] = []
    waiting = list(enumerate(times))[::-1]
    started = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - started
        while waiting and waiting[-1][1] <= now:
            number, due = waiting.pop()
            arrived[str(number)] = due
            engine.add(Request(prompts[number % len(prompts)], params, request_id=str(number)))
        if not engine.busy:
            time.sleep(max(0.0, waiting[-1][1] - now))
            continue
        finished = [output for output in engine.step() if output.finished]
        now = time.perf_counter() - started
        latencies += [now - arrived.pop(output.request_id) for output in finished]
        ended += [answer.metrics for output in finished for answer in output.outputs]
    return latencies, time.perf_counter() - started, Latency.of(ended)


def run_policy(llm: LLM, prompts: Sequence[list[int]], trace: str, policy: str, load: Load) -> TrafficResult:
    """Run one policy under one trace, on a new engine that has run one short batch."""
    length = POLICIES[policy]
    if length == 0:
        engine = llm.plain().with_options(max_batch_size=load.max_batch_size).engine
    else:
        engine = llm.with_options(num_speculative_tokens=length, max_batch_size=load.max_batch_size).engine
    replay(engine, prompts, [0.0] * min(4, load.max_batch_size), 16)
    recorder = Recorder(engine.parts.policy)
    engine.use_policy(recorder)
    latencies, seconds, latency = replay(engine, prompts, arrivals(trace, load), load.tokens)
    known = {"trace": trace, "policy": policy, "seconds": seconds, "latency": latency, **summed(latencies)}
    return _result(known, seconds, recorder.rounds)


def _result(known: dict[str, Any], seconds: float, rounds: list[Round]) -> TrafficResult:
    busy = sum(record.ms for record in rounds)
    start = rounds[0].began
    step = max(1, len(rounds) // _SERIES)
    return TrafficResult(
        **known,
        tokens_per_second=sum(record.tokens for record in rounds) / seconds,
        mean_rows=sum(record.rows * record.ms for record in rounds) / busy,
        mean_k=sum(record.mean_drafted * record.ms for record in rounds) / busy,
        series=[
            (round(record.began - start, 3), round(record.mean_drafted, 2), record.rows) for record in rounds[::step]
        ],
    )


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    traces: Sequence[str],
    load: Load,
    repeats: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> Iterator[TrafficResult]:
    """Run every policy under every trace; returns, of the repeats, the one with the median mean latency.

    They take turns, and each repeat begins with another policy.
    """
    policies = [name for name in POLICIES if name != "profiled" or llm.config.profile is not None]
    runs: dict[tuple[str, str], list[TrafficResult]] = {}
    steps = [(trace, policy) for trace in traces for turn in turns(policies, repeats) for policy in turn]
    for trace, policy in progress(steps):
        runs.setdefault((trace, policy), []).append(run_policy(llm, prompts, trace, policy, load))
    yield from map(median_of, runs.values())


def summary(results: Sequence[TrafficResult]) -> dict[str, Any]:
    """By trace: auto's mean latency, over all repeats, over that of the best fixed length and over each policy's."""
    by_trace: dict[str, dict[str, float]] = {}
    for result in results:
        by_trace.setdefault(result.trace, {})[result.policy] = statistics.fmean(result.means_of_all or [result.mean])
    return {
        trace: {
            "best_fixed": min(FIXED, key=means.__getitem__),
            "auto_over_best_fixed": means["auto"] / min(means[name] for name in FIXED),
            "auto_over": {name: means["auto"] / mean for name, mean in means.items()},
        }
        for trace, means in by_trace.items()
    }


def draw(results: Sequence[TrafficResult], path: Path, title: str) -> None:
    """Plot mean and p99 latency by trace and policy; below, k and rows over time under auto, trace by trace."""
    traces = list(dict.fromkeys(result.trace for result in results))
    figure, axes = new_figure(rows=2, columns=len(traces))
    grid = np.reshape(axes, (2, len(traces)))
    for column, trace in enumerate(traces):
        here = [result for result in results if result.trace == trace]
        above, below = grid[0, column], grid[1, column]
        draw_latencies(above, trace, here)
        series = next(r.series for r in here if r.policy == "auto")
        at, k, rows = zip(*series, strict=True)
        below.step(at, rows, where="post", color="0.7", label="rows")
        below.step(at, k, where="post", color="C3", label="k of auto")
        below.set(xlabel="s")
        below.legend(fontsize=8)
    save(figure, path, title)


def draw_latencies(axes: Axes, trace: str, results: Sequence[PolicyResult]) -> None:
    """Plot mean latencies as bars, the 99th percentiles as triangles."""
    axes.bar([r.policy for r in results], [r.mean for r in results], label="mean")
    axes.plot([r.policy for r in results], [r.p99 for r in results], "kv", label="p99")
    axes.set(title=f"{trace} traffic", ylabel="latency, s")
    axes.tick_params(axis="x", rotation=60)
    axes.legend(fontsize=8)


Traces = Annotated[str, typer.Option("--traces", help="steady, busy, varying, or several, separated by commas.")]
Requests = Annotated[int, typer.Option("--requests", min=2, help="Requests of a trace.")]
Interval = Annotated[float, typer.Option("--interval", help="Seconds between arrivals, on average.")]
Variation = Annotated[float, typer.Option("--cv", help="Coefficient of variation of the intervals.")]
AnswerTokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of every answer.")]
ALL_TRACES, DEFAULT_REQUESTS, DEFAULT_INTERVAL, DEFAULT_CV, DEFAULT_TOKENS = ",".join(TRACES), 120, 1.0, 1.0, 64


def main(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    traces: Traces = ALL_TRACES,
    requests: Requests = DEFAULT_REQUESTS,
    interval: Interval = DEFAULT_INTERVAL,
    cv: Variation = DEFAULT_CV,
    max_tokens: AnswerTokens = DEFAULT_TOKENS,
    repeats: Repeats = 1,
    output: PlottedDocument = Path("traffic.json"),
) -> None:
    """Serve the same arriving requests with every length policy. The last line is one JSON document."""
    plot, chosen = checked_plot(output), words("--traces", traces, TRACES)
    check_intervals(interval, cv)
    load = Load(requests, interval, cv, max_tokens, engine.max_batch_size or EngineConfig.DEFAULT_ROWS)
    llm = replace(engine, prefix_cache=False).load(model)
    check_draft_tokens(llm, engine.drafter)
    prompts = [llm.requests.tokenizer.encode(prompt) for prompt in PROMPTS]
    results = list(measure(llm, prompts, chosen, load, repeats, bars(quiet=False)))
    show(f"latency, {requests} requests, median of {repeats}", results, _COLUMNS)
    about = llm.engine.describe()
    draw(results, plot, about)
    document = {
        "command": command_line("python -m benchmarks.traffic"),
        "engine": about,
        "plot": str(plot),
        "load": asdict(load),
        "summary": summary(results),
        "results": [*map(asdict, results)],
        "machine": machine(llm.engine.threads),
        "versions": versions(),
    }
    end(document, output)
    note(f"written: {output}, {plot}")


_COLUMNS = {
    "mean s": "mean:.3f",
    "p50 s": "p50:.3f",
    "p99 s": "p99:.3f",
    "tokens/s": "tokens_per_second:.1f",
    "rows": "mean_rows:.1f",
    "k": "mean_k:.1f",
}


def check_intervals(interval: float, cv: float) -> None:
    """Raise ParameterError for intervals between requests that never end."""
    if not (0 < interval < math.inf and 0 < cv < math.inf):
        raise ParameterError("--interval, --cv", (interval, cv), "finite numbers above 0")


def show(title: str, results: Sequence[PolicyResult], columns: Mapping[str, str]) -> None:
    """Print two tables. columns: heading -> a field of the results and its format."""
    names = [f"{result.trace}: {result.policy}" for result in results]
    cells = [[f"{{0.{field}}}".format(result) for field in columns.values()] for result in results]
    stderr().print(Sheet(title, ["", *columns], [[name, *row] for name, row in zip(names, cells, strict=True)]))
    stderr().print(latency_table(zip(names, (result.latency for result in results), strict=True)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(with_flags(main, without={"num_speculative_tokens", "prefix_cache"}))  # it runs every length

if __name__ == "__main__":
    app()
