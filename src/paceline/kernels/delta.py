"""Reference implementation of gated delta nets (arXiv 2412.06464) in plain torch, token by token.

Shapes: n tokens of one slot, K key heads, H value heads (H / K of them share a key head), D key width, V value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.recurrent_state import RecurrentStates, SlotPass, StateShape
from paceline.kernels.spec import DeltaWeights

_EPSILON = 1e-6  # of the squared lengths of q and k


class TokenInput(NamedTuple):
    """q, k [H, D], v [H, V], decay and beta [H] of one token."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


def split_input(shape: StateShape, weights: DeltaWeights, window: Tensor, gates: Tensor) -> TokenInput:
    """Convolve the last inputs of a path: window [taps, channels], gates [2 H] (decay, beta) of its last token."""
    mixed = functional.silu((window * weights.conv.float().T).sum(0))
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.split_with_sizes([keys, keys, shape.channels - 2 * keys])
    shared = shape.value_heads // shape.key_heads
    q, k = (unit(x.view(shape.key_heads, -1)).repeat_interleave(shared, 0) for x in (q, k))
    decay, beta = gates.chunk(2)
    return TokenInput(q * shape.key_dim**-0.5, k, v.view(shape.value_heads, -1), decay, beta)


def unit(x: Tensor) -> Tensor:
    """Scale vectors [..., D] to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def step(state: Tensor, token: TokenInput) -> Tensor:
    """Return the state [H, D, V] after a token."""
    state = state * token.decay[:, None, None]
    recalled = (state * token.k[:, :, None]).sum(1)
    return state + token.k[:, :, None] * ((token.v - recalled) * token.beta[:, None])[:, None]


def read(state: Tensor, token: TokenInput) -> Tensor:
    """Return the output [H, V] of a token from the state after it."""
    return (state * token.q[:, :, None]).sum(1)


def gates_of(weights: DeltaWeights, beta_decay: Tensor) -> Tensor:
    """Decay and beta of tokens [n, 2 H], from their projections beta_decay [n, 2 H]."""
    b, a = beta_decay.chunk(2, dim=1)
    decay = (weights.rate.float() * functional.softplus(a + weights.bias.float())).exp()
    return torch.cat([decay, b.sigmoid()], 1)


def run_slot(states: RecurrentStates, layer: int, weights: DeltaWeights, part: SlotPass, inputs: Tensor) -> Tensor:
    """Run the nodes of one slot through a layer -> outputs [n, H, V]. inputs [n, input_width]: their own.

    Applies the inputs of the slot's last pass first, and stores the state after the certain nodes.
    """
    shape, slot = states.shape, part.slot
    fresh = part.start == 0
    state, tail = states.state[layer, slot], states.tail[layer, slot]
    if fresh:
        state, tail = torch.zeros_like(state), torch.zeros_like(tail)
    after = state, tail
    for earlier in states.inputs[layer, slot, : part.applied].clone():
        after = _append(shape, weights, after, earlier)[1]
    certain = after
    reached = {-1: after}  # after the text, then after the nodes that others may follow
    outputs = []
    for node, (parent, own) in enumerate(zip(part.parents, inputs, strict=True)):
        output, after = _append(shape, weights, reached[parent], own)
        if node < part.certain:
            del reached[parent]  # a chain: a long text's states would take gigabytes
        reached[node] = after
        outputs.append(output)
        if node + 1 == part.certain:
            certain = after
    states.state[layer, slot], states.tail[layer, slot] = certain
    kept = inputs[part.certain :]
    states.inputs[layer, slot, : len(kept)] = kept
    return torch.stack(outputs)


def _append(
    shape: StateShape, weights: DeltaWeights, before: tuple[Tensor, Tensor], own: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Add one token to a path: its output [H, V], and state and tail after it."""
    state, tail = before
    window = torch.cat([tail, own[None, : shape.channels]])
    token = split_input(shape, weights, window, own[shape.channels :])
    state = step(state, token)
    return read(state, token), (state, window[1:])
