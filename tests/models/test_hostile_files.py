"""Damaged files of every kind are refused with file and tensor (or configuration key), within the file's own memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hostile_files
from damaged_files import verdicts_of

# Of the interpreter: usually 3 MiB, whatever the files; 12.5 MiB were seen in a process's first load in int8. A third
# copy of a large file is 25 MiB.
SLACK_KIB = 16 << 10


def fault(found: dict[str, Any]) -> str | None:
    """Return what is wrong with the outcome of a load; None if nothing is."""
    if found["end"] != "refused":
        return "not refused"
    if found["place"] not in found["message"] or not re.search(found["pattern"], found["message"]):
        return "another message"
    return "too much memory" if found["kib"] > 2 * (found["bytes"] >> 10) + SLACK_KIB else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", hostile_files.PARTS)
def test_damaged_files_are_refused_by_name_within_their_own_memory(part: str, tmp_path: Path) -> None:
    cases = verdicts_of(hostile_files.__file__, str(tmp_path), part)
    assert len(cases) > 100
    assert [{"fault": fault(found), **found} for found in cases if fault(found)] == []


def test_the_page_says_how_many_cases_and_kinds_there_are() -> None:
    found = [case.kind for part in hostile_files.PARTS for case in hostile_files.cases(part)]
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
    assert f"(`tests/hostile_files.py`: {len(found):,} cases over {len(set(found))} kinds of files and models)" in page
