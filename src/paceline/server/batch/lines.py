"""Reads lines of batch files in constant memory, and validates OpenAI's format of a line."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field

from paceline.server import errors, limits
from paceline.server.protocol import Strict

_CHUNK = 2**16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]


class BatchLine(Strict):
    """A line of OpenAI's batch files. body: the request to ``url``."""

    custom_id: Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


@dataclass(frozen=True)
class InputLine:
    """A non-empty input line.

    index: its position among the non-empty lines, from 0. number: its position among all lines, from 1. content: None
    if it is longer than ``limit`` bytes. name: made of index and digest; it is stable across runs over the same file.
    """

    index: int
    number: int
    content: bytes | None
    digest: str
    limit: int

    @property
    def name(self) -> str:
        return f"batch_req_{self.index}_{self.digest}"

    @property
    def where(self) -> str:
        return f"line {self.number}"

    def text(self) -> bytes:
        """Return the content. Raises ApiError if the line is too long."""
        if self.content is None:
            message = f"{self.where} is longer than {self.limit} bytes"
            raise errors.invalid(message, code="line_too_long")
        return self.content


def parse_name(name: object) -> tuple[int, str]:
    """Parse a line's name into index and digest. Raises ValueError."""
    kind, index, digest = str(name).rsplit("_", 2)
    if kind != "batch_req" or not index.isdecimal():
        raise ValueError(name)
    return int(index), digest


def lines_of(file: BinaryIO, limit: int) -> Iterator[InputLine]:
    """Yield all non-empty lines lazily. Content of a line over ``limit`` bytes is dropped, its digest kept."""
    index = 0
    for number in itertools.count(1):
        content, digest, size = _next_line(file, limit, number == 1)
        if not size:
            return
        if content is None or content.strip():
            yield InputLine(index, number, content, digest, limit)
            index += 1


def _next_line(file: BinaryIO, limit: int, first: bool) -> tuple[bytes | None, str, int]:
    """Read one line. Returns content (None: too long), digest, and the bytes read, including the line break.

    The bytes read are 0 at the end of the file.
    """
    digest, read_so_far, kept = hashlib.blake2b(digest_size=8), 0, bytearray()
    while True:
        piece = file.readline(_CHUNK)
        read_so_far += len(piece)
        digest.update(piece.rstrip(b"\r\n"))  # the last line may get its line break later
        if len(kept) <= limit:
            kept += piece
        if len(piece) < _CHUNK or piece.endswith(b"\n"):
            break
    content = bytes(kept).rstrip(b"\r\n")
    if first:
        content = content.removeprefix(_BYTE_ORDER_MARK)
    return (content if len(content) <= limit else None), digest.hexdigest(), read_so_far


def count_lines(file: BinaryIO) -> int:
    """Count the non-empty lines of a seekable file. Its position does not change."""
    place, count, filled = file.tell(), 0, False
    while chunk := file.read(2**20):
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            count += filled or bool(part.strip())
            filled = False
        filled = filled or bool(rest.strip())
    file.seek(place)
    return count + filled


def seed_of(seed: int, name: str) -> int:
    """Return a seed for a line without one, derived from the batch's seed and the line's name only."""
    digest = hashlib.blake2b(f"{seed} {name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits, the range of seeds


class CustomIds:
    """Checks that each custom_id occurs once. Keeps only digests."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def take(self, custom_id: str) -> None:
        """Record a custom_id. Raises ApiError if an earlier line has it."""
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            message = f"an earlier line has the custom_id {errors.shortened(custom_id, limits.MAX_SHOWN)!r}"
            raise errors.invalid(message, "custom_id", "duplicate_custom_id")
        self._seen.add(digest)
