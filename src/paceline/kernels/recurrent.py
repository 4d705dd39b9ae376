"""Recurrent layers of any kind over the states of slots, in plain torch, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.recurrent_state import RowsPass
from paceline.kernels.spec import RecurrentMixer

_State: TypeAlias = tuple[Tensor, Tensor]  # of one slot or of several: state and tail


def run_rows(part: RowsPass, layer: int, mixer: RecurrentMixer, inputs: Tensor) -> Tensor:
    """Run a padded pass through a layer -> outputs [B, L, ...]. inputs [B, L, input_width]: the nodes' own.

    Applies the inputs of the slots' last passes first, and stores the states after the certain nodes, without a read by
    the host. Outputs of padding are undefined.
    """
    states, slots, parents = part.states, part.slots, part.parents
    append = torch.vmap(partial(_append, mixer))
    before = states.state[layer, slots], states.tail[layer, slots]
    after = _chosen(part.start == 0, (torch.zeros_like(before[0]), torch.zeros_like(before[1])), before)
    for place, earlier in enumerate(states.inputs[layer, slots, : states.kept].unbind(1)):
        after = _chosen(part.applied > place, append(after, earlier)[1], after)
    stored, reached, outputs = after, [after], []  # reached: before the nodes, then after each; of a chain the last one
    for node, own in enumerate(inputs.unbind(1)):
        parent = reached[-1] if parents is None else _of_parents(reached, parents[:, node])
        output, after = append(parent, own)
        reached = [after] if parents is None else [*reached, after]
        stored = _chosen(part.certain > node, after, stored)
        outputs.append(output)
    states.state[layer, slots], states.tail[layer, slots] = _chosen(part.counts > 0, stored, before)
    _keep_inputs(part, layer, inputs)
    return torch.stack(outputs, 1)


def _keep_inputs(part: RowsPass, layer: int, inputs: Tensor) -> None:
    """Store the inputs [B, L, input_width] of the nodes that are not certain; what lies behind them is undefined."""
    tables = part.states.inputs[layer]
    node = part.certain[:, None] + torch.arange(part.kept, device=inputs.device)
    row = torch.arange(len(part.slots), device=inputs.device)[:, None]
    own = inputs[row, node.clamp(max=part.nodes - 1)]
    tables[part.slots, : part.kept] = torch.where(
        (part.counts > 0)[:, None, None], own, tables[part.slots, : part.kept]
    )


def _chosen(where: Tensor, one: _State, other: _State) -> _State:
    """The rows' entries of ``one`` where [B] is true, else those of ``other``."""
    first, second = (torch.where(where.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(one, other, strict=True))
    return first, second


def _of_parents(reached: Sequence[_State], parents: Tensor) -> _State:
    """The states that the rows' nodes go on from. parents [B]: the number of each node's parent; -1: the text."""
    row = torch.arange(len(parents), device=parents.device)
    state, tail = (torch.stack(tables)[parents + 1, row] for tables in zip(*reached, strict=True))
    return state, tail


def _append(mixer: RecurrentMixer, before: _State, own: Tensor) -> tuple[Tensor, _State]:
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
