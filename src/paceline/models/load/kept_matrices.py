"""A checkpoint's matrices for a GPU, read one by one into the format that they are kept in.

Codes of the file are taken as they are where the format or another of as many bits holds them. Other matrices are read
into memory of the host, and rounded on the device, a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from paceline.kernels import pack
from paceline.kernels.pack import Coding, Format, Weight
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.weights import Placement, assemble
from paceline.models.native.matrices import (
    Outcome,
    StoredMatrix,
    codes_of,
    kind_of,
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

    def _codes(self, part: Placement, to: Format) -> Weight | None:
        """Return the stored codes of a part in the first coding that holds them."""
        found = (codes_of(part, coding) for coding in _CODINGS[to])
        codes = next((one for one in found if one is not None), None)
        return None if self.of_one and kind_of(codes) == "float8 in groups" else codes

    def _kept(self, part: Placement, codes: Weight | None, to: Format) -> Weight:
        self.outcome.count(part, kept=codes is not None)
        return pack.quantise(numbers_of(part), to, self.device) if codes is None else pack.on(codes, self.device)


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
