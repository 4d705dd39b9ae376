"""How ranks talk: numbers from rank 0 that say what comes, and tensors that are sent, added up or collected.

Everything that is sent is a plain tensor: nothing is unpickled anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.models.shares import Share

PATIENCE = timedelta(seconds=60)  # with a rank that lives and does not answer; one that is dead is noticed at once
FOREVER = timedelta(days=366)  # until rank 0 says what comes next
_AT_ONCE = 256  # numbers of a message; more follow in a second one


class Ranks:
    """One rank's end of the group. To be made on all ranks at the same time.

    store: where they find each other. device: of the model; CPUs add up by gloo, CUDA devices by NCCL. interface: the
    network interface that gloo listens on, or None: the address of this machine alone (127.0.0.1).
    """

    def __init__(self, store: Store, share: Share, device: torch.device, interface: str | None = None) -> None:
        self.share, self.device = share, device
        self._control = _gloo(PrefixStore("control", store), share, interface)
        store = PrefixStore("data", store)
        self._data: Any = _nccl(store, share) if device.type == "cuda" else _gloo(store, share, interface)
        self.name = "nccl" if device.type == "cuda" else "gloo"

    def say(self, numbers: Sequence[int]) -> None:
        """Rank 0: what the others are to do next."""
        first = torch.zeros(_AT_ONCE, dtype=torch.int64)
        told = torch.tensor([len(numbers), *numbers], dtype=torch.int64)
        first[: len(told)] = told[:_AT_ONCE]
        self._control.broadcast(first, 0).wait()
        if len(told) > _AT_ONCE:
            self._control.broadcast(told[_AT_ONCE:].contiguous(), 0).wait()

    def hear(self) -> list[int]:
        """The others: what is to be done next; waits for as long as nothing is."""
        first = torch.zeros(_AT_ONCE, dtype=torch.int64)
        self._control.broadcast(first, 0, timeout=FOREVER).wait()
        count, *numbers = first.tolist()
        if count < _AT_ONCE:
            return numbers[:count]
        rest = torch.zeros(count + 1 - _AT_ONCE, dtype=torch.int64)
        self._control.broadcast(rest, 0).wait()
        return [*numbers, *rest.tolist()]

    def send(self, tensor: Tensor) -> None:
        """Rank 0: a tensor to all."""
        self._data.broadcast(tensor.contiguous(), 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The others: what rank 0 sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self._data.broadcast(tensor, 0).wait()
        return tensor

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on each of them; in place. One number of ranks and one shape: one order."""
        part = part.contiguous()
        self._data.allreduce([part]).wait()
        return part

    def collect(self, part: Tensor) -> list[Tensor]:
        """Rank 0 gets all ranks' parts, of one shape; the others an empty list."""
        leads = self.share.rank == 0
        parts = [torch.empty_like(part) for _ in range(self.share.ranks)] if leads else []
        how = dist.GatherOptions()
        how.rootRank = 0
        self._data.gather([parts] if leads else [], [part.contiguous()], how).wait()
        return parts

    def abort(self) -> None:
        """Whoever waits for another rank waits no longer."""
        self._data.abort()


def _gloo(store: Store, share: Share, interface: str | None) -> Any:
    groups: Any = dist.ProcessGroupGloo  # whose options have no types
    options = groups._Options()
    options._timeout = PATIENCE
    where = {"hostname": "127.0.0.1"} if interface is None else {"interface": interface}
    options._devices = [groups.create_device(**where)]
    return groups(store, share.rank, share.ranks, options)


def _nccl(store: Store, share: Share) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, share.rank, share.ranks, options)
