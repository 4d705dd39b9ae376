"""``paceline plan``: what a model takes of a machine's memory, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import Sheet, stdout
from paceline.cli.models import AsJson
from paceline.cli.options import Model
from paceline.config import EngineConfig
from paceline.config.ranges import names_of
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.engine.plan import EnginePlan

_PLANNED = {
    "device", "dtype", "quantization", "kv_cache_dtype", "attention", "max_batch_size", "max_model_len",
    "prefill_chunk",
}  # fmt: skip
WITHOUT = set(names_of(EngineConfig)) - _PLANNED
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_GIB = 2**30
_MIB = 2**20


def plan(
    model: Model,
    *,
    engine: EngineConfig,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory of the device, such as 24GiB. Default: what is free on this machine."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan memory: weights, caches by length and dtype, and what fits. Reads configurations and headers alone."""
    from paceline.engine.plan import plan_engine

    planned = plan_engine(model, engine, None if memory is None else bytes_of(memory))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(planned)))
        return
    for line in _lines(planned, given=memory is not None):
        typer.echo(line)
    stdout().print(_table(planned))


def bytes_of(text: str) -> int:
    """The bytes of a size such as 24GiB, 80GB or 8000000000. Raises ParameterError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise ParameterError("--memory", text, "a size such as 24GiB, 80GB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _lines(planned: EnginePlan, *, given: bool) -> list[str]:
    sizes = {"memory": planned.memory, "weights": planned.weights, "states": planned.states}
    sizes["workspace"] = planned.workspace
    notes = {"memory": "given" if given else "free now", "workspace": f"of {planned.rows or 1} rows"}
    lines = [f"{planned.model}", f"{planned.runs}"]
    lines += [
        f"{name:10}{size / _GIB:8.2f} GiB  {notes.get(name, '')}".rstrip() for name, size in sizes.items() if size
    ]
    start = f"starts with {planned.rows} rows of {planned.positions} tokens" if planned.rows else "does not start"
    return [*lines, start + (f": {planned.note}" if planned.note else "")]


def _table(planned: EnginePlan) -> Sheet:
    dtypes = list(dict.fromkeys(each.kv_cache_dtype for each in planned.caches))
    by_length: dict[int, list[str]] = {}
    for each in planned.caches:
        cells = by_length.setdefault(each.tokens, [f"{each.tokens} tokens"])
        cells += [f"{each.row_bytes / _MIB:.1f}", str(each.rows_that_fit)]
    columns = ["", *(text for name in dtypes for text in (f"{name} MiB/row", f"{name} rows fit"))]
    return Sheet("keys and values, by length of the rows", columns, list(by_length.values()))
