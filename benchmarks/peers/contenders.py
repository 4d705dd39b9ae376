"""Choice of the configurations to repeat: a peer's clearly slower ones need no median. paceline's are all repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

CLOSE = 0.85  # fraction of a peer's best at a batch size; slower configurations are not repeated
THIRD = 1 / 3  # fraction of the fastest of all at a batch size; slower ones would not change the picture

Point: TypeAlias = tuple[str, str, int]  # peer, mode, batch size


def far_behind(speeds: Mapping[Point, float]) -> dict[Point, str]:
    """The points far behind the same peer's best at their batch size, with the reason. speeds: tokens/s."""
    best = {at: max(speed for other, speed in speeds.items() if _rival(other, at)) for at in speeds}
    return {at: f"{words} of this peer's best" for at, words in _under(CLOSE, speeds, best).items()}


def hopeless(speeds: Mapping[Point, float]) -> dict[Point, str]:
    """The points below a third of the fastest of all at their batch size, with the reason. speeds: tokens/s."""
    best = {at: max(speed for other, speed in speeds.items() if other[2] == at[2]) for at in speeds}
    return {at: f"{words} of the fastest" for at, words in _under(THIRD, speeds, best).items()}


def _rival(one: Point, other: Point) -> bool:
    return (one[0], one[2]) == (other[0], other[2])


def _under(share: float, speeds: Mapping[Point, float], best: Mapping[Point, float]) -> dict[Point, str]:
    return {
        at: f"{speed:.1f} tokens/s, {speed / best[at]:.0%}"
        for at, speed in speeds.items()
        if speed < share * best[at] and not at[0].startswith("paceline")
    }


def left_out(path: Path) -> dict[Point, str]:
    """The points that were far behind in the results of an earlier run. Failures are tried again."""
    entries = json.loads(path.read_text(encoding="utf-8"))["results"]
    speeds = {(e["peer"], e["mode"], e["batch"]): e["tokens_per_s"] for e in entries if "tokens_per_s" in e}
    return {point: f"{words} in {path.name}" for point, words in far_behind(speeds).items()}
