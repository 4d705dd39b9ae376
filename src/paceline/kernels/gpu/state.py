"""Arguments and results of kernels: a layer's norms and heads, a round's record.

B rows, k draft tokens; L new tokens per row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.draft import HostVerdict, Logprobs, VerifiedTree

RECORD_TAIL = 3  # accepted, drafted, gained


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm of x [..., width], computed in float32: RMS norm, or layer norm if ``centred``.

    weight, bias [width], or None; a bias only if it is centred.
    """

    width: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None = None
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return functional.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        return functional.rms_norm(x, (self.width,), self.weight, self.eps)


@dataclass(frozen=True)
class PackedHeads:
    """A layer's queries, keys and values as its matrix product gave them: table [B, L, H + 2G, D], whole lines.

    rotation: cosine and signed sine [B, L, 1, R], for the first R of a head's elements; None applies no rotation.
    norm: [H + G, D], weights of the norms of query and key; None for none. Applied only with a rotation.
    """

    table: Tensor
    heads: int
    kv_heads: int
    rotation: tuple[Tensor, Tensor] | None
    norm: Tensor | None
    eps: float


def with_logprobs(record: Tensor, own: Tensor, top_ids: Tensor | None = None, top: Tensor | None = None) -> Tensor:
    """Append the tokens' log-probabilities [B, k + 1] float32 to a record [B, k + 1 + 3], as bits in int64.

    top_ids, top [B, k + 1, m]: the most likely tokens and their log-probabilities; None for none.
    """
    parts = [record, own.view(torch.int32).long()]
    if top_ids is not None and top is not None:
        parts += [top_ids.flatten(1), top.contiguous().view(torch.int32).long().flatten(1)]
    return torch.cat(parts, dim=1)


def read_logprobs(record: list[list[int]], k: int) -> tuple[list[list[int]], Logprobs]:
    """Split a record that ``with_logprobs`` made into the plain record and the log-probabilities."""
    width, places = k + 1 + RECORD_TAIL, k + 1
    numbers = torch.tensor([line[width:] for line in record])
    own, rest = numbers[:, :places], numbers[:, places:]
    ids, top = rest.view(len(record), 2, places, rest.shape[1] // (2 * places)).unbind(1)
    return [line[:width] for line in record], Logprobs(_floats(own), ids, _floats(top))


def _floats(bits: Tensor) -> Tensor:
    """Bits stored in int64 -> float32."""
    return bits.int().view(torch.float32)


def tree_parents(count: int, width: int) -> list[int]:
    """The parent of each draft token of the trees that devices grow, or -1 at the root.

    count: draft tokens in breadth-first order. width: draft tokens per depth; all are children of the previous depth's
        first.
    """
    return [-1 if place < width else (place // width - 1) * width for place in range(count)]


def with_path(record: Tensor, path: Tensor) -> Tensor:
    """The record [B, 2 N + 4] of trees: that of their draft tokens [B, N + 4], with the paths [B, N] put in."""
    return torch.cat([record[:, :-RECORD_TAIL], path, record[:, -RECORD_TAIL:]], dim=1)


def accepted_path(record: Tensor) -> tuple[Tensor, Tensor]:
    """Path [B, N] and number of accepted draft tokens [B] in the record of trees."""
    drafted = (record.shape[1] - 1 - RECORD_TAIL) // 2
    return record[:, drafted + 1 : 2 * drafted + 1], record[:, -RECORD_TAIL]


def read_trees(record: list[list[int]], width: int) -> HostVerdict:
    """The record [B, 2 N + 4] of trees (``device_round``): N draft tokens per row, ``width`` per depth."""
    drafted = (len(record[0]) - 1 - RECORD_TAIL) // 2
    verdict = read_record(record)
    parents = tree_parents(drafted, width)
    verdict.trees = [
        VerifiedTree.of(parents[:count], line[drafted + 1 : drafted + 1 + kept])
        for line, count, kept in zip(record, verdict.drafted, verdict.accepted, strict=True)
    ]
    return verdict


def read_record(record: list[list[int]]) -> HostVerdict:
    """A round's record [B, k + 1 + 3] on the host. Rows that gained nothing are idle."""
    return HostVerdict(
        tokens=[line[: line[-3] + 1] for line in record],
        accepted=[line[-3] for line in record],
        drafted=[line[-2] for line in record],
        gained=[line[-1] for line in record],
    )
