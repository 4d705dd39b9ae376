"""Subprocess that renders one chat template within limits; started by chat_template.py.

Each line has the variables of one conversation. Only jinja2 is imported, so the process starts in 0.1 s. Templates get
the same functions as in transformers; a test compares the two.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.models.text.limited_program import Answer, serve


class _Generation(Extension):
    """{% generation %} marks the model's own text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    @staticmethod
    def _text(caller: Macro) -> str:
        return str(caller())


class _Dict:
    """The template's ``dict``: a function, so that templates cannot reach the attributes of the class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A jinja namespace that refuses names beginning with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, names = args[0], dict(*args[1:], **fields)
        Namespace.__init__(self, {_checked(name): value for name, value in names.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_checked(name), value)


def _checked(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")
    return name


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(template: str) -> jinja2.Template:
    """Compile a template with the filters, functions and extensions that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(template)


def _text(template: jinja2.Template, variables: dict[str, Any], characters: int) -> str:
    """Render the template. Raises ValueError if the text is longer than ``characters``."""
    pieces, size = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > characters:
            raise ValueError(f"its text has more than {characters} characters")
    return "".join(pieces)


def _renders(settings: dict[str, Any]) -> Answer:
    """Compile the template of the settings; return what renders one conversation."""
    template = compiled(settings["template"])
    return lambda line: {"text": _text(template, json.loads(line), settings["characters"])}


if __name__ == "__main__":
    serve(_renders)
