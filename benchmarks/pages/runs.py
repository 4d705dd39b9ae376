"""The runs under ``benchmarks/results``, and how their figures are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

Rows = list[list[str]]  # the cells of a table, without its head
Text = list[str]  # lines of Markdown


@cache
def load(name: str) -> dict[str, Any]:
    """The JSON document of a run."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def side(run: str, name: str, batch_size: int) -> dict[str, Any]:
    """One side of a run of ``bench offline``, or of synthetic acceptance, at one batch size."""
    (found,) = [each for each in load(run)["results"] if (each["side"], each["batch_size"]) == (name, batch_size)]
    return dict(found)


def listed(numbers: Iterable[float], form: str = ".2f") -> str:
    """Numbers with commas between them, for example "2.61, 1.52, 1.11"."""
    return ", ".join(f"{number:{form}}" for number in numbers)


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[str]:
    """Quotients of the numbers of two lists, with two decimals."""
    return [f"{mine / other:.2f}" for mine, other in zip(ours, theirs, strict=True)]


def percent(fraction: float, digits: int = 0) -> str:
    """A fraction in percent with its sign, for example "57 %"."""
    return f"{100 * fraction:.{digits}f} %"
