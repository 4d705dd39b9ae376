"""Request bodies: JSON within size limits. Long bodies are parsed outside of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, TypeVar, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from paceline.server import errors
from paceline.server.limits import MAX_PARTS, MAX_VALUES
from paceline.server.threads import WorkerThread

_SHORT = 2**14  # bytes; longer bodies are parsed in a worker thread
B = TypeVar("B", bound=BaseModel)


def read(model: type[B], body: bytes) -> B:
    """Parse and validate a body. Raises ApiError (400) that names the first invalid fields."""
    return checked(model, parsed(body))


def parsed(body: bytes) -> Any:
    """Parse JSON within size limits. Raises ApiError (400)."""
    _check_size(body)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise errors.invalid(f"the body is not valid JSON: {error}") from error


def checked(model: type[B], data: object) -> B:
    """Validate ``data`` as a ``model``. Raises ApiError (400) that names the first invalid fields."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise errors.from_validation(error.errors(include_url=False, include_input=False), data) from error


def _check_size(body: bytes) -> None:
    """Raise ApiError (400) if parsing would take too long.

    The first count includes the text of strings: it is fast and nearly always enough.
    """
    if not _within(body) and not _within(_outside_strings(body)):
        raise errors.invalid(
            f"the body is too complex: at most {MAX_VALUES} values and {MAX_PARTS} lists, objects and fields of "
            "objects; split it into several requests"
        )


def _within(text: bytes) -> bool:
    return text.count(b",") < MAX_VALUES and text.count(b"[") + text.count(b"{") + text.count(b":") <= MAX_PARTS


def _outside_strings(body: bytes) -> bytes:
    """Return the JSON without its strings, or only commas (over the limit) if it has too many strings."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > 2 * (MAX_VALUES + MAX_PARTS):
        return b"," * MAX_VALUES
    return b"".join(text.split(b'"')[::2])


def is_json(content_type: str) -> bool:
    """Return whether a Content-Type is application/json or application/*+json."""
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (kind == "json" or kind.endswith("+json"))


def _may_lack_type(request: Request) -> bool:
    """Whether a body without the Content-Type of JSON is taken: Ollama's clients send it so.

    A web page of another site could send such a request, too; browsers then add an Origin.
    """
    return request.url.path.startswith(errors.OLLAMA) and "origin" not in request.headers


class _Read(Request):
    """A request whose body is already parsed and validated."""

    def __init__(self, request: Request, body: bytes, document: BaseModel) -> None:
        headers = [(b"content-type", b"application/json"), *request.scope["headers"]]  # the first one counts
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._bytes, self._document = body, document

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        return self._document


def route_class(worker: WorkerThread) -> type[APIRoute]:
    """Return a route class that parses bodies with ``read``, long ones in a thread."""

    async def read_body(model: type[BaseModel], request: Request) -> _Read:
        body = await request.body()
        if not is_json(request.headers.get("content-type", "")) and not _may_lack_type(request):
            message = "the body must be JSON: send the header 'Content-Type: application/json'"
            raise errors.ApiError(415, errors.INVALID, message, code="unsupported_media_type")
        if len(body) <= _SHORT:
            return _Read(request, body, read(model, body))
        return _Read(request, body, await worker.run(read, model, body))

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
