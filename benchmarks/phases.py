"""Traffic and acceptance that change suddenly between phases: how close ``auto`` comes to knowing them in advance.

    python -m benchmarks.phases smollm2-135m --quantization int8 --max-model-len 2304

The models and all measured times are real. Acceptance is SYNTHETIC: draft tokens are accepted with the phase's
probability, after the real acceptance rule has run, so the text is meaningless, and the costs are those of real rounds.

Every fixed length runs the same phases. The oracle's time in a phase is that of the fastest fixed length: it knows the
phase and its best length, and pays nothing for changing. The last line is one JSON document.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.options import PlottedDocument
from torch import Tensor

from paceline.cli.console import Sheet, bars, latency_table, note, stderr
from paceline.cli.document import checked_plot, command_line, end
from paceline.cli.flags import with_flags
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Repeats
from paceline.config import SamplingParams
from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.core.outputs import Latency
from paceline.core.values import Accepted
from paceline.drafters.base import Drafter, Wrapper
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.lengths import FixedLength, LengthPolicy, PolicyInputs, make_policy
from paceline.lengths.calibration import Grid
from paceline.lengths.profile import Profile
from paceline.llm import LLM
from paceline.models.base import FlatModel
from paceline.tools.bench.measure import turns
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.plots import new_figure, save
from paceline.tools.bench.recording import Recorder, Round, latency_of


@dataclass(frozen=True)
class LoadPhase:
    """Rows whose draft tokens are accepted with probability ``acceptance``, until each gained ``tokens``."""

    rows: int
    acceptance: float


PHASES = (LoadPhase(1, 0.9), LoadPhase(16, 0.9), LoadPhase(16, 0.1), LoadPhase(1, 0.1), LoadPhase(1, 0.9))
LENGTHS = (0, 1, 2, 4, 8)
PROMPT = tuple(range(1, 9)) * 4


class Script(Wrapper):
    """A drafter with acceptance probability ``rate``, and the matching acceptance rule. The text is meaningless.

    Draft tokens that are not verified are right or wrong, too: the row's next token equals them or not accordingly.
    """

    name = "synthetic acceptance"

    def __init__(self, inner: Drafter, rule: AcceptanceRule) -> None:
        super().__init__(inner)
        self.rule, self.rate = rule, 1.0
        self._generator = torch.Generator().manual_seed(0)
        self._proposed: Draft | None = None

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        self._proposed = self.inner.propose(batch, plan).capped(plan.caps)
        return self._proposed

    def judge(self, draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
        """The real result with other tokens: each row gains its right draft tokens and one token more."""
        own = self.rule(draft, logits, batch)
        proposed = draft if self._proposed is None else DraftTensors.of(self._proposed, batch.device)
        self._proposed = None
        coins = torch.rand(proposed.tokens.shape, generator=self._generator).to(draft.tokens.device) < self.rate
        right = torch.minimum(coins.long().cumprod(1).sum(1), proposed.counts)
        accepted = torch.minimum(right, draft.counts)
        last = own.tokens[:, -1]
        if proposed.k > 0:
            token = proposed.tokens.gather(1, accepted.clamp(max=proposed.k - 1)[:, None])[:, 0]
            other = torch.where(last == token, (token + 1) % batch.vocab_size, last)
            last = torch.where(accepted < proposed.counts, torch.where(right > accepted, token, other), last)
        place = torch.arange(draft.k + 1, device=accepted.device)
        tokens = torch.where(place < accepted[:, None], torch.cat([draft.tokens, last[:, None]], dim=1), last[:, None])
        return Accepted(tokens, accepted)


class FreeDrafter(Drafter):
    """A drafter that takes no time: it proposes token 0. For targets without a draft model."""

    name = "free"

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return Draft([[0] * plan.k for _ in range(batch.rows)])


@dataclass(frozen=True)
class Run:
    """One policy through all phases. seconds: per phase, for exactly ``tokens`` per row; rounds: per phase.

    latency: milliseconds per token of each phase's first, last and all rows.
    """

    policy: str
    seconds: list[float]
    rounds: list[list[Round]]
    latency: list[Latency]

    @property
    def total(self) -> float:
        return sum(self.seconds)


class Stage:
    """An engine with scripted acceptance, used for one policy after the other."""

    def __init__(self, llm: LLM, phases: Sequence[LoadPhase] = PHASES, tokens: int = 300) -> None:
        rows = max(phase.rows for phase in phases)
        length = len(PROMPT) + (len(phases) + 1) * (tokens + 34)
        if length > llm.engine.max_model_len:
            raise ParameterError(
                "tokens", tokens, f"less: a row grows to {length} tokens, of {llm.engine.max_model_len}"
            )
        draft = llm.engine.models.draft is not None
        options = llm.with_options(
            drafter="model" if draft else None,
            max_batch_size=rows,
            num_speculative_tokens=int(draft),
            speculation_width=1,  # acceptance is scripted along a chain
        )
        self.engine: Engine = options.engine
        self.phases, self.tokens = tuple(phases), tokens
        parts = self.engine.parts
        if not draft:
            parts.drafter = FreeDrafter()
        self.costs = self.engine.measure_costs(Grid.coarse(rows))
        self.script = parts.drafter = Script(parts.drafter, parts.accept)
        parts.accept = self.script.judge

    def policy(self, name: str) -> LengthPolicy:
        """A new policy by name ("auto", "bass") or number, as the engine would make it."""
        if name.isdigit():
            return FixedLength(int(name))
        ragged = isinstance(self.engine.models.target, FlatModel)
        return make_policy(name, PolicyInputs(lambda: self.costs, _no_profile, self.script.decoders, ragged))

    def run(self, name: str) -> Run:
        engine, recorder = self.engine, Recorder(self.policy(name))
        engine.use_policy(recorder)
        seconds, rounds, latency = [], [], []
        ids: list[str] = []
        for phase in self.phases:
            self.script.rate = phase.acceptance
            while len(ids) > phase.rows:
                engine.abort(ids.pop())
            while len(ids) < phase.rows:
                ids.append(engine.add(Request(list(PROMPT), self._params())).request_id)
            while len(engine.scheduler.running) < phase.rows:
                engine.step()
            first = len(recorder.rounds)
            seconds.append(self._run_phase(recorder, phase.rows * self.tokens))
            rounds.append(recorder.rounds[first:])
            latency.append(latency_of(rounds[-1], rounds[-1][-1].ended - rounds[-1][0].began))
        engine.clear()
        return Run(name, seconds, rounds, latency)

    def _params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.engine.max_model_len, ignore_eos=True)

    def _run_phase(self, recorder: Recorder, goal: int) -> float:
        """Seconds for ``goal`` tokens; the last round's excess tokens are deducted in proportion."""
        tokens, started = 0, time.perf_counter()
        while tokens < goal:
            self.engine.step()
            tokens += recorder.rounds[-1].tokens
        return (time.perf_counter() - started) * goal / tokens


def _no_profile() -> Profile:
    raise ParameterError("policy", "profiled", "'auto', 'bass' or a number: phases have no profile")


@dataclass(frozen=True)
class PhaseComparison:
    """Medians of the repeats. oracle: the fastest fixed length's seconds, phase by phase."""

    phases: tuple[LoadPhase, ...]
    runs: dict[str, Run]
    totals: dict[str, list[float]]
    oracle: list[float]

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance": "synthetic",
            "phases": [{"rows": phase.rows, "acceptance": phase.acceptance} for phase in self.phases],
            "seconds": {name: run.seconds for name, run in self.runs.items()},
            "ms_per_token": {name: [asdict(each) for each in run.latency] for name, run in self.runs.items()},
            "totals_of_all": self.totals,
            "oracle_seconds": self.oracle,
            "over_oracle": {name: run.total / sum(self.oracle) for name, run in self.runs.items()},
            "k_of_auto": [[round(record.mean_drafted, 2) for record in rounds] for rounds in self.runs["auto"].rounds],
        }


def compare(
    stage: Stage,
    repeats: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    policies: Sequence[str] = (*map(str, LENGTHS), "bass", "auto"),
) -> PhaseComparison:
    """Run all policies through all phases, in turn; keeps each policy's run with the median total."""
    runs: dict[str, list[Run]] = {}
    for name in progress([name for turn in turns(policies, repeats) for name in turn]):
        runs.setdefault(name, []).append(stage.run(name))
    middle = {name: sorted(each, key=lambda run: run.total)[(len(each) - 1) // 2] for name, each in runs.items()}
    fixed = [each for name, each in runs.items() if name.isdigit()]
    oracle = [
        min(statistics.median(run.seconds[place] for run in each) for each in fixed)
        for place in range(len(stage.phases))
    ]
    totals = {name: [run.total for run in each] for name, each in runs.items()}
    return PhaseComparison(stage.phases, middle, totals, oracle)


def draw(comparison: PhaseComparison, path: Path, title: str) -> None:
    """Plot k of auto, round by round, over the phases; and each policy's time over the oracle's."""
    figure, (left, right) = new_figure(columns=2)
    lengths = [record.mean_drafted for rounds in comparison.runs["auto"].rounds for record in rounds]
    left.step(range(len(lengths)), lengths, where="post", linewidth=0.8)
    start = 0
    for phase, rounds in zip(comparison.phases, comparison.runs["auto"].rounds, strict=True):
        left.axvline(start, color="0.7", linewidth=0.8)
        left.text(start, max(lengths), f" {phase.rows} rows\n a = {phase.acceptance}", fontsize=7, va="top")
        start += len(rounds)
    left.set(xlabel="round", ylabel="k of auto")
    over = {name: run.total / sum(comparison.oracle) for name, run in comparison.runs.items()}
    right.bar(list(over), list(over.values()))
    right.axhline(1, color="k", linewidth=0.8)
    right.set(ylabel="time over the oracle's", xlabel="speculation length")
    save(figure, path, f"{title}\nacceptance is synthetic")


def main(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Tokens of a row in each phase.")] = 300,
    repeats: Repeats = 3,
    output: PlottedDocument = Path("phases.json"),
) -> None:
    """Compare auto with every fixed length and an oracle: batch 1, 16, 1, SYNTHETIC acceptance 0.9, 0.1, 0.9."""
    plot = checked_plot(output)
    stage = Stage(replace(engine, prefix_cache=False).load(model), PHASES, max_tokens)
    comparison = compare(stage, repeats, bars(quiet=False))
    names = [f"{phase.rows} x {phase.acceptance}" for phase in comparison.phases]
    document = comparison.as_json()
    rows = [
        [name, *(f"{s:.2f}" for s in run.seconds), f"{document['over_oracle'][name]:.3f}"]
        for name, run in comparison.runs.items()
    ]
    stderr().print(Sheet("seconds by phase (rows x synthetic acceptance)", ["k", *names, "over oracle"], rows))
    latencies = [
        (f"{k}: {name}", latency)
        for k, run in comparison.runs.items()
        for name, latency in zip(names, run.latency, strict=True)
    ]
    stderr().print(latency_table(latencies))
    about = stage.engine.describe()
    draw(comparison, plot, about)
    document |= {"machine": machine(stage.engine.threads), "versions": versions()}
    end({"command": command_line("python -m benchmarks.phases"), "engine": about, "plot": str(plot)} | document, output)
    note(f"written: {output}, {plot}")


CHOSEN_HERE = {
    "drafter",
    "reference_document",
    "num_speculative_tokens",
    "speculation_width",
    "max_batch_size",
    "profile",
    "prefix_cache",
}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(with_flags(main, without=CHOSEN_HERE))

if __name__ == "__main__":
    app()
