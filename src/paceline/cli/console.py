"""Output on the terminal: results on stdout, everything else on stderr."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from paceline.core.outputs import Latency
from paceline.errors import PacelineError
from paceline.progress import hidden, steps_with_bar


class Stdout:
    """Standard output of a command: what cannot be written raises PacelineError, in one line that says why.

    file: the stream below, None if it is closed. A reader that has gone (``| head``) remains a BrokenPipeError.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write past this class: UTF-8 where the encoding is ASCII
            raise AttributeError(name)
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write a text. Raises PacelineError."""
        with self._explained() as file:
            return file.write(text) if text != "" else 0  # click tests streams so, and ignores what is raised

    def flush(self) -> None:
        """Flush the stream. Raises PacelineError."""
        with self._explained() as file:
            file.flush()

    @contextmanager
    def _explained(self) -> Iterator[TextIO]:
        if self._file is None:
            raise _unwritable("it is closed")
        try:
            yield self._file
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            lacking = error.object[error.start]
            reason = f"its encoding, {self._file.encoding}, has no {lacking!r}; set PYTHONIOENCODING=utf-8"
            raise _unwritable(reason) from error
        except OSError as error:
            _discard(self._file)
            raise _unwritable(error.strerror or str(error)) from error


def _unwritable(reason: str) -> PacelineError:
    return PacelineError(f"standard output cannot be written: {reason}")


def _discard(file: TextIO) -> None:
    """Redirect a stream to nothing: its buffered text would fail again when the process ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    with suppress(io.UnsupportedOperation):
        os.dup2(nothing, file.fileno())
    os.close(nothing)


def json_is_ascii() -> bool:
    """Whether JSON on standard output must escape all but ASCII, because its encoding lacks characters."""
    return not (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")


def stdout() -> Console:
    """The console for results, made anew each time because callers may redirect the stream."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """The console for everything else."""
    return Console(file=sys.stderr, highlight=False)


def report_error(error: Exception) -> None:
    """Print an error as one red line on stderr."""
    with hidden():
        stderr().print(Text(f"error: {' '.join(str(error).split())}", style="bold red"), soft_wrap=True)


def note(text: str) -> None:
    """Print one dim line on stderr."""
    with hidden():
        stderr().print(Text(text, style="dim"), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on a terminal while the block runs."""
    with stderr().status(Text(what)):
        yield


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def stage_notes(quiet: bool) -> Iterator[None]:
    """Print the stages of loading as lines on stderr unless ``quiet``. On a terminal nothing is logged for them."""
    log, handler = logging.getLogger("paceline.loading"), _Notes()
    level = log.level
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def bars(quiet: bool) -> Callable[..., Any]:
    """A function that wraps steps, with their label, to show them as a bar on a terminal."""
    return lambda steps, what="runs": steps_with_bar(steps, what, shown=not quiet)


@dataclass(frozen=True)
class Sheet:
    """A table whose first column is text and whose others are numbers.

    Headings and texts wrap at spaces; no word and no number is ever cut. What is too wide for the terminal continues
    below, beside the first column again.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self._parts(options.max_width):
            yield self._drawn(part, options.max_width)

    def _parts(self, room: int) -> list[list[int]]:
        """The columns of each table: the first, and as many of the others as fit."""
        parts: list[list[int]] = []
        for column in range(1, len(self.columns)):
            here = [*parts[-1], column] if parts else [0, column]
            if parts and self._wide(here) <= room:
                parts[-1] = here
            else:
                parts.append([0, column])
        return parts

    def _wide(self, columns: Sequence[int]) -> int:
        return sum(map(self._least, columns)) + _GAP * len(columns)

    def _texts(self, column: int) -> list[str]:
        return [self.columns[column], *(row[column] for row in self.rows)]

    def _least(self, column: int) -> int:
        """Characters of the longest word; a number with what belongs to it is one word."""
        words = self.columns[column].split() + [
            word for row in self.rows for word in (row[column].split() if column == 0 else [row[column]])
        ]
        return max(map(cell_len, words), default=1)

    def _most(self, column: int) -> int:
        return max(cell_len(line) for text in self._texts(column) for line in text.split("\n"))

    def _drawn(self, columns: Sequence[int], room: int) -> Table:
        drawn = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        spare = max(0, room - self._wide(columns))
        for column in columns:
            width = min(self._most(column), self._least(column) + spare)
            width = max(width, self._least(column))
            spare -= width - self._least(column)
            drawn.add_column(
                Text(self.columns[column]), justify="right" if column else "left", width=width, vertical="bottom"
            )
        for row in self.rows:
            drawn.add_row(*(Text(row[column]) for column in columns))
        return drawn


def latency_table(rows: Iterable[tuple[str, Latency | None, *tuple[float | None, ...]]]) -> Sheet:
    """Latencies of each side: first (fastest), last (slowest) and mean sequence of its batch, perhaps utilisation.

    Empty where nothing is known; utilisation as a share of 1 (``utilisation``).
    """
    rows = list(rows)
    columns = ["", "first", "last", "all", *["utilisation"][: max((len(row) - 2 for row in rows), default=0)]]
    cells = [
        [side, *_three(known), *("" if share is None else f"{share:.1%}" for share in shares)]
        for side, known, *shares in rows
    ]
    return Sheet("ms/token of a batch's sequences, the first token not counted", columns, cells)


def _three(known: Latency | None) -> list[str]:
    return [""] * 3 if known is None else [f"{ms:.1f}" for ms in (known.first, known.last, known.all)]


_GAP = 2  # characters after each column
