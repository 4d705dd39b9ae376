"""The script that counts code."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.count_code import SOURCE, carries, files_of_steps, length_code, named_numbers, questions

from paceline.kernels import native
from toy import FlatToy, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES = {"model": {"drafters/model.py"}, "ngram": {"drafters/ngram.py", "drafters/lookup.py"}}
LINES, NUMBERS = 1728, 35  # of the length policies


def test_own_numbers_are_told_from_derived_ones(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("A = 3\nB = 2 * A\nC: float = 1.5\nd = 4\nNAME = 'x'\nclass K:\n    SIZE = 7\n")
    own = ["A = 3", "C: float = 1.5", "SIZE = 7"]
    assert sorted(named_numbers(file)) == sorted([("B = 2 * A", True), *((number, False) for number in own)])


def test_isinstance_on_concrete_drafters_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Mine(Drafter): ...\nclass Own(Mine): ...\nclass Free: ...\n")
    (tmp_path / "b.py").write_text("isinstance(x, (Own, int))\nisinstance(x, Drafter)\nisinstance(x, Free)\n")
    assert list(questions(tmp_path)) == ["b.py:1: isinstance(x, (Own, int))"]


def test_engine_and_rounds_use_no_isinstance_on_drafters_or_policies() -> None:
    asked = [line for line in questions(SOURCE) if not line.startswith(("bench/", "cli/"))]
    assert asked == []


def test_the_length_code_does_not_grow() -> None:
    """Who adds to it may take something else away."""
    lines, own, _ = length_code(SOURCE)
    assert sum(lines.values()) <= LINES, lines
    assert len(own) <= NUMBERS, own


@pytest.mark.parametrize(("drafter", "length", "most"), [("model", 4, 6), ("model", "auto", 8), ("ngram", "auto", 10)])
def test_a_step_runs_in_a_few_files(drafter: str, length: int | str, most: int) -> None:
    """One more where the kernels' twin in torch judges. Whether ``auto`` looks for copies, the clock decides."""
    draft = FlatToy() if drafter == "model" else None
    engine = make_engine(FlatToy(), draft, drafter=drafter, num_speculative_tokens=length, attention="auto")
    files = files_of_steps(engine, [1, 2, 3] * 4).keys() | SOURCES[drafter]
    assert ("lengths/auto.py" in files) == (length == "auto")
    assert {"round.py", "drafters/base.py" if drafter == "ngram" else "drafters/model.py"} <= files
    assert len([file for file in files if not carries(file)]) <= most + (not native.available()), sorted(files)
