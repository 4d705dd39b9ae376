"""Reference implementation of Mamba-2 layers (arXiv 2405.21060) in plain torch, token by token.

Shapes: n tokens of one slot, H heads of width P, G groups of heads that share B and C, each of width S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.recurrent_state import StateShape
from paceline.kernels.recurrent import convolve
from paceline.kernels.spec import LinearWeights


@dataclass(frozen=True)
class Mamba2Heads:
    """Heads of a Mamba-2 layer. groups: of heads that share B and C, each of width state_dim.

    taps: inputs of its causal depthwise convolution over x, B and C.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int

    @property
    def width(self) -> int:
        """Width of all heads together: of x, of the gate, and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, then B and C of each group."""
        return self.width + 2 * self.groups * self.state_dim


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 layer (``BambaMixer`` of transformers); implements ``RecurrentMixer``.

    Its first matrix gives the channels, then a gate for each element of the output. gates: the steps of the heads.
    conv [channels, taps], conv_bias [channels] or None. rate [H]: -exp(A_log). bias [H]: added to the step's input.
    skip [H]: factor of x in the output. norm [H P]: of the output, group by group, or None. epsilon: of that norm.
    least_step: steps are at least this.
    """

    heads: Mamba2Heads
    gates: LinearWeights
    conv: Tensor
    conv_bias: Tensor | None
    rate: Tensor
    bias: Tensor
    skip: Tensor
    norm: Tensor | None
    epsilon: float
    least_step: float = 0.0

    def shape(self, layers: int) -> StateShape:
        """Return what a slot keeps of ``layers`` layers: channels, then the steps; state [H, S, P]."""
        heads = self.heads
        state = heads.heads, heads.state_dim, heads.head_dim
        return StateShape(layers, heads.taps, heads.channels, heads.heads, state)

    def split(self, projected: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return channels and steps [n, channels + H], and the gates of the output [n, H P]."""
        assert gates is not None
        channels, out_gate = projected.tensor_split([self.heads.channels], dim=1)
        steps = functional.softplus(gates + self.bias.float()).clamp(min=self.least_step)
        return torch.cat([channels, steps], 1), out_gate

    def append(self, state: Tensor, window: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [H, P] of a token and the state after it [H, S, P]. gates [H]: its steps."""
        heads = self.heads
        mixed = functional.silu(convolve(window, self.conv, self.conv_bias))
        shared = heads.groups * heads.state_dim
        x, b, c = mixed.split_with_sizes([heads.width, shared, shared])
        x = x.view(heads.heads, heads.head_dim)
        b, c = (each.view(heads.groups, -1).repeat_interleave(heads.heads // heads.groups, 0) for each in (b, c))
        decay = (gates * self.rate.float()).exp()
        state = state * decay[:, None, None] + b[:, :, None] * (x * gates[:, None])[:, None]
        return (state * c[:, :, None]).sum(1) + x * self.skip.float()[:, None], state

    def finish(self, mixed: Tensor, kept: Tensor) -> Tensor:
        """Multiply outputs [n, H, P] by silu of the gate, then norm them (if at all) group by group -> [n, H P]."""
        gated = mixed.flatten(1) * functional.silu(kept)
        if self.norm is None:
            return gated
        groups = gated.view(len(kept), self.heads.groups, -1)
        return functional.rms_norm(groups, groups.shape[-1:], None, self.epsilon).flatten(1) * self.norm.float()
