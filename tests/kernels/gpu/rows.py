"""Random rows for the tests of kernels that accept and commit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.batch import Batch, RowStart
from paceline.core.rows import RowState, RowValues

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_batch(temperatures: list[float], vocab: int, seed: int = 0, positions: int = 200) -> Batch:
    """Row i is in slot 2 i + 1 and holds 3 + 20 i tokens; the slots between hold other sequences."""
    batch = new_batch(2 * len(temperatures) + 1, positions, vocab, DEVICE)
    for slot in range(2 * len(temperatures) + 1):
        row = slot // 2
        temperature = temperatures[row] if slot % 2 else 1.7
        params = SamplingParams(temperature=temperature, max_tokens=positions if slot % 2 else 1)
        length = row * 20 + 3 if slot % 2 else 7
        batch.set_row(
            slot, RowStart([1 % vocab] * length, params, sampling.sequence_seed(seed, row if slot % 2 else 99))
        )
    batch.set_live(range(1, 2 * len(temperatures) + 1, 2))
    return batch


def state_of(
    batch: Batch, limit: int | None = None, stops: list[list[int]] | None = None, live: int | None = None
) -> RowState:
    """The batch's rows as kernels take them; another ``limit``, other stop tokens or fewer live rows may end some."""
    state = copied(batch.state(batch.rows))
    if limit is not None:
        state.tables.limit.fill_(limit)
    if live is not None:
        state.live.fill_(live)
    if stops is not None:
        table = state.tables.stops.new_full((len(batch.stops), len(stops[0])), -1)
        table[state.slots.index] = torch.tensor(stops, device=DEVICE)
        return replace(state, tables=state.tables._replace(stops=table))
    return state


def copied(state: RowState) -> RowState:
    """The same rows in separate memory: every implementation commits into its copy."""
    tables = RowValues(*(table.clone() for table in state.tables))
    return replace(state, text=state.text.clone(), tables=tables, live=state.live.clone())


def same(one: RowState, other: RowState) -> bool:
    """Equal lengths, and equal text up to them, in every slot."""
    lengths = one.tables.length.tolist()
    assert lengths == other.tables.length.tolist()
    return all(torch.equal(one.text[slot, :length], other.text[slot, :length]) for slot, length in enumerate(lengths))


def kept(record: Tensor) -> list[tuple[list[int], int, int, int]]:
    """A record without the numbers beyond the gained tokens."""
    return [(line[: line[-3] + 1], line[-3], line[-2], line[-1]) for line in record.tolist()]


__all__ = ["DEVICE", "copied", "kept", "make_batch", "same", "state_of"]
