"""What kernels are given and give: a layer's norms and heads, a round's record.

B rows, k guesses; L new tokens a row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.draft import HostVerdict, JudgedTree, Logprobs

RECORD_TAIL = 3  # accepted, drafted, gained


@dataclass(frozen=True, eq=False)
class Norm:
    """Of x [..., width], inside in float32: over its root mean square, or ``centred`` over its standard deviation.

    weight, bias [width], or None for none; a bias only where it is centred.
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

    rotation: cosine and signed sine [B, L, 1, D]; None turns nothing. norm [H + G, D]: weights of the norms of query
    and key, None for none; applied only where something is turned.
    """

    table: Tensor
    heads: int
    kv_heads: int
    rotation: tuple[Tensor, Tensor] | None
    norm: Tensor | None
    eps: float


def with_logprobs(record: Tensor, own: Tensor, top_ids: Tensor | None = None, top: Tensor | None = None) -> Tensor:
    """A record [B, k + 1 + 3] and the log-probabilities [B, k + 1] float32 of its tokens, as the bits they are.

    top_ids, top [B, k + 1, m]: the likely tokens and theirs; None for none.
    """
    parts = [record, own.view(torch.int32).long()]
    if top_ids is not None and top is not None:
        parts += [top_ids.flatten(1), top.contiguous().view(torch.int32).long().flatten(1)]
    return torch.cat(parts, dim=1)


def read_logprobs(record: list[list[int]], k: int) -> tuple[list[list[int]], Logprobs]:
    """Take a record and its log-probabilities, read by the host, apart again."""
    width, places = k + 1 + RECORD_TAIL, k + 1
    numbers = torch.tensor([line[width:] for line in record])
    own, rest = numbers[:, :places], numbers[:, places:]
    ids, top = rest.view(len(record), 2, places, rest.shape[1] // (2 * places)).unbind(1)
    return [line[:width] for line in record], Logprobs(_floats(own), ids, _floats(top))


def _floats(bits: Tensor) -> Tensor:
    """What int64 numbers are as float32."""
    return bits.int().view(torch.float32)


def what_follows(guesses: int, width: int) -> list[int]:
    """Of the trees that devices grow, so many side by side: the guess that each follows, or -1; the first of those at
    the depth before.
    """
    return [-1 if place < width else (place // width - 1) * width for place in range(guesses)]


def read_trees(record: list[list[int]], width: int) -> HostVerdict:
    """The record [B, 2 N + 4] of trees (``device_round``): N guesses of a row, so many side by side."""
    guesses = (len(record[0]) - 1 - RECORD_TAIL) // 2
    verdict = read_record(record)
    follows = what_follows(guesses, width)
    verdict.trees = [
        JudgedTree.of(follows[:count], line[guesses + 1 : guesses + 1 + kept])
        for line, count, kept in zip(record, verdict.drafted, verdict.accepted, strict=True)
    ]
    return verdict


def read_record(record: list[list[int]]) -> HostVerdict:
    """A round's record [B, k + 1 + 3] on the host. A row that has gained nothing rests."""
    return HostVerdict(
        tokens=[line[: line[-3] + 1] for line in record],
        accepted=[line[-3] for line in record],
        drafted=[line[-2] for line in record],
        gained=[line[-1] for line in record],
    )
