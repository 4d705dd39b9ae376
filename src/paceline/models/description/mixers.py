"""Recurrent layers as the kernels' reference runs them, made from a description and weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.kernels.delta import DeltaNet
from paceline.kernels.mamba2 import Mamba2
from paceline.kernels.short_conv import ShortConv
from paceline.kernels.spec import LinearWeights, RecurrentMixer
from paceline.models.description.latent import first_in_order
from paceline.models.description.spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, MixerSpec, RecurrentSpec


def mixer_of(spec: RecurrentSpec, name: str, weights: Mapping[str, Tensor]) -> RecurrentMixer:
    """Return a recurrent layer's computation.

    name: of its weights, up to the last point. weights: by the names of ``description.weights.slots``.

    Views of the weights where possible. The tensors may be on device "meta".
    """
    if isinstance(spec, DeltaNetSpec):
        return _delta_of(spec, name, weights)
    if isinstance(spec, Mamba2Spec):
        return _mamba2_of(spec, name, weights)
    return ShortConv(_conv_of(name, weights))


def in_order(qkv: LinearWeights, spec: MixerSpec) -> LinearWeights:
    """Return the first matrix of a mixer with its outputs in the order in which backends read them.

    Gates of attention, each stored behind its head's query, move behind all queries, keys and values. Neighbours that
    turn together are moved apart by half of the elements that turn.
    """
    if not isinstance(spec, AttentionSpec):
        return qkv
    if spec.latent is not None:
        return first_in_order(qkv, spec)
    ordered = qkv.reordered(lambda rows: _gates_last(rows, spec)) if spec.gated and not spec.gates_apart else qkv
    return ordered.reordered(lambda rows: pairs_apart(rows, spec)) if spec.interleaved else ordered


def _gates_last(rows: Tensor, spec: AttentionSpec) -> Tensor:
    stacked = 2 * spec.query_width
    heads = rows[:stacked].view(spec.heads, 2, spec.head_dim, *rows.shape[1:])
    return torch.cat([heads[:, 0].flatten(0, 1), rows[stacked:], heads[:, 1].flatten(0, 1)])


def pairs_apart(rows: Tensor, spec: AttentionSpec, first: int = 0) -> Tensor:
    """Move elements that turn together apart by half of those that turn, in whole heads of queries, keys and values.

    rows: of the matrix of all of these, from row ``first`` on.
    """
    if not spec.interleaved or spec.rotary is None:
        return rows
    turned = max(0, spec.query_width + (spec.kv_width if spec.reads_layer is None else 0) - first)
    heads = rows[:turned].view(-1, spec.head_dim, *rows.shape[1:])
    pairs, rest = heads.tensor_split([2 * len(spec.rotary.inverse_frequencies)], dim=1)
    halves = pairs.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
    return torch.cat([torch.cat([halves, rest], 1).flatten(0, 1), rows[turned:]])


def _conv_of(name: str, weights: Mapping[str, Tensor]) -> Tensor:
    return weights[f"{name}conv.weight"].squeeze(1)


def _rate_of(name: str, weights: Mapping[str, Tensor]) -> Tensor:
    return -weights[f"{name}decay_rate.weight"].float().exp()


def _delta_of(spec: DeltaNetSpec, name: str, weights: Mapping[str, Tensor]) -> DeltaNet:
    return DeltaNet(
        heads=spec,
        gates=LinearWeights(weights[f"{name}beta_decay.weight"]),
        conv=_conv_of(name, weights),
        rate=_rate_of(name, weights),
        bias=weights[f"{name}decay_bias.weight"],
        norm=weights[f"{name}delta_norm.weight"],
        epsilon=spec.norm_eps,
    )


def _mamba2_of(spec: Mamba2Spec, name: str, weights: Mapping[str, Tensor]) -> Mamba2:
    return Mamba2(
        heads=spec,
        gates=LinearWeights(weights[f"{name}step.weight"]),
        conv=_conv_of(name, weights),
        conv_bias=weights.get(f"{name}conv.bias"),
        rate=_rate_of(name, weights),
        bias=weights[f"{name}step_bias.weight"],
        skip=weights[f"{name}skip.weight"],
        norm=weights.get(f"{name}mamba_norm.weight"),
        epsilon=spec.norm_eps,
        least_step=spec.least_step,
    )
