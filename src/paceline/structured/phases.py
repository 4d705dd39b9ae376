"""Constraints of answers with several parts: thoughts first, then text in which a grammar may begin.

The part that a token belongs to is a function of the tokens before it, so draft tokens are treated as the answer's own
tokens are, and an answer is the same with and without speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from paceline.errors import StructureError
from paceline.structured.cursor import GrammarCursor


@dataclass(frozen=True)
class Thinking:
    """The block of thoughts in front of an answer.

    begin, end: its markers. openings: sequences of tokens that begin thoughts before a grammar. inside: whether the
    prompt has begun the block. budget: maximum tokens of thoughts; None for no limit. closing: tokens that end the
    block when the budget is used up. barred: tokens that thoughts before a grammar may not contain. following: tokens
    between ``end`` and what comes next, which may be further thoughts; () if a grammar has to come next. overshoots:
    see ``overshoots``; needed before a grammar only.
    """

    begin: bytes
    end: bytes
    openings: Sequence[tuple[int, ...]]
    inside: bool
    budget: int | None = None
    closing: tuple[int, ...] = ()
    barred: Collection[int] = ()
    following: tuple[int, ...] = ()
    overshoots: Sequence[Sequence[int]] = ()

    def is_used_up(self, used: int) -> bool:
        """Whether the budget allows no more than the ``used`` tokens so far."""
        return self.budget is not None and used >= self.budget


def overshoots(end: bytes, spelled: Sequence[bytes]) -> list[list[int]]:
    """Tokens that complete a marker and have more text behind it, by the marker's bytes before the token.

    spelled: the bytes of each token. Those of item 0 contain the whole marker at any place.
    """
    by_size = [[token for token, data in enumerate(spelled) if 0 <= data.find(end) < len(data) - len(end)]]
    last = [(token, data) for token, data in enumerate(spelled) if end[-1:] in data]
    for size in range(1, len(end)):
        rest = end[size:]
        by_size.append([token for token, data in last if data.startswith(rest) and data != rest])
    return by_size


@dataclass(frozen=True)
class Trigger:
    """Text after which a grammar begins in an otherwise free answer.

    at_start: whether it counts only at the beginning. repeats: whether free text follows the grammar.
    """

    text: bytes
    at_start: bool = False
    repeats: bool = True


@dataclass(frozen=True)
class AnswerRules:
    """Required form of an answer.

    thinking: the thoughts before it; None if there are none. start: makes a cursor at the grammar's beginning; None if
    there is no grammar. trigger: None if the answer is the grammar from its beginning. ends: tokens that end an answer.
    newlines: tokens of which one may come between thoughts and grammar. bytes_of: what a token adds to the text, with
    the names of special tokens. header: tokens that have to come before a grammar without a trigger.
    """

    thinking: Thinking | None
    start: Callable[[], GrammarCursor] | None
    trigger: Trigger | None
    ends: Collection[int]
    newlines: Collection[int]
    bytes_of: Callable[[int], bytes]
    header: tuple[int, ...] = ()

    @property
    def required(self) -> bool:
        """Whether the answer has to follow the grammar, behind its thoughts if there are any."""
        return self.start is not None and self.trigger is None


class Phase:
    """The part of an answer that the next token belongs to. Phases are values: ``after`` returns the next one.

    is_free: whether any token may come, so that ``allowed`` returns None.
    """

    is_free: ClassVar[bool] = True

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        """Mask of the tokens that may come, bool [V]; None for all. Raises StructureError if the grammar fails."""
        return None

    def after(self, token: int) -> Phase:
        """The phase after a token. Raises StructureError if the token may not come."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Text(Phase):
    """Free text. tail: its last bytes, with which the trigger may begin; None if no trigger can come any more."""

    rules: AnswerRules
    tail: bytes | None = b""

    def after(self, token: int) -> Phase:
        return self if self.tail is None else self.after_bytes(self.rules.bytes_of(token))

    def after_bytes(self, data: bytes) -> Phase:
        trigger = self.rules.trigger
        if trigger is None or self.tail is None:
            return replace(self, tail=None)
        text = self.tail + data
        if trigger.at_start:
            text = text.lstrip()
            begins = text.startswith(trigger.text) or trigger.text.startswith(text)
            if not begins:
                return replace(self, tail=None)
        place = text.find(trigger.text)
        if place >= 0:
            return self._triggered(text[place + len(trigger.text) :])
        return replace(self, tail=text if trigger.at_start else text[max(0, len(text) - len(trigger.text) + 1) :])

    def _triggered(self, data: bytes) -> Phase:
        """The phase after the trigger and the bytes that its last token has behind it."""
        try:
            return _Grammar(self.rules, _start(self.rules).after_bytes(data))
        except StructureError:  # the token is not of the grammar's making: text goes on, and may trigger again
            return replace(self, tail=b"")


@dataclass(frozen=True)
class _Grammar(Phase):
    """Text of the grammar."""

    is_free = False
    rules: AnswerRules
    cursor: GrammarCursor

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        return self.cursor.allowed(vocabulary)

    def after(self, token: int) -> Phase:
        cursor = self.cursor.after(token)
        if cursor.ended and self.rules.trigger is not None and self.rules.trigger.repeats:
            return _Text(self.rules)
        return replace(self, cursor=cursor)


@dataclass(frozen=True)
class _Fork(Phase):
    """A place where an answer continues with one of several sequences of tokens, or with text of a grammar.

    paths: each sequence with the phase after it; a complete one takes precedence over the grammar. grammar: None if its
    text may not come. Tokens may belong to several paths and to the grammar until one of them is left.
    """

    is_free = False
    paths: Sequence[tuple[tuple[int, ...], Phase]]
    grammar: _Grammar | None = None

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        mask = np.zeros(vocabulary, dtype=bool) if self.grammar is None else self.grammar.cursor.allowed(vocabulary)
        mask[[tokens[0] for tokens, _ in self.paths]] = True
        return mask

    def after(self, token: int) -> Phase:
        paths = [(tokens[1:], phase) for tokens, phase in self.paths if tokens[0] == token]
        if paths:
            ended = [phase for tokens, phase in paths if not tokens]
            return ended[0] if ended else _Fork(paths, self._grammar_after(token))
        if self.grammar is None:
            raise StructureError("the answer has to continue in another way here")
        return self.grammar.after(token)

    def _grammar_after(self, token: int) -> _Grammar | None:
        try:
            return None if self.grammar is None else replace(self.grammar, cursor=self.grammar.cursor.after(token))
        except StructureError:  # the token is of a path alone
            return None


@dataclass(frozen=True)
class _BeforeThoughts(Phase):
    """A place where thoughts may begin, in an answer of another form otherwise.

    begin: what they begin with. used: tokens of thoughts before. text: the text from here on.
    """

    rules: AnswerRules
    thinking: Thinking
    begin: bytes
    used: int = 0
    text: bytes = b""

    def after(self, token: int) -> Phase:
        return self.after_bytes(self.rules.bytes_of(token))

    def after_bytes(self, data: bytes) -> Phase:
        text = (self.text + data).lstrip()
        if text.startswith(self.begin):
            return _thoughts(self.rules, self.thinking, self.used)
        if self.begin.startswith(text):
            return replace(self, text=text)
        return _Text(self.rules).after_bytes(text)


@dataclass(frozen=True)
class _Thoughts(Phase):
    """Thoughts. used: their tokens so far. tail: their last bytes, with which the end marker may begin."""

    rules: AnswerRules
    thinking: Thinking
    used: int
    tail: bytes

    def after(self, token: int) -> Phase:
        text, end = self.tail + self.rules.bytes_of(token), self.thinking.end
        place = text.find(end)
        if place >= 0:
            return _behind_thoughts(self.rules, self.thinking, text[place + len(end) :], self.used)
        return _thoughts(self.rules, self.thinking, self.used + 1, text[max(0, len(text) - len(end) + 1) :])


@dataclass(frozen=True)
class _ThoughtsBeforeGrammar(_Thoughts):
    """Thoughts that a grammar has to follow, so that the answer does not end within them."""

    is_free = False

    def allowed(self, vocabulary: int) -> np.ndarray | None:
        mask = np.ones(vocabulary, dtype=bool)
        mask[[*self.rules.ends, *self.thinking.barred, *self._misfits()]] = False
        return mask

    def _misfits(self) -> Iterator[int]:
        """Tokens that end the thoughts and carry text that cannot follow them."""
        for size, tokens in enumerate(self.thinking.overshoots):
            if self.tail.endswith(self.thinking.end[:size]):
                yield from (token for token in tokens if not self._fits(token))

    def _fits(self, token: int) -> bool:
        try:
            self.after(token)
        except StructureError:
            return False
        return True


def _thoughts(rules: AnswerRules, thinking: Thinking, used: int = 0, tail: bytes = b"") -> Phase:
    """Thoughts, or their end if the budget is used up."""
    if thinking.is_used_up(used):
        return _Fork([(thinking.closing, _behind_thoughts(rules, thinking, b"\n", used))])
    return (_ThoughtsBeforeGrammar if rules.required else _Thoughts)(rules, thinking, used, tail)


def _start(rules: AnswerRules) -> GrammarCursor:
    assert rules.start is not None
    return rules.start()


def _behind_thoughts(rules: AnswerRules, thinking: Thinking, data: bytes, used: int) -> Phase:
    """The phase after the end marker and the bytes that its last token has behind it."""
    if not rules.required:
        begin = b"".join(map(rules.bytes_of, thinking.following)) + thinking.begin
        text = _BeforeThoughts(rules, thinking, begin, used) if thinking.following else _Text(rules)
        return text.after_bytes(data)
    if thinking.following or rules.header:
        if data.strip():
            raise StructureError("text follows the thoughts where a marker has to")
        ended = not thinking.following or thinking.is_used_up(used)
        phase = _beginning(rules, None if ended else thinking, used)
        return _Fork([(thinking.following, phase)]) if thinking.following else phase
    grammar = _Grammar(rules, _start(rules).after_bytes(data.lstrip(b"\n")))
    return grammar if data else _Fork([((token,), grammar) for token in rules.newlines], grammar)


def _beginning(rules: AnswerRules, thinking: Thinking | None, used: int = 0) -> Phase:
    """The place where the grammar or thoughts begin. thinking: None if no more thoughts may come."""
    grammar = _Grammar(rules, _start(rules))
    paths: list[tuple[tuple[int, ...], Phase]] = [(rules.header, grammar)] if rules.header else []
    if thinking is not None:
        paths += [(opening, _thoughts(rules, thinking, used)) for opening in thinking.openings]
    return _Fork(paths, None if rules.header else grammar)


def _first_phase(rules: AnswerRules) -> Phase:
    thinking = rules.thinking
    if thinking is not None and thinking.inside:
        return _thoughts(rules, thinking)
    if rules.required:
        return _beginning(rules, thinking)
    return _Text(rules) if thinking is None else _BeforeThoughts(rules, thinking, thinking.begin)


class PhasedConstraint:
    """The state of one answer that follows rules. See ``Constraint``."""

    reads_logits = False

    def __init__(self, rules: AnswerRules) -> None:
        self._ends = rules.ends
        self._phase = _first_phase(rules)
        self._faults: dict[tuple[int, ...], StructureError] = {}  # errors by the draft tokens after which they occur

    def advance(self, tokens: Sequence[int]) -> None:
        """See ``Constraint``."""
        for place, token in enumerate(tokens):
            if fault := self._faults.get(tuple(tokens[:place])):
                raise fault
            if token in self._ends:
                break
            self._phase = self._phase.after(token)
        self._faults.clear()

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        """See ``Constraint``."""
        phase = self._phase
        for token in draft_tokens:
            if not phase.is_free or token in self._ends:
                break
            try:
                phase = phase.after(token)
            except StructureError:  # the token ends the answer with an error, if it is accepted
                return False
        return phase.is_free

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        """See ``Constraint``."""
        phase = self._phase
        for depth in range(first + len(logits)):
            if depth >= first and not self._mask(phase, draft_tokens[:depth], logits[depth - first]):
                return
            if depth == len(draft_tokens) or draft_tokens[depth] in self._ends:
                return
            try:
                phase = phase.after(draft_tokens[depth])
            except StructureError:
                return

    def _mask(self, phase: Phase, draft: Sequence[int], logits: Tensor) -> bool:
        """Forbid tokens in logits [V]. Returns False if llguidance fails, which counts only if the answer gets here."""
        try:
            allowed = phase.allowed(len(logits))
        except StructureError as error:
            self._faults[tuple(draft)] = error
            return False
        if allowed is not None:
            logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -math.inf)
        return True
