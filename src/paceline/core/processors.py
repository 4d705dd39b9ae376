"""Logits processors: what they leave of a row's logits is what its tokens are drawn from, drafted or not.

They are asked about every place of a round, behind the row's tokens and the draft tokens before that place. So they
have to be functions of the tokens and the logits alone, as speculation in transformers needs them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.config import LogitsProcessor, SamplingParams
from paceline.errors import ParameterError, RequestError, shown


class ProcessedRow:
    """A row's constraint (``rows.Constraint``): its processors, asked at each of its places.

    ends: tokens behind which nothing comes.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], ends: Collection[int]) -> None:
        self._processors, self._ends = processors, ends
        self._answer: list[int] = []
        self._empty: dict[tuple[int, ...], bool] = {}  # by the draft tokens before a place: whether no token is left

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> _Places:
        return _Places(self, list(draft_tokens), first, places)

    def advance(self, tokens: Sequence[int]) -> None:
        """Raises RequestError if one of the tokens stands where the processors had left none."""
        if any(self._empty.get(tuple(tokens[:place])) for place in range(len(tokens))):
            raise RequestError("the logits processors left no token that could come next")
        self._empty.clear()
        self._answer += tokens

    def process(self, drafted: Sequence[int], logits: Tensor) -> None:
        """Logits [V] behind these draft tokens, in place."""
        scores = self.scores(drafted, logits)
        # The target is asked last: what is noted of a draft model's logits is written over.
        self._empty[tuple(drafted)] = not bool((scores > -torch.inf).any())
        logits.copy_(scores)

    def scores(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        """What the processors make of logits [V], which stay as they are: float32 [V]."""
        scores = logits.float().clone()
        for process in self._processors:
            scores = process([*self._answer, *drafted], scores)
            if not isinstance(scores, Tensor) or scores.shape != logits.shape:
                raise RequestError(f"a logits processor returns the logits [{len(logits)}], not {shown(scores)}")
        return scores

    def goes_on(self, token: int, logits: Tensor) -> bool:
        """Whether anything can come behind a draft token, by the processed logits [V] of its own place."""
        return token not in self._ends and bool(logits[token] > -torch.inf)


@dataclass(frozen=True)
class _Places:
    """The question what may stand behind the first ``first`` draft tokens, and one more, and so on."""

    row: ProcessedRow
    drafted: list[int]
    first: int
    places: int

    def send(self) -> None:
        """The answer is worked out here, when it is asked for."""

    def mask(self, logits: Tensor) -> None:
        """Logits [places, V], in place; what follows a draft token that cannot stand there is left alone."""
        for place in range(self.places):
            at = self.first + place
            if place and not self.row.goes_on(self.drafted[at - 1], logits[place - 1]):
                return
            self.row.process(self.drafted[:at], logits[place])


def processed_row(
    params: SamplingParams, encode: Callable[[str], list[int]], ends: Collection[int], vocab_size: int
) -> Callable[[], ProcessedRow]:
    """What makes the constraint of one answer: allowed tokens, bad words, then the caller's own processors.

    encode: a text's tokens without those around it. ends: the tokens that end an answer. Raises ParameterError.
    """
    spelled = [encode(spelling) for word in params.bad_words for spelling in _spellings(word)]
    words = [word for word in spelled if word]
    _check_some_left(params, words, ends, vocab_size)
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids is not None:
        processors.append(partial(_keep_allowed, torch.tensor(params.allowed_token_ids)))
    if words:
        processors.append(partial(_forbid_words, words))
    return partial(ProcessedRow, [*processors, *params.logits_processors], frozenset(ends))


def _spellings(word: str) -> Iterator[str]:
    """A text inside of a word and at its beginning: tokenizers spell them by different tokens."""
    bare = word.lstrip(" ")
    yield bare or word
    yield f" {bare}"


def _check_some_left(
    params: SamplingParams, words: Sequence[Sequence[int]], ends: Collection[int], vocab_size: int
) -> None:
    """Raise ParameterError where allowed tokens and bad words together could leave none to draw."""
    held_back = set(ends) if params.min_tokens else set()
    forbidden = {word[-1] for word in words} | held_back
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if forbidden.issuperset(allowed):
        told = "tokens of which one, at least, completes no bad word and, with min_tokens, ends no answer"
        raise ParameterError("allowed_token_ids", params.allowed_token_ids, told)


def _keep_allowed(allowed: Tensor, _: list[int], logits: Tensor) -> Tensor:
    index = allowed.to(logits.device)
    return torch.full_like(logits, -torch.inf).index_copy_(0, index, logits[index])


def _forbid_words(words: Sequence[Sequence[int]], answer: list[int], logits: Tensor) -> Tensor:
    completing = [word[-1] for word in words if answer[max(0, len(answer) - len(word) + 1) :] == word[:-1]]
    logits[completing] = -torch.inf
    return logits
