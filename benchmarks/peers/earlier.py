"""An earlier run decides what is worth repeating: a peer's clear losers need no median."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

CLOSE = 0.85  # of a peer's best at a batch size: what was slower there is not measured again

Point: TypeAlias = tuple[str, str, int]  # peer, mode, batch size


def left_out(path: Path) -> dict[Point, str]:
    """What a results' file shows to be clearly behind the same peer's best, with the line that says so.

    paceline's own configurations are never left out; nor are failures, which are tried again.
    """
    entries = [entry for entry in json.loads(path.read_text(encoding="utf-8"))["results"] if "tokens_per_s" in entry]
    best = _best(entries)
    found = {}
    for entry in entries:
        share = entry["tokens_per_s"] / best[entry["peer"], entry["batch"]]
        if share < CLOSE and not entry["peer"].startswith("paceline"):
            point = entry["peer"], entry["mode"], entry["batch"]
            found[point] = f"{entry['tokens_per_s']:.1f} tokens/s in {path.name}, {share:.0%} of this peer's best"
    return found


def _best(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    best: dict[tuple[str, int], float] = {}
    for entry in entries:
        key = entry["peer"], entry["batch"]
        best[key] = max(best.get(key, 0.0), entry["tokens_per_s"])
    return best
