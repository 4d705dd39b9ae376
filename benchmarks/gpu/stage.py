"""Rows of one length on a pair of models, whose rounds run as in the engine, the host one round behind."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from benchmarks.gpu.cells import Setting
from benchmarks.gpu.floors import best_seconds, seconds_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.pages import pages_for
from paceline.core.values import DeviceAcceptance
from paceline.engine.rounds.device_drafters import device_drafter
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.program import RoundProgram
from paceline.errors import PacelineError
from paceline.kernels.attention import make_backend
from paceline.kernels.gpu.graphs import Graphs, Ticket
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.torch.transformer import Transformer

ROOM = 160  # tokens that a row may gain before it is reset
_TRACED_ROUNDS = 8
_NAMED_KERNELS = 16


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement.

    Chunks of at most ``rounds`` rounds run for about ``seconds``, at least ``chunks`` of them. repeats: of a single
    pass.
    """

    rounds: int = 24
    chunks: int = 3
    seconds: float = 0.25
    repeats: int = 20


@dataclass(frozen=True)
class TimedRounds:
    """Rounds with k draft tokens. round_ms: median over the chunks of a chunk's mean, host included.

    gained: mean tokens per row and round. context: mean tokens of a row. accepted, drafted: of all rows.
    """

    round_ms: float
    rounds: int
    gained: float
    context: float
    accepted: int
    drafted: int


class Stage:
    """The setting's rows, each with ``context`` random tokens and random keys and values.

    A row is reset before it has gained ROOM tokens, so that every chunk of rounds has the same contexts.
    """

    def __init__(self, target: Transformer, draft: Transformer, setting: Setting, *, capture: bool = True) -> None:
        self.setting, self.device = setting, target.device
        positions = setting.context + ROOM
        sizes = setting.rows, positions, target.vocab_size
        backend = make_backend(setting.attention, self.device)
        pool = setting.rows * pages_for(positions) if backend.name == "ragged" else None  # as an engine has them
        self.target = Decoder(target, backend, *sizes, pool=pool)
        self._draft = DraftDecoder(draft, make_backend(setting.attention, self.device), *sizes, pool=pool)
        generator = torch.Generator(self.device).manual_seed(0)
        for decoder in (self.target, self._draft):
            decoder.cache.randomise(setting.rows, positions, generator)
        self.batch = Batch(setting.rows, positions, target.vocab_size, self.device)
        self._fill(target.vocab_size)
        self._capture = capture and setting.attention != "split"  # split attention needs sizes from the host
        rule = DeviceAcceptance(synthetic=setting.rate if setting.width == 1 else None)
        drafter = device_drafter(self.target, self._draft, self.batch, width=setting.width)
        self.round = DeviceRound(RoundProgram(self.target, drafter, self.batch, rule), capture=self._capture)

    def _fill(self, vocab_size: int) -> None:
        """Random text; greedy decoding without an end."""
        context, params = self.setting.context, SamplingParams(temperature=0, max_tokens=ROOM, ignore_eos=True)
        for row in range(self.setting.rows):
            tokens = torch.randint(vocab_size, (context,), generator=torch.Generator().manual_seed(row))
            self.batch.set_row(row, RowStart(tokens.tolist(), params, row))
        self.batch.set_live(range(self.setting.rows))

    def _begin_anew(self) -> None:
        self.batch.length.fill_(self.setting.context)
        self._draft.num_computed_tokens.fill_(self.setting.context - 1)
        self._synchronise()

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def longest(self) -> int:
        """Upper bound on row lengths: the positions that attention without row lengths processes."""
        return self.setting.context + ROOM

    def rounds(self, k: int, count: int) -> tuple[float, list[list[int]]]:
        """Run rounds from the beginning -> seconds, and the rounds' records, line by line."""
        self._begin_anew()
        flying: deque[Ticket] = deque()
        lines: list[list[int]] = []
        began = time.perf_counter()
        for _ in range(count):
            flying.append(self._play(k))
            if len(flying) > 1:
                lines += flying.popleft().read()
        lines += flying.popleft().read()
        return time.perf_counter() - began, lines

    def _play(self, k: int) -> Ticket:
        return self.round.run(self.setting.rows, k, self.longest - k)

    def run(self, k: int, effort: Effort) -> TimedRounds:
        """Time rounds with k draft tokens; capture and warm-up are not counted."""
        count = self._chunk(k, effort.rounds)
        self.rounds(k, 1)
        chunks: list[float] = []
        lines: list[list[int]] = []
        while len(chunks) < effort.chunks or sum(chunks) * count < effort.seconds:
            took, records = self.rounds(k, count)
            chunks.append(took / count)
            lines += records
        gained = statistics.fmean(line[-1] for line in lines)
        return TimedRounds(
            round_ms=statistics.median(chunks) * 1e3,
            rounds=count * len(chunks),
            gained=gained,
            context=self.setting.context + gained * (count - 1) / 2,
            accepted=sum(line[-3] for line in lines),
            drafted=sum(line[-2] for line in lines),
        )

    def _chunk(self, k: int, most: int) -> int:
        """The number of rounds in a chunk, so that no row reaches its end."""
        return max(1, min(most, ROOM // (k + 1) - 1))

    def verify_ms(self, k: int, repeats: int) -> float:
        """Milliseconds of the fastest forward pass of the target.

        The pass covers each row's last token and k draft tokens, logits included.
        """
        self._begin_anew()
        rows, graphs = self.setting.rows, Graphs(self.device, capture=self._capture)
        slots = self.batch.state(rows).slots
        start, tokens = self.batch.length[:rows] - 1, self.batch.text[:rows, : k + 1].clone()

        def run() -> Tensor:
            return self.target.logits(self.target.forward(tokens, start, self.longest + 1, slots))

        return best_seconds(lambda: graphs.run(k, run), self.device, repeats) * 1e3

    def queued_ms(self, k: int, rounds: int) -> float:
        """Milliseconds of a round when many are launched at once, so that the device never waits for the host."""
        count = self._chunk(k, rounds)
        self.rounds(k, 1)
        self._begin_anew()

        def launch() -> None:
            for _ in range(count):
                self._play(k)

        return seconds_of(launch, self.device) / count * 1e3

    def trace(self, k: int) -> Trace:
        """Trace some rounds. It may slow down later measurements in this process.

        Raises TraceError if there is no trace.
        """
        if self.device.type != "cuda":
            raise TraceError("only CUDA devices are traced")
        count = self._chunk(k, _TRACED_ROUNDS)
        self.rounds(k, 1)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.rounds(k, count)
        kernels = [event for event in trace.events() if event.device_type.name == "CUDA"]
        if not kernels:
            raise TraceError("the profiler saw no kernel: CUPTI does not work here")
        by_name: Counter[str] = Counter()
        for kernel in kernels:
            by_name[kernel.name] += kernel.time_range.elapsed_us() / count
        launched = Counter(kernel.name for kernel in kernels)
        busy = covered([(kernel.time_range.start, kernel.time_range.end) for kernel in kernels])
        most = by_name.most_common(_NAMED_KERNELS)
        return Trace(busy / 1e3 / count, {name: KernelTime(us, launched[name] / count) for name, us in most})


@dataclass(frozen=True)
class KernelTime:
    """A kernel's microseconds and launches in one round."""

    us: float
    launches: float


@dataclass(frozen=True)
class Trace:
    """A round on the device. busy_ms: milliseconds in which some kernel runs. kernels: the longest ones, by name."""

    busy_ms: float
    kernels: dict[str, KernelTime]


class TraceError(PacelineError):
    """The device's idle time could not be traced."""


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans (start, end)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
