"""Options that people type for other engines' commands: translated, or answered with the right name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperOption

from paceline.config import EngineConfig, SamplingParams
from paceline.config.names import ENGINE, SAME, SAMPLING
from paceline.config.ranges import names_of
from paceline.errors import PacelineError

_FIELDS = {*names_of(EngineConfig), *names_of(SamplingParams), "draft_model"}


def own_options(arguments: Sequence[str], params: Sequence[Any]) -> list[str]:
    """The arguments of a command with its own options in place of other engines'. params: the command's.

    Raises PacelineError for an option that is only similar to one of its own.
    """
    options = [param for param in params if isinstance(param, TyperOption)]
    known = {spelling: option for option in options for spelling in (*option.opts, *option.secondary_opts)}
    spellings = {str(option.name): option.opts[0] for option in options}
    own: list[str] = []
    is_value = False  # of the option before it
    for argument in arguments:
        plain = is_value or "--" in own
        own.append(argument if plain else _translated(argument, known, spellings))
        option = None if plain else known.get(own[-1])
        is_value = option is not None and not option.is_flag
    return own


def _translated(argument: str, known: Collection[str], spellings: Mapping[str, str]) -> str:
    spelled, equals, value = argument.partition("=")
    if not spelled.startswith("--") or spelled in {"--", *known}:
        return argument
    name = spelled.removeprefix("--").replace("-", "_")
    if SAME.get(name) in spellings:
        return spellings[SAME[name]] + equals + value
    if hint := {**SAMPLING, **ENGINE}.get(name):
        raise PacelineError(f"there is no option {spelled} here; instead: {_in_dashes(hint, spellings)}")
    return argument


def _in_dashes(hint: str, spellings: Mapping[str, str]) -> str:
    """The hint with the names of fields as options."""
    fields = {name: spelling for name, spelling in spellings.items() if name in _FIELDS}
    return re.sub(r"(?<![\w-])[a-z_]+\b", lambda word: fields.get(word[0], word[0]), hint)
