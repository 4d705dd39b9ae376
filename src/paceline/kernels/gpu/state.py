"""Arguments and results of kernels: a layer's norms and heads, a round's record.

B rows, k draft tokens; L new tokens per row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.draft import Logprobs, Verdict
from paceline.core.values import LogprobTensors

RECORD_TAIL = 3  # accepted, drafted, gained
CLAMPED_LIMIT, CLAMPED_SLOPE = 7.0, 1.702  # of the gate "clamped_silu" (gpt-oss); see ``steps.gate``


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


def with_logprobs(record: Tensor, logprobs: LogprobTensors) -> Tensor:
    """Append log-probabilities to a record [B, k + 1 + 3], as bits in int64."""
    own, values = (table.contiguous().view(torch.int32).long() for table in (logprobs.own, logprobs.top_values))
    return torch.cat([record, own, logprobs.top_ids.flatten(1), values.flatten(1)], dim=1)


def read_logprobs(record: list[list[int]], k: int) -> tuple[list[list[int]], Logprobs]:
    """Split a record that ``with_logprobs`` made into the plain record and the log-probabilities."""
    width, places = k + 1 + RECORD_TAIL, k + 1
    numbers = torch.tensor([line[width:] for line in record])
    own, rest = numbers[:, :places], numbers[:, places:]
    ids, top = rest.view(len(record), 2, places, rest.shape[1] // (2 * places)).unbind(1)
    return [line[:width] for line in record], Logprobs(_floats(own), ids.tolist(), _floats(top))


def _floats(bits: Tensor) -> list[Any]:
    """Bits stored in int64 -> float32."""
    values: list[Any] = bits.int().view(torch.float32).tolist()
    return values


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


def read_trees(record: list[list[int]], width: int) -> Verdict:
    """The record [B, 2 N + 4] of trees (``rounds.device_drafters``): N draft tokens per row, ``width`` per depth."""
    drafted = (len(record[0]) - 1 - RECORD_TAIL) // 2
    verdict, parents = read_record(record), tree_parents(drafted, width)
    return replace(
        verdict,
        parents=[parents[:count] for count in verdict.drafted],
        path=[line[drafted + 1 : drafted + 1 + count] for line, count in zip(record, verdict.accepted, strict=True)],
    )


def read_record(record: list[list[int]]) -> Verdict:
    """A round's record [B, k + 1 + 3] on the host. Rows that gained nothing are idle."""
    return Verdict(
        tokens=[line[: line[-3] + 1] for line in record],
        accepted=[line[-3] for line in record],
        drafted=[line[-2] for line in record],
        gained=[line[-1] for line in record],
    )
