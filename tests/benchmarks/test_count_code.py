"""The script that counts code."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.count_code import SOURCE, carries, files_of_steps, questions

from paceline.kernels import native
from toy import FlatToy, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES = {"model": {"drafters/model.py"}, "ngram": {"drafters/ngram.py", "drafters/lookup.py"}}


def test_isinstance_on_concrete_drafters_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Mine(Drafter): ...\nclass Own(Mine): ...\nclass Free: ...\n")
    (tmp_path / "b.py").write_text("isinstance(x, (Own, int))\nisinstance(x, Drafter)\nisinstance(x, Free)\n")
    assert list(questions(tmp_path)) == ["b.py:1: isinstance(x, (Own, int))"]


def test_engine_and_rounds_use_no_isinstance_on_drafters_or_policies() -> None:
    asked = [line for line in questions(SOURCE) if not line.startswith(("bench/", "cli/"))]
    assert asked == []


@pytest.mark.parametrize(("drafter", "length", "most"), [("model", 4, 6), ("model", "auto", 8), ("ngram", "auto", 10)])
def test_a_step_runs_in_a_few_files(drafter: str, length: int | str, most: int) -> None:
    """One more where the kernels' twin in torch judges. Whether ``auto`` looks for copies, the clock decides."""
    draft = FlatToy() if drafter == "model" else None
    engine = make_engine(FlatToy(), draft, drafter=drafter, num_speculative_tokens=length, attention="auto")
    files = files_of_steps(engine, [1, 2, 3] * 4).keys() | SOURCES[drafter]
    assert ("lengths/auto.py" in files) == (length == "auto")
    assert {"round.py", "drafters/base.py" if drafter == "ngram" else "drafters/model.py"} <= files
    assert len([file for file in files if not carries(file)]) <= most + (not native.available()), sorted(files)
