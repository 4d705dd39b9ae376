"""The script that measures how late calls with a time budget return; on a toy its times mean nothing."""

from __future__ import annotations

import pytest
from benchmarks.deadlines import arguments, measure

from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_cell_is_measured_by_as_many_calls_as_were_asked_for() -> None:
    options = arguments(["toy", "--budgets", "0.01", "0.02", "--rows", "1", "4", "--prompts", "5", "--repeats", "2"])
    found = measure(toy_llm(drafter=None), options)
    assert [(cell["budget"], cell["rows"], cell["prompt"]) for cell in found["cells"]] == [
        (0.01, 1, 5), (0.01, 4, 5), (0.02, 1, 5), (0.02, 4, 5),
    ]  # fmt: skip
    assert all(-20 <= cell["late_ms_min"] <= cell["late_ms_median"] <= cell["late_ms_max"] for cell in found["cells"])
    assert found["first_call_late_ms"] >= -20
