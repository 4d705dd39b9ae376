"""Random rows for the tests of kernels that accept and commit."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.batch import Batch, RowStart
from paceline.core.rows import RowState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batch(temperatures: list[float], vocab: int, seed: int = 0, positions: int = 200) -> Batch:
    """Row i holds 3 + 20 i tokens."""
    batch = new_batch(len(temperatures), positions, vocab, DEVICE)
    for row, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature, max_tokens=positions)
        batch.set_row(row, RowStart([1 % vocab] * (row * 20 + 3), params, sampling.sequence_seed(seed, row)))
    batch.set_rows(len(temperatures))
    return batch


def state_of(
    batch: Batch, limit: int | None = None, stops: list[list[int]] | None = None, live: int | None = None
) -> RowState:
    """The batch's rows as kernels take them; another ``limit``, other stop tokens or fewer live rows may end some."""
    state = copied(batch.state(batch.rows, may_sync=False))
    if limit is not None:
        state.limit.fill_(limit)
    if live is not None:
        state.live.fill_(live)
    return state if stops is None else replace(state, stops=torch.tensor(stops, device=DEVICE))


def copied(state: RowState) -> RowState:
    """The same rows in separate memory: every implementation commits into its copy."""
    tensors = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "reads"}
    return replace(state, **{name: tensor.clone() for name, tensor in tensors.items()})


def same(one: RowState, other: RowState) -> bool:
    """Equal lengths, and equal text up to them."""
    assert one.length.tolist() == other.length.tolist()
    return all(
        torch.equal(one.text[row, :length], other.text[row, :length]) for row, length in enumerate(one.length.tolist())
    )


def kept(record: Tensor) -> list[tuple[list[int], int, int, int]]:
    """A record without the numbers beyond the gained tokens."""
    return [(line[: line[-3] + 1], line[-3], line[-2], line[-1]) for line in record.tolist()]


__all__ = ["DEVICE", "copied", "kept", "make_batch", "same", "state_of"]
