"""Reference implementation of gated short convolutions (LFM2) in plain torch, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.core.recurrent_state import StateShape
from paceline.kernels.recurrent import convolve


@dataclass(frozen=True)
class ShortConv:
    """A short convolution between two gates (``Lfm2ShortConv`` of transformers); implements ``RecurrentMixer``.

    Its first matrix gives B, C and x of C channels each. A slot keeps the last products B x; there is no other state.
    conv [channels, taps].
    """

    conv: Tensor
    gates: None = None

    def shape(self, layers: int) -> StateShape:
        """Return what a slot keeps of ``layers`` layers: the convolution's inputs."""
        channels, taps = self.conv.shape
        return StateShape(layers, taps, channels)

    def split(self, projected: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return B x and C, [n, channels] each."""
        b, c, x = projected.chunk(3, dim=1)
        return b * x, c

    def append(self, state: Tensor, window: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolution [channels], and the state, which is empty."""
        return convolve(window, self.conv), state

    def finish(self, mixed: Tensor, kept: Tensor) -> Tensor:
        """Multiply outputs by C, [n, channels] each."""
        return mixed * kept
