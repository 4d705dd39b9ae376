"""``paceline bench traffic``, ``traffic-http`` and ``phases``: whether the speculation length follows the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import Sheet, bars, latency_table, note, stderr
from paceline.cli.document import PlottedDocument, checked_plot, command_line, end
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet, Repeats, check_draft_tokens, refuse_given
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.tools.bench.traffic import PolicyResult

Quick = Annotated[bool, typer.Option("--quick", help="Run a few short requests only, as a test.")]
Traces = Annotated[str, typer.Option("--traces", help="steady, busy, varying, or several, separated by commas.")]
Requests = Annotated[int, typer.Option("--requests", min=2, help="Requests of a trace.")]
Interval = Annotated[float, typer.Option("--interval", help="Seconds between arrivals, on average.")]
Variation = Annotated[float, typer.Option("--cv", help="Coefficient of variation of the intervals.")]
AnswerTokens = Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of every answer.")]
ALL_TRACES, DEFAULT_REQUESTS, DEFAULT_INTERVAL, DEFAULT_CV, DEFAULT_TOKENS = "steady,busy,varying", 120, 1.0, 1.0, 64


def traffic(
    context: typer.Context,
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    traces: Traces = ALL_TRACES,
    requests: Requests = DEFAULT_REQUESTS,
    interval: Interval = DEFAULT_INTERVAL,
    cv: Variation = DEFAULT_CV,
    max_tokens: AnswerTokens = DEFAULT_TOKENS,
    repeats: Repeats = 1,
    output: PlottedDocument = Path("traffic.json"),
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Serve the same arriving requests with every length policy. The last line is one JSON document."""
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.bench.traffic import PROMPTS, Load, draw, measure, summary

    plot = checked_plot(output)
    _need_drafter(engine)
    wanted = _known_traces(traces)
    _check_intervals(interval, cv)
    load = Load(requests, interval, cv, max_tokens, engine.max_batch_size)
    if quick:
        refuse_given(
            context,
            "left out beside --quick, which chooses it",
            "requests",
            "interval",
            "cv",
            "max_tokens",
            "max_batch_size",
        )
        load = Load(6, 0.02, 1.0, 8, 4)
    llm = replace(engine, prefix_cache=False).load(model, quiet)
    check_draft_tokens(llm, engine.drafter)
    prompts = [llm.requests.tokenizer.encode(prompt) for prompt in PROMPTS]
    results = list(measure(llm, prompts, wanted, load, repeats, bars(quiet)))
    if not quiet:
        rows = [
            _row(result, ("mean", "p50", "p99"), ("tokens_per_second", "mean_rows", "mean_k")) for result in results
        ]
        columns = ["", "mean s", "p50 s", "p99 s", "tokens/s", "rows", "k"]
        stderr().print(Sheet(f"latency, {load.requests} requests, median of {repeats}", columns, rows))
        stderr().print(latency_table([(f"{result.trace}: {result.policy}", result.latency) for result in results]))
    draw(results, plot, llm.engine.describe())
    document = {"load": asdict(load), "summary": summary(results), "results": [*map(asdict, results)]}
    document |= {"machine": machine(llm.engine.threads), "versions": versions()}
    _finish(document, llm.engine.describe(), output, plot, quiet)


def traffic_http(
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
    quiet: Quiet = False,
) -> None:
    """Send the traffic of bench traffic to running servers, each with its policy or a limit on draft tokens."""
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.bench.traffic import Load
    from paceline.tools.bench.traffic_http import compared, draw, measure, served

    plot = checked_plot(output)
    _check_intervals(interval, cv)
    load = Load(requests, interval, cv, max_tokens, max_batch_size=0)  # the server's own
    policies = served(servers)
    results = list(measure(policies, _known_traces(traces), load, repeats, bars(quiet), api_key))
    if not quiet:
        rows = [_row(result, ("mean", "p50", "p99", "mean_ttft"), ("tokens_per_second",)) for result in results]
        columns = ["", "mean s", "p50 s", "p99 s", "first token s", "tokens/s"]
        stderr().print(Sheet(f"latency over HTTP, {load.requests} requests, median of {repeats}", columns, rows))
        stderr().print(latency_table([(f"{result.trace}: {result.policy}", result.latency) for result in results]))
    where = ", ".join(dict.fromkeys(policy.url for policy in policies))
    draw(results, plot, where)
    sent = {name: value for name, value in asdict(load).items() if name != "max_batch_size"}
    last = policies[-1].name
    document = {"load": sent, "policies": [asdict(policy) for policy in policies], "results": [*map(asdict, results)]}
    document |= {"compared": {"policy": last, "mean_latency_over": compared(results, last)}}
    document |= {"machine": machine(), "versions": versions()}
    _finish(document, where, output, plot, quiet)


CHOSEN_BY_PHASES = {
    "drafter",
    "reference_document",
    "num_speculative_tokens",
    "speculation_width",
    "max_batch_size",
    "profile",
    "prefix_cache",
}


def phases(
    context: typer.Context,
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of a row in each phase.")] = 300,
    repeats: Repeats = 3,
    output: PlottedDocument = Path("phases.json"),
    quick: Quick = False,
    quiet: Quiet = False,
) -> None:
    """Compare auto with every fixed length and an oracle: batch 1, 16, 1, SYNTHETIC acceptance 0.9, 0.1, 0.9."""
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.bench.phases import PHASES, LoadPhase, Stage, compare, draw

    plot = checked_plot(output)
    if quick:
        refuse_given(context, "left out beside --quick, which chooses it", "max_tokens", "repeats")
    llm = replace(engine, prefix_cache=False).load(model, quiet)
    if quick:
        stage = Stage(llm, [LoadPhase(1, 0.9), LoadPhase(2, 0.1)], tokens=8)
        repeats = 1
    else:
        stage = Stage(llm, PHASES, max_tokens)
    comparison = compare(stage, repeats, bars(quiet))
    document = comparison.as_json()
    if not quiet:
        names = [f"{phase.rows} x {phase.acceptance}" for phase in comparison.phases]
        rows = [
            [name, *(f"{s:.2f}" for s in run.seconds), f"{document['over_oracle'][name]:.3f}"]
            for name, run in comparison.runs.items()
        ]
        stderr().print(Sheet("seconds by phase (rows x synthetic acceptance)", ["k", *names, "over oracle"], rows))
        latencies = [(name, run.latency) for name, run in comparison.runs.items()]
        stderr().print(
            latency_table([(f"{k}: {n}", each) for k, of_k in latencies for n, each in zip(names, of_k, strict=True)])
        )
    draw(comparison, plot, stage.engine.describe())
    document |= {"machine": machine(stage.engine.threads), "versions": versions()}
    _finish(document, stage.engine.describe(), output, plot, quiet)


def _need_drafter(engine: EngineFlags) -> None:
    if engine.drafter is None:
        raise ParameterError("--drafter", "none", "a drafter: without draft tokens all policies are the same")


def _check_intervals(interval: float, cv: float) -> None:
    if not (0 < interval < math.inf and 0 < cv < math.inf):
        raise ParameterError("--interval, --cv", (interval, cv), "finite numbers above 0")


def _known_traces(text: str) -> list[str]:
    from paceline.tools.bench.traffic import TRACES

    wanted = text.split(",")
    if not set(wanted) <= set(TRACES):
        raise ParameterError("--traces", text, f"names out of {', '.join(TRACES)}, separated by commas")
    return wanted


def _row(result: PolicyResult, seconds: Sequence[str], others: Sequence[str]) -> list[str]:
    """A row of a table. seconds: fields with three decimals; others: with one."""
    cells = [f"{getattr(result, name):.{digits}f}" for names, digits in ((seconds, 3), (others, 1)) for name in names]
    return [f"{result.trace}: {result.policy}", *cells]


def _finish(document: dict[str, Any], engine: str, output: Path, plot: Path, quiet: bool) -> None:
    """Write the document to the file and, as the last line, to stdout."""
    end({"command": command_line(), "engine": engine, "plot": str(plot)} | document, output)
    if not quiet:
        note(f"written: {output}, {plot}")
