"""The loop of ranks other than 0: receive instructions from rank 0 and carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from paceline.config import AttentionName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.core.slots import Slots
from paceline.kernels.attention import AttentionBackend, make_backend
from paceline.kernels.attention.cached import CachedAttend, PackedCachedAttend
from paceline.kernels.gpu.graphs import recorded, wait_for
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.model import BACKEND_NAMES, PartOfModel
from paceline.models.parallel.native import NativePart
from paceline.models.parallel.plan import Op, as_steps, unpacked_pass


class Follower:
    """A rank's part of the model and of every cache. It decides nothing."""

    model: PartOfModel | NativePart

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._caches: dict[int, KVCache] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: object = None

    @torch.inference_mode()
    def run(self) -> None:
        """Follow rank 0 until it sends the end."""
        self._follow_until(until=Op.END)

    def _follow_until(self, until: Op) -> None:
        op = None
        while op != until:
            instructions = list(as_steps(self.ranks.receive_numbers()))
            tensors = [self.ranks.receive(shape, torch.int64) if shape else None for _, _, shape in instructions]
            for (op, numbers, _), tensor in zip(instructions, tensors, strict=True):
                self._do(op, numbers, tensor)

    def _do(self, op: Op, numbers: tuple[int, ...], tensor: Tensor | None) -> None:
        """Run one operation; numbers and tensor as ``Op`` defines them."""
        match op, numbers, tensor:
            case Op.FORWARD, (cache, *how), Tensor():
                self.forward(self._caches[cache], how, tensor)
            case Op.HEAD, (tokens,), None:
                self.head(tokens)
            case Op.COPY_ROW, (cache, source, destination, length), None:
                self._caches[cache].copy_row(source, destination, length)
            case Op.ERASE_ROW, (cache, row), None:
                self._caches[cache].erase_row(row)
            case Op.CUT_ROW, (cache, row, length), None:
                self._caches[cache].cut(row, length)
            case Op.KEEP, (cache,), Tensor():
                self._caches[cache].keep(tensor[:, 0], tensor[:, 1], tensor[:, 2:])
            case Op.NEW_CACHE, (cache, rows, positions), None:
                self._caches[cache] = KVCache(*self.model.cache_shape(rows, positions), paged=self.model.paged)
            case Op.DROP_CACHE, (cache,), None:
                del self._caches[cache]
            case Op.CAPTURE, (graph,), None:
                self._capture(graph)
            case Op.REPLAY, (graph,), None:
                self._graphs[graph].replay()
            case Op.DROP_GRAPH, (graph,), None:
                wait_for(self.model.device)  # it may still run
                del self._graphs[graph]
            case ((Op.END | Op.CAPTURED), (), None):
                pass
            case _:
                raise ValueError(f"rank 0 sent an invalid instruction: {op!r} with {len(numbers)} numbers")

    def forward(self, cache: KVCache, how: Sequence[int], tokens: Tensor) -> None:
        """Run a pass over ``tokens``. how: the operation's numbers behind the cache."""
        raise NotImplementedError

    def head(self, tokens: int) -> None:
        """Receive the hidden states of so many tokens, and compute this rank's part of their logits."""
        raise NotImplementedError

    def _capture(self, number: int) -> None:
        """Capture the same passes as rank 0 at the same time."""
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, self._pool):
            self._follow_until(until=Op.CAPTURED)
        self._pool = self._pool or graph.pool()
        self._graphs[number] = graph


class TorchFollower(Follower):
    """The same of a model that torch runs."""

    def __init__(self, model: PartOfModel) -> None:
        super().__init__(model.ranks)
        self.model: PartOfModel = model

    def forward(self, cache: KVCache, how: Sequence[int], tokens: Tensor) -> None:
        backend_number, first, longest = how
        name = BACKEND_NAMES[backend_number]
        index, tokens, positions, ancestors = unpacked_pass(tokens)
        rows = Slots(index, None if first < 0 else range(first, first + len(index)))
        backend = _backend(name, self.model.device)
        plan = backend.plan(positions, longest, ancestors)
        packs = name == "ragged" and self.model.device.type == "cuda"
        attend = (PackedCachedAttend if packs else CachedAttend)(cache, backend, plan, rows)
        self.model.hidden_states(tokens, positions, attend)

    def head(self, tokens: int) -> None:
        self.model.run_head(self.ranks.receive((tokens, self.model.hidden_width), self.model.dtype))


class NativeFollower(Follower):
    """The same of a model on the CPU kernels."""

    def __init__(self, model: NativePart, ranks: Ranks) -> None:
        super().__init__(ranks)
        self.model: NativePart = model

    def forward(self, cache: KVCache, how: Sequence[int], tokens: Tensor) -> None:
        wants_hidden, read, text, *taps = how
        run = self.model.forward if wants_hidden else self.model.fill
        run(Nodes(*tokens)._replace(read=read, text=text), cache, taps)

    def head(self, tokens: int) -> None:
        self.model.logits(self.ranks.receive((tokens, self.model.width), torch.float32))


@cache
def _backend(name: AttentionName, device: torch.device) -> AttentionBackend:
    return make_backend(name, device)
