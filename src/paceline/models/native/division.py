"""One rank's part of a model on the CPU kernels: some heads of attention, and some outputs of every other matrix.

Unlike in ``description.shards``, no matrix is split by its inputs: ranks copy each other's columns before a product.
So no sum is divided, and the bits are one process's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import ParameterError
from paceline.kernels.abi import PANEL
from paceline.kernels.spec import Division, Heads, LayerWeights, LinearWeights, NativeSpec
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import AttentionSpec, DecoderSpec


def division_of(whole: DecoderSpec, shard: ModelShard) -> Division:
    """Return how a model is divided, as rank ``shard.rank`` sees it, without memory for the exchange.

    Raises ParameterError if the model cannot be divided among so many ranks.
    """
    shard.local(whole)
    widths = [layer.dense.width for layer in whole.layers]
    narrowest = min(whole.width, whole.vocab_size, *widths) // PANEL
    if shard.ranks > narrowest:
        allowed = f"at most {narrowest} on the CPU kernels: each rank needs {PANEL} outputs of each matrix"
        raise ParameterError("tensor_parallel", shard.ranks, allowed)
    heads = [[0, *(shard_of.heads(layer.attention)[0].stop for shard_of in shard.all())] for layer in whole.layers]
    return Division(
        rank=shard.rank,
        hidden=_edges(whole.width, shard.ranks),
        tokens=_edges(whole.vocab_size, shard.ranks),
        attended=tuple(
            tuple(edge * layer.attention.head_dim for edge in edges)
            for layer, edges in zip(whole.layers, heads, strict=True)
        ),
        activated=tuple(_edges(width, shard.ranks) for width in widths),
        memory=torch.empty(0, dtype=torch.uint8),
    )


def _edges(columns: int, ranks: int) -> tuple[int, ...]:
    """Edges of equal shares that begin at whole panels."""
    panels = -(-columns // PANEL)
    return tuple(min(columns, panels * rank // ranks * PANEL) for rank in range(ranks + 1))


def part_of(spec: NativeSpec, whole: DecoderSpec, shard: ModelShard, division: Division) -> NativeSpec:
    """Return one rank's part of a model. whole: the model's description."""
    layers = [
        _part_of(weights, layer.attention, shard, _range(division.hidden, shard), _range(activated, shard))
        for weights, layer, activated in zip(spec.layers, whole.layers, division.activated, strict=True)
    ]
    first = layers[0].heads
    assert first is not None
    return replace(spec, layers=layers, heads=first.heads, kv_heads=first.kv_heads, division=division)


def _range(edges: Sequence[int], shard: ModelShard) -> range:
    return range(edges[shard.rank], edges[shard.rank + 1])


def _part_of(
    layer: LayerWeights, attention: AttentionSpec, shard: ModelShard, hidden: range, activated: range
) -> LayerWeights:
    linears = layer.qkv, layer.attention_out, layer.gate_up, layer.down
    qkv, out, up, down = (linear for linear in linears if linear is not None)  # ModelShard.local refuses others
    queries, keys = shard.heads(attention)
    first = range(queries.start, queries.stop), *(_moved(keys, attention.heads + at) for at in (0, attention.kv_heads))
    width = len(up.weight) // (1 if layer.plain else 2)
    return replace(
        layer,
        qkv=_rows(qkv, [range(part.start * attention.head_dim, part.stop * attention.head_dim) for part in first]),
        attention_out=_rows(out, [hidden]),
        gate_up=_rows(up, [activated] if layer.plain else [activated, _moved(activated, width)]),
        down=_rows(down, [hidden]),
        heads=Heads(len(queries), len(keys), attention.head_dim),
    )


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


def _rows(linear: LinearWeights, parts: Sequence[range]) -> LinearWeights:
    def chosen(rows: Tensor) -> Tensor:
        return torch.cat([rows[part.start : part.stop] for part in parts])

    return linear.reordered(chosen)
