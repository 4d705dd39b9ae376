"""Damaged files of every kind are refused with file and tensor (or configuration key), within the file's own memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Of the interpreter: usually 3 MiB, whatever the files; 12.5 MiB were seen in a process's first load in int8. A third
# copy of a large file is 25 MiB.
SLACK_KIB = 16 << 10
MOST_KIB = 256 << 10  # of a load that may succeed
PARTS = "heads and adapters", "quantised safetensors", "safetensors and configurations", "GGUF"


def loads(folder: Path, parts: str, which: str = "all") -> list[dict[str, Any]]:
    """Outcomes of "all" or "some" loads of some parts, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "hostile", str(folder), parts, which],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def fault(load: dict[str, Any]) -> str | None:
    """Return what is wrong with the outcome of a load; None if nothing is."""
    may_load = load["pattern"] is None
    if load["end"] != "refused" and not (may_load and load["end"] == "loaded"):
        return "not refused"
    if load["end"] == "refused" and load["place"] not in load["message"]:
        return "refused without its name"
    if not may_load and (load["error"] != "ModelFormatError" or not re.search(load["pattern"], load["message"])):
        return "another error"
    if len(load["message"]) > 1000:
        return "a long message"
    most = MOST_KIB if may_load else 2 * (load["bytes"] >> 10) + SLACK_KIB
    return "too much memory" if load["kib"] > most else None


@pytest.mark.timeout(600)
def test_damaged_files_are_refused_by_name_within_their_own_memory(tmp_path: Path) -> None:
    """Every fourth damage in one precision, on the kernels or in torch."""
    found = loads(tmp_path, ",".join(PARTS), "some")
    assert len(found) > 250
    assert len({load["by"] for load in found}) > 4
    assert [{"fault": fault(load), **load} for load in found if fault(load)] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_damaged_files_are_refused_in_every_precision(part: str, tmp_path: Path) -> None:
    found = loads(tmp_path, part)
    assert len(found) > 100
    assert [{"fault": fault(load), **load} for load in found if fault(load)] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_files_damaged_at_random_load_or_are_refused_by_name(tmp_path: Path) -> None:
    found = loads(tmp_path, "at random")
    ends = [load["end"] for load in found]
    assert min(ends.count("loaded"), ends.count("refused")) > 30, "the damage is too small or too large to test with"
    assert [{"fault": fault(load), **load} for load in found if fault(load)] == []
