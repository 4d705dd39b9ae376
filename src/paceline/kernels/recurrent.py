"""Recurrent layers of any kind over the states of slots, in plain torch, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.recurrent_state import RecurrentStates, SlotPass
from paceline.kernels.spec import RecurrentMixer


def run_slot(states: RecurrentStates, layer: int, mixer: RecurrentMixer, part: SlotPass, inputs: Tensor) -> Tensor:
    """Run the nodes of one slot through a layer -> outputs [n, ...]. inputs [n, input_width]: their own.

    Applies the inputs of the slot's last pass first, and stores the state after the certain nodes.
    """
    slot = part.slot
    state, tail = states.state[layer, slot], states.tail[layer, slot]
    if part.start == 0:
        state, tail = torch.zeros_like(state), torch.zeros_like(tail)
    after = state, tail
    for earlier in states.inputs[layer, slot, : part.applied].clone():
        after = _append(mixer, after, earlier)[1]
    certain = after
    reached = {-1: after}  # after the text, then after the nodes that others may follow
    outputs = []
    for node, (parent, own) in enumerate(zip(part.parents, inputs, strict=True)):
        output, after = _append(mixer, reached[parent], own)
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


def _append(mixer: RecurrentMixer, before: tuple[Tensor, Tensor], own: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Add one token to a path: its output, and state and tail after it."""
    state, tail = before
    channels = tail.shape[1]
    window = torch.cat([tail, own[None, :channels]])
    output, state = mixer.append(state, window, own[channels:])
    return output, (state, window[1:])


def convolve(window: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal convolution of each channel: window [taps, channels], weight [channels, taps] -> [channels]."""
    mixed = (window * weight.float().T).sum(0)
    return mixed if bias is None else mixed + bias.float()
