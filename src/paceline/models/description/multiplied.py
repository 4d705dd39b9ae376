"""Stored matrices whose rows a model multiplies by constants of its configuration: they are multiplied when read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.pack import Coding, Weight, multiply_rows
from paceline.models.description.weights import CodedTensor, HasInputOrder, StoredTensor


def multiplied(stored: StoredTensor, factors: Tensor) -> StoredTensor:
    """Return a stored matrix with its rows multiplied. factors: [rows], or [1] for all rows."""
    return (MultipliedCodes if isinstance(stored, CodedTensor) else MultipliedTensor)(stored, factors)


@dataclass(frozen=True)
class MultipliedTensor:
    """A stored matrix of numbers, as ``multiplied`` makes it."""

    stored: StoredTensor
    factors: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def unpack_into(self, destination: Tensor) -> None:
        exact = torch.empty(self.shape, dtype=torch.float32)
        self.stored.unpack_into(exact)
        destination.copy_(exact * self.factors[:, None])


class MultipliedCodes(MultipliedTensor):
    """A stored matrix of codes: their scales are multiplied, so codes that a format holds stay as they are."""

    @property
    def stored_as(self) -> str:
        assert isinstance(self.stored, CodedTensor), "``multiplied`` tells them apart"
        return self.stored.stored_as

    @property
    def ordered(self) -> bool:
        return isinstance(self.stored, HasInputOrder) and self.stored.ordered

    def codes(self, to: Coding) -> Weight | None:
        assert isinstance(self.stored, CodedTensor), "``multiplied`` tells them apart"
        codes = self.stored.codes(to)
        return None if codes is None else multiply_rows(codes, self.factors)
