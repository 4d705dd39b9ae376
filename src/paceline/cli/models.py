"""``paceline list``, ``show``, ``rm`` and ``ps``: the models on this machine, and those that a server has loaded."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer

from paceline.config.aliases import ALIASES
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.models.files.cached import CachedModel

_PATIENCE = 10.0  # seconds that a server may take to answer
_SHOWN = 300  # characters of its refusal
_FOREVER = 366 * 86400.0  # seconds: such a model stays loaded
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_models(
    known: Annotated[
        bool, typer.Option("--known", help="List the short names of models and what they stand for.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the models in the caches, and the packed copies of their weights."""
    if known:
        _print([{"name": name, "model": model} for name, model in ALIASES.items()], as_json)
        return
    from paceline.models.files.cached import cached_models

    models = cached_models()
    names = {file.resolve(): model.short_name for model in models if model.copy_of is None for file in model.files}
    _print([_row(model, names, as_json=as_json) for model in models], as_json)


def _row(model: CachedModel, names: dict[Path, str], *, as_json: bool) -> dict[str, Any]:
    source = None if model.copy_of is None else names.get(model.copy_of.resolve(), str(model.copy_of))
    full = model.name if model.short_name != model.name else ""
    return {
        "name": model.short_name,
        "size": model.size if as_json else size_text(model.size),
        "modified": model.modified if as_json else time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified)),
        "model": full if source is None else f"packed copy of {source}",
    }


def show(
    model: Annotated[str, typer.Argument(help="The name of a model, as in paceline list, or its path.")],
    as_json: AsJson = False,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone.")] = False,
) -> None:
    """Describe a model by its files, without loading its weights."""
    from paceline.models.load.facts import model_facts

    facts = model_facts(model)
    if template:
        typer.echo(facts.chat_template or "")
    elif as_json:
        typer.echo(json.dumps(dataclasses.asdict(facts)))
    else:
        shown = {
            "path": facts.path,
            "size": f"{size_text(facts.size)}, {facts.file_format}",
            "architecture": facts.family + ("" if facts.native else ", by transformers' code"),
            "parameters": facts.parameter_size,
            "precision": facts.precision,
            "context": f"{facts.context} tokens",
            "abilities": ", ".join(facts.abilities),
            "chat template": "none" if facts.chat_template is None else f"{len(facts.chat_template)} characters",
            "sampling": ", ".join(f"{name} {value}" for name, value in facts.sampling.items()) or "nothing recommended",
            "license": facts.license or "see its publisher",
        }
        for name, value in shown.items():
            typer.echo(f"{name:14} {value}")


def rm(names: Annotated[list[str], typer.Argument(help="Names as in paceline list.")]) -> None:
    """Delete models, or packed copies of weights, from the caches. A model's packed copies go with it."""
    from paceline.models.files.cached import remove

    for name in names:
        for model in remove(name):
            typer.echo(f"deleted {model.short_name}, {size_text(model.size)}")


def ps(
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key, if the server needs one.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that a running server has loaded."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = Request(f"{url.rstrip('/')}/api/ps", headers=headers)
        with urlopen(request, timeout=_PATIENCE) as reply:
            models = json.load(reply)["models"]
    except HTTPError as error:
        raise PacelineError(f"{url} refused: {error.read().decode(errors='replace')[:_SHOWN]}") from error
    except (OSError, ValueError, KeyError) as error:
        why = f"no server of paceline answers at {url} ({error}): --url names another address"
        raise PacelineError(why) from error
    rows = [
        {
            "name": model["name"],
            "size": model["size"] if as_json else size_text(model["size"]),
            "context": model["context_length"],
            "until": model["expires_at"] if as_json else _until(model["expires_at"]),
        }
        for model in models
    ]
    _print(rows, as_json)


def _until(expires: str) -> str:
    """When a model is unloaded if no request comes, as people read it."""
    seconds = (datetime.fromisoformat(expires) - datetime.now(UTC)).total_seconds()
    return "stays loaded" if seconds > _FOREVER else f"{max(0.0, seconds):.0f} s without a request"


def size_text(size: int) -> str:
    """Bytes as people read them: 98 MB, 4.7 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print rows with the same names as JSON, or as columns that are never cut: names are copied from them."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    lines = [[name.upper() for name in row] for row in rows[:1]] + [[*map(str, row.values())] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
