"""transformers' logits processors and stopping criteria, called for one row at a time as the engine decodes it.

A row's text is what transformers would show them: the prompt with its padding, then the answer. They have to be
functions of that text and the scores, as transformers' own assisted decoding needs them, too: they are asked about
guesses, some of which are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]  # text [1, L] int64, scores [1, V] float32 -> scores [1, V]
Criterion = Callable[[Tensor, None], Tensor | bool]  # text [1, L], no scores -> whether the row ends, [1] bool


@dataclass
class Record:
    """Logits [V] of every token that a row has gained: as the model gave them, and as the processors left them."""

    raw: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


class Processed:
    """A row's processors, as the constraint that the engine asks at each of its places.

    text [1, L]: its prompt with its padding. ends: tokens behind which nothing comes. record: where logits are kept
    that led to a token; None: nowhere.
    """

    def __init__(
        self, text: Tensor, processors: Sequence[Processor], ends: Collection[int], record: Record | None = None
    ) -> None:
        self._text, self._processors, self._ends, self._record = text, processors, ends, record
        self._seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by the guesses before a place

    def ask(self, guesses: Sequence[int], first: int, places: int) -> _Places:
        return _Places(self, list(guesses), first, places)

    def advance(self, tokens: Sequence[int]) -> None:
        self._text = torch.cat([self._text, self._text.new_tensor([tokens])], 1)
        if self._record is not None:
            for place in range(len(tokens)):
                raw, scores = self._seen[tuple(tokens[:place])]
                self._record.raw.append(raw)
                self._record.scores.append(scores)
        self._seen.clear()

    def process(self, guesses: Sequence[int], logits: Tensor) -> None:
        """Logits [V] behind these guesses, in place."""
        text = torch.cat([self._text, self._text.new_tensor([guesses])], 1) if guesses else self._text
        scores = logits.float()[None].clone()
        for process in self._processors:
            scores = process(text, scores)
        if self._record is not None:  # the target is asked last: what a draft model was told is written over
            self._seen[tuple(guesses)] = logits.clone(), scores[0]
        logits.copy_(scores[0])

    def goes_on(self, guess: int, logits: Tensor) -> bool:
        """Whether anything can come behind a guess, by the processed logits [V] of its own place."""
        return guess not in self._ends and bool(logits[guess] > -torch.inf)


@dataclass(frozen=True)
class _Places:
    """The question what may stand behind the first ``first`` guesses, and one more, and so on."""

    row: Processed
    guesses: list[int]
    first: int
    places: int

    def send(self) -> None:
        """Nobody else works it out."""

    def mask(self, logits: Tensor) -> None:
        """Logits [places, V], in place; what follows a guess that cannot stand there is left alone."""
        for place in range(self.places):
            at = self.first + place
            if place and not self.row.goes_on(self.guesses[at - 1], logits[place - 1]):
                return
            self.row.process(self.guesses[:at], logits[place])


class Criteria:
    """A row's stopping criteria, in the place of a text stream that looks for stop strings."""

    def __init__(self, text: Tensor, criteria: Iterable[Criterion]) -> None:
        self._ids, self._criteria = text, list(criteria)
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        self._ids = torch.cat([self._ids, self._ids.new_tensor([[token_id]])], 1)
        if any(bool(torch.as_tensor(ends(self._ids, None)).any()) for ends in self._criteria):
            self.stopped = "stopping_criteria"
        return ""

    def finish(self) -> str:
        return ""
