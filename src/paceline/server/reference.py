"""``/docs``: the API as a page, made from its OpenAPI document. It has no scripts and needs no other server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from paceline.server.playground import HEADERS

_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>paceline: API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<link rel="icon" href="playground/icon.svg"><link rel="stylesheet" href="playground/style.css"></head>'
    '<body><header class="top"><h1>paceline: API</h1><p class="model"><a href="openapi.json">openapi.json</a></p>'
)
_PAGES = (
    '<nav class="pages" aria-label="Pages"><a href="chat">Chat</a> <a href="./">Inspector</a> '
    '<a href="docs" aria-current="page">API</a></nav>'
)


def add_reference(app: FastAPI, playground: bool) -> None:
    """Serve the page. playground: whether it links to the pages of the playground, which are then served, too."""
    head = _HEAD + (_PAGES if playground else "") + '</header><main class="reference">'

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(head + "".join(_sections(app.openapi())) + "</main></body></html>", headers=HEADERS)


def _sections(document: dict[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            yield f"<section><h2>{method.upper()} {escape(path)}</h2><p>{_text(said)}</p>"
            body = said.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            if name:
                yield from _fields(document["components"]["schemas"][name])
            yield "</section>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield f"<p>{_text(schema)}</p><table><tbody>"
    for name, field in schema.get("properties", {}).items():
        needed = ", required" if name in schema.get("required", ()) else ""
        yield f"<tr><th>{escape(name)}</th><td>{escape(_kind(field))}{needed}</td><td>{_text(field)}</td></tr>"
    yield "</tbody></table>"


def _text(described: dict[str, Any]) -> str:
    return escape(described.get("description", "").replace("``", ""))


def _kind(field: dict[str, Any]) -> str:
    """The types that a field may have, without null, which stands for its absence."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if choices := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(kind for kind in map(_kind, choices) if kind != "null"))
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    return repr(field["const"]) if "const" in field else str(field.get("type", "any"))
