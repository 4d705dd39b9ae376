"""What rank 0 tells the others: operations, each some numbers and perhaps a tensor of whole numbers.

A plan is what changed in the caches since the last one, and one forward pass or one use of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Op(IntEnum):
    """What is to be done. Behind each its numbers, and the shape of its tensor."""

    END = 0  # nothing more will come
    NEW_CACHE = 1  # cache, rows, positions
    DROP_CACHE = 2  # cache
    COPY_ROW = 3  # cache, source, destination, length
    SWAP_ROWS = 4  # cache, one, other, length
    KEEP = 5  # cache; [B, 2 + k]: rows, text, paths
    FORWARD = 6  # cache, backend, first row, longest; [B, L, 2 or 2 + L]: tokens, positions, of a tree ancestors
    HEAD = 7  # tokens; their hidden states follow
    CAPTURE = 8  # graph: what comes until CAPTURED is recorded as it, and not run (CUDA)
    CAPTURED = 9
    REPLAY = 10  # graph
    DROP_GRAPH = 11  # graph


@dataclass(frozen=True)
class Step:
    """One operation. tensor: int64, sent beside the numbers, for it may lie on a device that the host does not read."""

    op: Op
    numbers: tuple[int, ...] = ()
    tensor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.tensor is None else tuple(self.tensor.shape)


def as_numbers(steps: Sequence[Step]) -> list[int]:
    """[op, how many numbers, how many dimensions, numbers, dimensions] of each."""
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
    """tokens, positions [B, L], of a tree ancestors [B, L, L] -> [B, L, 2 or 2 + L] int64."""
    parts = [tokens[..., None], positions[..., None], *([] if ancestors is None else [ancestors.long()])]
    return torch.cat(parts, 2)


def unpacked_pass(packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens, positions, ancestors."""
    ancestors = packed[..., 2:].bool() if packed.shape[2] > 2 else None
    return packed[..., 0].contiguous(), packed[..., 1].contiguous(), ancestors
