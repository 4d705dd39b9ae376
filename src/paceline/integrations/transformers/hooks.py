"""transformers' logits processors and stopping criteria, called for one row at a time while the engine decodes it.

A row's text is the one that transformers would pass: the prompt with its padding, then the answer. Processors and
criteria have to be functions of that text and the scores, as for transformers' own assisted decoding: they are called
on draft tokens, some of which are rejected.
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
    """Logits [V] of every token of a row: the model's, and those that the processors returned."""

    raw: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


class Processed(ProcessedRow):
    """A row's processors of transformers' kind, as the constraint that the engine applies at each of its places.

    text: [1, L], the row's prompt with its padding.
    ends: tokens that end an answer. max_tokens: its length at most.
    record: receives the logits of every token; None: they are not recorded.
    """

    def __init__(
        self,
        text: Tensor,
        processors: Sequence[Processor],
        ends: Collection[int],
        max_tokens: int,
        record: Record | None = None,
    ) -> None:
        super().__init__((), ends, max_tokens)
        self._text, self._each, self._record = text, processors, record
        self._logits: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by the draft tokens before a place

    def advance(self, tokens: Sequence[int]) -> None:
        asked = tokens[: self._left_tokens]
        super().advance(tokens)
        self._text = torch.cat([self._text, self._text.new_tensor([tokens])], 1)
        if self._record is not None:
            for place, token in enumerate(asked):
                raw, scores = self._logits[tuple(tokens[:place])]
                self._record.raw.append(raw)
                self._record.scores.append(scores)
                if token in self._ends:  # what comes after it was not processed
                    break
        self._logits.clear()

    def scores(self, draft_tokens: Sequence[int], logits: Tensor) -> Tensor:
        text = torch.cat([self._text, self._text.new_tensor([draft_tokens])], 1) if draft_tokens else self._text
        scores = logits.float()[None].clone()
        for process in self._each:
            scores = process(text, scores)
        if self._record is not None:  # the target comes last and overwrites the draft model's
            self._logits[tuple(draft_tokens)] = logits.clone(), scores[0]
        return scores[0]


class Criteria:
    """A row's stopping criteria, in the place of a detokenizer that looks for stop strings."""

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
