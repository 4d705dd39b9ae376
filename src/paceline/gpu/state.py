"""What kernels are given: a round's rows, guesses and record, a layer's heads. All of it lives on the device.

B rows, k guesses, S stop tokens, V vocabulary; L new tokens a row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batch import Batch, HostVerdict

RECORD_TAIL = 3  # accepted, drafted, gained


@dataclass(frozen=True)
class Ends:
    """When rows end. limit [R] int64: the length at which a row must; stops [R, S] int64: tokens that end it, -1 none.

    live [1] int64: rows from here on do not play, whatever their state.
    """

    limit: Tensor
    stops: Tensor
    live: Tensor

    @staticmethod
    def make(capacity: int, stops: int, device: torch.device) -> Ends:
        """No row plays yet; ``stops``: most stop tokens of a row."""
        limit = torch.zeros(capacity, dtype=torch.int64, device=device)
        table = torch.full((capacity, stops), -1, dtype=torch.int64, device=device)
        return Ends(limit, table, torch.zeros(1, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class RowState:
    """The first B rows of a batch, as views: text [B, P], length, prompt_length, seed [B] int64, temperature [B]."""

    text: Tensor
    length: Tensor
    prompt_length: Tensor
    temperature: Tensor
    seed: Tensor
    limit: Tensor
    stops: Tensor
    live: Tensor

    @staticmethod
    def of(batch: Batch, ends: Ends, rows: int) -> RowState:
        sampling = batch.sampling
        return RowState(
            text=batch.tokens[:rows],
            length=batch.length[:rows],
            prompt_length=sampling.prompt_length[:rows],
            temperature=sampling.temperature[:rows],
            seed=sampling.seed[:rows],
            limit=ends.limit[:rows],
            stops=ends.stops[:rows],
            live=ends.live,
        )

    @property
    def rows(self) -> int:
        return self.length.shape[0]


@dataclass(frozen=True)
class Guesses:
    """tokens [B, k] int64; counts [B] int64, how many are real; logits [B, k, V]: what each was drawn from (rejection).

    Without logits guesses are certain ones, for which both rules are the same law.
    """

    tokens: Tensor
    counts: Tensor
    logits: Tensor | None = None

    @property
    def k(self) -> int:
        return self.tokens.shape[1]


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
