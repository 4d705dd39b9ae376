"""Tensor parallelism: the shard of a model that each rank keeps.

Attention is split by heads, the MLP by columns, the output head by tokens, as in Megatron-LM (Shoeybi et al.,
arXiv 1909.08053, section 3). The inputs of attention and MLP are replicated; their outputs are partial sums. Embedding,
positions and norms are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.errors import ParameterError
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from paceline.models.description.weights import Placement, Slot, StoredTensor

_UNIT = 64  # columns: matrix products are faster with widths that are multiples of it


@dataclass(frozen=True)
class ModelShard:
    """The shard of rank ``rank`` of ``ranks``."""

    rank: int
    ranks: int

    def all(self) -> list[ModelShard]:
        """Return the shards of all ranks."""
        return [ModelShard(rank, self.ranks) for rank in range(self.ranks)]

    def of(self, size: int) -> range:
        """Return this rank's range of ``size`` columns or tokens.

        The ranges begin at multiples of 64 if that leaves no rank empty. None is empty if ``size`` >= ``ranks``.
        """
        unit = math.gcd(size, _UNIT)
        unit = unit if size // unit >= self.ranks else 1
        return range(*(size // unit * edge // self.ranks * unit for edge in (self.rank, self.rank + 1)))

    def heads(self, spec: AttentionSpec) -> tuple[range, range]:
        """Return this rank's query heads, and the key/value heads that they read.

        Groups that the ranks do not divide are distributed unevenly. If there are fewer groups than ranks, several
        ranks share a group: each of them keeps its key/value head and some of its query heads.
        """
        groups, queries = spec.kv_heads, spec.heads // spec.kv_heads
        if groups >= self.ranks:
            own = range(groups * self.rank // self.ranks, groups * (self.rank + 1) // self.ranks)
            return range(own.start * queries, own.stop * queries), own
        group = groups * self.rank // self.ranks
        sharing = [rank for rank in range(self.ranks) if groups * rank // self.ranks == group]
        index = sharing.index(self.rank)
        edges = (group * queries + queries * edge // len(sharing) for edge in (index, index + 1))
        return range(*edges), range(group, group + 1)

    def local(self, spec: DecoderSpec) -> DecoderSpec:
        """Return the description of this rank's layers; vocab_size stays that of the whole model.

        Raises ParameterError if there are more ranks than heads, MLP columns or tokens.
        """
        if spec.recurrent or len(spec.attentions) < len(spec.layers):
            raise ParameterError("tensor_parallel", self.ranks, "1 with recurrent layers, which are not split yet")
        if any(attention.latent is not None for attention in spec.attentions):
            raise ParameterError("tensor_parallel", self.ranks, "1 with latent attention, which is not split yet")
        if not spec.plain_attention:
            raise ParameterError(
                "tensor_parallel",
                self.ranks,
                "1 with attention's gates, sinks or values of another width, not split yet",
            )
        if not all(isinstance(layer.mlp, MLPSpec) for layer in spec.layers):
            raise ParameterError("tensor_parallel", self.ranks, "1 with a mixture of experts, which is not split yet")
        if len(set(spec.kv_layers)) > 1 or len(spec.kv_layers) < len(spec.layers) or spec.token_inputs is not None:
            allowed = "1 with heads of several widths, shared keys or per-layer embeddings, which are not split yet"
            raise ParameterError("tensor_parallel", self.ranks, allowed)
        if any(attention.qk_norm == "all" for attention in spec.attentions):
            raise ParameterError("tensor_parallel", self.ranks, "1 with norms of queries and keys over all heads")
        sizes = (size for layer in spec.layers for size in (layer.attention.heads, layer.dense.width))
        narrowest = min(spec.vocab_size, *sizes)
        if self.ranks > narrowest:
            allowed = f"at most {narrowest}: each rank needs at least one head, one column of the MLP and one token"
            raise ParameterError("tensor_parallel", self.ranks, allowed)
        return replace(spec, layers=tuple(self._local_layer(layer) for layer in spec.layers))

    def _local_layer(self, layer: LayerSpec) -> LayerSpec:
        queries, groups = self.heads(layer.attention)
        attention = replace(layer.attention, heads=len(queries), kv_heads=len(groups))
        return replace(layer, mixer=attention, mlp=replace(layer.dense, width=len(self.of(layer.dense.width))))


@dataclass(frozen=True)
class CutTensor:
    """Some rows (dim 0) or columns (dim 1) of a stored tensor."""

    stored: StoredTensor
    dim: int
    lines: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.stored.shape)
        shape[self.dim] = _count(self.lines)
        return tuple(shape)

    def unpack_into(self, destination: Tensor) -> None:
        whole = torch.empty(self.stored.shape, dtype=destination.dtype)
        self.stored.unpack_into(whole)
        destination.copy_(torch.cat([whole.narrow(self.dim, part.start, len(part)) for part in self.lines], self.dim))


@dataclass(frozen=True)
class OrderedTensor:
    """A stored tensor with its rows in the order of their parts."""

    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        return self.placement.slot.shape

    def unpack_into(self, destination: Tensor) -> None:
        self.placement.read_into(destination)


def cut(whole: Checkpoint, shard: ModelShard) -> Checkpoint:
    """Return a rank's parts of a model's tensors, described as the whole. Rank 0 alone has biases of partial sums."""
    return replace(whole, placements=[piece for each in whole.placements for piece in _cut(each, whole.spec, shard)])


def _cut(placement: Placement, spec: DecoderSpec, shard: ModelShard) -> Iterator[Placement]:
    name = placement.slot.target.split(".")
    part, suffix = name[-2:]
    if name[0] == "layers":
        layer = spec.layers[int(name[1])]
        columns, rows = _columns(part, layer, shard), _rows(part, layer, shard)
    else:
        columns, rows = None, [shard.of(spec.vocab_size)] if part == "head" else None
    if columns is not None and suffix == "weight":
        yield _by_columns(placement, columns)
    elif columns is not None and shard.rank != 0:
        return
    elif rows is not None:
        yield _by_rows(placement, rows)
    else:
        yield placement


def _columns(part: str, layer: LayerSpec, shard: ModelShard) -> range | None:
    """Return the input columns of a matrix whose outputs are summed over the ranks; None for other matrices."""
    if part == "o":
        return _wide(shard.heads(layer.attention)[0], layer.attention.head_dim)
    return shard.of(layer.dense.width) if part == "down" else None


def _rows(part: str, layer: LayerSpec, shard: ModelShard) -> list[range] | None:
    """Return the output rows of a matrix that is split by outputs, part by part; None for other matrices."""
    attention, width = layer.attention, layer.dense.width
    queries, groups = (_wide(heads, attention.head_dim) for heads in shard.heads(attention))
    inner = shard.of(width)
    kept = {
        "qkv": [queries, *(_moved(groups, attention.query_width + at) for at in (0, attention.kv_width))],
        "gate_up": [inner, _moved(inner, width)],
        "up": [inner],
    }
    return kept.get(part)


def _by_columns(placement: Placement, columns: range) -> Placement:
    slot, dim = placement.slot, 0 if placement.transposed else 1
    stored = CutTensor(placement.stored, dim, (columns,))
    return replace(placement, slot=replace(slot, shape=(slot.shape[0], len(columns))), stored=stored)


def _by_rows(placement: Placement, rows: Sequence[range]) -> Placement:
    """Keep ``rows``, numbered in the fused target matrix. The stored tensor may be only a part of that."""
    if placement.alternating is not None:
        ordered = OrderedTensor(placement)
        placement = replace(placement, stored=ordered, transposed=False, alternating=None)
    slot = placement.slot
    own = range(slot.first, slot.first + slot.shape[0])
    kept = [range(max(part.start, own.start), min(part.stop, own.stop)) for part in rows]
    inside = tuple(_moved(part, -slot.first) for part in kept if len(part) > 0)
    before = sum(len(range(part.start, min(part.stop, own.start))) for part in rows)
    dim = 1 if placement.transposed else 0
    target = Slot(slot.target, (_count(inside), *slot.shape[1:]), before, _count(rows))
    return replace(placement, slot=target, stored=CutTensor(placement.stored, dim, inside))


def _wide(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(lines: range, by: int) -> range:
    return range(lines.start + by, lines.stop + by)


def _count(lines: Sequence[range]) -> int:
    return sum(map(len, lines))
