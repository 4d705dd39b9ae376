"""Options of the benches that take the engine's options, as the commands of paceline do."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ParameterError

PlottedDocument = Annotated[
    Path, typer.Option("--output", help="The JSON document; the plot has the same name with .png.")
]


def words(name: str, text: str, known: Collection[str]) -> list[str]:
    """The words of a list such as code,chat. Raises ParameterError for a word that is not known."""
    chosen = [word.strip() for word in text.split(",")]
    if unknown := [word for word in chosen if word not in known]:
        raise ParameterError(name, unknown[0], f"some of {', '.join(known)}")
    return chosen
