"""A journal loses at most the problem in progress, and is not continued with other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import PacelineError, ParameterError
from paceline.tools.evaluation.curves import Answer
from paceline.tools.evaluation.journal import Journal

ANSWER = Answer(0, "    return 'é\ud800'\n", 1.25, "stop", -0.5, 7, 4, 3, True, "passed")
SETTINGS = {"seed": 1, "sides": ("plain, n=1",)}


def test_complete_lines_survive_a_kill_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, SETTINGS, resume=False)
    for number in range(2):
        journal.add(f"HumanEval/{number}", {"plain, n=1": [ANSWER]})
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = Journal(path, SETTINGS, resume=True)
        assert len(kept.problems) == max(0, sum(end <= size for end in ends) - 1)
        assert all(configurations == {"plain, n=1": [ANSWER]} for configurations in kept.problems.values())
        assert path.read_bytes() == whole[: max([end for end in ends if end <= size], default=ends[0])]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", SETTINGS, resume=False)
    with pytest.raises(ParameterError, match=r"--resume: seed=2 is not allowed: 1,"):
        Journal(tmp_path / "journal", SETTINGS | {"seed": 2}, resume=True)


def test_an_existing_journal_is_not_overwritten(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", SETTINGS, resume=False)
    with pytest.raises(ParameterError, match="--resume"):
        Journal(tmp_path / "journal", SETTINGS, resume=False)


@pytest.mark.parametrize("line", ["[]", "{}", "x", '{"task_id": "a", "sides": {"b": [{}]}}', '{"task_id": 1}'])
def test_files_that_are_no_journal_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal"
    Journal(path, SETTINGS, resume=False)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PacelineError, match="no journal"):
        Journal(path, SETTINGS, resume=True)
    path.write_text(json.dumps({"something": "else"}) + "\n")
    with pytest.raises(PacelineError):
        Journal(path, SETTINGS, resume=True)
