"""Lines of a batch file, read one by one however long the file is, and OpenAI's form of them."""

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

Url = Literal["/v1/chat/completions", "/v1/completions"]


class BatchLine(Strict):
    """A request as OpenAI's batch files spell it. body: what would be sent to ``url``."""

    custom_id: Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL)]
    method: Literal["POST"]
    url: Url
    body: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line that is not empty. index: how many came before it; number: of all lines, the first is 1.

    content: None if it is longer than the limit. name: index and digest, the same in every run over the same file.
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
        """Raises ApiError if there are too many."""
        if self.content is None:
            message = f"{self.where} is longer than {self.limit} bytes, the most that are read of one"
            raise errors.invalid(message, code="line_too_long")
        return self.content


def parse_name(name: object) -> tuple[int, str]:
    """Index and digest of a line's name. Raises ValueError."""
    kind, index, digest = str(name).rsplit("_", 2)
    if kind != "batch_req" or not index.isdecimal():
        raise ValueError(name)
    return int(index), digest


def lines_of(file: BinaryIO, limit: int) -> Iterator[Line]:
    """All lines that are not empty, each when it is asked for; of one that is too long only the digest is kept."""
    index = 0
    for number in itertools.count(1):
        content, digest, size = _next_line(file, limit, number == 1)
        if not size:
            return
        if content is None or content.strip():
            yield Line(index, number, content, digest, limit)
            index += 1


def _next_line(file: BinaryIO, limit: int, first: bool) -> tuple[bytes | None, str, int]:
    """Content (None: too long), digest and bytes read, the line's end included; 0 at the file's end."""
    digest, read_so_far, kept = hashlib.blake2b(digest_size=8), 0, bytearray()
    while True:
        piece = file.readline(_CHUNK)
        read_so_far += len(piece)
        digest.update(piece.rstrip(b"\r\n"))  # a last line may gain its end later
        if len(kept) <= limit:
            kept += piece
        if len(piece) < _CHUNK or piece.endswith(b"\n"):
            break
    content = bytes(kept).rstrip(b"\r\n")
    if first:
        content = content.removeprefix(_BYTE_ORDER_MARK)
    return (content if len(content) <= limit else None), digest.hexdigest(), read_so_far


def count_lines(file: BinaryIO) -> int:
    """How many lines that are not empty, of a file that can be read again; its place stays as it was."""
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
    """The seed of a line that has none: by the job's and the line's own name, whatever else is in the file."""
    digest = hashlib.blake2b(f"{seed} {name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # of 63 bits, as seeds are


class Names:
    """Every custom_id once. Of each only a digest is kept."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def take(self, custom_id: str) -> None:
        """Raises ApiError if a line before had it."""
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            message = f"a line before has the custom_id {errors.shortened(custom_id, limits.MAX_SHOWN)!r}, too"
            raise errors.invalid(message, "custom_id", "duplicate_custom_id")
        self._seen.add(digest)
