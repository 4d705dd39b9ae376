"""Request ids: in the response header ``X-Request-Id`` and in all log lines of the request."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.http_heads import header
from paceline.server.logs import request_id

HEADER = b"x-request-id"
_CLEAN = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Tracing:
    """ASGI middleware that keeps the client's request id if it is short and plain, else creates one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
            await send(message)

        request_id.set(name.decode())
        await self._app(scope, receive, send_with_name)


def _request_id(scope: Scope) -> bytes:
    client_id = header(scope, HEADER)
    return client_id if _CLEAN.fullmatch(client_id) else b"req-" + secrets.token_hex(8).encode()
