"""Prefix-affine routing: a request goes to the replica that has its prefix cached, unless that one is too busy."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

BLOCK = 128  # characters of a prompt per digest: some 30 tokens
_REMEMBERED = 2**16  # digests
_SLACK = 4  # requests that a replica may have in flight beyond the one with the fewest, and still be preferred


def blocks_of(document: Any, owner: str = "") -> list[bytes]:
    """Digests of a request's prefixes, the shortest first: message by message, or block by block of its prompt.

    A system prompt does not count: some clients change it with each request.
    document: the parsed body of any route; anything but a request has no digests.
    owner: name under which replicas cache the prompt; digests of different owners differ.
    """
    if not isinstance(document, dict):
        return []
    asked = next((document[name] for name in ("messages", "input", "prompt") if name in document), None)
    if isinstance(asked, list) and "prompt" not in document:
        parts = [json.dumps(item) for item in asked]
    else:
        text = asked if isinstance(asked, str) else json.dumps(asked) if isinstance(asked, list) else ""
        parts = [text[at : at + BLOCK] for at in range(0, len(text) - BLOCK + 1, BLOCK)]
    return list(itertools.accumulate(parts, _chained, initial=owner.encode()))[1:]


def _chained(before: bytes, part: str) -> bytes:
    return hashlib.blake2b(before + part.encode("utf-8", "surrogatepass"), digest_size=12).digest()


class Affinity:
    """The cached prefixes and the number of requests in flight of each replica. Thread-safe."""

    def __init__(self, slack: int = _SLACK, remembered: int = _REMEMBERED) -> None:
        self._slack, self._most = slack, remembered
        self._readers: OrderedDict[bytes, str] = OrderedDict()
        self._flights: dict[str, str] = {}
        self._chosen: dict[str, int] = {}
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def choose(self, flight: str, blocks: Sequence[bytes], replicas: Sequence[str]) -> str:
        """Choose one of the replicas. The request counts as in flight there until ``end``, or until it is chosen for
        again.
        """
        with self._lock:
            self._flights.pop(flight, None)
            loads = self._loads(replicas)
            least = min(loads.values())
            fits = {replica for replica, load in loads.items() if load <= least + self._slack}
            reader = next((found for block in reversed(blocks) if (found := self._readers.get(block)) in fits), None)
            chosen = reader or min(loads, key=lambda each: (loads[each], self._chosen.get(each, -1)))
            self._note(flight, blocks, chosen)
            return chosen

    def _loads(self, replicas: Sequence[str]) -> dict[str, int]:
        loads = dict.fromkeys(replicas, 0)
        for replica in self._flights.values():
            if replica in loads:
                loads[replica] += 1
        return loads

    def _note(self, flight: str, blocks: Sequence[bytes], chosen: str) -> None:
        self._flights[flight] = chosen
        self._chosen[chosen] = next(self._turn)
        for block in blocks:
            self._readers[block] = chosen
            self._readers.move_to_end(block)
        while len(self._readers) > self._most:
            self._readers.popitem(last=False)

    def end(self, flight: str) -> None:
        """The request is no longer in flight."""
        with self._lock:
            self._flights.pop(flight, None)


AFFINITY = Affinity()  # shared in this process by Ray Serve's router and by the front, which knows when requests end
