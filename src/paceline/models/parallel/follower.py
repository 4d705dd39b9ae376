"""The loop of ranks other than 0: receive instructions from rank 0 and carry them out."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.config import AttentionName
from paceline.core.cache import KVCache
from paceline.core.slots import Slots
from paceline.kernels.attention import AttentionBackend, make_backend
from paceline.kernels.attention.cached import CachedAttend, PackedCachedAttend
from paceline.kernels.gpu.graphs import recorded, wait_for
from paceline.models.parallel.model import BACKEND_NAMES, PartOfModel
from paceline.models.parallel.plan import Op, as_steps, unpacked_pass


class Follower:
    """A rank's part of the model and of every cache. It decides nothing."""

    def __init__(self, model: PartOfModel) -> None:
        self.model, self.ranks = model, model.ranks
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
            case Op.FORWARD, (cache, backend, first, longest), Tensor():
                self._forward(self._caches[cache], BACKEND_NAMES[backend], first, longest, tensor)
            case Op.HEAD, (tokens,), None:
                self._head(tokens)
            case Op.COPY_ROW, (cache, source, destination, length), None:
                self._caches[cache].copy_row(source, destination, length)
            case Op.ERASE_ROW, (cache, row), None:
                self._caches[cache].erase_row(row)
            case Op.KEEP, (cache,), Tensor():
                self._caches[cache].keep(tensor[:, 0], tensor[:, 1], tensor[:, 2:])
            case Op.NEW_CACHE, (cache, rows, positions), None:
                self._caches[cache] = KVCache(*self.model.cache_shape(rows, positions))
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

    def _capture(self, number: int) -> None:
        """Capture the same passes as rank 0 at the same time."""
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, self._pool):
            self._follow_until(until=Op.CAPTURED)
        self._pool = self._pool or graph.pool()
        self._graphs[number] = graph

    def _forward(self, cache: KVCache, name: AttentionName, first: int, longest: int, packed: Tensor) -> None:
        """Run the pass like ``Decoder``; the result is the same as on rank 0."""
        index, tokens, positions, ancestors = unpacked_pass(packed)
        rows = Slots(index, None if first < 0 else range(first, first + len(index)))
        backend = _backend(name, self.model.device)
        plan = backend.plan(positions, longest, ancestors)
        packs = name == "ragged" and self.model.device.type == "cuda"
        attend = (PackedCachedAttend if packs else CachedAttend)(cache, backend, plan, rows)
        self.model.hidden_states(tokens, positions, attend)

    def _head(self, tokens: int) -> None:
        self.model.run_head(self.ranks.receive((tokens, self.model.hidden_width), self.model.dtype))


@cache
def _backend(name: AttentionName, device: torch.device) -> AttentionBackend:
    return make_backend(name, device)
