"""Reference pages made from the code: every command's --help, the server's OpenAPI as tables, the model families.

``python docs/generated.py`` writes the tables of families and of GGUF's types into ``docs/models.md`` and
``docs/files.md``, which tests compare.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli.main import app as cli
from paceline.config import ServerConfig
from paceline.errors import ModelFormatError, ParameterError
from paceline.models.description.shards import ModelShard
from paceline.models.families import FAMILIES
from paceline.models.families.base import Family
from paceline.models.files.gguf_tensors import READABLE, UNREADABLE, precision_loss
from paceline.models.native.spec import check_reference

WIDTH = 100  # characters of a terminal


def written_by_code(_app: object, page: str, source: list[str]) -> None:
    """Handler of Sphinx's source-read: append the generated part of a page."""
    if page in PAGES:
        source[0] += "\n" + "\n".join(PAGES[page]())


# The command line


def command_line() -> Iterator[str]:
    """Markdown lines: a section for every command with its --help."""
    for words in _commands(get_command(cli), ()):
        shown = CliRunner().invoke(
            cli,
            [*words, "--help", "all"],
            prog_name="paceline",
            env={"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"},
        )
        if shown.exit_code != 0:
            raise RuntimeError(f"paceline {' '.join(words)} --help failed: {shown.output}")
        lines = [line.rstrip() for line in shown.output.strip("\n").splitlines()]
        yield from (f"## {' '.join(['paceline', *words])}", "", "```text", *lines, "```", "")


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*words, name))


# The server


def http() -> Iterator[str]:
    """Markdown lines: a section for every path, then one for every document that is sent or returned."""
    from paceline.server.app import make_app

    def nothing() -> Any:
        raise AssertionError("no model is loaded to describe the server")

    document = make_app(ServerConfig(), nothing).openapi()
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            yield from (f"## {method.upper()} {path}", "", said.get("description", ""), "")
            yield from _bodies(said)
    yield from ("## Documents", "")
    for name, schema in document["components"]["schemas"].items():
        yield from (f"### {name}", "", " ".join(schema.get("description", "").split()), "")
        yield from _fields(schema)
    yield from _fields_without_effect()
    yield from ("## Refusals", "", "| status | meaning |", "| --- | --- |")
    refusals = next(iter(document["paths"].values()))["post"]["responses"]
    yield from (f"| {status} | {said['description']} |" for status, said in refusals.items() if status != "200")


def _fields_without_effect() -> Iterator[str]:
    """Markdown lines: per API, fields that are accepted without an effect, and those that are refused by name."""
    from paceline.server.chat_protocol import ChatRequest
    from paceline.server.embeddings import EmbeddingRequest
    from paceline.server.messages.protocol import MessagesRequest
    from paceline.server.ollama.protocol import AnswerRequest, ModelOptions
    from paceline.server.protocol import CompletionRequest
    from paceline.server.responses.protocol import ResponsesRequest

    yield from ("## Fields without effect", "")
    yield from ("Other values of these fields, and all other fields, are refused by name.", "")
    yield from (
        (
            "Further hints have no effect where the model's chat template has no use for them: `thinking` and "
            "`output_config.effort` in /v1/messages, `reasoning.effort` in /v1/responses. `reasoning.summary` and "
            "`text.verbosity` of /v1/responses never have one."
        ),
        "",
    )
    for path, body in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatRequest),
        ("/v1/embeddings", EmbeddingRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/responses", ResponsesRequest),
        ("/api/chat and /api/generate", AnswerRequest),
        ("options of /api/chat and /api/generate", ModelOptions),
    ):
        yield from (f"### Without effect in {path}", "", "| field | accepted | otherwise |", "| --- | --- | --- |")
        for name in sorted(body.labels - body.model_fields.keys()):
            yield f"| `{name}` | any value | |"
        for name, (why, harmless) in sorted(body.unsupported.items()):
            if name not in body.model_fields:
                values = ", ".join(f"`{value!r}`" for value in harmless) or "null"
                yield f"| `{name}` | {values} | refused: {why} |"
        yield ""


def _bodies(said: dict[str, Any]) -> Iterator[str]:
    for what, place in (("Takes", said.get("requestBody", {})), ("Gives", said["responses"]["200"])):
        for media, body in place.get("content", {}).items():
            kind = _kind(body["schema"]) if body.get("schema") else "text"
            yield from (f"{what} {kind} ({media.partition(';')[0]}).", "")


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    if "properties" not in schema:
        return
    yield from ("| field | type | if left out | meaning |", "| --- | --- | --- | --- |")
    needed = schema.get("required", ())
    for name, field in schema["properties"].items():
        left_out = "refused" if name in needed else f"`{field['default']!r}`" if "default" in field else ""
        meaning = field.get("description", "").replace("|", "\\|")
        yield f"| `{name}` | {_kind(field)} | {left_out} | {meaning} |"
    yield ""


_LIMITS = {
    "minimum": "at least {:g}",
    "exclusiveMinimum": "more than {:g}",
    "maximum": "at most {:g}",
    "exclusiveMaximum": "less than {:g}",
    "maxLength": "at most {:g} characters",
    "maxItems": "at most {:g}",
}


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema's type in words, with its limits: "integer, at least 1"."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if several := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_kind(one) for one in several)
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value!r}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        kind = f"list of ({_kind(schema.get('items', {}))})"
    return ", ".join([kind, *(text.format(schema[name]) for name, text in _LIMITS.items() if name in schema)])


# Types of GGUF files


def gguf_types() -> Iterator[str]:
    """Lines of a Markdown table: one row per type, its size, and what becomes of its numbers in each precision."""
    from gguf import GGML_QUANT_SIZES

    yield from ("| type | bits a weight | in bfloat16 | in int8 | in int4 |", "| --- | --- | --- | --- | --- |")
    for kind in READABLE:
        block, size = GGML_QUANT_SIZES[kind]
        losses = " | ".join(precision_loss(kind, to) for to in ("bf16", "int8", "int4"))
        yield f"| {kind.name} | {8 * size / block:.4g} | {losses} |"
    refused = ", ".join(sorted(kind.name for kind in UNREADABLE))
    yield f"| {refused} | | refused | refused | refused |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "reference-cli": command_line,
    "reference-http": http,
}


# Families of models


def families() -> Iterator[str]:
    """Lines of a Markdown table: one row per description, of the usual configuration of its first family."""
    yield "| family | `model_type` | GGUF architecture | CPU kernels | GPU | several processes |"
    yield "| --- | --- | --- | --- | --- | --- |"
    alike: dict[object, list[Family]] = {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type):
        alike.setdefault(family.describe, []).append(family)
    for families_alike in alike.values():
        yield f"| {' | '.join(_columns(families_alike))} |"


def _columns(alike: list[Family]) -> Iterator[str]:
    family = alike[0]
    spec = family.describe(AutoConfig.for_model(family.model_type, **family.usual))
    assert spec is not None, "the usual configuration of a family runs"
    about = sys.modules[family.describe.__module__].__doc__ or ""
    yield about.splitlines()[0].removesuffix(".")
    yield ", ".join(f"`{name}`" for each in alike for name in (each.model_type, *each.other_types))
    architectures = (name for each in alike if each.gguf is not None for name in each.gguf.architectures)
    yield ", ".join(f"`{name}`" for name in architectures) or "-"
    try:
        check_reference(spec)
    except ModelFormatError as error:
        yield "no: needs " + str(error).partition(" without ")[2]
    else:
        yield "bf16, int8, int4"
    yield "bf16, int8, int4, fp8; graphs"
    try:
        ModelShard(0, 2).local(spec)
    except ParameterError:
        yield "no"
    else:
        yield "yes"


def write_families(page: Path) -> None:
    """Replace the table of families of a page."""
    _write_table(page, families())


def write_types(page: Path) -> None:
    """Replace the table of GGUF's types of a page."""
    _write_table(page, gguf_types())


def _write_table(page: Path, lines: Iterator[str]) -> None:
    """Replace the table whose first column has the name of the first column of ``lines``."""
    table = list(lines)
    before, _, rest = page.read_text().partition(f"| {table[0].split()[1]} |")
    after = rest.partition("\n\n")[2]
    page.write_text(before + "\n".join(table) + "\n\n" + after)


# Docstrings

_FIELD = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): ")
_BETWEEN = re.compile(rf"(?<=\.) (?={_FIELD.pattern})")


def readable(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Handler of Sphinx's autodoc-process-docstring: lines like "name: description" become a list."""
    made: list[str] = []
    for line in _BETWEEN.sub("\n", "\n".join(lines)).split("\n"):
        found = _FIELD.match(line)
        if found:
            made += ["", f"* **{found[1]}**: {line[found.end() :]}"]
        elif line.strip() and made and _in_list(made):
            made.append(f"  {line.strip()}")
        else:
            made.append(line)
    lines[:] = [*made, ""]


def _in_list(made: list[str]) -> bool:
    return made[-1].startswith(("* **", "  "))


if __name__ == "__main__":
    write_families(Path(__file__).parent / "models.md")
    write_types(Path(__file__).parent / "files.md")
