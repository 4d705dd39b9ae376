"""What a request gained in a round, copied out of the engine's outputs so that other threads can read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from paceline.core.outputs import CompletionOutput, RequestOutput, TokenKind, TokenLogprob

T = TypeVar("T")


@dataclass(frozen=True)
class Delta:
    """New content of answer ``index``: text, tokens and their log-probabilities.

    kinds, pieces: per token, how it was produced and the text it added. ended: the complete answer, if it is finished.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    kinds: Sequence[TokenKind]
    pieces: Sequence[str]
    logprobs: Sequence[TokenLogprob]
    ended: CompletionOutput | None

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Concatenate consecutive deltas of one answer."""
        return Delta(
            index=deltas[0].index,
            text="".join(delta.text for delta in deltas),
            token_ids=_chained(delta.token_ids for delta in deltas),
            kinds=_chained(delta.kinds for delta in deltas),
            pieces=_chained(delta.pieces for delta in deltas),
            logprobs=_chained(delta.logprobs for delta in deltas),
            ended=deltas[-1].ended,
        )

    @staticmethod
    def whole(answer: CompletionOutput) -> Delta:
        """Return a finished answer as a single delta."""
        return Delta(
            index=answer.index,
            text=answer.text,
            token_ids=answer.token_ids,
            kinds=answer.token_kinds,
            pieces=answer.pieces,
            logprobs=answer.logprobs or [],
            ended=answer,
        )


@dataclass(frozen=True)
class Update:
    """New content of prompt ``number``. output: the complete output, if all its answers are finished."""

    number: int
    deltas: Sequence[Delta]
    output: RequestOutput | None

    @property
    def entries(self) -> int:
        """Tokens and log-probabilities: the measure of how long serializing takes."""
        return sum(len(delta.token_ids) + sum(len(entry.top) for entry in delta.logprobs) for delta in self.deltas)

    @staticmethod
    def joined(updates: Sequence[Update]) -> Update:
        """Merge consecutive updates of one prompt."""
        if len(updates) == 1:
            return updates[0]
        of_answer: defaultdict[int, list[Delta]] = defaultdict(list)
        for update in updates:
            for delta in update.deltas:
                of_answer[delta.index].append(delta)
        return Update(updates[0].number, [*map(Delta.joined, of_answer.values())], updates[-1].output)


def _chained(parts: Iterable[Sequence[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


class OutputCursor:
    """Position up to which each answer of a request has been delivered."""

    def __init__(self, output: RequestOutput) -> None:
        self.output, n = output, len(output.candidates)
        self.tokens, self.characters, self.ended = [0] * n, [0] * n, [False] * n

    def take_new(self) -> list[Delta]:
        """Return what was added since the last call."""
        return [self._take(answer) for answer in self.output.candidates if self._has_new(answer)]

    def _has_new(self, answer: CompletionOutput) -> bool:
        return not self.ended[answer.index] and (answer.finished or len(answer.token_ids) > self.tokens[answer.index])

    def _take(self, answer: CompletionOutput) -> Delta:
        index = answer.index
        first, first_character = self.tokens[index], self.characters[index]
        self.tokens[index], self.characters[index] = len(answer.token_ids), len(answer.text)
        self.ended[index] = answer.finished
        return Delta(
            index=index,
            text=answer.text[first_character:],
            token_ids=answer.token_ids[first:],
            kinds=answer.token_kinds[first:],
            pieces=answer.pieces[first:],
            logprobs=[] if answer.logprobs is None else answer.logprobs[first:],
            ended=answer if answer.finished else None,
        )
