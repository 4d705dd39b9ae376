"""The script that counts code."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.count_code import SOURCE, carries, files_of_steps, named_numbers, questions

from toy import FlatToy, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def test_numbers_are_told_from_what_follows_from_them(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("A = 3\nB = 2 * A\nC: float = 1.5\nd = 4\nNAME = 'x'\nclass K:\n    SIZE = 7\n")
    own = ["A = 3", "C: float = 1.5", "SIZE = 7"]
    assert sorted(named_numbers(file)) == sorted([("B = 2 * A", True), *((number, False) for number in own)])


def test_questions_for_concrete_drafters_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Mine(Drafter): ...\nclass Own(Mine): ...\nclass Free: ...\n")
    (tmp_path / "b.py").write_text("isinstance(x, (Own, int))\nisinstance(x, Drafter)\nisinstance(x, Free)\n")
    assert list(questions(tmp_path)) == ["b.py:1: isinstance(x, (Own, int))"]


def test_engine_and_rounds_ask_for_no_concrete_drafter_or_policy() -> None:
    asked = [line for line in questions(SOURCE) if not line.startswith(("bench/", "cli/"))]
    assert asked == []


@pytest.mark.parametrize(("length", "most"), [(4, 7), ("auto", 10)])
def test_a_step_is_understood_from_a_few_files(length: int | str, most: int) -> None:
    engine = make_engine(FlatToy(), FlatToy(), drafter="model", num_speculative_tokens=length, attention="auto")
    files = files_of_steps(engine, [1, 2, 3] * 4)
    assert ("lengths/auto.py" in files) == (length == "auto")
    assert {"round.py", "drafters/model.py"} <= files.keys()
    assert len([file for file in files if not carries(file)]) <= most, sorted(files)
