"""Progress of long work, one line on stderr while it is a terminal; results are never printed into it.

No thread redraws the line: measurements run undisturbed, and the line changes when the work says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

T = TypeVar("T")
_BAR_WIDTH = 16  # columns: with the counts, times and figures of a batch the line fits into 80
_INTERVAL = 0.1  # seconds between two drawings
_OPEN: list[Line] = []  # lines that have begun and not ended


class Line:
    """A line on the terminal that changes while a block runs, and is gone after it. Without a terminal it is nothing.

    columns: what it shows of its task. shown: False suppresses it.
    """

    def __init__(self, what: str, columns: Iterable[ProgressColumn], *, shown: bool = True) -> None:
        self._what, self._columns = what, tuple(columns)
        self._shown = shown and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._drawn = 0.0

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal that shows the line."""
        return self._shown

    def __enter__(self) -> Self:
        if self._shown:
            console = Console(file=sys.stderr, highlight=False)
            self._progress = Progress(
                *self._columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._add(self._progress)
            _OPEN.append(self)
            self._progress.start()
        return self

    def _add(self, progress: Progress) -> None:
        self._task = progress.add_task(self._what, total=None, note="")

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            _OPEN.remove(self)

    def change(self, *, advance: float = 0, note: str | None = None, what: str | None = None) -> None:
        """Add to the work done, or change the text before the bar (what) or after it (note)."""
        if self._progress is None:
            return
        self._progress.update(self._task, advance=advance, description=what)
        if note is not None:
            self._progress.update(self._task, note=note)
        if what is not None or time.monotonic() >= self._drawn + _INTERVAL:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def hide(self) -> bool:
        """Take the line off the terminal; returns whether it was there."""
        there = self._progress is not None and self._progress.live.is_started
        if there and self._progress is not None:
            self._progress.stop()
        return there

    def show(self) -> None:
        """Draw the line again after ``hide``."""
        if self._progress is not None:
            self._progress.start()


class Bar(Line):
    """A bar with the work done, the time it took and the time left. A bar of a single step is not shown.

    total: the whole work; None if it is unknown. done: what was done before. unit: of the work; bytes are shown in MB.
    """

    def __init__(self, what: str, total: float | None, *, shown: bool = True, done: float = 0, unit: str = "") -> None:
        count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        if unit not in ("", "bytes"):
            what = f"{what}, {unit}"
        texts = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True))
        times = TimeElapsedColumn(), TimeRemainingColumn()
        columns = TextColumn("{task.description}", markup=False), BarColumn(_BAR_WIDTH), count, *times, texts
        super().__init__(what, columns, shown=shown and total != 1)
        self._total, self._done = total, done

    def _add(self, progress: Progress) -> None:
        self._task = progress.add_task(self._what, total=self._total, note="")
        progress.update(self._task, completed=self._done)


def steps_with_bar(
    steps: Iterable[T], what: str = "runs", *, total: int | None = None, shown: bool = True, done: int = 0
) -> Iterator[T]:
    """Yield the steps, with a bar that advances after each. total: of ``done`` and all steps; None: their length."""
    if total is None and isinstance(steps, Sized):
        total = len(steps) + done
    with Bar(what, total, shown=shown, done=done) as bar:
        for step in steps:
            yield step
            bar.change(advance=1)


@contextmanager
def hidden() -> Iterator[None]:
    """Take the open lines off the terminal while the block prints something."""
    lines = [line for line in _OPEN if line.hide()]
    try:
        yield
    finally:
        for line in lines:
            line.show()
