"""``paceline bench drafters``: which drafter is best for a target on which tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import Sheet, bars, note, stderr
from paceline.cli.document import PlottedDocument, checked_plot, command_line, end
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet, Repeats, numbers, whole_numbers, words
from paceline.config import EngineConfig
from paceline.errors import ParameterError
from paceline.models.files.hub import own_head

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.tools.bench.drafters import Count, DraftTime, MeasurementPlan, Speed

CHOSEN_BY_DRAFTERS = {"drafter", "num_speculative_tokens", "profile", "max_batch_size", "prefix_cache"}


def drafters(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    head: Annotated[str | None, typer.Option("--head", help="A trained head, beside --draft-model's model.")] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks, separated by commas.")] = (
        "code,chat,maths,summary,translation,questions"
    ),
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=20, help="Prompts of every task.")] = 20,
    draft_tokens: Annotated[
        int,
        typer.Option(
            "--draft-tokens", "--guesses", min=1, max=16, help="Draft tokens a round, where acceptance is counted."
        ),
    ] = 4,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Batch sizes, where time is measured.")
    ] = "1,4,8,16",
    temperatures: Annotated[str, typer.Option("--temperatures", help="Temperatures; 0 is greedy.")] = "0,0.8",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, help="Maximum tokens of an answer.")] = 64,
    repeats: Repeats = 3,
    output: PlottedDocument = Path("drafters.json"),
    quiet: Quiet = False,
) -> None:
    """Compare a target's drafters: n-gram lookup, draft model, trained head. The last line is one JSON document."""
    from paceline.tools.bench.drafters import MeasurementPlan, contenders, count, draft_costs, draw, speeds
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.bench.tasks import TASKS

    plot = checked_plot(output)
    sizes = tuple(sorted(set(whole_numbers("--batch-sizes", batch_sizes))))
    wanted = words("--tasks", tasks, TASKS)
    allowed = "numbers from 0 to 2, separated by commas"
    heats = numbers("--temperatures", temperatures, float, lambda heat: 0 <= heat <= 2, allowed)
    plan = MeasurementPlan(
        tuple(task for task in TASKS if task in wanted),
        prompts,
        draft_tokens,
        max_tokens,
        tuple(dict.fromkeys(heats)),
        sizes,
        repeats,
    )
    _refuse_without_model(engine)
    usual = replace(engine, draft_dtype="same", draft_quantization="same", draft_vocab_size=None)
    target = replace(usual, draft_model=None).load(model, quiet)
    with_model = _with(engine, model, engine.draft_model)
    with_head = _with(usual, model, head or own_head(model))
    known = contenders(target, with_model, with_head)

    counts = list(count(known, plan, bars(quiet)))
    costs = list(draft_costs(known, plan))
    fast = list(speeds(known, plan, bars(quiet)))
    if not quiet:
        for temperature in plan.temperatures:
            stderr().print(_acceptance(counts, plan, temperature))
        stderr().print(_speeds(fast, costs, plan))
        note(f"written: {output}, {plot}")
    draw(counts, fast, plot, target.engine.describe())
    document = {
        "command": command_line(),
        "plan": asdict(plan),
        "engines": {each.name: each.llm.engine.describe() for each in known},
        "machine": machine(target.engine.threads),
        "versions": versions(),
        "acceptance": [each.as_document() for each in counts],
        "costs": [asdict(each) for each in costs],
        "speeds": [asdict(each) for each in fast],
    }
    end(document, output)


def _refuse_without_model(engine: EngineFlags) -> None:
    for name in ("draft_dtype", "draft_quantization", "draft_vocab_size"):
        value = getattr(engine, name)
        if engine.draft_model is None and value != getattr(EngineConfig, name):
            raise ParameterError(f"--{name.replace('_', '-')}", value, "left out without --draft-model")


def _with(engine: EngineFlags, model: str, draft: str | None) -> LLM | None:
    return None if draft is None else replace(engine, draft_model=draft).load(model, quiet=True)


def _acceptance(counts: Sequence[Count], plan: MeasurementPlan, temperature: float) -> Sheet:
    here = {(each.drafter, each.task): each for each in counts if each.temperature == temperature}
    rows = [
        [name, *(f"{here[name, task].mean_acceptance_length:.2f}" for task in plan.tasks)]
        for name in dict.fromkeys(drafter for drafter, _ in here)
    ]
    title = f"tokens a round, {plan.k} draft tokens, temperature {temperature:g}"
    return Sheet(title, ["", *plan.tasks], rows)


def _speeds(fast: Sequence[Speed], costs: Sequence[DraftTime], plan: MeasurementPlan) -> Sheet:
    cells = [(size, temperature) for temperature in plan.temperatures for size in plan.batch_sizes]
    found = {(each.drafter, each.batch_size, each.temperature): each.speed_up for each in fast}
    shares = {(each.drafter, each.batch_size): each.share for each in costs}
    smallest = plan.batch_sizes[0]
    rows = [
        [name, f"{shares[name, smallest]:.0%}", *(f"{found[name, size, heat]:.2f}x" for size, heat in cells)]
        for name in dict.fromkeys(drafter for drafter, _, _ in found)
    ]
    columns = ["", f"a draft of {plan.k},\nof a round", *(f"rows {size}\nT={heat:g}" for size, heat in cells)]
    return Sheet("auto over plain decoding", columns, rows)
