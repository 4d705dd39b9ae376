"""Logits processors of a row: its tokens are drawn from the processed logits.

A processor runs at every position of a round, after the row's tokens and the draft tokens before that position. It must
therefore be a function of the tokens and the logits only. Assisted generation in transformers has the same requirement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.config import LogitsProcessor, SamplingParams
from paceline.errors import ParameterError, RequestError, shown


class ProcessedRow:
    """Constraint (``rows.Constraint``) that applies a row's logits processors at each position.

    Like plain decoding, it asks no processor after the end of an answer or a token that the processors forbid, although
    drafts may go on there.

    ends: tokens that end the answer. max_tokens: the answer's length at most. min_tokens: number of first tokens that
    are no ends. reads_logits: False if the processors only forbid tokens, whatever the logits are.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        ends: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
        *,
        reads_logits: bool = True,
    ) -> None:
        self.reads_logits = reads_logits
        self._processors, self._ends = processors, frozenset(ends)
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._answer: list[int] = []
        self._scores: dict[tuple[int, ...], Tensor] = {}  # processed logits [V], by the draft tokens before a position

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        for place, own in enumerate(logits[: max(0, self._left_tokens - first)], first):
            if not self._goes_on(draft_tokens[:place]):
                return
            self.process(draft_tokens[:place], own)

    def advance(self, tokens: Sequence[int]) -> None:
        """Append the tokens. Raises RequestError if the processors had left no token at one of their positions."""
        for place in range(len(tokens)):
            scores = self._scores.get(tuple(tokens[:place]))
            if scores is not None and not self._any_left(scores, len(self._answer) + place):
                raise RequestError("the logits processors left no token that could come next")
        self._scores.clear()
        self._answer += tokens

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        return False

    def process(self, drafted: Sequence[int], logits: Tensor) -> None:
        """Apply the processors to logits [V] after these draft tokens, in place."""
        scores = self.scores(drafted, logits)
        self._scores[tuple(drafted)] = scores  # the target comes last in a round and overwrites a draft model's
        logits.copy_(scores)

    @property
    def _left_tokens(self) -> int:
        """Tokens that the answer may still get."""
        return self._max_tokens - len(self._answer)

    def _any_left(self, scores: Tensor, place: int) -> bool:
        """Whether a token is left at a place of the answer."""
        left = scores > -torch.inf
        if place < self._min_tokens:
            left[[token for token in self._ends if token < len(left)]] = False
        return bool(left.any())

    def scores(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        """Processed logits, float32 [V]; the argument [V] is not changed."""
        scores = logits.float().clone()
        for process in self._processors:
            scores = process([*self._answer, *drafted], scores)
            if not isinstance(scores, Tensor) or scores.shape != logits.shape:
                raise RequestError(f"a logits processor returns the logits [{len(logits)}], not {shown(scores)}")
        return scores

    def _goes_on(self, drafted: Sequence[int]) -> bool:
        """Whether the last draft token is allowed and does not end the answer; true for none."""
        if not drafted:
            return True
        before = self._scores.get(tuple(drafted[:-1]))  # none if one before it was not allowed
        return before is not None and drafted[-1] not in self._ends and bool(before[drafted[-1]] > -torch.inf)


def processed_row(
    params: SamplingParams, encode: Callable[[str], list[int]], ends: Collection[int], vocab_size: int
) -> Callable[[], ProcessedRow]:
    """Return a factory for the constraint of one answer: allowed tokens, bad words, then the caller's processors.

    encode: tokenizes text without special tokens. ends: the tokens that end an answer. Raises ParameterError if no
    token could be left.
    """
    spelled = [encode(spelling) for word in params.bad_words for spelling in _spellings(word)]
    words = [word for word in spelled if word]
    _check_some_left(params, words, ends, vocab_size)
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        processors.append(partial(_keep_allowed, torch.tensor(params.allowed_token_ids)))
    if words:
        processors.append(partial(_forbid_words, words))
    processors += params.logits_processors
    limits = tuple(ends), params.max_tokens, params.min_tokens
    return partial(ProcessedRow, processors, *limits, reads_logits=bool(params.logits_processors))


def _spellings(word: str) -> Iterator[str]:
    """Spellings of a word inside of text and after a space, which tokenizers encode differently."""
    bare = word.lstrip(" ")
    yield bare or word
    yield f" {bare}"


def _check_some_left(
    params: SamplingParams, words: Sequence[Sequence[int]], ends: Collection[int], vocab_size: int
) -> None:
    """Raise ParameterError if allowed tokens and bad words together could leave no token."""
    held_back = set(ends) if params.min_tokens else set()
    forbidden = {word[-1] for word in words} | held_back
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if forbidden.issuperset(allowed):
        allowed_values = "tokens of which one, at least, completes no bad word and, with min_tokens, ends no answer"
        raise ParameterError("allowed_token_ids", params.allowed_token_ids, allowed_values)


def _keep_allowed(allowed: Tensor, _: list[int], logits: Tensor) -> Tensor:
    index = allowed.to(logits.device)
    return torch.full_like(logits, -torch.inf).index_copy_(0, index, logits[index])


def _forbid_words(words: Sequence[Sequence[int]], answer: list[int], logits: Tensor) -> Tensor:
    completing = [word[-1] for word in words if answer[max(0, len(answer) - len(word) + 1) :] == word[:-1]]
    logits[completing] = -torch.inf
    return logits
