"""Plots to files, without a display."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any, TypeAlias

from paceline.config.files import written_whole
from paceline.errors import MissingPackageError

Axes: TypeAlias = Any  # matplotlib's
Figure: TypeAlias = Any

TITLE_WIDTH = 150  # characters


def new_figure(rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure and its axes. Raises MissingPackageError if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "bench") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(6 * columns, 1.2 + 3.2 * rows))
    return figure, axes


def save(figure: Figure, path: Path, title: str) -> None:
    """Write the file atomically and close the figure."""
    from matplotlib import pyplot

    lines = [wrapped for line in title.splitlines() for wrapped in textwrap.wrap(line, TITLE_WIDTH)]
    figure.suptitle("\n".join(lines), fontsize=8)
    figure.tight_layout()
    with written_whole(path) as part:
        figure.savefig(part, dpi=120)
    pyplot.close(figure)
