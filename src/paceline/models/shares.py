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
from paceline.models.config import ModelConfig
from paceline.models.weights import Placement, Slot, StoredTensor

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

    def heads(self, config: ModelConfig) -> tuple[range, range]:
        """Return this rank's query heads, and the key/value heads that they read.

        Groups that the ranks do not divide are distributed unevenly. If there are fewer groups than ranks, several
        ranks share a group: each of them keeps its key/value head and some of its query heads.
        """
        groups, queries = config.kv_heads, config.heads // config.kv_heads
        if groups >= self.ranks:
            own = range(groups * self.rank // self.ranks, groups * (self.rank + 1) // self.ranks)
            return range(own.start * queries, own.stop * queries), own
        group = groups * self.rank // self.ranks
        sharing = [rank for rank in range(self.ranks) if groups * rank // self.ranks == group]
        index = sharing.index(self.rank)
        edges = (group * queries + queries * edge // len(sharing) for edge in (index, index + 1))
        return range(*edges), range(group, group + 1)

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's layers; vocab_size stays that of the whole model.

        Raises ParameterError if there are more ranks than heads, MLP columns or tokens.
        """
        narrowest = min(config.heads, config.mlp_width, config.vocab_size)
        if self.ranks > narrowest:
            allowed = f"at most {narrowest}: each rank needs at least one head, one column of the MLP and one token"
            raise ParameterError("tensor_parallel", self.ranks, allowed)
        queries, groups = self.heads(config)
        mlp_width = len(self.of(config.mlp_width))
        return replace(config, heads=len(queries), kv_heads=len(groups), mlp_width=mlp_width)


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


def cut(placements: Sequence[Placement], config: ModelConfig, share: ModelShard) -> list[Placement]:
    """Return a rank's parts of a whole model's tensors. Biases of partial sums are kept by rank 0 alone."""
    return [piece for placement in placements for piece in _cut(placement, config, share)]


def _cut(placement: Placement, config: ModelConfig, share: ModelShard) -> Iterator[Placement]:
    part, suffix = placement.slot.target.rsplit(".", 2)[-2:]
    columns, rows = _columns(part, config, share), _rows(part, config, share)
    if columns is not None and suffix == "weight":
        yield _by_columns(placement, columns)
    elif columns is not None and share.rank != 0:
        return
    elif rows is not None:
        yield _by_rows(placement, rows)
    else:
        yield placement


def _columns(part: str, config: ModelConfig, share: ModelShard) -> range | None:
    """Return the input columns of a matrix whose outputs are summed over the ranks; None for other matrices."""
    if part == "o":
        return _wide(share.heads(config)[0], config.head_dim)
    return share.of(config.mlp_width) if part == "down" else None


def _rows(part: str, config: ModelConfig, share: ModelShard) -> list[range] | None:
    """Return the output rows of a matrix that is split by outputs, part by part; None for other matrices."""
    queries, groups = (_wide(heads, config.head_dim) for heads in share.heads(config))
    inner = share.of(config.mlp_width)
    kept = {
        "qkv": [queries, *(_moved(groups, config.query_width + at) for at in (0, config.kv_width))],
        "gate_up": [inner, _moved(inner, config.mlp_width)],
        "up": [inner],
        "head": [share.of(config.vocab_size)],
    }
    return kept.get(part)


def _by_columns(placement: Placement, columns: range) -> Placement:
    slot, dim = placement.slot, 0 if placement.transposed else 1
    stored = CutTensor(placement.stored, dim, (columns,))
    return replace(placement, slot=replace(slot, shape=(slot.shape[0], len(columns))), stored=stored)


def _by_rows(placement: Placement, rows: Sequence[range]) -> Placement:
    """Keep ``rows``, numbered in the fused target matrix. The stored tensor may be only a part of that."""
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
