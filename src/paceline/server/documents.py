"""JSON serialization of replies. Long replies are written in pieces, outside of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from paceline.server.threads import WorkerThread

_SHORT_REPLY = 512  # tokens and log-probabilities; serializing them takes a millisecond
_DEEP = 5  # document, choices, choice, log-probabilities, tokens; deeper values are short


def written(document: BaseModel) -> bytes:
    """Serialize at once. Fields that were not set are left out."""
    return document.model_dump_json(exclude_unset=True).encode()


def written_in_pieces(document: BaseModel) -> bytes:
    """Serialize to the same bytes as ``written``, in short pieces.

    pydantic holds the GIL while it serializes; between two pieces other threads can run.
    """
    return b"".join(_pieces(document, _DEEP))


def event(document: bytes) -> bytes:
    """Format a JSON document as a server-sent event."""
    return b"data: " + document + b"\n\n"


def named_event(name: str, document: bytes) -> bytes:
    """Format a JSON document as a server-sent event with a name."""
    return b"event: %s\n%s" % (name.encode(), event(document))


def typed_events(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """Serialize documents as server-sent events named by their "type"."""
    return b"".join(named_event(document["type"], to_json(document)) for document in documents)


class ReplyWriter(WorkerThread):
    """Serializes short replies at once, and long ones in a thread.

    waits: whether ``build`` may wait for a subprocess; short replies are then made in the thread, too.
    build: makes the documents. entries: their tokens and log-probabilities.
    """

    def __init__(self, *, waits: bool = False) -> None:
        super().__init__("waiting replies" if waits else "replies")
        self._waits = waits

    def _at_once(self, entries: int) -> bool:
        return entries <= _SHORT_REPLY and not self._waits

    async def written(self, build: Callable[[], BaseModel], entries: int) -> bytes:
        """Serialize a reply."""
        if self._at_once(entries):
            return written(build())
        return await self.run(lambda: written_in_pieces(build()))

    async def events(self, build: Callable[[], Sequence[BaseModel]], entries: int) -> bytes:
        """Serialize documents as server-sent events."""
        if self._at_once(entries):
            return b"".join(event(written(document)) for document in build())
        return await self.run(lambda: b"".join(event(written_in_pieces(document)) for document in build()))

    async def lines(self, build: Callable[[], Sequence[BaseModel]], entries: int) -> bytes:
        """Serialize documents as lines of JSON."""
        if self._at_once(entries):
            return b"".join(written(document) + b"\n" for document in build())
        return await self.run(lambda: b"".join(written_in_pieces(document) + b"\n" for document in build()))

    async def typed_events(self, build: Callable[[], Iterable[Mapping[str, Any]]], entries: int) -> bytes:
        """Serialize documents as server-sent events named by their "type"."""
        if self._at_once(entries):
            return typed_events(build())
        return await self.run(lambda: typed_events(build()))


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    if isinstance(value, BaseModel) and depth:
        yield b"{"
        for number, name in enumerate(name for name in type(value).model_fields if name in value.model_fields_set):
            yield b'%s"%s":' % (b"," if number else b"", name.encode())
            yield from _pieces(getattr(value, name), depth - 1)
        yield b"}"
    elif isinstance(value, list) and depth and isinstance(next(iter(value), None), (BaseModel, dict)):
        yield b"["
        for number, item in enumerate(value):
            yield b"," if number else b""
            yield from _pieces(item, depth - 1)
        yield b"]"
    else:
        yield written(value) if isinstance(value, BaseModel) else to_json(value)
