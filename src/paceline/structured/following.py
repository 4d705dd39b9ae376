"""One grammar in a process of its own: compiled, tried out, then followed for all answers that it holds.

Nothing else of paceline runs here. The limits are kept by the kernel: it ends the process.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from paceline.errors import StructureError
from paceline.structured.limits import NICE, Limits
from paceline.structured.messages import receive, send
from paceline.structured.schemas import grammar_of


class Vocabulary:
    """A model's tokens as xgrammar takes them, and what its grammars may cost.

    spellings: "" for what is no part of a text. size: of the logits. unspelled: bytes without a token of their own.
    """

    def __init__(
        self,
        spellings: Sequence[str],
        byte_level: bool,
        size: int,
        ends: Sequence[int],
        unspelled: Sequence[int],
        limits: Mapping[str, Any],
    ) -> None:
        kind = xgrammar.VocabType.BYTE_LEVEL if byte_level else xgrammar.VocabType.BYTE_FALLBACK
        self.tokens = xgrammar.TokenizerInfo(list(spellings), kind, vocab_size=size, stop_token_ids=list(ends))
        self.words = -(-size // 32)  # of a mask
        self.unspelled = frozenset(unspelled)
        self.limits = Limits(**limits)


def follow(connection: socket.socket, vocabulary: Vocabulary) -> None:
    """Compile what is asked for, then answer questions until nobody asks any more."""
    with suppress(EOFError, OSError):
        asked, _ = receive(connection)
        followed = _compile_or_say_why(connection, asked, vocabulary)
        while followed is not None:
            question, _ = receive(connection)
            started = time.process_time()
            places = sum(row[-1] for row in question["rows"])
            with ended_after(vocabulary.limits.mask_seconds + vocabulary.limits.place_seconds * places):
                said, masks = followed.answer(question)
            send(connection, {"seconds": time.process_time() - started, "rows": said}, masks)


def _compile_or_say_why(connection: socket.socket, asked: dict[str, str], vocabulary: Vocabulary) -> _Followed | None:
    limits = vocabulary.limits
    give_memory(limits.compile_memory)
    try:
        with ended_after(limits.compile_seconds):
            followed = _Followed(_nicely(lambda: compile_grammar(asked, vocabulary)), vocabulary)
            followed.try_out(limits.trial_tokens)
    except MemoryError:
        return None  # whoever asked sees this process end
    except StructureError as error:
        send(connection, {"error": str(error)})
        return None
    except Exception as error:  # noqa: BLE001 - xgrammar's are RuntimeErrors; whatever it is, the request is told
        if "bad_alloc" in str(error):
            return None
        send(connection, {"error": f"the structure asked for cannot be followed: {_reason(error)}"})
        return None
    give_memory(limits.follow_memory)
    send(connection, {})
    return followed


def compile_grammar(asked: dict[str, str], vocabulary: Vocabulary) -> xgrammar.CompiledGrammar:
    """Raises StructureError, RuntimeError."""
    text = grammar_of(asked["kind"], asked["text"], vocabulary.unspelled)
    compiler = xgrammar.GrammarCompiler(vocabulary.tokens, max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(text)


def _reason(error: Exception) -> str:
    """xgrammar's own words without the place in its source."""
    return str(error).split(": ", 1)[-1].strip()


class _Followed:
    """A compiled grammar and where its answers are in it."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._grammar, self._vocabulary = grammar, vocabulary
        self._answers: dict[int, xgrammar.GrammarMatcher] = {}

    def answer(self, question: dict[str, Any]) -> tuple[list[tuple[int, bool]], bytes]:
        """Of every row asked for: how many masks there are from place ``first`` on, and whether the last of them
        allows nothing; and the masks, [number, words] int32.
        """
        for number in question["gone"]:
            self._answers.pop(number, None)
        walks = [self._walk(*row) for row in question["rows"]]
        return [(len(masks), stuck) for masks, stuck in walks], b"".join(mask for masks, _ in walks for mask in masks)

    def _walk(
        self, number: int, gained: Sequence[int], draft_tokens: Sequence[int], first: int, places: int
    ) -> tuple[list[bytes], bool]:
        """Take what the answer has gained, then walk along the draft tokens, and back: masks from place ``first``
        on.
        """
        matcher = self._matcher(number, gained)
        if matcher is None:
            return [self._nothing().tobytes()], True
        masks: list[bytes] = []
        walked, stuck = 0, False
        for place in range(first + places):
            if matcher.is_terminated():
                break
            if place >= first:
                mask = self._mask(matcher)
                masks.append(mask.tobytes())
                stuck = not mask.any()
            if place == len(draft_tokens) or stuck or not matcher.accept_token(draft_tokens[place]):
                break
            walked += 1
        matcher.rollback(walked)
        return masks, stuck

    def _matcher(self, number: int, gained: Sequence[int]) -> xgrammar.GrammarMatcher | None:
        """An answer's place after what it gained; None if the grammar does not allow that."""
        matcher = self._answers.get(number)
        if matcher is None:
            matcher = self._answers[number] = xgrammar.GrammarMatcher(self._grammar)
        for token in gained:
            if not matcher.is_terminated() and not matcher.accept_token(token):
                return None
        return matcher

    def _nothing(self) -> NDArray[np.int32]:
        return np.zeros(self._vocabulary.words, dtype=np.int32)

    def _mask(self, matcher: xgrammar.GrammarMatcher) -> NDArray[np.int32]:
        mask = self._nothing()
        matcher.fill_next_token_bitmask(mask[None], 0)
        return mask

    def try_out(self, tokens: int) -> None:
        """Go some tokens into the grammar at random: many that become too much do so at once."""
        chance = random.Random(0)
        matcher = xgrammar.GrammarMatcher(self._grammar)
        for _ in range(tokens):
            allowed = np.flatnonzero(np.unpackbits(self._mask(matcher).view(np.uint8), bitorder="little"))
            if len(allowed) == 0:
                raise StructureError("the structure asked for cannot be completed")
            if not matcher.accept_token(int(chance.choice(allowed))) or matcher.is_terminated():
                return


def _nicely(work: Callable[[], xgrammar.CompiledGrammar]) -> xgrammar.CompiledGrammar:
    """The work's result, worked out with less of the processor where others want it."""
    results: list[xgrammar.CompiledGrammar] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """The kernel ends this process if it takes more processor time than this."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def give_memory(size: int) -> None:
    """So many bytes of address space more than this process has now, where the system says how many these are."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        has = int(pages.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (has + size, hard))
