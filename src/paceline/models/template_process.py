"""Renders one chat template in a process of its own, within limits: chat_template.py starts it.

A line of JSON says template and limits; then every line is the variables of a conversation, and is answered by a line
with its text or an error. It needs jinja2 and nothing of paceline or transformers, so it starts in a tenth of a second.
What templates find here is what transformers gives them; a test compares the two.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """{% generation %} marks what the model wrote, for training; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    @staticmethod
    def _text(caller: Macro) -> str:
        return str(caller())


class _Dict:
    """``dict`` without what a class would lend."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace whose names begin with a letter."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, given = args[0], dict(*args[1:], **fields)
        Namespace.__init__(self, {_checked(name): value for name, value in given.items()})

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
    """With all that templates for transformers may use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(template)


def _text(template: jinja2.Template, variables: dict[str, Any], characters: int) -> str:
    """Raises ValueError where it grows beyond ``characters``."""
    pieces, size = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > characters:
            raise ValueError(f"it makes more than {characters} characters of them")
    return "".join(pieces)


def _limit(what: int, amount: int) -> None:
    """As far as whoever started us allows."""
    _, most = resource.getrlimit(what)
    amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
    resource.setrlimit(what, (amount, most))


def _limit_memory(more: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + more)
    _limit(resource.RLIMIT_CORE, 0)


def _limit_time(seconds: int) -> None:
    """Of the processor, from now on; the kernel ends what takes more."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)


def _answer(settings: dict[str, Any], line: str, made: list[jinja2.Template]) -> dict[str, str]:
    try:
        if not made:
            made.append(compiled(settings["template"]))
        return {"text": _text(made[0], json.loads(line), settings["characters"])}
    except MemoryError:
        return {"error": f"it needs more than {settings['memory'] >> 20} MiB"}
    except RecursionError:
        return {"error": "it is nested without end"}
    except Exception as error:  # noqa: BLE001  (a template may raise whatever it likes)
        return {"error": f"{error}"[:1000] or type(error).__name__}


def main() -> None:
    """Answer until nobody asks."""
    settings = json.loads(sys.stdin.readline())
    _limit_memory(settings["memory"])
    made: list[jinja2.Template] = []
    for line in sys.stdin:
        _limit_time(settings["seconds"])
        sys.stdout.write(json.dumps(_answer(settings, line, made)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
