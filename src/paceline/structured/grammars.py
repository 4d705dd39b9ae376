"""Grammars of llguidance, compiled for a model's tokens, and the constraints that follow them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import StructuredOutputs
from paceline.core.rows import Constraint
from paceline.errors import MissingPackageError, StructureError
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.calls import CallsStructure
from paceline.structured.limits import CACHED_GRAMMARS, CONCURRENT_COMPILES, MAX_RECOMPILE_SECONDS, GrammarLimits
from paceline.structured.trial import (
    POLL_SECONDS,
    GrammarLimitError,
    TrialJob,
    UndecidedError,
    check_compiled,
    check_followed,
    compile_cancelled,
    try_out,
)
from paceline.structured.trial_program import compiled, walk

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_BYTES = [bytes([byte]) for byte in range(256)]
_NEEDED = {*range(0x20, 0x7F), *range(0x80, 0xC0)}  # JSON's own bytes, and UTF-8 continuation bytes


class Grammars:
    """Compiles structures for one model, and caches the grammars. Thread-safe.

    Raises MissingPackageError without llguidance, StructureError if the model's tokens cannot spell JSON.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise MissingPackageError("llguidance", "structured")
        self._limits = GrammarLimits() if limits is None else limits
        if not eos_token_ids:
            raise StructureError("the model has no end-of-text token, which structured answers need")
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._unspelled = _unspelled(tokenizer.name, vocabulary.tokens)
        self._tokens = _llguidance_tokenizer(vocabulary, eos_token_ids)
        token_of = {spelled: token for token, spelled in reversed([*enumerate(vocabulary.tokens)])}
        self._byte_tokens = [token_of.get(byte, -1) for byte in _BYTES]
        self._special = {name.decode(): token for token, name in vocabulary.special_names.items()}
        self._lock = threading.Lock()
        # least recently used first
        self._cache: OrderedDict[str, Grammar | StructureError] = OrderedDict()
        self._compile_locks: weakref.WeakValueDictionary[str, _CompileLock] = weakref.WeakValueDictionary()
        self._compile_slots = threading.Semaphore(CONCURRENT_COMPILES)

    def compile(
        self, structure: StructuredOutputs, stopped: Callable[[], bool] = lambda: False
    ) -> Callable[[], Constraint]:
        """Return a function that makes a constraint for one answer. See ``grammar``."""
        grammar = self.grammar(structure, stopped)
        return lambda: GrammarConstraint(grammar)

    def grammar(
        self, structure: StructuredOutputs | CallsStructure, stopped: Callable[[], bool] = lambda: False
    ) -> Grammar:
        """Compile a structure, or return it from the cache.

        stopped: returns True once the request has ended. Raises StructureError if the structure cannot be followed,
        UndecidedError if that is not known, because the request has ended or the machine is too busy.
        """
        kind, text = _kind_and_text(structure)
        key = f"{kind} {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"  # refused texts may be long
        with self._lock:
            compile_lock = self._compile_locks.setdefault(key, _CompileLock())
        with _acquired(compile_lock.lock, stopped):
            grammar = self._cached(key)
            if grammar is None:
                with _acquired(self._compile_slots, stopped):
                    grammar = self._compiled(TrialJob(kind, text, self._unspelled, self._special), stopped)
                self._store(key, grammar)
        if isinstance(grammar, StructureError):
            raise StructureError(str(grammar), grammar.field)
        return grammar

    def _cached(self, key: str) -> Grammar | StructureError | None:
        with self._lock:
            grammar = self._cache.get(key)
            if isinstance(grammar, Grammar) and grammar.worn:
                return None
            if grammar is not None:
                self._cache.move_to_end(key)
            return grammar

    def _store(self, key: str, grammar: Grammar | StructureError) -> None:
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)

    def _compiled(self, job: TrialJob, stopped: Callable[[], bool]) -> Grammar | StructureError:
        """The grammar, or why it is refused. Raises UndecidedError."""
        try:
            text, notes = try_out(job, self._limits, stopped)
            return Grammar(text, self._tokens, self._limits, self._byte_tokens, notes)
        except UndecidedError:
            raise
        except StructureError as error:
            return StructureError(str(error), error.field)  # without the traceback, which holds the text


class _CompileLock:
    """A lock for one structure, so that concurrent requests compile it only once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@contextmanager
def _acquired(lock: Any, stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock. Raises UndecidedError if the request ends before the lock is free."""
    while not lock.acquire(timeout=POLL_SECONDS):
        if stopped():
            raise compile_cancelled()
    try:
        yield
    finally:
        lock.release()


def _kind_and_text(structure: StructuredOutputs | CallsStructure) -> tuple[str, str]:
    """The kind of a structure and its text, as in ``TrialJob``."""
    if isinstance(structure, CallsStructure):
        return "calls", structure.as_text()
    if structure.grammar is not None:
        return "grammar", structure.grammar
    if structure.choice is not None:
        return "choice", json.dumps(structure.choice)
    if structure.regex is not None:
        return "regex", structure.regex
    return ("object", "") if structure.json is None else ("schema", str(structure.json))


# --- tokens ---


def _unspelled(name: str, tokens: Collection[bytes]) -> list[int]:
    """The bytes without a token of their own. Raises StructureError if JSON itself needs one of them."""
    spelled = set(tokens)
    unspelled = [byte for byte, alone in enumerate(_BYTES) if alone not in spelled]
    if missing := _NEEDED.intersection(unspelled):
        shown = ", ".join(f"{byte:02x}" for byte in sorted(missing)[:8])
        raise StructureError(f"{name} has no tokens for the bytes {shown}, which structured answers need")
    return unspelled


def _llguidance_tokenizer(vocabulary: _Vocabulary, ends: Sequence[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    wrapper: Any = vocabulary  # has the interface of a TokenizerWrapper
    return LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=list(ends))


class _Vocabulary:
    """A model's tokens with the interface of llguidance's TokenizerWrapper.

    Special tokens have their names behind a byte that no text has. special_names: those names by token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        spellings = tokenizer.tokens()
        text = [s is not None and not tokenizer.is_special(t) and t not in ends for t, s in enumerate(spellings)]
        self.special_token_ids = [token for token, is_text in enumerate(text) if not is_text]
        self.tokens = [tokenizer.token_bytes(t) if is_text else b"" for t, is_text in enumerate(text)][:size]
        self.special_names = {t: s.encode() for t, s in enumerate(spellings[:size]) if s and not text[t]}
        for token, name in self.special_names.items():
            self.tokens[token] = b"\xff" + name
        self.tokens += [b""] * (size - len(self.tokens))
        self.eos_token_id = ends[0]

    def __call__(self, text: str) -> list[int]:
        """Not implemented: llguidance tokenizes only for forced tokens, which are disabled here."""
        raise NotImplementedError


# --- answers ---


class Grammar:
    """A compiled structure, shared by all answers that follow it.

    byte_tokens: the token of each byte, -1 for bytes without one of their own. notes: what it does not enforce, for the
    log. Raises StructureError if it cannot be followed, GrammarLimitError if it exceeds a limit.
    """

    def __init__(
        self,
        text: str,
        tokens: LLTokenizer,
        limits: GrammarLimits,
        byte_tokens: Sequence[int],
        notes: Sequence[str] = (),
    ) -> None:
        self._text, self._tokens, self._limits = text, tokens, asdict(limits)
        self.notes = notes
        self.ends = frozenset(tokens.eos_tokens)
        self.byte_tokens = byte_tokens
        started = time.thread_time()
        self._first = self._compiled()
        self._seconds = time.thread_time() - started
        self.worn = False  # whether it has to be compiled again before the next request uses it
        trial = self.matcher()
        walk(trial, self.ends, limits.trial_tokens)
        check_followed(trial.get_error())

    def matcher(self) -> LLMatcher:
        """A matcher at the start of the grammar. All matchers share lexer states and the limit on their number."""
        return self._first.deep_copy()

    def renewed(self) -> LLMatcher:
        """Recompile the grammar, and return a matcher without lexer states. Later matchers share its states.

        Raises GrammarLimitError if recompiling would block the engine for too long.
        """
        if self._seconds > MAX_RECOMPILE_SECONDS:
            self.worn = True
            raise GrammarLimitError("its lexer has too many states")
        self._first = self._compiled()
        return self.matcher()

    def _compiled(self) -> LLMatcher:
        matcher = compiled(self._tokens, self._text, self._limits)
        check_compiled(matcher.get_error())
        return matcher


class GrammarConstraint:
    """The state of one answer in its grammar. See ``Constraint``."""

    reads_logits = False

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._tokens: list[int] = []
        self._faults: dict[tuple[int, ...], StructureError] = {}  # errors by the draft tokens after which they occur

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        """See ``Constraint``."""
        masks = self._masks(draft_tokens, first, len(logits))
        if masks:
            bits = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), -1)
            allowed = np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little")
            forbidden = torch.from_numpy(allowed == 0).to(logits.device)
            logits[: len(masks)].masked_fill_(forbidden, -math.inf)

    def advance(self, tokens: Sequence[int]) -> None:
        """See ``Constraint``."""
        for place, token in enumerate(tokens):
            if fault := self._faults.get(tuple(tokens[:place])):
                raise fault
            if token in self._grammar.ends:
                break
            if not self._take(token, []):
                raise StructureError("the requested structure cannot be completed")
            self._tokens.append(token)
        self._faults.clear()

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        """See ``Constraint``."""
        return False

    def _masks(self, draft: Sequence[int], first: int, places: int) -> list[bytes]:
        """Masks of the tokens allowed after the first ``first + j`` draft tokens, for each j below ``places``.

        A mask has a bit for each token. The list is shorter if a draft token is not allowed or ends the answer. An
        error of llguidance is stored, and raised when the answer reaches its position.
        """
        masks: list[bytes] = []
        consumed = 0
        for depth in range(first + places):
            if depth >= first:
                mask = self._mask(draft[:depth])
                if mask is None:
                    break
                masks.append(mask)
            if depth == len(draft) or draft[depth] in self._grammar.ends or not self._take(draft[depth], draft[:depth]):
                break
            consumed += 1
        if not self._matcher.rollback(consumed):
            self._matcher = self._grammar.matcher()
            self._matcher.consume_tokens(self._tokens)
        return masks

    def _mask(self, draft: Sequence[int]) -> bytes | None:
        """The mask at the matcher's state, which is after these draft tokens; None if llguidance fails."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and self._recovers(draft):
            mask = self._matcher.compute_bitmask()
        try:
            check_followed(self._matcher.get_error())
        except StructureError as error:
            self._faults[tuple(draft)] = error
            return None
        return mask

    def _take(self, token: int, draft: Sequence[int]) -> bool:
        """Advance the matcher, which is after these draft tokens, by a token. Returns whether the token is allowed."""
        consumed = self._matcher.try_consume_tokens([token])
        if self._matcher.is_error() and self._recovers(draft):
            consumed = self._matcher.try_consume_tokens([token])
        return consumed == 1

    def _recovers(self, draft: Sequence[int]) -> bool:
        """If the matcher failed because of shared lexer states, replace it by one without them.

        Returns whether that was done.
        """
        if "too many states" not in self._matcher.get_error():
            return False
        self._matcher = self._grammar.renewed()
        return bool(self._matcher.consume_tokens([*self._tokens, *draft]))
