"""Subprocess that renders one chat template within limits; started by chat_template.py.

The first input line is JSON with the template and the limits. Each further line has the variables of one conversation,
and is answered by one line with its text or an error. Only jinja2 is imported, so the process starts in 0.1 s.
Templates get the same functions as in transformers; a test compares the two.
"""

from __future__ import annotations

import json
import math
import signal
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

_USUAL_BYTES = 64 << 20  # address space of this process before the first conversation, with a margin


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


def _limit(kind: int, amount: int) -> None:
    """Set a soft limit, at most the hard limit of this process."""
    import resource  # Windows has none: there the parent has no limits set

    _, hard = resource.getrlimit(kind)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (amount, hard))


def _limit_memory(additional_bytes: int) -> None:
    import resource

    usage = Path("/proc/self/statm")
    used = int(usage.read_text().split()[0]) * resource.getpagesize() if usage.exists() else _USUAL_BYTES
    _limit(resource.RLIMIT_AS, used + additional_bytes)
    _limit(resource.RLIMIT_CORE, 0)


def _limit_time(seconds: int) -> None:
    """Limit the CPU time from now on; the kernel kills the process when it is used up."""
    import resource

    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)


def _reply(settings: dict[str, Any], line: str, templates: list[jinja2.Template]) -> dict[str, str]:
    """Render one conversation. templates: the compiled template, empty before the first conversation."""
    try:
        if not templates:
            templates.append(compiled(settings["template"]))
        return {"text": _text(templates[0], json.loads(line), settings["characters"])}
    except MemoryError:
        return {"error": f"it needs more than {settings['memory'] >> 20} MiB"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001  (a template may raise any exception)
        return {"error": f"{error}"[:1000] or type(error).__name__}


def main() -> None:
    """Serve conversations until the input ends, which a signal to the whole process group does not change."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    if settings["limits_itself"]:
        _limit_memory(settings["memory"])
    templates: list[jinja2.Template] = []
    for line in sys.stdin:
        if settings["limits_itself"]:
            _limit_time(settings["seconds"])
        sys.stdout.write(json.dumps(_reply(settings, line, templates)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
