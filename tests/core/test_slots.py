"""Slots: views where they are consecutive, copies elsewhere, and the same values in both cases."""

from __future__ import annotations

import pytest
import torch

from paceline.core.slots import Slots

CPU = torch.device("cpu")


@pytest.mark.parametrize("numbers", [[0, 1, 2], [2, 3], [1, 3], [0, 1, 3], [3, 1, 2], [2], []])
@pytest.mark.parametrize("known", [True, False])
def test_of_and_store_read_and_set_the_rows_own_entries(numbers: list[int], known: bool) -> None:
    table = torch.arange(8).view(4, 2)
    slots = Slots.listed(numbers, CPU) if known else Slots(torch.tensor(numbers, dtype=torch.int64))
    assert slots.of(table).tolist() == [[2 * slot, 2 * slot + 1] for slot in numbers]
    table[slots.where] = torch.full((len(numbers), 2), -1)
    assert [slot for slot, line in enumerate(table.tolist()) if line == [-1, -1]] == sorted(numbers)


def test_consecutive_slots_are_a_view() -> None:
    table = torch.zeros(4, 2)
    Slots.listed([1, 2], CPU).of(table).fill_(1)
    Slots.listed([0, 3], CPU).of(table).fill_(2)
    assert table[:, 0].tolist() == [0, 1, 1, 0]


def test_a_part_has_its_rows_slots() -> None:
    part = Slots.listed([0, 2, 3, 5], CPU).part(1, 3)
    assert (list(part.numbers or ()), part.index.tolist(), part.first) == ([2, 3], [2, 3], 2)
