"""Incremental parser for multipart/form-data (RFC 7578), as browsers and OpenAI's clients send it.

Content of files is passed on as it arrives; only small fields are kept in memory.
"""

from __future__ import annotations

import email
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from email.policy import compat32
from email.utils import collapse_rfc2231_value

from paceline.server import errors

_MAX_PARTS = 16
_MAX_HEADERS = 2**12  # bytes per part
_MAX_FIELD = 2**12  # bytes of a field that is not a file
_MAX_BOUNDARY = 70
_END = b"--"  # after the last boundary
_ALPHABETS = "us-ascii", "utf-8", "iso-8859-1"


@dataclass
class FormPart:
    """One part of a form. filename: None unless it is a file. content: empty for files, which go to ``write``."""

    name: str
    filename: str | None
    content: bytes = b""


class FormReader:
    """Parses a form piece by piece, in constant memory.

    write: called with each piece of a file's content. Raises ApiError: 415 for another Content-Type, 400 for a broken
    form.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._boundary = b"\r\n--" + _boundary(content_type)
        self._buffer = bytearray(b"\r\n")  # a body starts with a boundary without a line break before it
        self._step = self._preamble
        self._parts: list[FormPart] = []

    def feed(self, piece: bytes) -> None:
        """Parse the next bytes. Raises ApiError."""
        self._buffer += piece
        while self._step():
            pass

    def end(self) -> list[FormPart]:
        """Return all parts after the last piece. Raises ApiError if the form is incomplete."""
        if self._step != self._epilogue or not self._parts:
            raise _broken()
        return self._parts

    # Each state consumes what it can from the buffer and returns whether more can be done.

    def _preamble(self) -> bool:
        if len(self._buffer) < len(self._boundary):
            return False
        if not self._buffer.startswith(self._boundary):
            raise _broken()
        del self._buffer[: len(self._boundary)]
        self._step = self._head
        return True

    def _head(self) -> bool:
        if self._buffer.startswith(_END):
            self._step = self._epilogue
            return True
        at = self._buffer.find(b"\r\n\r\n")
        head = bytes(self._buffer[: max(at, 0)])
        if at > _MAX_HEADERS or (at < 0 and len(self._buffer) > _MAX_HEADERS):
            raise _bad_part()
        if at < 0:
            return False
        if len(self._parts) == _MAX_PARTS:
            raise _broken()
        if self._boundary in head:
            raise _bad_part()
        self._parts.append(_part(head))
        del self._buffer[: at + 4]
        self._step = self._content
        return True

    def _content(self) -> bool:
        at = self._buffer.find(self._boundary)
        sure = at if at >= 0 else max(0, len(self._buffer) - len(self._boundary) + 1)
        self._keep(bytes(self._buffer[:sure]))
        del self._buffer[: sure + len(self._boundary) if at >= 0 else sure]
        if at < 0:
            return False
        self._step = self._head
        return True

    def _keep(self, content: bytes) -> None:
        part = self._parts[-1]
        if part.filename is not None:
            self._write(content)
        elif len(part.content) + len(content) > _MAX_FIELD:
            raise errors.invalid(f"a form field that is not a file has at most {_MAX_FIELD} bytes")
        else:
            part.content += content

    def _epilogue(self) -> bool:
        """Ignore everything after the last boundary."""
        self._buffer.clear()
        return False


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type.encode("ascii", "replace").decode()
    boundary = _parameter(header, "content-type", "boundary")
    if header.get_content_type() != "multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY:
        message = "the body must be a form with a file: Content-Type multipart/form-data with a boundary"
        raise errors.ApiError(415, errors.INVALID, message, code="unsupported_media_type")
    return boundary.encode()


def _part(head: bytes) -> FormPart:
    if not head.startswith(b"\r\n"):
        raise _bad_part()
    headers = email.message_from_string(head[2:].decode("utf-8", "replace"), policy=compat32)
    if headers.get_content_disposition() != "form-data":
        raise errors.invalid("a form part needs the header 'Content-Disposition: form-data; name=...'")
    name, filename = (_parameter(headers, "content-disposition", key) for key in ("name", "filename"))
    return FormPart(name or "", filename)


def _parameter(headers: Message, header: str, name: str) -> str | None:
    """Return a header's parameter, decoded if it names a charset (RFC 2231), or None. Raises ApiError."""
    try:
        value = headers.get_param(name, None, header)
    except ValueError as error:  # RFC 2231 section number that does not fit
        raise _bad_parameter(name) from error
    if isinstance(value, tuple):
        if (value[0] or _ALPHABETS[0]).lower() not in _ALPHABETS:  # Python accepts more names, some of them no charsets
            raise _bad_parameter(name)
        value = collapse_rfc2231_value(value)
    return value


def _broken() -> errors.ApiError:
    return errors.invalid(f"a form has 1 to {_MAX_PARTS} parts, each after a boundary, and a final boundary")


def _bad_part() -> errors.ApiError:
    return errors.invalid(f"a form part has headers of at most {_MAX_HEADERS} bytes, an empty line and content")


def _bad_parameter(name: str) -> errors.ApiError:
    return errors.invalid(f"the {name} of a form must be ASCII, or encoded as {' or '.join(_ALPHABETS[1:])}")
