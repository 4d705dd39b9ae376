"""``paceline profile``: cost and acceptance of every speculation length at every batch size, on this machine.

For each batch size and each k the real models continue real prompts with k fixed, and the rounds are timed while all
rows decode (none prefills, none has finished). Each repeat goes through all k before the next begins. The cost table is
measured separately, by rounds of a fixed context.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import SamplingParams
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.lengths import FixedLength
from paceline.lengths.calibration import Grid
from paceline.lengths.profile import Profile
from paceline.tools.bench.fit import PaperFit, fit_paper
from paceline.tools.bench.offline import versions
from paceline.tools.bench.plots import Axes, new_figure, save
from paceline.tools.bench.prompts import COPYING, OPEN
from paceline.tools.bench.recording import Recorder, Round, kept_by_position, latency_of, longest_stretch

if TYPE_CHECKING:
    from paceline.llm import LLM

PROMPTS = tuple(prompt for pair in zip(COPYING[::2], OPEN[::2], strict=True) for prompt in pair)
"""Every second built-in prompt; ``benchmarks/traffic.py`` uses the others."""

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Sweep:
    """The measurements: each batch size with k = 0 .. max_k, ``tokens`` per row, ``repeats`` times."""

    batch_sizes: tuple[int, ...]
    max_k: int
    tokens: int
    repeats: int
    calibration_seconds: float = 60.0

    @staticmethod
    def quick() -> Sweep:
        """A quick test whether everything works; its numbers are not reliable."""
        return Sweep((1, 2), 2, tokens=16, repeats=1, calibration_seconds=0.5)


@dataclass(frozen=True)
class SweepPoint:
    """One fixed length at one batch size, with real prompts; medians. ms_per_token: per sequence.

    first_ms_per_token, last_ms_per_token: of the fastest and the slowest sequence.
    """

    batch_size: int
    k: int
    ms_per_token: float
    ms_per_round: float
    tokens_per_second: float
    mean_acceptance_length: float
    first_ms_per_token: float
    last_ms_per_token: float


@dataclass(frozen=True)
class MeasuredProfile(Profile):
    """A profile with further measurements for its readers.

    acceptance[j]: acceptance rate of draft token j + 1, if all before it were accepted.
    """

    acceptance: tuple[float, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        points = [asdict(point) for point in self.sweep]
        report = {"versions": self.versions, "acceptance": list(self.acceptance), "sweep": points, "fit": self.fit}
        return super().as_json() | report


def run_profile(
    llm: LLM, prompts: Sequence[list[int]], sweep: Sweep, progress: Callable[[Iterable[Any], str], Iterable[Any]]
) -> tuple[MeasuredProfile, PaperFit]:
    """Measure everything. progress(steps, what) may show a bar. Raises ParameterError without a drafter."""
    if llm.config.drafter is None:
        raise ParameterError("drafter", None, "'ngram', or a draft model: without drafts there is nothing to profile")
    engine = llm.with_options(max_batch_size=max(sweep.batch_sizes), num_speculative_tokens=sweep.max_k).engine
    grid = Grid(sweep.batch_sizes, tuple(range(sweep.max_k + 1)), sweep.calibration_seconds, repeats=5)
    costs = engine.measure_costs(grid, lambda points: progress(points, "cost of rounds"))
    runs = list(_play(engine, prompts, sweep, progress))
    points = tuple(_point(size, k, runs) for size in sweep.batch_sizes for k in range(sweep.max_k + 1))
    accepted = [
        statistics.fmean(p.mean_acceptance_length - 1 for p in points if p.k == k) for k in range(1, sweep.max_k + 1)
    ]
    of_size = {size: [p for p in points if p.batch_size == size] for size in sweep.batch_sizes}
    fit = fit_paper(costs, [[p.ms_per_round for p in here] for here in of_size.values()], accepted)
    profile = MeasuredProfile(
        identity=engine.identity(),
        costs=costs,
        best={size: min(here, key=lambda p: p.ms_per_token).k for size, here in of_size.items()},
        acceptance=acceptance_by_position([r for run in runs if run.k == sweep.max_k for r in run.rounds], sweep.max_k),
        sweep=points,
        versions=versions(),
        fit=asdict(fit) | {"optimum": {str(size): fit.best(size, sweep.max_k) for size in sweep.batch_sizes}},
    )
    return profile, fit


@dataclass(frozen=True)
class _Run:
    """The rounds of one batch while all its rows decoded."""

    batch_size: int
    k: int
    rounds: list[Round]

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds from the first round's start to the last one's end, including the engine's work between rounds."""
        return self.rounds[-1].ended - self.rounds[0].began


def _play(
    engine: Engine, prompts: Sequence[list[int]], sweep: Sweep, progress: Callable[[Iterable[Any], str], Iterable[Any]]
) -> Iterator[_Run]:
    for size in sweep.batch_sizes:
        _run(engine, prompts, size, sweep.max_k, WARM_UP_TOKENS, 0)
    steps = [(r, size, k) for size in sweep.batch_sizes for r in range(sweep.repeats) for k in range(sweep.max_k + 1)]
    for repeat, size, k in progress(steps, "batch sizes and lengths"):
        yield _run(engine, prompts, size, k, sweep.tokens, repeat)


def _run(engine: Engine, prompts: Sequence[list[int]], size: int, k: int, tokens: int, first: int) -> _Run:
    recorder = Recorder(FixedLength(k))
    engine.use_policy(recorder)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, keep_prefix=False)  # prompts repeat
    for row in range(size):
        engine.add(Request(prompts[(first + row) % len(prompts)], params))
    while engine.busy:
        engine.step()
    together = longest_stretch(recorder.rounds, size)
    whole = [record for record in together if record.k == k] or together  # the last rounds may have room for fewer
    if not whole:
        raise ParameterError("tokens", tokens, "more tokens per row: no round had all rows decoding")
    return _Run(size, k, whole)


def _point(size: int, k: int, runs: Sequence[_Run]) -> SweepPoint:
    here = [run for run in runs if run.batch_size == size and run.k == k]
    rows = sum(record.rows for run in here for record in run.rounds)
    latencies = [latency_of(run.rounds, run.seconds) for run in here]
    return SweepPoint(
        batch_size=size,
        k=k,
        ms_per_token=statistics.median(1000 * run.seconds * size / run.tokens for run in here),
        ms_per_round=statistics.median(record.ms for run in here for record in run.rounds),
        tokens_per_second=statistics.median(run.tokens / run.seconds for run in here),
        mean_acceptance_length=sum(run.tokens for run in here) / rows,
        first_ms_per_token=statistics.median(each.first for each in latencies),
        last_ms_per_token=statistics.median(each.last for each in latencies),
    )


def acceptance_by_position(rounds: Sequence[Round], k: int) -> tuple[float, ...]:
    """Probability that draft token 1, 2, ... k is accepted if all before it were; 0 where none was tried."""
    rows = [(accepted, k) for record in rounds if record.k == k for accepted in record.accepted]
    return tuple(rate or 0.0 for rate in kept_by_position(rows, k))


def draw(profile: MeasuredProfile, fit: PaperFit, path: Path, title: str) -> None:
    """``profile.png``: ms per token against k, one line per batch size, the fit dashed; acceptance against position."""
    figure, (left, right) = new_figure(columns=2)
    for number, size in enumerate(profile.best):
        _draw_size(left, profile, fit, size, f"C{number}")
    left.set(xlabel="speculation length k", ylabel="ms per token of a sequence", ylim=(0, None))
    left.set_xticks(range(1 + max(p.k for p in profile.sweep)))
    left.legend(title="batch size (dashed: fit)", fontsize=8)
    right.plot(range(1, len(profile.acceptance) + 1), profile.acceptance, "o-")
    right.set_xticks(range(1, len(profile.acceptance) + 1))
    right.set(xlabel="position in the draft", ylabel="accepted, if all before it were", ylim=(0, 1))
    save(figure, path, title)


def _draw_size(axes: Axes, profile: MeasuredProfile, fit: PaperFit, size: int, colour: str) -> None:
    points = [p for p in profile.sweep if p.batch_size == size]
    axes.plot([p.k for p in points], [p.ms_per_token for p in points], "-", color=colour, label=str(size))
    best = next(p for p in points if p.k == profile.best[size])
    axes.plot([best.k], [best.ms_per_token], "o", color=colour)
    axes.plot([p.k for p in points], [fit.ms_per_token(size, p.k) for p in points], "--", color=colour, alpha=0.6)
