"""Measures the time of rounds on this machine: the real models, on rows that belong to no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import torch

from paceline.config import SamplingParams
from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.cache_budget import UNLIMITED, KVCacheBudget
from paceline.core.draft import Draft, Verdict
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import StepFeatures
from paceline.drafters.base import Drafter
from paceline.kernels.cpu import cpu_ops
from paceline.kernels.gpu.graphs import Ticket
from paceline.lengths.cost import CostTable, interpolate
from paceline.models.decoding.decoder import Decoder

ProgressBar = Callable[[Sequence["TimedRun"]], Iterable["TimedRun"]]

CONTEXT = 96  # tokens per row in most measurements
LONG_CONTEXT = 768  # tokens per row in the measurements of what context costs
CONTEXT_ROWS = 4  # rows in those: enough to time them, few enough for their memory
FEEDS = (1, 15, 64)  # missing tokens that a draft model reads; up to 15 in its first pass (``ModelDrafter.at_once``)
MAX_SPREAD = 1.25  # ratio of two fastest times that only a busy machine explains: an idle one spreads by up to 7 %
GREEDY_ROWS = SamplingParams(temperature=0)
CUT_ROWS = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)  # what Qwen3 recommends
COARSE_TOKENS = 64  # tokens of the largest verification while an engine starts: bounds its start-up time
# The same on a GPU, where few tokens only take the time of reading the weights: 8 draft tokens of 64 rows are 576.
GPU_TOKENS = 1024


@dataclass(frozen=True)
class Grid:
    """Batch sizes and lengths to measure: each twice, then again for ``seconds``, at most ``repeats`` times in all.

    max_tokens: largest verification to run, in tokens; larger ones are extrapolated. None: no limit.
    """

    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float = 2.0
    repeats: int = 6
    max_tokens: int | None = None

    @staticmethod
    def coarse(capacity: int, *, on_gpu: bool = False) -> Grid:
        """Few sizes, for the start of an engine: 1, 2, 4, ... rows and the capacity; 0, 1, 3 and 7 draft tokens.

        on_gpu: more tokens, and 8 instead of 7, a length that ``auto`` captures anyway.
        """
        sizes = {capacity} | {2**power for power in range(capacity.bit_length() - 1)}
        lengths, most = ((0, 1, 3, 8), GPU_TOKENS) if on_gpu else ((0, 1, 3, 7), COARSE_TOKENS)
        return Grid(tuple(sorted(sizes)), lengths, max_tokens=most)

    def measured(self, rows: int) -> tuple[int, ...]:
        """Lengths to measure with ``rows`` rows: at least two, so that the others can be extrapolated."""
        limit = self.max_tokens
        return tuple(k for j, k in enumerate(self.lengths) if limit is None or j < 2 or rows * (k + 1) <= limit)


@dataclass
class TimedRun:
    """Something to time, and its fastest time so far in milliseconds. Other programs can only slow a run down."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    ms: float = float("inf")

    def measure(self) -> None:
        self.prepare()
        started = time.perf_counter()
        self.run()
        self.ms = min(self.ms, 1000 * (time.perf_counter() - started))


def implausible(points: Mapping[tuple[int, int], TimedRun]) -> list[TimedRun]:
    """Runs that a busy machine must have slowed down, because other runs contradict them.

    points: by (rows, tokens per row). A pass takes no longer than one with more rows and more tokens, and no longer
    than several smaller passes with as many tokens in all.
    """
    return [
        point
        for (rows, tokens), point in points.items()
        if any(
            point.ms > MAX_SPREAD * other.ms * max(1.0, rows * tokens / (more_rows * more_tokens))
            for (more_rows, more_tokens), other in points.items()
            if (more_rows >= rows and more_tokens >= tokens) or (more_rows <= rows and more_tokens <= tokens)
        )
    ]


Times: TypeAlias = Mapping[tuple[int, int], TimedRun]  # by rows and draft tokens per row


class RoundRunner(Protocol):
    """Runs whole rounds on a batch of its own (``rounds.device_round.DeviceRound``)."""

    batch: Batch

    @property
    def fed_tokens(self) -> int: ...

    def run(self, rows: int, k: int, longest: int, features: StepFeatures) -> Ticket: ...

    def catch_up(self, rows: int, missing: int, longest: int) -> None: ...


class VerifyingRound(Protocol):
    """Verifies, accepts and commits in one call (``rounds.kernels.NativeRound``)."""

    def run(self, draft: Draft) -> Verdict: ...


class Calibration:
    """Measures rounds on rows that belong to no request. The engine must be idle: its caches' first rows are written.

    runner: runs whole rounds, whose verification and drafting cannot be timed apart; ``verify`` then holds both. None:
        the host runs them, with the kernels that ``natively`` returns for a batch, or, if it returns None, step by
        step and without a commit.
    room: memory for the rows' caches, which are empty again afterwards.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter,
        accept: AcceptanceRule,
        grid: Grid,
        runner: RoundRunner | None = None,
        natively: Callable[[Batch], VerifyingRound | None] = lambda _batch: None,
        room: KVCacheBudget = UNLIMITED,
    ) -> None:
        self.target, self.drafter, self.accept, self.grid, self.runner = target, drafter, accept, grid, runner
        self._room = room
        positions = target.cache.positions
        rows, self._beyond = max(grid.batch_sizes), max(grid.lengths) + 2
        self.context = max(
            1, min(CONTEXT, positions - self._beyond, room.max_positions(rows, positions) - self._beyond)
        )
        few, short = min(CONTEXT_ROWS, rows), self.context + self._beyond
        spare = room.max_positions(few, positions, beside=(rows - few) * room.bytes_for(short))
        self.long_context = max(self.context, min(LONG_CONTEXT, positions - self._beyond, spare - self._beyond))
        device = target.model.device
        self.batch = runner.batch if runner else Batch(rows, positions, target.vocab_size, device, cpu_ops(device))
        self._kernels = None if runner else natively(self.batch)

    def run(self, progress: ProgressBar = iter) -> CostTable:
        """Measure the table. progress: may wrap the runs in a progress bar."""
        if not self._room.is_short:
            return self._run(progress)
        rows = max(self.grid.batch_sizes)
        few, positions = min(CONTEXT_ROWS, rows), self.target.cache.positions
        for row in range(rows):
            context = self.long_context if row < few else self.context
            self._resize(row, min(context + self._beyond, positions))
        try:
            return self._run(progress)
        finally:
            for row in range(rows):
                self._resize(row, 0)

    def _resize(self, row: int, positions: int) -> None:
        for decoder in (self.target, *self.drafter.decoders):
            decoder.resize_row(row, positions)

    @torch.inference_mode()
    def _run(self, progress: ProgressBar) -> CostTable:
        sizes, lengths = self.grid.batch_sizes, self.grid.lengths
        self._fill(max(sizes), self.context)
        self._fill(min(CONTEXT_ROWS, max(sizes)), self.long_context)
        verify = {(b, k): self._verify(b, k, self.context) for b in sizes for k in self.grid.measured(b)}
        one_pass, many = self.drafter.one_pass, 1 + max(lengths)
        few = many if one_pass else 1
        draft = {(b, k): self._draft(b, k) for b in sizes for k in (few, many)}
        feed = {n: self._feed(n) for n in (0, *FEEDS) if n < self.context and self.drafter.decoders}
        rows = min(CONTEXT_ROWS, max(sizes))
        near = {k: self._verify(rows, k, self.context) for k in (0, max(lengths))}
        far = {k: self._verify(rows, k, self.long_context) for k in (0, max(lengths))}
        cut = {}
        if self.runner is not None:
            cut = {(b, k): self._verify(b, k, self.context, CUT_ROWS) for b in sizes for k in self._ends(b)}
        self._measure([*(p for group in (verify, draft, feed, near, far, cut) for p in group.values())], progress)
        self._measure_again({(b, k + 1): point for (b, k), point in verify.items()})
        self._measure_again(draft)
        self._clear()
        steps = [max(0.0, (draft[b, many].ms - draft[b, few].ms) / max(1, many - few)) for b in sizes]
        once, token = self._context_cost(near, far, rows)
        feed_ms = {n: max(0.0, point.ms - feed[0].ms) for n, point in feed.items() if n > 0}
        return CostTable(
            batch_sizes=sizes,
            lengths=lengths,
            context=self.context,
            verify=self._verify_table({place: point.ms for place, point in verify.items()}),
            draft_once=tuple(max(0.0, draft[b, few].ms - step) for b, step in zip(sizes, steps, strict=True)),
            draft_step=tuple(steps),
            context_once=once,
            context_token=token,
            feed_tokens=tuple(feed_ms) or (1,),
            feed=tuple(feed_ms.values()) or (0.0,),
            one_pass=one_pass,
            **self._cut_costs(cut, verify),
        )

    def _ends(self, rows: int) -> tuple[int, int]:
        """The shortest and the longest draft that are measured with ``rows`` rows."""
        lengths = self.grid.measured(rows)
        return lengths[0], lengths[-1]

    def _cut_costs(self, cut: Times, greedy: Times) -> dict[str, tuple[float, ...]]:
        """What top-k and top-p add, by batch size: to a round, and for each draft token of a row."""
        once, step = [], []
        for rows in self.grid.batch_sizes if cut else ():
            few, many = self._ends(rows)
            least, most = (max(0.0, cut[rows, k].ms - greedy[rows, k].ms) for k in (few, many))
            step.append(max(0.0, most - least) / max(1, many - few))
            once.append(max(0.0, least - few * step[-1]))
        return {"cut_once": tuple(once), "cut_step": tuple(step)}

    @torch.inference_mode()
    def plain_ms(self) -> float:
        """Milliseconds of a plain round of one row, the fastest of a few: tells whether a table's machine was busy."""
        self._fill(1, self.context)
        point = self._verify(1, 0, self.context)
        for _ in range(1 + self.grid.repeats):
            point.measure()
        self._clear()
        return point.ms

    def _verify_table(self, measured: dict[tuple[int, int], float]) -> tuple[tuple[float, ...], ...]:
        """Times as [size][length], where no round is slower than one with more rows or more draft tokens.

        Noise only adds time, so a slower one takes the other's time. This is done before extrapolation as well, so that
        no line falls.
        """
        smooth = {
            (size, k): min(ms for (rows, length), ms in measured.items() if rows >= size and length >= k)
            for size, k in measured
        }
        table = []
        for size in self.grid.batch_sizes:
            lengths = self.grid.measured(size)
            line = [smooth[size, k] for k in lengths]
            table.append([interpolate(lengths, line, k) for k in self.grid.lengths])
        return tuple(tuple(line) for line in np.minimum.accumulate(table[::-1], axis=0)[::-1].tolist())

    def _measure(self, points: list[TimedRun], progress: ProgressBar) -> None:
        points[0].measure()  # warm-up
        points[0].ms = float("inf")
        ends = time.perf_counter() + self.grid.seconds
        for point in progress([*points, *points]):  # the second time much later than the first: pauses rarely hit both
            point.measure()
        for _ in range(self.grid.repeats - 2):
            for point in points:
                if time.perf_counter() > ends:
                    return
                point.measure()

    def _measure_again(self, points: Mapping[tuple[int, int], TimedRun]) -> None:
        """Repeat implausible runs until they are plausible, at most ``repeats`` times."""
        for _ in range(self.grid.repeats):
            for point in implausible(points):
                point.measure()

    def _context_cost(self, near: dict[int, TimedRun], far: dict[int, TimedRun], rows: int) -> tuple[float, float]:
        """Milliseconds per row and position of context: once, and for each token fed.

        near, far: by draft tokens per row, at ``context`` and at ``long_context``.
        """
        longest = max(near)
        area = rows * (self.long_context - self.context)
        if area == 0 or longest == 0:
            return 0.0, 0.0
        plain, wide = ((far[k].ms - near[k].ms) / area for k in (0, longest))
        token = max(0.0, (wide - plain) / longest)
        return max(0.0, plain - token), token

    def _fill(self, rows: int, context: int) -> None:
        """Fill caches with random numbers, because untouched memory would be read too fast."""
        generator = torch.Generator(self.batch.device).manual_seed(0)  # leaves the caller's global generator alone
        for decoder in (self.target, *self.drafter.decoders):
            decoder.cache.randomise(rows, context, generator)

    def _rows(self, rows: int, context: int, params: SamplingParams = GREEDY_ROWS) -> None:
        """Start ``rows`` rows of ``context`` random tokens, of which all caches lack the last.

        They have the target's adapters (if any) in turn, whose time is then in the table. Where the device drafts, the
        texts' second halves repeat their first ones. N-gram drafts are then different tokens, as in real drafts: a
        mixture of experts would route equal ones to the same experts.
        """
        names = () if self.target.adapters is None else self.target.adapters.names
        for row in range(rows if names else 0):
            self.target.set_adapter(row, names[row % len(names)])
        draws = torch.randint(self.batch.vocab_size, (rows, context), generator=torch.Generator().manual_seed(rows))
        if self.runner is not None:
            draws[:, context - context // 2 :] = draws[:, : context // 2]
        params = replace(params, max_tokens=self.batch.positions)
        in_turn = [replace(params, adapter=name) for name in names] or [params]
        self.batch.set_live(())
        for row, tokens in enumerate(draws.tolist()):
            self.batch.set_row(row, RowStart(tokens, in_turn[row % len(in_turn)], seed=row))
        self.batch.set_live(range(rows))
        for decoder in (self.target, *self.drafter.decoders):
            decoder.pretend(rows, context - 1)

    def _clear(self) -> None:
        """End the rows of the measurement."""
        self.batch.set_live(())
        for row in range(max(self.grid.batch_sizes)):
            self.target.set_adapter(row, None)

    def _verify(self, rows: int, k: int, context: int, params: SamplingParams = GREEDY_ROWS) -> TimedRun:
        """A verification; with a runner, a whole round and the host's reading of its result.

        The first run includes the capture, if there is one.
        """
        if (runner := self.runner) is not None:
            sampling = self.batch.sampling
            return TimedRun(
                lambda: runner.run(rows, k, context, sampling.step_features).read(),
                lambda: self._rows(rows, context, params),
            )
        # Different tokens, as in real drafts: a mixture of experts would route equal ones to the same experts.
        generator = torch.Generator().manual_seed(rows * (k + 1))
        tokens = torch.randint(self.batch.vocab_size, (rows, k), generator=generator)
        draft = Draft(tokens.tolist())

        def run() -> object:
            if self._kernels is not None:
                return self._kernels.run(draft)
            tensors = DraftTensors.of(draft, self.batch.device)
            return self.accept(tensors, self.target.verify(self.batch, tensors), self.batch).tokens.tolist()

        return TimedRun(run, lambda: self._rows(rows, context))

    def _draft(self, rows: int, k: int) -> TimedRun:
        if self.runner is not None:
            return TimedRun(lambda: None, ms=0.0)  # part of the round; a measured no-op would be noise
        plan = SpeculationPlan(
            k, fallback=lambda batch, _ngram_draft: [k] * batch.rows
        )  # always the draft model, which takes time

        def run() -> object:
            return self.drafter.propose(self.batch, plan).drafted

        return TimedRun(run, lambda: self._rows(rows, self.context))

    def _feed(self, tokens: int) -> TimedRun:
        """Draft one token for a row after reading ``tokens`` missing ones. On a device, only read them."""

        def prepare() -> None:
            self._rows(1, self.context)
            for decoder in self.drafter.decoders:
                decoder.pretend(1, self.context - 1 - tokens)

        if (runner := self.runner) is None:
            return TimedRun(self._draft(1, 1).run, prepare)
        if tokens == 0:
            return TimedRun(lambda: None, ms=0.0)

        def read() -> None:
            runner.catch_up(1, tokens + runner.fed_tokens, self.context)  # the last are read by the round itself
            self.batch.length[:1].tolist()  # waits for the device

        return TimedRun(read, prepare)
