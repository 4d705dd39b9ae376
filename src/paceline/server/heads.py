"""Heads of requests that HTTP/1.1 (RFC 9112) has rules about and h11 lets through."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

from paceline.server import errors

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_URL = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE)


def checked_head(scope: Scope) -> Scope:
    """The request as its head means it. Raises ApiError (400) where two readers of the head could differ."""
    scope = _without_url(scope)
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        message = "the request has Content-Length and Transfer-Encoding; send one of them"
        raise errors.invalid(message, code=errors.TWO_LENGTHS)
    host = header(scope, b"host")
    if not _HOST.fullmatch(host):
        shown = errors.shortened(host.decode("latin-1"), 100)
        raise errors.invalid(f"the Host header is a name and perhaps a port, not {shown!r}", code="invalid_host")
    return scope


def header(scope: Scope, name: bytes) -> bytes:
    """The first of this name; nothing if there is none."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _without_url(scope: Scope) -> Scope:
    """A target that is a URL becomes a path; the URL's host takes the place of the Host header (3.2.2)."""
    target = _URL.fullmatch(scope["raw_path"])
    if target is None:
        return scope
    host, path = target[1], target[2] or b"/"
    headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
    return {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}
