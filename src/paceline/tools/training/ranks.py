"""Data-parallel training on CPUs: each rank takes a part of every step, and gradients are summed.

A launcher such as torchrun starts the ranks. Rank 0 makes the data, evaluates, saves and reports; all ranks hold the
same head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from paceline.models.description.shards import ModelShard
from paceline.models.parallel.launch import interface_of, launched_share

_NO_TIMEOUT = timedelta(days=365)  # rank 0 writes data for hours; the launcher ends the others if one fails


class TrainingRanks:
    """This process's rank among the ranks that train together."""

    def __init__(self, share: ModelShard = ModelShard(0, 1)) -> None:  # noqa: B008 (it cannot be changed)
        self.rank, self.size = share.rank, share.ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, step: Sequence[int]) -> list[int]:
        """This rank's conversations of a step; empty where the step has fewer conversations than there are ranks."""
        return list(step[self.rank :: self.size])

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks. Every rank has to call this."""
        if self.size > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            distributed.all_reduce(flat)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, number: float) -> float:
        """The sum of a number over all ranks. Every rank has to call this."""
        numbers = torch.tensor([number], dtype=torch.float64)
        self.all_reduce([numbers])
        return numbers.item()


@contextmanager
def training_ranks() -> Iterator[TrainingRanks]:
    """The ranks that the launcher has started, or this process alone.

    Raises ParameterError if the launcher's settings are invalid.
    """
    share = launched_share()
    if share is None or share.ranks == 1:
        yield TrainingRanks()
        return
    interface_of()
    distributed.init_process_group("gloo", timeout=_NO_TIMEOUT)
    try:
        yield TrainingRanks(share)
    finally:
        distributed.destroy_process_group()
