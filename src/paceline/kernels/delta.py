"""Reference implementation of gated delta nets (arXiv 2412.06464) in plain torch, token by token.

Shapes: n tokens of one slot, K key heads, H value heads (H / K of them share a key head), D key width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.recurrent_state import StateShape
from paceline.kernels.recurrent import convolve
from paceline.kernels.spec import LinearWeights

_EPSILON = 1e-6  # of the squared lengths of q and k


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of a gated delta net. taps: inputs of its causal depthwise convolution over queries, keys and values."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: all heads of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class _DeltaInput(NamedTuple):
    """q, k [H, D], v [H, V], decay and beta [H] of one token."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (``models/qwen3_5`` of transformers); implements ``RecurrentMixer``.

    Its first matrix gives the channels, then a gate for each element of the output.
    gates: the rows of beta, then of the decay, one for each value head.
    conv [channels, taps]. rate [H]: -exp(A_log). bias [H]: added to the decay's input. norm [V]: of each head's output.
    epsilon: of that norm.
    """

    heads: DeltaHeads
    gates: LinearWeights
    conv: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    epsilon: float

    def shape(self, layers: int) -> StateShape:
        """Return what a slot keeps of ``layers`` layers: channels, then decay and beta; state [H, D, V]."""
        heads = self.heads
        state = heads.value_heads, heads.key_dim, heads.value_dim
        return StateShape(layers, heads.taps, heads.channels, 2 * heads.value_heads, state)

    def split(self, projected: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return channels with decay and beta [n, channels + 2 H], and the gates of the output [n, H V]."""
        assert gates is not None
        channels, out_gate = projected.tensor_split([self.heads.channels], dim=1)
        b, a = gates.chunk(2, dim=1)
        decay = (self.rate.float() * functional.softplus(a + self.bias.float())).exp()
        return torch.cat([channels, decay, b.sigmoid()], 1), out_gate

    def append(self, state: Tensor, window: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [H, V] of a token and the state after it [H, D, V]."""
        token = self._token(window, gates)
        state = state * token.decay[:, None, None]
        recalled = (state * token.k[:, :, None]).sum(1)
        state = state + token.k[:, :, None] * ((token.v - recalled) * token.beta[:, None])[:, None]
        return (state * token.q[:, :, None]).sum(1), state

    def finish(self, mixed: Tensor, kept: Tensor) -> Tensor:
        """Norm each head's output [n, H, V] and multiply by silu of the gate -> [n, H V]."""
        normed = functional.rms_norm(mixed, mixed.shape[-1:], self.norm.float(), self.epsilon)
        return normed.flatten(1) * functional.silu(kept)

    def _token(self, window: Tensor, gates: Tensor) -> _DeltaInput:
        heads = self.heads
        mixed = functional.silu(convolve(window, self.conv))
        keys = heads.key_heads * heads.key_dim
        q, k, v = mixed.split_with_sizes([keys, keys, heads.channels - 2 * keys])
        shared = heads.value_heads // heads.key_heads
        q, k = (_unit(x.view(heads.key_heads, -1)).repeat_interleave(shared, 0) for x in (q, k))
        return _DeltaInput(q * heads.key_dim**-0.5, k, v.view(heads.value_heads, -1), *gates.chunk(2))


def _unit(x: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()
