"""``paceline profile``: find the best speculation length for every batch size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import Sheet, bars, latency_table, note, stdout
from paceline.cli.document import checked_plot, command_line, end
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet, Repeats, refuse_given, whole_numbers
from paceline.cli.questions import PromptsFile, questions_in, tokens_of
from paceline.core.outputs import Latency
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.tools.bench.fit import PaperFit
    from paceline.tools.bench.profile import MeasuredProfile

DEFAULT_SIZES, DEFAULT_MAX_K, DEFAULT_TOKENS, DEFAULT_REPEATS = "1,2,4,8,16,32", 8, 128, 3  # the paper's sweep


def profile(
    context: typer.Context,
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Batch sizes, separated by commas.")
    ] = DEFAULT_SIZES,
    max_k: Annotated[
        int, typer.Option("--max-k", min=1, max=32, help="Maximum speculation length; all from 0 are measured.")
    ] = DEFAULT_MAX_K,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, help="Tokens of every answer.")] = DEFAULT_TOKENS,
    repeats: Repeats = DEFAULT_REPEATS,
    prompts_file: PromptsFile = None,
    output: Annotated[Path, typer.Option("--output", help="The profile; the plot has the same name with .png.")] = Path(
        "profile.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Measure two small batches once, as a test.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure all speculation lengths at all batch sizes and write a profile. The last line is one JSON document."""
    from paceline.tools.bench.profile import PROMPTS, Sweep, draw, run_profile

    plot = checked_plot(output)
    sizes = tuple(sorted(set(whole_numbers("--batch-sizes", batch_sizes))))
    if quick:
        refuse_given(
            context, "left out beside --quick, which chooses it", "batch_sizes", "max_k", "max_tokens", "repeats"
        )
    if engine.drafter is None:
        raise ParameterError("--drafter", "none", "a drafter: without draft tokens there is nothing to profile")
    asked = [] if prompts_file is None else questions_in(prompts_file)
    sweep = Sweep.quick() if quick else Sweep(sizes, max_k, max_tokens, repeats)
    llm = replace(engine, num_speculative_tokens=sweep.max_k).load(model, quiet)
    prompts = [tokens_of(llm, job) for job in asked] or [llm.requests.tokenizer.encode(prompt) for prompt in PROMPTS]
    measured, fit = run_profile(llm, prompts, sweep, bars(quiet))
    measured.save(output)
    draw(measured, fit, plot, llm.engine.describe())
    if not quiet:
        _show(measured, fit)
        note(f"written: {output}, {plot}")
    end({"command": command_line(), "plot": str(plot)} | measured.as_json(), None)


def _show(profile: MeasuredProfile, fit: PaperFit) -> None:
    longest = max(point.k for point in profile.sweep)
    rows = []
    for size, best in profile.best.items():
        times = [point.ms_per_token for point in profile.sweep if point.batch_size == size]
        rows.append([str(size), *(f"{ms:.1f}" for ms in times), str(best), str(fit.best(size, longest))])
    columns = ["batch", *(f"k={k}" for k in range(longest + 1)), "best k", "fit's k"]
    stdout().print(Sheet("ms per token of a sequence", columns, rows))
    shown = {0: "plain", **{k: f"k = {k}" for k in profile.best.values() if k > 0}}
    stdout().print(
        latency_table(
            [
                (
                    f"batch {p.batch_size}, {shown[p.k]}",
                    Latency(p.first_ms_per_token, p.last_ms_per_token, p.ms_per_token),
                )
                for p in profile.sweep
                if p.k in (0, profile.best[p.batch_size])
            ]
        )
    )
    stdout().print(f"fit: rounds off by {fit.error:.1%}, accepted length by {fit.error_accepted:.1%} on average")
