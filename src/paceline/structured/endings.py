"""Which definitions of a translated schema have a finite value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def endless(definitions: Mapping[str, Schema]) -> set[str]:
    """The definitions without a finite value, such as an object that requires itself.

    definitions: by their '$ref'. Takes time linear in their size: a part is looked at once for each part of its own.
    """
    parts = _Parts()
    for name, schema in definitions.items():
        parts.add(name, schema)
    return definitions.keys() - parts.ending()


class _Parts:
    """Parts of schemas, and how many of its own parts each waits for before it is known to have a finite value."""

    def __init__(self) -> None:
        self._waits: dict[str | int, int] = {}
        self._users: defaultdict[str | int, list[str | int]] = defaultdict(list)

    def add(self, name: str | int, schema: Schema) -> None:
        """Add a schema and its parts. name: its '$ref', or its number."""
        inner, self._waits[name] = _needed(schema)
        for part in inner:
            part_name = part.get("$ref", len(self._waits))
            self._users[part_name].append(name)
            if "$ref" not in part:
                self.add(part_name, part)

    def ending(self) -> set[str | int]:
        """Names of the parts that have a finite value."""
        ready = [name for name, count in self._waits.items() if count == 0]
        for name in ready:  # grows meanwhile
            for user in self._users[name]:
                self._waits[user] -= 1
                if self._waits[user] == 0:
                    ready.append(user)
        return set(ready)


def _needed(schema: Schema) -> tuple[list[Schema], int]:
    """The parts of a schema, and of how many a value of it has values."""
    if "$ref" in schema:
        return [schema], 1
    if "anyOf" in schema:
        return schema["anyOf"], 1
    inner: list[Schema] = []
    if schema.get("type") == "object":
        inner = [schema["properties"][name] for name in schema["required"]]
        inner += [schema["additionalProperties"]] * (schema.get("minProperties", 0) > len(inner))
    if schema.get("type") == "array":
        low, first = schema["minItems"], schema["prefixItems"]
        inner = [*first[:low], *([schema["items"]] if low > len(first) else [])]
    return inner, len(inner)
