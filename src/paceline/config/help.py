"""Help texts, written beside each field, for ``--help``, the server's schema and the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Help:
    """The description of a field, as a part of its annotation.

    text: one or two short sentences, which ``--help`` shows. flags: the spellings on the command line; none: the
    field's name with dashes. more: what the reference adds to ``text``.
    """

    text: str
    flags: tuple[str, ...]
    more: str

    def __init__(self, text: str, *flags: str, more: str = "") -> None:
        for name, value in (("text", text), ("flags", flags), ("more", more)):
            object.__setattr__(self, name, value)

    @property
    def whole(self) -> str:
        """The description for the reference."""
        return f"{self.text} {self.more}".strip()


def helps_of(kind: type) -> Mapping[str, Help]:
    """The description of every field of a dataclass. Raises TypeError if a field has none."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _help(field.name, hints[field.name]) for field in dataclasses.fields(kind)}


def _help(name: str, hint: Any) -> Help:
    for part in get_args(hint):
        if isinstance(part, Help):
            return part
    raise TypeError(f"{name} has no description; annotate it with Help(...)")


def described(kind: type[T]) -> type[T]:
    """Append the descriptions of a dataclass's fields to its docstring."""
    fields = "\n".join(f"    {name}: {said.whole}" for name, said in helps_of(kind).items())
    kind.__doc__ = f"{(kind.__doc__ or '').rstrip()}\n\n{fields}\n    "
    return kind
