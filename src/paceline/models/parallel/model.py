"""A model of which each rank keeps a part. Rank 0's is a ``Model`` like any other; the others follow it."""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline.config import AttentionName
from paceline.core.cache import KVCache
from paceline.errors import RankError
from paceline.kernels.attention import BACKENDS
from paceline.kernels.attention.base import Attend
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import Streams
from paceline.models.config import ModelConfig
from paceline.models.linear import Linear
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.plan import Op, Step, as_numbers, packed_pass
from paceline.models.transformer import Transformer

CacheShape: TypeAlias = tuple[int, int, int, int, int, torch.dtype, torch.device]
BACKEND_NAMES = cast(tuple[AttentionName, ...], tuple(BACKENDS))

LAST_WORDS = 2.0  # seconds in which a process that broke a connection is seen to have ended


class AddedUp:
    """A linear layer of which each rank has some columns."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.add_up(self._part(x))

    def tensors(self) -> tuple[Tensor, ...]:
        return self._part.tensors()


class SomeRows:
    """Some of a matrix's rows: of an embedding that is the head, too."""

    def __init__(self, weight: Tensor, rows: range) -> None:
        self._weight, self._rows = weight, weight[rows.start : rows.stop]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,)


class PartOfModel(Transformer):
    """A rank's part: its forward pass gives what the whole model's gives, if all ranks run it together.

    config: of the whole model; weights: of this part (``models.loading.load_part``).
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], name: str, ranks: Ranks) -> None:
        super().__init__(ranks.share.local(config), weights, name)
        self.ranks, self.hidden_width = ranks, config.embed_width or config.width
        for block in self._blocks:
            block.attention.output = AddedUp(block.attention.output, ranks)
            block.mlp.down = AddedUp(block.mlp.down, ranks)
        if config.tied:
            self._head = SomeRows(self._embedding, ranks.share.of(config.vocab_size))
        self.precision += f", cut into {ranks.share.ranks} ranks ({ranks.name})"

    def cache_shape(self, rows: int, positions: int) -> CacheShape:
        """What ``KVCache`` takes, for the heads of this part."""
        return self.layers, rows, self.kv_heads, positions, self.head_dim, self.dtype, self.device

    def run_head(self, hidden: Tensor) -> Tensor | None:
        """Hidden [N, width] -> logits [N, vocab_size] in float32 on rank 0."""
        sizes = [len(share.of(self.vocab_size)) for share in self.ranks.share.all()]
        own = self._head(hidden)
        parts = self.ranks.collect(functional.pad(own, (0, max(sizes) - own.shape[-1])))
        if not parts:
            return None
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1).float()


class Fellows(Protocol):
    """The other ranks' processes."""

    def fate(self, patience: float = 0.0) -> str | None:
        """Which of them has ended, and how; None: none has. patience: seconds in which one may still be seen to."""
        ...

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None:
        """None of them is left afterwards."""
        ...


class LeadingPart(PartOfModel):
    """Rank 0's: everything that it and its caches do, the others are told to do, too.

    What happens to the caches is told with the next forward pass. If anything goes wrong in a pass the ranks no longer
    stand at the same place, so nothing can be run any more: RankError.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], name: str, ranks: Ranks, fellows: Fellows
    ) -> None:
        super().__init__(config, weights, name, ranks)
        self._fellows, self._turn, self._numbers = fellows, threading.Lock(), count()
        self._pending: deque[Step] = deque()
        self._failure: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def when_a_rank_ends(self, call: Callable[[], None]) -> None:
        self._listeners.append(call)

    def a_rank_has_ended(self) -> None:
        """From whoever watches them, in a thread of his."""
        for call in self._listeners:
            call()

    def check(self) -> None:
        with self._turn:
            if fate := self._failure or self._fellows.fate():
                raise RankError(fate)

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """One on every rank."""
        cache = MirroredCache(next(self._numbers), self._pending, self.cache_shape(rows, positions))
        self._pending.append(Step(Op.NEW_CACHE, (cache.number, rows, positions)))
        weakref.finalize(cache, self._pending.append, Step(Op.DROP_CACHE, (cache.number,)))
        return cache

    def streams(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()) -> Streams:
        assert isinstance(attend, CachedAttend)
        assert isinstance(attend.cache, MirroredCache)
        plan, backend = attend.plan, BACKEND_NAMES.index(attend.backend.name)
        numbers = attend.cache.number, backend, attend.first_row, plan.longest
        with self._together(Step(Op.FORWARD, numbers, packed_pass(tokens, positions, plan.ancestors))):
            return super().streams(tokens, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        with self._together(Step(Op.HEAD, (len(flat),))):
            self.ranks.send(flat)
            logits = self.run_head(flat)
        assert logits is not None
        return logits.view(*hidden.shape[:-1], -1)

    @contextmanager
    def capturing(self) -> Iterator[int]:
        """What is captured in here, the others capture, too -> the graph's number."""
        number = next(self._numbers)
        with self._together(Step(Op.CAPTURE, (number,))):
            pass
        yield number
        with self._together(Step(Op.CAPTURED)):
            pass

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        """The others replay that graph beside what is done in here."""
        with self._together(Step(Op.REPLAY, (number,))):
            yield

    def forget(self, number: int) -> None:
        """The others drop that graph before what comes next."""
        self._pending.append(Step(Op.DROP_GRAPH, (number,)))

    @contextmanager
    def _together(self, step: Step) -> Iterator[None]:
        """All ranks do this, after what is pending."""
        with self._turn, uninterrupted():
            if self._failure is not None:
                raise RankError(self._failure)
            try:
                self._tell(step)
                yield
            except BaseException as error:
                self._failure = self._why(error)
                self._fellows.end(self.ranks, orderly=False)
                raise RankError(self._failure) from error

    def _tell(self, step: Step) -> None:
        if fate := self._fellows.fate():
            raise RankError(fate)
        steps = [self._pending.popleft() for _ in range(len(self._pending))] + [step]
        self.ranks.say(as_numbers(steps))
        for each in steps:
            if each.tensor is not None:
                self.ranks.send(each.tensor)

    def _why(self, error: BaseException) -> str:
        fate = self._fellows.fate(LAST_WORDS) or f"a forward pass failed ({type(error).__name__}: {error})"
        return f"{fate}; the ranks that share {self.name} cannot go on, and the engine has ended: make a new LLM"

    def close(self) -> None:
        """The other ranks end. The model cannot be used afterwards; closing it again does nothing."""
        with self._turn:
            if self._failure is None:
                self._failure = f"the ranks that share {self.name} have ended, for it was closed"
                self._fellows.end(self.ranks, orderly=True)


class MirroredCache(KVCache):
    """Rank 0's cache; what happens to it will happen to the other ranks' of the same number, in the same order."""

    def __init__(self, number: int, pending: deque[Step], shape: CacheShape) -> None:
        super().__init__(*shape)
        self.number, self._pending = number, pending

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        super().keep(rows, text, paths)
        self._pending.append(Step(Op.KEEP, (self.number,), torch.cat([rows[:, None], text[:, None], paths], 1)))

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        self._pending.append(Step(Op.COPY_ROW, (self.number, source, destination, length)))

    def swap_rows(self, one: int, other: int, length: int) -> None:
        super().swap_rows(one, other, length)
        self._pending.append(Step(Op.SWAP_ROWS, (self.number, one, other, length)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes when this is over: ranks that stop in the middle of a pass no longer stand at the same place."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


__all__ = ["BACKEND_NAMES", "Fellows", "LeadingPart", "MirroredCache", "PartOfModel", "uninterrupted"]
