"""The common part of the workers: JSON lines over the standard streams.

It uses only the standard library, because it runs in every environment.
A worker is started with one JSON argument (see ``Setup``), loads its models, writes one line (``{"ready": ...}`` or
``{"error": ...}``) and then answers each request line with one line, until its input ends. Output of libraries goes to
stderr instead, so that it cannot break the protocol.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """How to load.

    target, draft: the models' paths in the worker's format; draft is None if the pair has none.
    modes: the modes that it will run. precision: its name in the plan. max_tokens_of_row: prompt and answer.
    """

    target: str
    draft: str | None
    modes: tuple[str, ...]
    precision: str
    k: int
    max_batch: int
    max_tokens_of_row: int
    threads: int
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls) -> Setup:
        given = json.loads(sys.argv[1])
        return cls(**{**given, "modes": tuple(given["modes"])})


@dataclass
class Run:
    """One measured run. prefill_s: until the last row had its first token; each worker describes how it is measured."""

    prefill_s: float
    total_s: float
    output_ids: list[list[int]]
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    notes: list[str] = field(default_factory=list)

    def reply(self) -> dict[str, Any]:
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.total_s - self.prefill_s,
            "total_s": self.total_s,
            "tokens": sum(map(len, self.output_ids)),
            "output_ids": self.output_ids,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.drafted if self.drafted and self.accepted is not None else None,
            "notes": self.notes,
        }


class Peer(Protocol):
    """A loaded engine. ``info``: versions, precision and notes, sent once when it is ready."""

    info: Mapping[str, Any]

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run: ...


class FirstTokens:
    """The times of one run: its start, and each row's first token."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: dict[Any, float] = {}

    def seen(self, row: object) -> None:
        """Record that a row has at least one token."""
        self._first.setdefault(row, time.perf_counter())

    def prefill(self) -> float:
        return max(self._first.values()) - self._start

    def total(self) -> float:
        return time.perf_counter() - self._start


def versions(*packages: str) -> dict[str, str]:
    """The installed versions of these distributions."""
    return {package: importlib.metadata.version(package) for package in packages}


def serve(load: Callable[[Setup], Peer]) -> None:
    """Load, report it, answer until the input ends."""
    out = _private_stdout()
    try:
        peer = load(Setup.from_arguments())
    except Exception as error:
        _say(out, {"error": error_line(error)})
        raise SystemExit(1) from error
    _say(out, {"ready": True, **peer.info})
    for line in sys.stdin:
        _say(out, _answer(peer, json.loads(line)))


def _answer(peer: Peer, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        run = peer.run(request["mode"], request["prompts"], request["max_tokens"], request["k"])
    except Exception as error:  # noqa: BLE001  whatever it was, the report shows its line
        return {"error": error_line(error)}
    return run.reply()


def error_line(error: BaseException) -> str:
    """The exception's name and its first non-empty line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def _private_stdout() -> Any:
    """Reserve the standard output for the protocol; all other output goes to stderr."""
    private = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return private


def _say(out: Any, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
