"""Communication between ranks: instructions from rank 0 as numbers; tensors that are sent, summed or gathered.

Only plain tensors are sent: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.models.description.shards import ModelShard

PATIENCE = timedelta(seconds=60)  # for a rank that lives but does not answer; a dead one is noticed at once
FOREVER = timedelta(days=366)  # for the next instruction of rank 0
_AT_ONCE = 256  # numbers in the first message; more follow in a second one


class Ranks:
    """One rank's end of the process group. All ranks must create theirs at the same time.

    store: where the ranks find each other.
    device: of the model; CPUs sum by gloo, CUDA devices by NCCL.
    interface: the network interface that gloo listens on; None: loopback only (127.0.0.1).
    """

    def __init__(self, store: Store, share: ModelShard, device: torch.device, interface: str | None = None) -> None:
        self.share, self.device = share, device
        self._control = _gloo(PrefixStore("control", store), share, interface)
        store = PrefixStore("data", store)
        self._data: Any = _nccl(store, share) if device.type == "cuda" else _gloo(store, share, interface)
        self.name = "nccl" if device.type == "cuda" else "gloo"

    def broadcast_numbers(self, numbers: Sequence[int]) -> None:
        """On rank 0: send instructions to the other ranks."""
        first = torch.zeros(_AT_ONCE, dtype=torch.int64)
        instructions = torch.tensor([len(numbers), *numbers], dtype=torch.int64)
        first[: len(instructions)] = instructions[:_AT_ONCE]
        self._control.broadcast(first, 0).wait()
        if len(instructions) > _AT_ONCE:
            self._control.broadcast(instructions[_AT_ONCE:].contiguous(), 0).wait()

    def receive_numbers(self) -> list[int]:
        """On other ranks: wait for the next instructions, without a time limit."""
        first = torch.zeros(_AT_ONCE, dtype=torch.int64)
        self._control.broadcast(first, 0, timeout=FOREVER).wait()
        count, *numbers = first.tolist()
        if count < _AT_ONCE:
            return numbers[:count]
        rest = torch.zeros(count + 1 - _AT_ONCE, dtype=torch.int64)
        self._control.broadcast(rest, 0).wait()
        return [*numbers, *rest.tolist()]

    def send(self, tensor: Tensor) -> None:
        """On rank 0: send a tensor to all ranks."""
        self._data.broadcast(tensor.contiguous(), 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """On other ranks: receive a tensor from rank 0."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._data.broadcast(tensor, 0).wait()
        return tensor

    def add_up(self, part: Tensor) -> Tensor:
        """Sum all ranks' parts in place, on every rank. The order of additions depends only on shape and number of
        ranks.
        """
        part = part.contiguous()
        self._data.allreduce([part]).wait()
        return part

    def collect(self, part: Tensor) -> list[Tensor]:
        """Gather all ranks' parts, of one shape, on rank 0; the others get an empty list."""
        leads = self.share.rank == 0
        parts = [torch.empty_like(part) for _ in range(self.share.ranks)] if leads else []
        how = dist.GatherOptions()
        how.rootRank = 0
        self._data.gather([parts] if leads else [], [part.contiguous()], how).wait()
        return parts

    def abort(self) -> None:
        """Abort all pending communication of this rank."""
        self._data.abort()


def _gloo(store: Store, share: ModelShard, interface: str | None) -> Any:
    groups: Any = dist.ProcessGroupGloo  # its options have no types
    options = groups._Options()
    options._timeout = PATIENCE
    where = {"hostname": "127.0.0.1"} if interface is None else {"interface": interface}
    options._devices = [groups.create_device(**where)]
    return groups(store, share.rank, share.ranks, options)


def _nccl(store: Store, share: ModelShard) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, share.rank, share.ranks, options)
