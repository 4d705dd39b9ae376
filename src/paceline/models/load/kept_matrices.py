"""A checkpoint's matrices for a GPU, read one by one into the format that they are kept in.

Codes of the file are taken as they are where the format or another of as many bits holds them. Other matrices are read
into memory of the host, and rounded on the device, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from paceline.kernels import pack
from paceline.kernels.pack import Coding, Float8Weight, Format, Fp4Weight, Int4Weight, Weight
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.weights import Placement, assemble
from paceline.models.native.matrices import (
    Outcome,
    StoredMatrix,
    codes_of,
    matrices_of,
    numbers_in,
    numbers_of,
    others_than,
    shapes_of,
)

_CODINGS: dict[Format, tuple[Coding, ...]] = {"int8": ("int8",), "int4": ("int4", "fp4"), "fp8": ("fp8",)}
"""The codes that are kept for each format."""


@dataclass(frozen=True)
class KeptMatrix(StoredMatrix):
    """A matrix that is kept on a device; None: the host.

    of_one: whether it is of one expert; then float8 codes whose scales are of blocks are rounded again, to one scale a
        line, as grouped products read them.
    """

    device: torch.device | None = None
    of_one: bool = False

    def of_expert(self, expert: int) -> Self:
        return replace(super().of_expert(expert), of_one=True)

    def __call__(self, to: Format) -> Weight:
        """Read the matrix in a format, or in codes of as many bits.

        Raises ModelFormatError for numbers that are not finite.
        """
        with ThreadPoolExecutor(len(self.parts)) as pool:
            codes = list(pool.map(lambda part: _codes(part, _CODINGS[to]), self.parts))
            if self.of_one:
                codes = [None if _kind(one) == "float8 in groups" else one for one in codes]
            if not all(_stack(codes[0], other) for other in codes[1:]):
                codes = [None if one is None or _stands_alone(one) else one for one in codes]
            weights = list(pool.map(lambda part, own: self._kept(part, own, to), self.parts, codes))
        self.outcome.add(numbers_in(self.parts))
        return pack.stack(weights)

    def _kept(self, part: Placement, codes: Weight | None, to: Format) -> Weight:
        self.outcome.count(part, kept=codes is not None)
        return pack.quantise(numbers_of(part), to, self.device) if codes is None else pack.on(codes, self.device)


def _codes(part: Placement, codings: Sequence[Coding]) -> Weight | None:
    """Return the stored codes of a part in the first of the codings that holds them."""
    return next((found for coding in codings if (found := codes_of(part, coding)) is not None), None)


def _stands_alone(codes: Weight) -> bool:
    """Whether rows of other codes, or of rounded numbers, cannot stand below these in one matrix."""
    return _kind(codes) != "plain" or (isinstance(codes, Int4Weight) and codes.order is not None)


def _kind(codes: Weight | None) -> str:
    """Return what rounded numbers are not, or "plain"."""
    if isinstance(codes, Fp4Weight):
        return "fp4"
    return "float8 in groups" if isinstance(codes, Float8Weight) and codes.scales.dim() > 1 else "plain"


def _stack(one: Weight | None, other: Weight | None) -> bool:
    """Whether two parts' codes, None for numbers to round, can be rows of one matrix."""
    orders = [part.order for part in (one, other) if isinstance(part, Int4Weight) and part.order is not None]
    if orders:
        return len(orders) == 2 and torch.equal(*orders)
    return _kind(one) == _kind(other)


def unread_matrices(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, outcome: Outcome
) -> tuple[dict[str, Tensor], dict[str, KeptMatrix]]:
    """Return a checkpoint's tensors on a device, its matrices on device "meta", and what reads those.

    dtype: of what is no matrix. Raises ModelFormatError for numbers beyond it.
    """
    parts = matrices_of(checkpoint.placements)
    outcome.total = sum(map(numbers_in, parts.values()))
    tensors = shapes_of(parts) | assemble(others_than(parts, checkpoint.placements), dtype, device)
    return tensors, {target: KeptMatrix(found, outcome, device) for target, found in parts.items()}
