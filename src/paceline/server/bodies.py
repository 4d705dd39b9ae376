"""Bodies of requests: JSON within limits, read and checked beside the event loop where they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from email.message import Message
from typing import Any, TypeVar, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from paceline.server import errors
from paceline.server.limits import MAX_PARTS, MAX_VALUES

_SHORT = 2**14  # bytes: read at once; longer ones take their turn in a thread
B = TypeVar("B", bound=BaseModel)


def read(model: type[B], body: bytes) -> B:
    """A body as a document. Raises ApiError (400) with the first faults, each cut short."""
    return checked(model, parsed(body))


def parsed(body: bytes) -> Any:
    """What JSON says, within limits. Raises ApiError (400)."""
    _check_size(body)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise errors.invalid(f"the body is not JSON: {error}") from error


def checked(model: type[B], data: object) -> B:
    """Such data as a document. Raises ApiError (400) with the first faults, each cut short."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise errors.from_validation(error.errors(include_url=False, include_input=False), data) from error


def _check_size(body: bytes) -> None:
    """Counts without regard to strings first, which is quick and nearly always enough."""
    if not _within(body) and not _within(_outside_strings(body)):
        raise errors.invalid(
            f"the body has too many parts: at most {MAX_VALUES} values and {MAX_PARTS} lists, objects and fields of "
            "objects; send several requests"
        )


def _within(text: bytes) -> bool:
    return text.count(b",") < MAX_VALUES and text.count(b"[") + text.count(b"{") + text.count(b":") <= MAX_PARTS


def _outside_strings(body: bytes) -> bytes:
    """What is left of JSON without its strings; commas alone if there are too many of those."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > 2 * (MAX_VALUES + MAX_PARTS):
        return b"," * MAX_VALUES
    return b"".join(text.split(b'"')[::2])


def is_json(content_type: str) -> bool:
    """Whether a header says application/json, or a kind of it."""
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))


class _Read(Request):
    """A request whose body has been read as a document."""

    def __init__(self, request: Request, body: bytes, document: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes, self._document = body, document

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        return self._document


def route_class(pool: Executor) -> type[APIRoute]:
    """Routes whose bodies are read by ``read``; long ones in ``pool``, where they wait for one another."""

    async def read_body(model: type[BaseModel], request: Request) -> _Read:
        body = await request.body()
        if not is_json(request.headers.get("content-type", "")):
            message = "the body must be JSON and say so: send the header 'Content-Type: application/json'"
            raise errors.ApiError(415, errors.INVALID, message, code="unsupported_media_type")
        if len(body) <= _SHORT:
            return _Read(request, body, read(model, body))
        loop = asyncio.get_running_loop()
        return _Read(request, body, await loop.run_in_executor(pool, read, model, body))

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler, field = super().get_route_handler(), self.body_field
            if field is None:
                return handler
            model = cast("type[BaseModel]", field.field_info.annotation)

            async def handle(request: Request) -> Response:
                return await handler(await read_body(model, request))

            return handle

    return JsonRoute
