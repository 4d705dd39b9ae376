"""All drafters of one target on six tasks: acceptance, cost and speed.

There are two measurements. Acceptance does not depend on time: every drafter proposes k tokens per round, and the
accepted ones are counted, task by task. For speed, ``auto`` chooses the length, and plain decoding and all drafters
take turns on the same batches, in which the tasks are mixed evenly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import SamplingParams
from paceline.lengths import FixedLength
from paceline.lengths.calibration import Grid
from paceline.tools.bench.measure import questions, run_batch, turns
from paceline.tools.bench.offline import Paceline
from paceline.tools.bench.plots import new_figure, save
from paceline.tools.bench.recording import Recorder, Round, kept_by_position
from paceline.tools.bench.tasks import PROMPTS, TASKS, Task

if TYPE_CHECKING:
    from paceline.llm import LLM

ROWS = 8  # rows of a batch whose acceptance is counted
SIBLINGS = 4  # samples per prompt when they are each other's source
COST_SECONDS = 1.0
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class MeasurementPlan:
    """The measurements. prompts: per task; k: draft tokens where acceptance is counted; tokens: longest answer."""

    tasks: tuple[Task, ...]
    prompts: int
    k: int
    tokens: int
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    repeats: int


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
    task: Task
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
        run = run_batch(llm, questions(llm, PROMPTS[task][: plan.prompts]), _sampled(plan, temperature, each.answers))
        yield _counted(each.name, task, temperature, run.tokens, recorder.rounds, plan.k)


def _sampled(plan: MeasurementPlan, temperature: float, answers: int) -> list[SamplingParams]:
    """Sampling parameters: every prompt has its own seed, the same for all drafters."""
    return [
        SamplingParams(temperature=temperature, max_tokens=plan.tokens, seed=seed, n=answers)
        for seed in range(plan.prompts)
    ]


def _counted(drafter: str, task: Task, temperature: float, tokens: int, rounds: Sequence[Round], k: int) -> Count:
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
        yield from _speeds(asked, plan, mixed_batches(plan.tasks, size, at_least), temperature)


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


def mixed_batches(tasks: Sequence[Task], size: int, at_least: int) -> list[list[str]]:
    """The fewest batches of ``size`` prompts with equally many of every task, and ``at_least`` prompts in all."""
    equal = math.lcm(len(tasks), size)
    wanted = equal * math.ceil(at_least / equal)
    mixed = [PROMPTS[tasks[n % len(tasks)]][n // len(tasks) % len(PROMPTS[tasks[0]])] for n in range(wanted)]
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
