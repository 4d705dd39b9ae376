"""Grammars over a model's tokens. They are compiled and followed in processes of their own (nursery.py)."""

from __future__ import annotations

import importlib.util
import logging
import math
import select
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import StructuredOutputs
from paceline.core.rows import Constraint
from paceline.errors import MissingPackageError, StructureError
from paceline.models.tokenizer import Tokenizer
from paceline.structured.limits import AT_ONCE, KEPT, MOST_PATTERN, MOST_TEXT, REFUSED_KEPT, Limits
from paceline.structured.messages import receive, send
from paceline.structured.processes import KILLED, TOO_LONG, Nursery, how_it_ended

log = logging.getLogger("paceline")

_BYTES = [bytes([byte]) for byte in range(256)]
_NEEDED = {*range(0x20, 0x7F), *range(0x80, 0xC0)}  # JSON itself, and how every character beyond ASCII goes on
_POLL = 0.05  # seconds


class Grammars:
    """Compiles structures for one model. May be used by any thread.

    Raises MissingPackageError, or StructureError if the model's tokens cannot be held to a grammar.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        if importlib.util.find_spec("xgrammar") is None:
            raise MissingPackageError("xgrammar", "structured")
        self._limits = Limits() if limits is None else limits
        self._nursery = Nursery(
            {
                "spellings": _spellings(tokenizer),
                "byte_level": tokenizer.is_byte_level(),
                "size": vocab_size,
                "ends": list(eos_token_ids),
                "unspelled": _unspelled(tokenizer, eos_token_ids),
                "limits": asdict(self._limits),
            }
        )
        self._turn = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Follower] = OrderedDict()  # the last used at the end
        self._refused: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._one_each: weakref.WeakValueDictionary[tuple[str, str], _Turn] = weakref.WeakValueDictionary()
        self._compiling = threading.Semaphore(AT_ONCE)

    def compile(
        self, wanted: StructuredOutputs, stopped: Callable[[], bool] = lambda: False
    ) -> Callable[[], Constraint]:
        """What makes a constraint for one answer. Raises StructureError, also when ``stopped`` says so meanwhile."""
        key = _kind_and_text(wanted)
        with self._turn:
            turn = self._one_each.setdefault(key, _Turn())
        with _held(turn.lock, stopped):
            follower = self._known(key) or self._start(key, stopped)
        return lambda: GrammarConstraint(follower)

    def _known(self, key: tuple[str, str]) -> Follower | None:
        """Compiled before and still alive. Raises StructureError if it was too much before."""
        with self._turn:
            follower = self._kept.get(key)
            if follower is not None and follower.over is not None:
                del self._kept[key]
                self._refuse(key, follower.over)
                follower = None
            if key in self._refused:
                raise StructureError(self._refused[key])
            if follower is not None:
                self._kept.move_to_end(key)
            return follower

    def _start(self, key: tuple[str, str], stopped: Callable[[], bool]) -> Follower:
        follower = Follower(self._nursery, {"kind": key[0], "text": key[1]}, self._limits)
        with _held(self._compiling, stopped):
            try:
                follower.start(self._limits.compile_wait, stopped)
            except TooMuchError as error:
                with self._turn:
                    self._refuse(key, str(error))
                raise
        with self._turn:
            self._kept[key] = follower
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)  # it ends when its last answer does
        return follower

    def _refuse(self, key: tuple[str, str], why: str) -> None:
        self._refused[key] = why
        while len(self._refused) > REFUSED_KEPT:
            self._refused.popitem(last=False)

    def close(self) -> None:
        """End the processes; answers that are under way end with them."""
        self._nursery.close()


class TooMuchError(StructureError):
    """Following the structure takes more time or memory than it may."""


class _Turn:
    """Who compiles a structure; others that want the same one wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@contextmanager
def _held(lock: Any, stopped: Callable[[], bool]) -> Any:
    while not lock.acquire(timeout=_POLL):
        if stopped():
            raise StructureError("nobody waits for this structure any more")
    try:
        yield
    finally:
        lock.release()


def _kind_and_text(wanted: StructuredOutputs) -> tuple[str, str]:
    kind, text, most = "object", "", 0
    if wanted.regex is not None:
        kind, text, most = "regex", wanted.regex, MOST_PATTERN
    elif wanted.json is not None:
        kind, text, most = "schema", str(wanted.json), MOST_TEXT
    if len(text) > most:
        raise StructureError(f"the {kind} has {len(text)} characters; up to {most} can be followed")
    return kind, text


def _unspelled(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> list[int]:
    """The bytes that no token spells alone. Raises StructureError where JSON itself needs one of them."""
    if not eos_token_ids:
        raise StructureError("the model has no end-of-text token, with which a structured answer ends")
    spelled = {tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size) if not tokenizer.is_special(t)}
    unspelled = [byte for byte, alone in enumerate(_BYTES) if alone not in spelled]
    if missing := _NEEDED.intersection(unspelled):
        shown = ", ".join(f"{byte:02x}" for byte in sorted(missing)[:8])
        raise StructureError(f"{tokenizer.name} has no tokens for the bytes {shown}, which structured answers need")
    return unspelled


def _spellings(tokenizer: Tokenizer) -> list[str]:
    """Special tokens are no part of the text, so they spell nothing."""
    tokens = enumerate(tokenizer.tokens())
    return ["" if spelling is None or tokenizer.is_special(token) else spelling for token, spelling in tokens]


class Follower:
    """A process that follows one grammar for all answers that ask for it, and what it may still cost.

    over: why it cannot go on, once it cannot: all its answers end as they are.
    """

    def __init__(self, nursery: Nursery, asked: dict[str, str], limits: Limits) -> None:
        self._nursery, self._asked, self._limits = nursery, asked, limits
        self.over: str | None = None
        self.gone: list[int] = []  # answers that are over
        self._answers = 0
        self._allowance = limits.mask_seconds
        self._questions: list[Asked] = []
        self._deadline: float | None = None  # of the reply that is awaited
        self.life = 0  # how often it was started

    def new_answer(self) -> int:
        """A number for it."""
        self._answers += 1
        return self._answers

    def start(self, wait: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Compile, in so many seconds at most. Raises StructureError, TooMuchError."""
        self._connection, self._pid, self._parent = self._nursery.fork()
        self._release = weakref.finalize(self, _let_go, self._connection, self._parent, self._pid)
        self.life += 1
        deadline = time.monotonic() + wait
        try:
            send(self._connection, self._asked, deadline=deadline)
            _wait_for(self._connection, deadline, stopped)
            said, _ = receive(self._connection, deadline)
        except _StoppedError as error:
            self._end()
            raise StructureError("nobody waits for this structure any more") from error
        except (OSError, EOFError) as error:
            why = self._why_it_ended(isinstance(error, TimeoutError), self._limits.compile_seconds)
            raise TooMuchError(f"the structure asked for is too much to follow: {why}") from error
        if "error" in said:
            raise StructureError(said["error"])

    # --- in a round: all questions are sent before the first reply is waited for ---

    def ask(self, question: Asked) -> None:
        """To be sent with the others."""
        if self._deadline is not None:  # a round was given up after it was sent
            self.hear()
        self._questions.append(question)

    def send(self) -> None:
        """What has been asked for."""
        if self._deadline is not None or self.over is not None or not self._questions:
            return
        self._deadline = time.monotonic() + self._limits.mask_wait
        gone, self.gone = self.gone, []
        try:
            rows = [question.row() for question in self._questions]
            send(self._connection, {"gone": gone, "rows": rows}, deadline=self._deadline)
        except OSError:
            pass  # heard below

    def hear(self) -> None:
        """The reply, to everything that was sent; ``over`` if there will be none."""
        self.send()
        if self._deadline is None:
            self._questions.clear()
            return
        try:
            said, masks = receive(self._connection, self._deadline)
        except (OSError, EOFError) as error:
            if self._restarted(isinstance(error, TimeoutError)):
                self.hear()
            return
        self._deadline = None
        self._tell(said["rows"], masks)
        self._pay(said["seconds"], sum(count for count, _ in said["rows"]))

    def _tell(self, rows: Sequence[tuple[int, bool]], masks: bytearray) -> None:
        total = sum(count for count, _ in rows)
        table = np.frombuffer(masks, dtype=np.uint8).reshape(total, -1) if total else np.empty((0, 0), np.uint8)
        place = 0
        for question, (count, stuck) in zip(self._questions, rows, strict=True):
            question.hear(table[place : place + count], stuck)
            place += count
        self._questions.clear()

    def _pay(self, seconds: float, places: int) -> None:
        grown = self._allowance + self._limits.place_seconds * places
        self._allowance = min(self._limits.mask_seconds, grown) - seconds
        if self._allowance < 0:
            mean = f"{1000 * self._limits.place_seconds:g} ms a token on the average are allowed"
            self._give_up(f"it takes {1000 * seconds:.0f} ms a round; {mean}")

    def _restarted(self, late: bool) -> bool:
        """After a reply that did not come: whether there is a new process, which learns all the answers again.

        Only if the process was killed from outside, and once: what it did itself it would do again.
        """
        deadline, self._deadline = self._deadline, None
        status = self._end()
        if late or how_it_ended(status) != KILLED or self.life > 1 or deadline is None:
            self._give_up(_why(status, late, self._limits.mask_seconds))
            return False
        try:
            self.start(deadline - time.monotonic())
        except StructureError as error:
            self._give_up(str(error))
            return False
        return True

    def _give_up(self, why: str) -> None:
        log.warning("answers end because their structure is too much to follow: %s", why)
        self.over = f"the structure asked for is too much to follow: {why}"
        self._questions.clear()
        self._end()

    def _why_it_ended(self, late: bool, seconds: float) -> str:
        return _why(self._end(), late, seconds)

    def _end(self) -> int:
        """Its status; -1 if that is not known."""
        self._release.detach()
        self._connection.close()
        try:
            return self._parent.end(self._pid)
        except (OSError, EOFError):
            return -1


def _let_go(connection: Any, parent: Any, pid: int) -> None:
    connection.close()
    parent.forget(pid)


def _why(status: int, late: bool, seconds: float) -> str:
    if late or how_it_ended(status) == TOO_LONG:
        return f"it takes more than the {seconds:g} s that are allowed"
    if how_it_ended(status) == KILLED:
        return "the process that followed it was killed"
    return "it needs more memory than is allowed, or crashes"


class _StoppedError(Exception):
    """Nobody waits any more."""


def _wait_for(connection: Any, deadline: float, stopped: Callable[[], bool]) -> None:
    """Until there is something to read. Raises TimeoutError, _StoppedError."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1000 * _POLL):
        if time.monotonic() > deadline:
            raise TimeoutError
        if stopped():
            raise _StoppedError


class GrammarConstraint:
    """One answer's place in a grammar: the tokens that it has gained, of which the process knows the first ``told``."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._number = follower.new_answer()
        self._tokens: list[int] = []
        self._told, self._life = 0, 0
        self._stuck: set[tuple[int, ...]] = set()  # draft tokens after which nothing may follow
        weakref.finalize(self, follower.gone.append, self._number)

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> Asked:
        """See ``Constraint``."""
        asked = Asked(self, draft_tokens, first, places)
        self._follower.ask(asked)
        return asked

    def advance(self, tokens: Sequence[int]) -> None:
        """See ``Constraint``."""
        for place, token in enumerate(tokens):
            if self._stuck and tuple(tokens[:place]) in self._stuck:
                raise StructureError("the structure asked for cannot be completed")
            self._tokens.append(token)
        self._stuck.clear()

    def row(self, draft_tokens: Sequence[int], first: int, places: int) -> tuple[object, ...]:
        """A question as the process takes it, with what it has not been told yet."""
        if self._life != self._follower.life:
            self._life, self._told = self._follower.life, 0
        fresh, self._told = self._tokens[self._told :], len(self._tokens)
        return self._number, fresh, list(draft_tokens), first, places

    def hear(self) -> None:
        """Wait for the reply. Raises StructureError if there is none."""
        self._follower.hear()
        if self._follower.over is not None:
            raise StructureError(self._follower.over)

    def send(self) -> None:
        """Ask, if that has not been done yet."""
        self._follower.send()

    def stick(self, draft_tokens: Sequence[int]) -> None:
        """Nothing may follow the answer and these draft tokens."""
        self._stuck.add(tuple(draft_tokens))


class Asked:
    """A question of one row in one round. See ``rows.MaskQuery``."""

    def __init__(self, constraint: GrammarConstraint, draft_tokens: Sequence[int], first: int, places: int) -> None:
        self._constraint, self._draft_tokens, self._first, self._places = constraint, draft_tokens, first, places
        self._masks: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def row(self) -> tuple[object, ...]:
        """As the process takes it."""
        return self._constraint.row(self._draft_tokens, self._first, self._places)

    def send(self) -> None:
        """See ``rows.MaskQuery``."""
        self._constraint.send()

    def hear(self, masks: np.ndarray[Any, np.dtype[np.uint8]], stuck: bool) -> None:
        """The masks of the first places, [count, bytes]. stuck: the last of them allows nothing."""
        if stuck:
            self._constraint.stick(self._draft_tokens[: self._first + len(masks) - 1])
            masks = masks[:-1]
        self._masks = masks

    def mask(self, logits: Tensor) -> None:
        """See ``rows.MaskQuery``."""
        if self._masks is None:
            self._constraint.hear()
        if self._masks is not None and len(self._masks):
            allowed = np.unpackbits(self._masks, axis=1, count=logits.shape[-1], bitorder="little")
            forbidden = torch.from_numpy(allowed == 0).to(logits.device)
            logits[: len(self._masks)].masked_fill_(forbidden, -math.inf)
