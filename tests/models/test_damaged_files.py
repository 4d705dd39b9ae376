"""Hundreds of damaged models: each one loads or is refused by name, in bounded time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import damaged_files
from damaged_files import MEMORY, verdicts_of

SEED = 1
MAX_SECONDS = 60.0  # for a busy machine; on an idle one it takes less than 1 s, or 6 s for cases that reach a limit
MAX_MIB = MEMORY // 4 >> 20  # in addition to an idle process


def verdicts(folder: Path, *only: str) -> list[dict[str, Any]]:
    return verdicts_of(damaged_files.__file__, str(folder), str(SEED), *only)


def fault(verdict: dict[str, Any], idle: int) -> str | None:
    """Return what is wrong with the result of a load. idle: MiB of a process that loads nothing."""
    if verdict["end"] == "failed":
        return "neither loaded nor refused"
    if verdict["end"] == "refused" and "damaged/" not in verdict["message"]:
        return "refused without its name"
    if len(verdict.get("message", "")) > 1000:
        return "refused with a long message"
    if verdict["seconds"] > MAX_SECONDS or verdict["mib"] > idle + MAX_MIB:
        return "too slow or too large"
    return None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_damaged_file_loads_or_is_refused_by_name(tmp_path: Path) -> None:
    idle, *loads = verdicts(tmp_path)
    whole = [verdict for verdict in loads if verdict["case"].startswith("whole")]
    damaged = [verdict for verdict in loads if verdict not in whole]
    assert [verdict["end"] for verdict in whole] == ["loaded"] * len(whole)
    assert len(damaged) > 200
    ends = [verdict["end"] for verdict in damaged]
    assert min(ends.count("loaded"), ends.count("refused")) > 30, "the damage is too small or too large to test with"
    wrong = [{"fault": fault(verdict, idle["mib"]), **verdict} for verdict in damaged if fault(verdict, idle["mib"])]
    assert wrong == []
