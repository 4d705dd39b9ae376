"""Heads of requests and responses: checks that HTTP/1.1 (RFC 9112) requires and h11 does not do, and request ids."""

from __future__ import annotations

import re
import secrets
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server import errors
from paceline.server.logs import request_id

REQUEST_ID = b"x-request-id"
_CLEAN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_URL = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE)


def checked_head(scope: Scope) -> Scope:
    """Return the request with its target and Host header normalized.

    Raises ApiError (400) if two parsers could read the head differently (request smuggling).
    """
    scope = _without_url(scope)
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        message = "the request has both Content-Length and Transfer-Encoding; send only one"
        raise errors.invalid(message, code=errors.TWO_LENGTHS)
    host = header(scope, b"host")
    if not _HOST.fullmatch(host):
        shown = errors.shortened(host.decode("latin-1"), 100)
        raise errors.invalid(f"the Host header must be NAME or NAME:PORT, not {shown!r}", code="invalid_host")
    return scope


def header(scope: Scope, name: bytes) -> bytes:
    """Return the first header of this name, or empty bytes."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _without_url(scope: Scope) -> Scope:
    """Split an absolute-form target into its path and the Host header (RFC 9112, section 3.2.2)."""
    target = _URL.fullmatch(scope["raw_path"])
    if target is None:
        return scope
    host, path = target[1], target[2] or b"/"
    headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
    return {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}


class Tracing:
    """ASGI middleware for request ids: in the response header ``X-Request-Id`` and in all log lines of the request.

    It keeps the client's id if it is short and plain, else it creates one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, name)]}
            await send(message)

        request_id.set(name.decode())
        await self._app(scope, receive, send_with_name)


def _request_id(scope: Scope) -> bytes:
    client_id = header(scope, REQUEST_ID)
    return client_id if _CLEAN_ID.fullmatch(client_id) else b"req-" + secrets.token_hex(8).encode()
