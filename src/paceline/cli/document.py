"""Results of measurements: one JSON document, in a file and as the last line of stdout."""

from __future__ import annotations

import json
import math
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from paceline.config.files import check_output, write_text
from paceline.errors import MissingPackageError

_SECRET = "--api-key"


def command_line(program: str = "paceline") -> str:
    """The command line of this process without its secrets, for documents that are published.

    program: how users start it.
    """
    words = sys.argv[1:]
    for place, word in enumerate(words):
        if word == _SECRET and place + 1 < len(words):
            words[place + 1] = "..."
        elif word.startswith(f"{_SECRET}="):
            words[place] = f"{_SECRET}=..."
    return f"{program} {shlex.join(words)}"


def need_matplotlib(extra: str) -> None:
    """Raise MissingPackageError, which names the extra, before the work and not after it."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise MissingPackageError(error.name, extra) from error


def checked_plot(output: Path) -> Path:
    """The plot's path beside the document's.

    Raises ParameterError unless both can be written, and MissingPackageError without matplotlib.
    """
    need_matplotlib("bench")
    plot = output.with_suffix(".png")
    check_output("--output", output, plot)
    return plot


def as_text(document: dict[str, Any]) -> str:
    """The document as one line of JSON, with null for nan and infinities."""
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def end(document: dict[str, Any], output: Path | None) -> None:
    """Write the document to the file, if there is one, and to stdout even if the file fails."""
    text = as_text(document)
    try:
        if output is not None:
            write_text(output, text + "\n")
    finally:
        typer.echo(text)
