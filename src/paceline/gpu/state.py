"""What kernels are given and give: a layer's heads, a round's record.

B rows, k guesses; L new tokens a row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.batch import HostVerdict

RECORD_TAIL = 3  # accepted, drafted, gained


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


def read_record(record: list[list[int]]) -> tuple[HostVerdict, list[int]]:
    """A round's record [B, k + 1 + 3] on the host -> the verdict, and how many tokens each row gained (0: it rests)."""
    verdict = HostVerdict(
        tokens=[line[: line[-3] + 1] for line in record],
        accepted=[line[-3] for line in record],
        drafted=[line[-2] for line in record],
    )
    return verdict, [line[-1] for line in record]
