"""Drafters and policies of other packages that define what earlier versions called."""

from __future__ import annotations

import pytest

from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.row_keeper import PerRow
from paceline.lengths import LengthPolicy


def test_state_that_moves_rows_is_warned_about() -> None:
    with pytest.warns(FutureWarning, match=r"Mine\.move .*slots"):

        class Mine(PerRow[int]):
            def move(self, source: int, destination: int) -> None:
                self[destination] = self.pop(source)


@pytest.mark.parametrize("name", ["selects", "times", "lost", "move"])
def test_a_policy_with_a_retired_attribute_is_warned_about(name: str) -> None:
    with pytest.warns(FutureWarning, match=rf"Old\.{name} "):
        type("Old", (LengthPolicy,), {name: True})


def test_a_policy_may_use_the_former_names() -> None:
    class Old(LengthPolicy):
        most_guesses = 3

        def hopeful(self, rows: int) -> bool:
            return rows < 5

    assert Old().max_draft_tokens == 3
    assert Old().expects_to_draft(4)
    assert not Old().expects_to_draft(5)


def test_a_policy_of_today_causes_no_warning() -> None:
    class Fine(LengthPolicy):
        def select(self, batch: Batch, draft: Draft) -> Draft:
            return draft

    assert Fine().reads_drafts
