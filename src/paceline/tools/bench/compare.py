"""Comparison of two documents of ``paceline bench offline``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.files import read_text
from paceline.errors import ParameterError

_DRAWS = 4000  # bootstrap samples
_OUTSIDE = 0.025  # of the samples on either side of the interval
_SETTINGS = ("machine", "model", "draft_model", "prompts", "versions")


@dataclass(frozen=True)
class Ratio:
    """One side at one batch size in two runs. tokens_per_second: by the mean of the repeats, without prefill.

    ratio: second over first, with the bounds of its 95 % interval. acceptance_lengths: tokens per round, None where
    unknown.
    """

    side: str
    batch_size: int
    tokens_per_second: tuple[float, float]
    ratio: float
    low: float
    high: float
    acceptance_lengths: tuple[float | None, float | None]

    @property
    def texts(self) -> list[str]:
        """The cells of a table."""
        lengths = ["" if each is None else f"{each:.2f}" for each in self.acceptance_lengths]
        paces = [f"{each:.1f}" for each in self.tokens_per_second]
        return [*paces, f"{self.ratio:.3f}x", f"{self.low:.3f} to {self.high:.3f}", *lengths]


def read_run(path: Path) -> dict[str, Any]:
    """Read a document. Raises ParameterError if it is none of ``paceline bench offline``."""
    try:
        document = json.loads(read_text("bench compare", path))
        [
            (each["side"], each["batch_size"], each["tokens"], each["decode_seconds_of_all"][0])
            for each in document["results"]
        ]
    except (ValueError, TypeError, LookupError) as error:
        allowed = "a JSON document of paceline bench offline --output FILE"
        raise ParameterError("bench compare", str(path), allowed) from error
    return dict(document)


def different_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """The settings in which two runs differ, so that a ratio does not tell of the engine alone."""
    return (name for name in _SETTINGS if first.get(name) != second.get(name))


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Ratio]:
    """Compare what both runs have. Raises ParameterError if they have nothing in common.

    The interval is that of a percentile bootstrap over the repeats of each run: with three repeats it is hardly more
    than the spread of what was measured.
    """
    ours = {(each["side"], each["batch_size"]): each for each in second["results"]}
    pairs = [(each, ours[each["side"], each["batch_size"]]) for each in first["results"] if _key(each) in ours]
    if not pairs:
        sides = sorted({each["side"] for each in first["results"]})
        raise ParameterError("bench compare", ", ".join(sides), "runs with a side and a batch size in common")
    return [_ratio(*pair) for pair in pairs]


def _key(result: Mapping[str, Any]) -> tuple[str, int]:
    return result["side"], result["batch_size"]


def _ratio(first: Mapping[str, Any], second: Mapping[str, Any]) -> Ratio:
    runs = [[seconds / each["tokens"] for seconds in each["decode_seconds_of_all"]] for each in (first, second)]
    chance = random.Random(0)
    drawn = sorted(_over(*(chance.choices(run, k=len(run)) for run in runs)) for _ in range(_DRAWS))
    edge = int(_OUTSIDE * _DRAWS)
    paces = [len(run) / sum(run) for run in runs]
    return Ratio(
        side=first["side"],
        batch_size=first["batch_size"],
        tokens_per_second=(paces[0], paces[1]),
        ratio=_over(*runs),
        low=drawn[edge],
        high=drawn[-1 - edge],
        acceptance_lengths=(first.get("mean_acceptance_length"), second.get("mean_acceptance_length")),
    )


def _over(first: Sequence[float], second: Sequence[float]) -> float:
    """How many times faster the second run is: the ratio of the mean seconds per token."""
    return (sum(first) / len(first)) / (sum(second) / len(second))
