"""References within a JSON schema."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from paceline.errors import StructureError

_PLACE = re.compile("0|[1-9][0-9]{0,5}")  # in a list of a schema: it has no more than MAX_SCHEMA_CHARACTERS


def resolved(root: Any, target: str) -> Any:
    """What a '$ref' in the schema ``root`` leads to. Raises StructureError."""
    if target != "#" and not target.startswith("#/"):
        raise StructureError(f"the schema refers to {target!r}; only its own parts ('#/$defs/...') can be followed")
    value = root
    for part in unquote(target).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and _PLACE.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            raise StructureError(f"the schema refers to {target!r}, which it does not have")
    return value
