"""Grammars in llguidance's Lark syntax, with JSON schemas that are translated to be followed exactly.

Beside llguidance's own ``%json SCHEMA`` there is ``%special "NAME"``: the special token of that name, or its letters in
vocabularies without it. A rule may go on until there, too: ``rule[suffix=%special "NAME"]: /regex/``, or with the name
of a terminal in place of the regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import StructureError

# A literal without an end is one piece, too: searched for from each of its quotes, an end costs quadratic time.
_PIECE = re.compile(
    r"""
    (?P<comment> //[^\n]* | \#[^\n]* )
  | \[suffix=%special \s* (?P<suffix> "(?:[^"\\\n]|\\.)*+" ) \]: \s* (?P<before> /(?:[^/\\\n]|\\.)++/ | [A-Z_]+ )
  | (?P<string> "(?:[^"\\\n]|\\.)*+"? )
  | (?P<regex> /(?:[^/\\\n]|\\.)++/? )
  | %(?P<word> json | special | llguidance | regex | lark )\b \s*
    """,
    re.VERBOSE,
)


def translated(text: str, schema: Callable[[Any], str], special: Mapping[str, int]) -> str:
    """Return a grammar whose schemas and special tokens are replaced.

    schema: returns the schema that is followed in place of one. special: token ids of special tokens by name.
    Raises StructureError.
    """
    pieces: list[str] = []
    place = 0
    while (match := _PIECE.search(text, place)) is not None:
        pieces.append(text[place : match.start()])
        place = match.end()
        word = match["word"]
        if match["suffix"] is not None:
            name, _ = _value_at(match["suffix"], 0, "special")
            pieces.append(_until(match["before"], name, special))
        elif word is None:
            pieces.append(match[0])
        elif word in ("json", "special"):
            value, place = _value_at(text, place, word)
            pieces.append(f"%json {schema(value)}" if word == "json" else _special(value, special))
        else:
            raise StructureError(f"the grammar has %{word}, which is not supported; leave it out")
    return "".join([*pieces, text[place:]])


def _value_at(text: str, place: int, word: str) -> tuple[Any, int]:
    """The JSON value at a place of the grammar, and the place behind it."""
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except ValueError as error:
        raise StructureError(f"the grammar has %{word} without JSON behind it: {error}") from error


def _until(before: str, name: Any, special: Mapping[str, int]) -> str:
    """What follows the name of a rule that ends with a special token, which llguidance refuses in a suffix."""
    token = _special(name, special)
    return f": {before} {token}" if name in special else f"[suffix={token}]: {before}"


def _special(name: Any, special: Mapping[str, int]) -> str:
    if not isinstance(name, str):
        raise StructureError(f"the grammar has %special {json.dumps(name)[:100]}; it needs the name of a token")
    return f"<[{special[name]}]>" if name in special else json.dumps(name)
