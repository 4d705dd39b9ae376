"""All drafters of one target on six tasks: acceptance, cost and speed.

    python -m benchmarks.drafters MODEL --draft-model DRAFT --head HEAD

There are two measurements. Acceptance does not depend on time: every drafter proposes k tokens per round, and the
accepted ones are counted, task by task. For speed, ``auto`` chooses the length, and plain decoding and all drafters
take turns on the same batches, in which the tasks are mixed evenly. The last line is one JSON document.

The tasks differ in how much can be copied or predicted. code: functions to complete. chat: open requests. maths: word
    problems. summary: a short report to shorten. translation: sentences, to and from four languages. questions: facts,
    in a sentence or two.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from benchmarks.options import PlottedDocument, words

from paceline.cli.console import Sheet, bars, note, stderr
from paceline.cli.document import checked_plot, command_line, end
from paceline.cli.flags import with_flags
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Repeats, numbers, whole_numbers
from paceline.config import EngineConfig, SamplingParams
from paceline.config.files import read_text
from paceline.config.ranges import rules_of
from paceline.config.registry import DRAFTERS
from paceline.errors import ParameterError
from paceline.lengths import FixedLength
from paceline.lengths.calibration import Grid
from paceline.llm import LLM
from paceline.models.files.hub import own_head
from paceline.tools.bench.measure import questions, run_batch, turns
from paceline.tools.bench.offline import Paceline, machine, versions
from paceline.tools.bench.plots import new_figure, save
from paceline.tools.bench.recording import Recorder, Round, kept_by_position

Task = Literal["code", "chat", "maths", "summary", "translation", "questions"]
TASKS: tuple[Task, ...] = get_args(Task)
_LINES = [json.loads(line) for line in (Path(__file__).parent / "data" / "tasks.jsonl").read_bytes().splitlines()]
PROMPTS: Mapping[str, tuple[str, ...]] = {
    task: tuple(line["text"] for line in _LINES if line["set"] == task) for task in TASKS
}
"""Twenty user messages for each task; models with a chat template are asked them as a chat."""

ROWS = 8  # rows of a batch whose acceptance is counted
SIBLINGS = 4  # samples per prompt when they are each other's source
COST_SECONDS = 1.0
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class MeasurementPlan:
    """The measurements.

    texts: user messages by task. prompts: of each task; k: draft tokens where acceptance is counted; tokens: longest
    answer.
    """

    texts: Mapping[str, tuple[str, ...]]
    prompts: int
    k: int
    tokens: int
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    repeats: int

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.texts)

    def as_document(self) -> dict[str, Any]:
        """All fields but the texts, for JSON."""
        fields = asdict(self)
        del fields["texts"]
        return {"tasks": self.tasks, **fields}


@dataclass(frozen=True)
class Contender:
    """One drafter of the target. answers: per prompt where acceptance is counted."""

    name: str
    llm: LLM
    answers: int = 1

    def at(self, temperature: float) -> bool:
        """Whether it takes part at a temperature: greedy samples of a prompt are equal, with nothing to copy."""
        return temperature > 0 or self.answers == 1


def contenders(target: LLM, with_model: LLM | None, with_head: LLM | None) -> list[Contender]:
    """All drafters for the target: n-gram lookup, and those of a draft model and a trained head, if given."""
    copies = target.with_options(drafter="ngram")
    found = [Contender("ngram", copies), Contender("siblings", copies, SIBLINGS)]
    if with_model is not None:
        names = {"model": "model", "hybrid": "model or copies"}
        found += [Contender(name, with_model.with_options(drafter=drafter)) for drafter, name in names.items()]
    if with_head is not None:
        names = {"feature": "head", "hybrid": "head or copies"}
        found += [Contender(name, with_head.with_options(drafter=drafter)) for drafter, name in names.items()]
    return found


@dataclass(frozen=True)
class Count:
    """Acceptance with k draft tokens per round.

    rounds: of all rows together.
    by_position: probability that draft token 1, 2, ... is accepted if those before it were; None where none was tried.
    saved_by_sibling: fraction of rounds that accepted a draft token with a higher-ranked sibling.
    """

    drafter: str
    task: str
    temperature: float
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    by_position: tuple[float | None, ...]
    saved_by_sibling: float

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round and sequence, including those of the last round beyond the end."""
        return 1 + self.accepted / max(1, self.rounds)

    def as_document(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self) | {"mean_acceptance_length": self.mean_acceptance_length}


def count(
    drafters: Sequence[Contender], plan: MeasurementPlan, progress: Callable[[Iterable[Any], str], Iterable[Any]]
) -> Iterator[Count]:
    """Count acceptance of every drafter on every task at every temperature. progress(steps, what) may show a bar."""
    engines = {
        each.name: each.llm.with_options(max_batch_size=ROWS, num_speculative_tokens=plan.k) for each in drafters
    }
    steps = [
        (each, task, temperature)
        for each in drafters
        for task in plan.tasks
        for temperature in plan.temperatures
        if each.at(temperature)
    ]
    for each, task, temperature in progress(steps, "acceptance"):
        llm = engines[each.name]
        recorder = llm.engine.use_policy(Recorder(FixedLength(plan.k)))
        asked = questions(llm, plan.texts[task][: plan.prompts])
        run = run_batch(llm, asked, _sampled(plan, temperature, each.answers, len(asked)))
        yield _counted(each.name, task, temperature, run.tokens, recorder.rounds, plan.k)


def _sampled(plan: MeasurementPlan, temperature: float, answers: int, prompts: int) -> list[SamplingParams]:
    """Sampling parameters: every prompt has its own seed, the same for all drafters."""
    return [
        SamplingParams(temperature=temperature, max_tokens=plan.tokens, seed=seed, n=answers) for seed in range(prompts)
    ]


def _counted(drafter: str, task: str, temperature: float, tokens: int, rounds: Sequence[Round], k: int) -> Count:
    rows = [row for record in rounds for row in zip(record.accepted, record.depths, strict=True)]
    return Count(
        drafter=drafter,
        task=task,
        temperature=temperature,
        tokens=tokens,
        rounds=len(rows),
        drafted=sum(sum(record.drafted) for record in rounds),
        accepted=sum(accepted for accepted, _ in rows),
        by_position=kept_by_position(rows, k),
        saved_by_sibling=sum(record.saved for record in rounds) / max(1, len(rows)),
    )


@dataclass(frozen=True)
class Speed:
    """One drafter at one batch size: ``auto`` over plain decoding, the median of the repeats, without prefill."""

    drafter: str
    batch_size: int
    temperature: float
    speed_up: float
    of_all: tuple[float, ...]


def speeds(
    drafters: Sequence[Contender],
    plan: MeasurementPlan,
    progress: Callable[[Iterable[Any], str], Iterable[Any]],
    at_least: int = len(TASKS),
) -> Iterator[Speed]:
    """Time every drafter at every batch size and temperature, in turn; siblings are left out (they share a prompt).

    at_least: the fewest prompts of a turn.
    """
    asked = [each for each in drafters if each.answers == 1]
    cells = [(size, temperature) for size in plan.batch_sizes for temperature in plan.temperatures]
    for size, temperature in progress(cells, "speed"):
        yield from _speeds(asked, plan, mixed_batches(plan.texts, size, at_least), temperature)


def _speeds(
    drafters: Sequence[Contender], plan: MeasurementPlan, batches: Sequence[Sequence[str]], temperature: float
) -> list[Speed]:
    size = len(batches[0])
    options = {each.name: each.llm.with_options(max_batch_size=size, prefix_cache=False) for each in drafters}
    plain = drafters[0].llm.plain().with_options(max_batch_size=size, prefix_cache=False)
    sides = [Paceline(name, llm, None, temperature) for name, llm in {"plain": plain, **options}.items()]
    prompts = [questions(plain, batch) for batch in batches]
    for side in sides:
        side.time(prompts[0], WARM_UP_TOKENS)
    paces: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in turns(sides, plan.repeats):
        for side in turn:
            timings = [side.time(batch, plan.tokens) for batch in prompts]
            paces[side.name].append(sum(t.decode_seconds for t in timings) / sum(t.tokens for t in timings))
    return [
        Speed(name, size, temperature, statistics.median(gains), tuple(gains))
        for name, own in list(paces.items())[1:]
        for gains in [[base / pace for base, pace in zip(paces["plain"], own, strict=True)]]
    ]


def mixed_batches(texts: Mapping[str, Sequence[str]], size: int, at_least: int) -> list[list[str]]:
    """The fewest batches of ``size`` prompts with equally many of every task, and ``at_least`` prompts in all.

    texts: by task; they are repeated where a task has too few.
    """
    tasks = [*texts.values()]
    equal = math.lcm(len(tasks), size)
    wanted = equal * math.ceil(at_least / equal)
    mixed = [tasks[n % len(tasks)][n // len(tasks) % len(tasks[n % len(tasks)])] for n in range(wanted)]
    return [mixed[first : first + size] for first in range(0, wanted, size)]


@dataclass(frozen=True)
class DraftTime:
    """The time of drafting k tokens for each row: in milliseconds, and as a fraction of a plain round."""

    drafter: str
    batch_size: int
    k: int
    ms: float
    share: float


def draft_costs(drafters: Sequence[Contender], plan: MeasurementPlan) -> Iterator[DraftTime]:
    """The cost of each drafter, measured like ``auto`` does."""
    for each in drafters:
        if each.answers == 1:
            engine = each.llm.with_options(max_batch_size=max(plan.batch_sizes)).engine
            costs = engine.measure_costs(Grid(plan.batch_sizes, (0, plan.k), COST_SECONDS))
            for size in plan.batch_sizes:
                ms = costs.draft_ms(size, plan.k)
                yield DraftTime(each.name, size, plan.k, ms, ms / costs.verify_ms(size, 0))


def draw(counts: Sequence[Count], fast: Sequence[Speed], path: Path, title: str) -> None:
    """Plot tokens per round by task, and speed over plain decoding by batch size, at the first temperature."""
    figure, (left, right) = new_figure(columns=2)
    names = list(dict.fromkeys(each.drafter for each in counts))
    tasks = list(dict.fromkeys(each.task for each in counts))
    first = counts[0].temperature
    for number, name in enumerate(names):
        here = [each for each in counts if each.drafter == name and each.temperature == first]
        places = [tasks.index(each.task) + 0.8 * number / len(names) for each in here]
        left.bar(places, [each.mean_acceptance_length for each in here], 0.8 / len(names), label=name)
        line = [each for each in fast if each.drafter == name and each.temperature == first]
        right.plot([each.batch_size for each in line], [each.speed_up for each in line], "o-", color=f"C{number}")
    left.set_xticks([place + 0.4 for place in range(len(tasks))], tasks, fontsize=8)
    left.set(ylabel="tokens per round")
    left.legend(fontsize=8)
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xlabel="rows", ylabel="over plain decoding", ylim=(0, None))
    save(figure, path, title)


def main(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    head: Annotated[str | None, typer.Option("--head", help="A trained head, beside --draft-model's model.")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="Another drafter: a name, module:Class or path.py:Class. Repeatable."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts-file",
            help='JSON lines in place of the tasks, as in Spec-Bench: {"category": ..., "turns": [...]}, of which the '
            'first is asked; or {"prompt": ...}.',
        ),
    ] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks, separated by commas.")] = ",".join(TASKS),
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=20, help="Prompts of every task.")] = 20,
    draft_tokens: Annotated[
        int,
        typer.Option("--draft-tokens", min=1, max=16, help="Draft tokens a round, where acceptance is counted."),
    ] = 4,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Batch sizes, where time is measured.")
    ] = "1,4,8,16",
    temperatures: Annotated[str, typer.Option("--temperatures", help="Temperatures; 0 is greedy.")] = "0,0.8",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, help="Maximum tokens of an answer.")] = 64,
    repeats: Repeats = 3,
    output: PlottedDocument = Path("drafters.json"),
) -> None:
    """Compare a target's drafters: n-gram lookup, draft model, trained head. The last line is one JSON document."""
    plot = checked_plot(output)
    chosen = words("--tasks", tasks, TASKS)
    allowed = "numbers from 0 to 2, separated by commas"
    if prompts_file is not None and chosen != list(TASKS):
        raise ParameterError("--tasks", tasks, "left out beside --prompts-file, whose categories are the tasks")
    plan = MeasurementPlan(
        {task: PROMPTS[task] for task in TASKS if task in chosen}
        if prompts_file is None
        else by_category(prompts_file),
        prompts,
        draft_tokens,
        max_tokens,
        tuple(dict.fromkeys(numbers("--temperatures", temperatures, float, lambda value: 0 <= value <= 2, allowed))),
        tuple(sorted(set(whole_numbers("--batch-sizes", batch_sizes)))),
        repeats,
    )
    target, known = load_contenders(engine, model, head or own_head(model), also or ())
    counts = list(count(known, plan, bars(quiet=False)))
    costs = list(draft_costs(known, plan))
    fast = list(speeds(known, plan, bars(quiet=False)))
    for temperature in plan.temperatures:
        stderr().print(_acceptance_table(counts, plan, temperature))
    stderr().print(_speed_table(fast, costs, plan))
    draw(counts, fast, plot, target.engine.describe())
    document = {
        "command": command_line("python -m benchmarks.drafters"),
        "plan": plan.as_document(),
        "engines": {each.name: each.llm.engine.describe() for each in known},
        "machine": machine(target.engine.threads),
        "versions": versions(),
        "acceptance": [each.as_document() for each in counts],
        "costs": [asdict(each) for each in costs],
        "speeds": [asdict(each) for each in fast],
    }
    end(document, output)
    note(f"written: {output}, {plot}")


def by_category(path: Path) -> dict[str, tuple[str, ...]]:
    """The texts of a file by their category, which is the file's name for lines without one. Raises ParameterError."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(read_text("--prompts-file", path).splitlines(), 1):
        if line.strip():
            try:
                entry = json.loads(line)
                text = entry["turns"][0] if "turns" in entry else entry["prompt"]
            except (ValueError, LookupError, TypeError) as error:
                allowed = 'lines with {"turns": [...]} or {"prompt": ...}'
                raise ParameterError("--prompts-file", f"line {number}", allowed) from error
            found.setdefault(str(entry.get("category", path.stem)), []).append(str(text))
    if not found:
        raise ParameterError("--prompts-file", str(path), "a file with a prompt a line")
    return {category: tuple(texts) for category, texts in found.items()}


def load_contenders(
    engine: EngineFlags, model: str, head: str | None, also: Sequence[str] = ()
) -> tuple[LLM, list[Contender]]:
    """The target without a draft model, and its drafters. also: names of further ones.

    Raises ParameterError for options that need a draft model where there is none.
    """
    for name in ("draft_dtype", "draft_quantization", "draft_vocab_size"):
        value = getattr(engine, name)
        if engine.draft_model is None and value != getattr(EngineConfig, name):
            raise ParameterError(f"--{name.replace('_', '-')}", value, "left out without --draft-model")
    usual = replace(engine, draft_model=None, draft_dtype="same", draft_quantization="same", draft_vocab_size=None)
    target = usual.load(model)
    with_model = None if engine.draft_model is None else engine.load(model, quiet=True)
    with_head = None if head is None else replace(usual, draft_model=head).load(model, quiet=True)
    further = []
    for name in also:
        needs = DRAFTERS.get(rules_of(EngineConfig)["drafter"].take("--also", name)).needs_draft_model
        if needs and with_model is None:
            raise ParameterError("--also", name, "a drafter without a draft model, or given beside --draft-model")
        further.append(Contender(name, (with_model if needs and with_model else target).with_options(drafter=name)))
    return target, [*contenders(target, with_model, with_head), *further]


def _acceptance_table(counts: Sequence[Count], plan: MeasurementPlan, temperature: float) -> Sheet:
    lengths = {
        (each.drafter, each.task): each.mean_acceptance_length for each in counts if each.temperature == temperature
    }
    rows = [
        [name, *(f"{lengths[name, task]:.2f}" for task in plan.tasks)]
        for name in dict.fromkeys(drafter for drafter, _ in lengths)
    ]
    title = f"tokens a round, {plan.k} draft tokens, temperature {temperature:g}"
    return Sheet(title, ["", *plan.tasks], rows)


def _speed_table(fast: Sequence[Speed], costs: Sequence[DraftTime], plan: MeasurementPlan) -> Sheet:
    cells = [(size, temperature) for temperature in plan.temperatures for size in plan.batch_sizes]
    speed_ups = {(each.drafter, each.batch_size, each.temperature): each.speed_up for each in fast}
    shares = {(each.drafter, each.batch_size): each.share for each in costs}
    rows = [
        [name, f"{shares[name, plan.batch_sizes[0]]:.0%}", *(f"{speed_ups[name, *cell]:.2f}x" for cell in cells)]
        for name in dict.fromkeys(drafter for drafter, _, _ in speed_ups)
    ]
    columns = ["", f"a draft of {plan.k},\nof a round", *(f"rows {size}\nT={heat:g}" for size, heat in cells)]
    return Sheet("auto over plain decoding", columns, rows)


CHOSEN_HERE = {"drafter", "num_speculative_tokens", "profile", "max_batch_size", "prefix_cache"}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(with_flags(main, without=CHOSEN_HERE))

if __name__ == "__main__":
    app()
