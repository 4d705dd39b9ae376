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

from paceline.core.processors import ProcessedRow

Processor = Callable[[Tensor, Tensor], Tensor]  # text [1, L] int64, scores [1, V] float32 -> scores [1, V]
Criterion = Callable[[Tensor, None], Tensor | bool]  # text [1, L], no scores -> whether the row ends, [1] bool


@dataclass
class Record:
    """Logits [V] of every token that a row has gained: as the model gave them, and as the processors left them."""

    raw: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


class Processed(ProcessedRow):
    """A row's processors of transformers' kind, as the constraint that the engine asks at each of its places.

    text [1, L]: its prompt with its padding. ends: tokens behind which nothing comes. record: where logits are kept
    that led to a token; None: nowhere.
    """

    def __init__(
        self, text: Tensor, processors: Sequence[Processor], ends: Collection[int], record: Record | None = None
    ) -> None:
        super().__init__((), ends)
        self._text, self._each, self._record = text, processors, record
        self._seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by the draft tokens before a place

    def advance(self, tokens: Sequence[int]) -> None:
        super().advance(tokens)
        self._text = torch.cat([self._text, self._text.new_tensor([tokens])], 1)
        if self._record is not None:
            for place in range(len(tokens)):
                raw, scores = self._seen[tuple(tokens[:place])]
                self._record.raw.append(raw)
                self._record.scores.append(scores)
        self._seen.clear()

    def scores(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        text = torch.cat([self._text, self._text.new_tensor([drafted])], 1) if drafted else self._text
        scores = logits.float()[None].clone()
        for process in self._each:
            scores = process(text, scores)
        if self._record is not None:  # the target is asked last: what a draft model was told is written over
            self._seen[tuple(drafted)] = logits.clone(), scores[0]
        return scores[0]


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
