"""Processes that learn together: each takes its part of every step, and their gradients are added up.

A launcher such as torchrun starts them. The first one makes the data, looks, saves and reports; all hold the same head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import Tensor, distributed

from paceline.models.parallel.launch import interface_of, launched_share
from paceline.models.shares import Share

_FOR_EVER = timedelta(days=365)  # the first one writes data for hours; a launcher ends the others if one fails


class TrainingRanks:
    """share: which one of how many this process is."""

    def __init__(self, share: Share = Share(0, 1)) -> None:  # noqa: B008 (it cannot be changed)
        self.rank, self.size = share.rank, share.ranks

    @property
    def first(self) -> bool:
        return self.rank == 0

    def part(self, step: Sequence[int]) -> list[int]:
        """This process's conversations of a step; none where there are too few."""
        return list(step[self.rank :: self.size])

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each becomes the sum of all processes' ones; these wait for each other."""
        if self.size > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            distributed.all_reduce(flat)
            for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, number: float) -> float:
        """Of all processes."""
        numbers = torch.tensor([number], dtype=torch.float64)
        self.add_up([numbers])
        return numbers.item()


@contextmanager
def training_ranks() -> Iterator[TrainingRanks]:
    """All that the launcher has started, or this process alone. Raises ParameterError."""
    share = launched_share()
    if share is None or share.ranks == 1:
        yield TrainingRanks()
        return
    interface_of()
    distributed.init_process_group("gloo", timeout=_FOR_EVER)
    try:
        yield TrainingRanks(share)
    finally:
        distributed.destroy_process_group()
