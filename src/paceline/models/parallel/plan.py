"""Rank 0's instructions: operations, each with some numbers and sometimes an integer tensor.

A plan holds the changes of the caches since the last one, and one forward pass or one use of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Op(IntEnum):
    """The operations, each with its numbers and the shape of its tensor."""

    END = 0  # no further operations
    NEW_CACHE = 1  # cache, rows, positions
    DROP_CACHE = 2  # cache
    COPY_ROW = 3  # cache, source, destination, length
    SWAP_ROWS = 4  # cache, one, other, length
    KEEP = 5  # cache; [B, 2 + k]: rows, text, paths
    FORWARD = 6  # cache, backend, first row, longest; [B, L, 2 or 2 + L]: tokens, positions, for trees ancestors
    HEAD = 7  # tokens; their hidden states follow
    CAPTURE = 8  # graph: what follows until CAPTURED is captured, not run (CUDA)
    CAPTURED = 9
    REPLAY = 10  # graph
    DROP_GRAPH = 11  # graph


@dataclass(frozen=True)
class Step:
    """One operation. tensor: int64, sent separately, because it may lie on a device that the host does not read."""

    op: Op
    numbers: tuple[int, ...] = ()
    tensor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.tensor is None else tuple(self.tensor.shape)


def as_numbers(steps: Sequence[Step]) -> list[int]:
    """[op, number count, dimension count, numbers, dimensions] of each step."""
    return [
        number for step in steps for number in (step.op, len(step.numbers), len(step.shape), *step.numbers, *step.shape)
    ]


def as_steps(numbers: Sequence[int]) -> Iterator[tuple[Op, tuple[int, ...], tuple[int, ...]]]:
    """The operations, with the shapes of their tensors: () for none."""
    at = 0
    while at < len(numbers):
        op, count, dims = numbers[at : at + 3]
        middle, at = at + 3 + count, at + 3 + count + dims
        yield Op(op), tuple(numbers[middle - count : middle]), tuple(numbers[middle:at])


def packed_pass(tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> Tensor:
    """tokens, positions [B, L], for trees ancestors [B, L, L] -> [B, L, 2 or 2 + L] int64."""
    parts = [tokens[..., None], positions[..., None], *([] if ancestors is None else [ancestors.long()])]
    return torch.cat(parts, 2)


def unpacked_pass(packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens, positions, ancestors."""
    ancestors = packed[..., 2:].bool() if packed.shape[2] > 2 else None
    return packed[..., 0].contiguous(), packed[..., 1].contiguous(), ancestors
