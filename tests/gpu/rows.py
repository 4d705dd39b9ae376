"""Random rows for the tests of kernels that accept and commit."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from paceline import sampling
from paceline.batch import Batch, RowStart
from paceline.gpu.state import Ends, RowState
from paceline.params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STOPS = 2


def make_batch(temperatures: list[float], vocab: int, seed: int = 0, positions: int = 200) -> Batch:
    """Row i holds 3 + 20 i tokens."""
    batch = Batch(len(temperatures), positions, vocab, DEVICE)
    for row, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature, max_tokens=positions)
        batch.set_row(row, RowStart([1 % vocab] * (row * 20 + 3), params, sampling.sequence_seed(seed, row)))
    batch.set_rows(len(temperatures))
    return batch


def state_of(
    batch: Batch, limit: int | None = None, stops: list[list[int]] | None = None, live: int | None = None
) -> RowState:
    ends = Ends.make(batch.rows, STOPS, torch.device(DEVICE))
    ends.limit.fill_(batch.positions if limit is None else limit)
    ends.live.fill_(batch.rows if live is None else live)
    if stops is not None:
        ends.stops.copy_(torch.tensor(stops))
    return RowState.of(batch, ends, batch.rows)


def copied(state: RowState) -> RowState:
    """The same rows in memory of their own: every implementation commits into its copy."""
    return replace(state, **{f.name: getattr(state, f.name).clone() for f in fields(state)})


def same(one: RowState, other: RowState) -> bool:
    """Equal lengths, and equal text up to them."""
    assert one.length.tolist() == other.length.tolist()
    return all(
        torch.equal(one.text[row, :length], other.text[row, :length]) for row, length in enumerate(one.length.tolist())
    )


def kept(record: Tensor) -> list[tuple[list[int], int, int, int]]:
    """A record without what lies beyond the tokens that count."""
    return [(line[: line[-3] + 1], line[-3], line[-2], line[-1]) for line in record.tolist()]


__all__ = ["DEVICE", "STOPS", "copied", "kept", "make_batch", "same", "state_of"]
