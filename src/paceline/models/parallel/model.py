"""A model divided among ranks. Rank 0's part is a ``Model`` like any other; the others follow it."""

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
from paceline.core.cache import KVCache, KVHeads
from paceline.errors import RankError
from paceline.kernels.attention import BACKENDS
from paceline.kernels.attention.base import Attend
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import HiddenStates
from paceline.models.description.spec import DecoderSpec
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.plan import Op, Step, as_numbers, packed_pass
from paceline.models.torch.experts import Experts
from paceline.models.torch.linear import Linear
from paceline.models.torch.transformer import Transformer

CacheShape: TypeAlias = tuple[Sequence[KVHeads], int, int, torch.dtype, torch.device]
BACKEND_NAMES = cast(tuple[AttentionName, ...], tuple(BACKENDS))

LAST_WORDS = 2.0  # seconds to wait for the exit of a process that broke a connection


class SummedLinear:
    """A linear layer divided by columns, whose outputs all ranks sum."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.add_up(self._part(x))

    def tensors(self) -> tuple[Tensor, ...]:
        return self._part.tensors()


class EmbeddingShard:
    """Some rows of an embedding that is also the head."""

    def __init__(self, weight: Tensor, rows: range) -> None:
        self._weight, self._rows = weight, weight[rows.start : rows.stop]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,)


class PartOfModel(Transformer):
    """A rank's part: its forward pass gives the whole model's result, if all ranks run it together.

    spec: of the whole model; weights: of this part (``load.loading.load_shard``).
    """

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], name: str, ranks: Ranks) -> None:
        super().__init__(ranks.share.local(spec), weights, name)
        self.ranks, self.hidden_width = ranks, spec.embed_width
        for block in self._blocks:
            block.attention.output = SummedLinear(block.attention.output, ranks)
            assert block.mlp is not None, "check_shardable refuses layers of one part"
            assert not isinstance(block.mlp, Experts), "check_shardable refuses them"
            block.mlp.down = SummedLinear(block.mlp.down, ranks)
        if spec.tied:
            self._head = EmbeddingShard(self._embedding, ranks.share.of(spec.vocab_size))
        self.precision += f", cut into {ranks.share.ranks} ranks ({ranks.name})"

    def cache_shape(self, rows: int, positions: int) -> CacheShape:
        """``KVCache``'s arguments, for the heads of this part."""
        return self.kv_layers, rows, positions, self.dtype, self.device

    def run_head(self, hidden: Tensor) -> Tensor | None:
        """Hidden [N, width] -> logits [N, vocab_size] in float32 on rank 0, None on others."""
        sizes = [len(share.of(self.vocab_size)) for share in self.ranks.share.all()]
        own = self._head(hidden)
        parts = self.ranks.collect(functional.pad(own, (0, max(sizes) - own.shape[-1])))
        if not parts:
            return None
        return self.scaled(torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1).float())


class RankProcesses(Protocol):
    """The other ranks' processes."""

    def find_ended(self, patience: float = 0.0) -> str | None:
        """A message about the rank that has ended; None if all run. patience: seconds to wait for an exit."""
        ...

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None:
        """End all of them."""
        ...


class LeadingPart(PartOfModel):
    """Rank 0's part: it makes the other ranks repeat everything that it and its caches do.

    Changes of caches are sent with the next forward pass. After an error in a pass the ranks are out of step, and every
    further call raises RankError.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor], name: str, ranks: Ranks, processes: RankProcesses
    ) -> None:
        super().__init__(spec, weights, name, ranks)
        self._processes, self._turn, self._numbers = processes, threading.Lock(), count()
        self._pending: deque[Step] = deque()
        self._failure: str | None = None
        self._listeners: list[Callable[[], None]] = []

    def when_a_rank_ends(self, call: Callable[[], None]) -> None:
        self._listeners.append(call)

    def on_rank_ended(self) -> None:
        """Notify the listeners; called in the watching thread."""
        for call in self._listeners:
            call()

    def check(self) -> None:
        with self._turn:
            if ended := self._failure or self._processes.find_ended():
                raise RankError(ended)

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """Create a cache on every rank."""
        cache = MirroredCache(next(self._numbers), self._pending, self.cache_shape(rows, positions))
        self._pending.append(Step(Op.NEW_CACHE, (cache.number, rows, positions)))
        weakref.finalize(cache, self._pending.append, Step(Op.DROP_CACHE, (cache.number,)))
        return cache

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        assert isinstance(attend, CachedAttend)
        assert isinstance(attend.cache, MirroredCache)
        plan, backend = attend.plan, BACKEND_NAMES.index(attend.backend.name)
        first = attend.rows.first
        numbers = attend.cache.number, backend, -1 if first is None else first, plan.longest
        packed = packed_pass(attend.rows.index, tokens, positions, plan.ancestors)
        with self._on_all_ranks(Step(Op.FORWARD, numbers, packed)):
            return super().hidden_states(tokens, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        with self._on_all_ranks(Step(Op.HEAD, (len(flat),))):
            self.ranks.send(flat)
            logits = self.run_head(flat)
        assert logits is not None
        return logits.view(*hidden.shape[:-1], -1)

    @contextmanager
    def capturing(self) -> Iterator[int]:
        """Let the other ranks capture what is run inside -> the graph's number."""
        number = next(self._numbers)
        with self._on_all_ranks(Step(Op.CAPTURE, (number,))):
            pass
        yield number
        with self._on_all_ranks(Step(Op.CAPTURED)):
            pass

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        """Let the other ranks replay that graph while this rank does, inside the context."""
        with self._on_all_ranks(Step(Op.REPLAY, (number,))):
            yield

    def forget(self, number: int) -> None:
        """Let the other ranks drop that graph before the next operation."""
        self._pending.append(Step(Op.DROP_GRAPH, (number,)))

    @contextmanager
    def _on_all_ranks(self, step: Step) -> Iterator[None]:
        """Run a step on all ranks, after the pending ones."""
        with self._turn, uninterrupted():
            if self._failure is not None:
                raise RankError(self._failure)
            try:
                self._send_steps(step)
                yield
            except BaseException as error:
                self._failure = self._failure_message(error)
                self._processes.end(self.ranks, orderly=False)
                raise RankError(self._failure) from error

    def _send_steps(self, step: Step) -> None:
        if ended := self._processes.find_ended():
            raise RankError(ended)
        steps = [self._pending.popleft() for _ in range(len(self._pending))] + [step]
        self.ranks.broadcast_numbers(as_numbers(steps))
        for each in steps:
            if each.tensor is not None:
                self.ranks.send(each.tensor)

    def _failure_message(self, error: BaseException) -> str:
        ended = self._processes.find_ended(LAST_WORDS) or f"a forward pass failed ({type(error).__name__}: {error})"
        return f"{ended}; the ranks that share {self.name} cannot go on, and the engine has ended: make a new LLM"

    def close(self) -> None:
        """End the other ranks. The model cannot be used afterwards; closing it again does nothing."""
        with self._turn:
            if self._failure is None:
                self._failure = f"the model {self.name} was closed, and its ranks have ended"
                self._processes.end(self.ranks, orderly=True)


class MirroredCache(KVCache):
    """Rank 0's cache; its changes are repeated, in order, on the other ranks' caches with the same number."""

    def __init__(self, number: int, pending: deque[Step], shape: CacheShape) -> None:
        super().__init__(*shape)
        self.number, self._pending = number, pending

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        super().keep(rows, text, paths)
        self._pending.append(Step(Op.KEEP, (self.number,), torch.cat([rows[:, None], text[:, None], paths], 1)))

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        self._pending.append(Step(Op.COPY_ROW, (self.number, source, destination, length)))

    def erase_row(self, row: int) -> None:
        super().erase_row(row)
        self._pending.append(Step(Op.ERASE_ROW, (self.number, row)))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the context: ranks that stop in the middle of a pass would be out of step."""
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


__all__ = ["BACKEND_NAMES", "LeadingPart", "PartOfModel", "RankProcesses"]
