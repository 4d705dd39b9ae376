"""Uploads as browsers and OpenAI's clients send them: multipart/form-data (RFC 7578), whole and in memory."""

from __future__ import annotations

import email
from dataclasses import dataclass
from email.message import Message
from email.policy import compat32

from paceline.server import errors

_MAX_PARTS = 16
_MAX_HEADERS = 2**12  # bytes of one part's
_MAX_BOUNDARY = 70


@dataclass(frozen=True)
class Part:
    """A field of a form. filename: None unless it is a file."""

    name: str
    filename: str | None
    content: bytes


def parts_of(content_type: str, body: bytes) -> list[Part]:
    """All fields. Raises ApiError: 415 for another kind of body, 400 for a broken one."""
    boundary = _boundary(content_type)
    preamble, *found = (b"\r\n" + body).split(b"\r\n--" + boundary, _MAX_PARTS + 1)
    if preamble or len(found) < 2 or not found[-1].startswith(b"--"):
        raise errors.invalid(f"a form has 1 to {_MAX_PARTS} parts, each behind its boundary, and an end")
    return [_part(part) for part in found[:-1]]


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type.encode("ascii", "replace").decode()
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY:
        message = "the body must be a form with a file, of the Content-Type multipart/form-data with a boundary"
        raise errors.ApiError(415, errors.INVALID, message, code="unsupported_media_type")
    return boundary.encode()


def _part(part: bytes) -> Part:
    head, end, content = part.partition(b"\r\n\r\n")
    if not part.startswith(b"\r\n") or not end or len(head) > _MAX_HEADERS:
        raise errors.invalid(f"a part of a form has headers of at most {_MAX_HEADERS} bytes, an empty line and content")
    headers = email.message_from_string(head[2:].decode("utf-8", "replace"), policy=compat32)
    if headers.get_content_disposition() != "form-data":
        raise errors.invalid("a part of a form has the header 'Content-Disposition: form-data; name=...'")
    name = headers.get_param("name", "", "content-disposition")
    return Part(str(name), headers.get_filename(), content)
