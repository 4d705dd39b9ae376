"""Which part of a model each of several ranks keeps: attention by heads, the MLP by columns, the head by tokens.

It is Megatron's cut (Shoeybi et al., 1909.08053, section 3): what comes in is whole on every rank, what an attention or
an MLP gives is a part of a sum. Embedding, positions and norms are whole everywhere.
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

_UNIT = 64  # numbers that a matrix product likes to have together


@dataclass(frozen=True)
class Share:
    """The part of rank ``rank`` of ``ranks``."""

    rank: int
    ranks: int

    def all(self) -> list[Share]:
        """Those of all ranks."""
        return [Share(rank, self.ranks) for rank in range(self.ranks)]

    def of(self, size: int) -> range:
        """Its stretch of ``size`` things, none empty where there are enough; cut at multiples of 64 if that works."""
        unit = math.gcd(size, _UNIT)
        unit = unit if size // unit >= self.ranks else 1
        return range(*(size // unit * edge // self.ranks * unit for edge in (self.rank, self.rank + 1)))

    def heads(self, config: ModelConfig) -> tuple[range, range]:
        """Its query heads and the key/value heads that these read, all of one group or whole groups.

        Groups that do not divide among the ranks are dealt unevenly. Where there are fewer groups than ranks, ranks
        share a group: each keeps its key/value head and some of its query heads.
        """
        groups, queries = config.kv_heads, config.heads // config.kv_heads
        if groups >= self.ranks:
            own = range(groups * self.rank // self.ranks, groups * (self.rank + 1) // self.ranks)
            return range(own.start * queries, own.stop * queries), own
        group = groups * self.rank // self.ranks
        sharing = [rank for rank in range(self.ranks) if groups * rank // self.ranks == group]
        place = sharing.index(self.rank)
        edges = (group * queries + queries * edge // len(sharing) for edge in (place, place + 1))
        return range(*edges), range(group, group + 1)

    def local(self, config: ModelConfig) -> ModelConfig:
        """What its layers look like; the embedding and the head are the whole model's. Raises ParameterError."""
        narrowest = min(config.heads, config.mlp_width, config.vocab_size)
        if self.ranks > narrowest:
            allowed = f"at most {narrowest}: a rank needs a head, a column of the MLP and a token of its own"
            raise ParameterError("tensor_parallel", self.ranks, allowed)
        queries, groups = self.heads(config)
        mlp_width = len(self.of(config.mlp_width))
        return replace(config, heads=len(queries), kv_heads=len(groups), mlp_width=mlp_width)


@dataclass(frozen=True)
class CutTensor:
    """Some lines of a stored tensor. dim: 0 rows, 1 columns, as it is stored."""

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
        destination.copy_(torch.cat([whole.narrow(self.dim, each.start, len(each)) for each in self.lines], self.dim))


def cut(placements: Sequence[Placement], config: ModelConfig, share: Share) -> list[Placement]:
    """Of a whole model's tensors what a rank keeps; the biases of partial sums are rank 0's."""
    return [piece for placement in placements for piece in _cut(placement, config, share)]


def _cut(placement: Placement, config: ModelConfig, share: Share) -> Iterator[Placement]:
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


def _columns(part: str, config: ModelConfig, share: Share) -> range | None:
    """What comes into a matrix whose products are added up over the ranks."""
    if part == "o":
        return _wide(share.heads(config)[0], config.head_dim)
    return share.of(config.mlp_width) if part == "down" else None


def _rows(part: str, config: ModelConfig, share: Share) -> list[range] | None:
    """Of a fused matrix, part by part."""
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
    """rows: of the target, of which the tensor may be a stretch."""
    slot = placement.slot
    own = range(slot.first, slot.first + slot.shape[0])
    kept = [range(max(each.start, own.start), min(each.stop, own.stop)) for each in rows]
    inside = tuple(_moved(each, -slot.first) for each in kept if len(each) > 0)
    before = sum(len(range(each.start, min(each.stop, own.start))) for each in rows)
    dim = 1 if placement.transposed else 0
    target = Slot(slot.target, (_count(inside), *slot.shape[1:]), before, _count(rows))
    return replace(placement, slot=target, stored=CutTensor(placement.stored, dim, inside))


def _wide(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(lines: range, by: int) -> range:
    return range(lines.start + by, lines.stop + by)


def _count(lines: Sequence[range]) -> int:
    return sum(map(len, lines))
