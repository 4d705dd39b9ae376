"""Checks of request heads that HTTP/1.1 (RFC 9112) requires and h11 does not do."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from paceline.server import errors

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
