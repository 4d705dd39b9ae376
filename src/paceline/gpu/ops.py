"""What a round does to logits, behind one protocol: Triton's kernels, or their twins in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.gpu import twin
from paceline.gpu.launch import why_not
from paceline.gpu.state import Guesses, RowState
from paceline.sampling import Purpose


class RoundOps(Protocol):
    """Nothing here reads the device. B rows, k guesses, V vocabulary."""

    name: str

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        """logits [B, L, V] -> [B, L] int64; position j stands at length + first + j."""
        ...

    def coupled(self, guesses: Guesses, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        """Accept and commit -> the record [B, k + 4] (``gpu.accept.coupled``)."""
        ...

    def rejection(self, guesses: Guesses, logits: Tensor, rows: RowState) -> Tensor:
        """Accept and commit -> the record [B, k + 4] (``gpu.accept.rejection``)."""
        ...


class TwinOps:
    """Plain torch."""

    name = "torch"

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        return twin.draw(logits, rows.temperature, rows.seed, rows.length, first, purpose)

    def coupled(self, guesses: Guesses, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        return twin.coupled(guesses, logits, rows, synthetic)

    def rejection(self, guesses: Guesses, logits: Tensor, rows: RowState) -> Tensor:
        return twin.rejection(guesses, logits, rows)


class TritonOps:
    """A few small launches."""

    name = "triton"

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        from paceline.gpu.draw import Noise, draw  # needs triton

        return draw(logits, Noise(rows.temperature, rows.seed, rows.length), first, purpose)

    def coupled(self, guesses: Guesses, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        from paceline.gpu.accept import coupled

        return coupled(guesses, logits, rows, synthetic)

    def rejection(self, guesses: Guesses, logits: Tensor, rows: RowState) -> Tensor:
        from paceline.gpu.accept import rejection

        return rejection(guesses, logits, rows)


def ops_for(device: torch.device) -> RoundOps:
    """The kernels where there is a GPU for them, else the twins (the interpreter is for tests that ask for it)."""
    return TritonOps() if device.type == "cuda" and why_not(device) is None else TwinOps()
