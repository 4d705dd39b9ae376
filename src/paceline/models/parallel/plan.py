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
    KEEP = 4  # cache; [B, 2 + k]: rows, text, paths
    FORWARD = 5  # cache, backend, first of consecutive rows or -1, longest; [B, L, 3 or 3 + L]: see ``packed_pass``.
    # On the CPU kernels: cache, whether hidden states are wanted, Nodes.read, Nodes.text, taps; [3 or 5, N]
    HEAD = 6  # tokens; their hidden states follow
    CAPTURE = 7  # graph: what follows until CAPTURED is captured, not run (CUDA)
    CAPTURED = 8
    REPLAY = 9  # graph
    DROP_GRAPH = 10  # graph
    ERASE_ROW = 11  # cache, row
    CUT_ROW = 12  # cache, row, length


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


def packed_pass(rows: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor | None) -> Tensor:
    """rows [B] of the cache, tokens, positions [B, L], for trees ancestors [B, L, L] -> [B, L, 3 or 3 + L] int64."""
    of_tokens = rows[:, None].expand_as(tokens)
    trees = [] if ancestors is None else [ancestors.long()]
    return torch.cat([of_tokens[..., None], tokens[..., None], positions[..., None], *trees], 2)


def unpacked_pass(packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """rows, tokens, positions, ancestors."""
    ancestors = packed[..., 3:].bool() if packed.shape[2] > 3 else None
    return packed[:, 0, 0].contiguous(), packed[..., 1].contiguous(), packed[..., 2].contiguous(), ancestors
