"""What goes to the terminal: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text


def stdout() -> Console:
    """Where results go. Made anew each time, for tests and callers may redirect the stream."""
    return Console(file=sys.stdout, highlight=False)


def stderr() -> Console:
    """Where everything about the results goes."""
    return Console(file=sys.stderr, highlight=False)


def report_error(error: Exception) -> None:
    """One red line on stderr."""
    stderr().print(Text(f"error: {' '.join(str(error).split())}", style="bold red"), soft_wrap=True)


def note(text: str) -> None:
    """One dim line on stderr."""
    stderr().print(Text(text, style="dim"), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on a terminal while something takes its time."""
    with stderr().status(Text(what)):
        yield


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    drawn = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=number == 0, vertical="bottom")
    for row in rows:
        drawn.add_row(*row)
    return drawn
