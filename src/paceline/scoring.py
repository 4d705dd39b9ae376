"""Log-probabilities of given texts: what ``LLM.score``, and ``echo`` with ``logprobs``, ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from paceline.decoder import Decoder
from paceline.outputs import TokenLogprob
from paceline.prefixes import Scope

CHUNK = 32  # positions whose logits are alive at once
UNASKED_CHUNK = 256  # positions read at once whose logits nobody wants; of several texts together, wanted or not
WORTH_A_PASS = 4  # tokens: for fewer in common a text does not wait until another has read them


class ScoringRow:
    """A cache of one row that texts are read into one after the other: what the next begins with is not read again.

    decoder: one row of at least as many positions as the longest text has tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._held: list[int] = []  # the tokens whose keys and values lie in the row
        self._scope = Scope()  # whose they are
        self._last: PromptScorer | None = None  # of the texts that were scored to their end

    def read(self, scorer: PromptScorer, start: int, stop: int) -> Tensor:
        """Read a text's tokens start .. stop - 1; the row holds those before them -> hidden [stop - start, width]."""
        token_ids, self._scope = scorer.token_ids, scorer.scope
        tokens = torch.tensor([token_ids[start:stop]], device=self._decoder.model.device)
        self._held = self._held[:start]  # an exception in the middle leaves nothing that is half written
        hidden = self._decoder.forward(tokens, tokens.new_tensor([start]), stop)[0]
        self._held = token_ids[:stop]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def holds(self, scorer: PromptScorer) -> int:
        """How many of a text's first tokens the row holds, as far as it may have them."""
        return common_prefix(self._held, scorer.token_ids) if scorer.scope.may_copy(self._scope) else 0

    def told(self, scorer: PromptScorer) -> list[TokenLogprob]:
        """What the text before it has brought that holds for this one, too."""
        last, first = self._last, scorer.first
        if last is None or not scorer.scope.may_copy(last.scope) or last.top != scorer.top or last.first > first:
            return []
        common = max(common_prefix(last.token_ids, scorer.token_ids), first)
        return last.logprobs[first - last.first : common - last.first]

    def remember(self, scorer: PromptScorer) -> None:
        self._last = scorer


class PromptScorer:
    """Scores a text, a chunk at a time; logprobs[i] is that of token first + i after those before it.

    Texts may take turns in a row: what another one has overwritten is read again, at once, so that all of them get on.
    top: how many of the most likely tokens to tell. first: the first token that is scored, from 1 on; those before it
    are only read. scope: whose texts it may begin with unread, and who may copy its own.
    """

    def __init__(self, row: ScoringRow, token_ids: Sequence[int], top: int, scope: Scope, first: int = 1) -> None:
        self._row, self.token_ids, self.top, self.scope, self.first = row, list(token_ids), top, scope, first
        self.logprobs: list[TokenLogprob] = row.told(self)
        self._reached = 0  # so many tokens it has read, or found

    @property
    def finished(self) -> bool:
        return self.first + len(self.logprobs) >= len(self.token_ids)

    def step(self) -> None:
        """Read the next chunk: of what comes before the tokens that are scored, or these. At the end nothing."""
        if self.finished:
            return
        wanted = self.first + len(self.logprobs) - 1  # the position whose logits are asked for next
        held = min(self._row.holds(self), wanted)
        while held < min(self._reached, wanted):
            held = self._read_on(held, wanted)
        if held < wanted:
            self._reached = self._read_on(held, wanted)
        else:
            self._score(wanted)

    def _read_on(self, held: int, wanted: int) -> int:
        stop = min(wanted, held + UNASKED_CHUNK)
        self._row.read(self, held, stop)
        return stop

    def _score(self, start: int) -> None:
        self._reached = stop = min(start + CHUNK, len(self.token_ids) - 1)
        hidden = self._row.read(self, start, stop)
        self.logprobs += told(self._row.logits(hidden), self.token_ids[start + 1 : stop + 1], self.top)
        if self.finished:
            self._row.remember(self)


@dataclass(eq=False)
class _Reading:
    """A text in a row. first: of its tokens that are scored. reached: so many tokens the row holds.

    before: whose first ``common`` tokens are its own, too, and are copied when they have been read.
    """

    row: int
    tokens: list[int]
    first: int
    before: _Reading | None = None
    common: int = 0
    reached: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Nothing follows the last token: it is not read."""
        return len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return self.reached == self.stop


class BatchScorer:
    """Scores many texts, several at a time, each in a row of its own; what two of them begin with is read once.

    decoder: its rows are for these texts alone, of at least as many positions as the longest has tokens.
    texts: (tokens, the first that is scored, from 1 on), in an order in which those that begin alike are neighbours.
    scores: of each text, in this order, as far as it has come; with the most likely token.
    """

    def __init__(self, decoder: Decoder, rows: int, texts: Sequence[tuple[list[int], int]]) -> None:
        self._decoder, self._rows, self._texts = decoder, rows, texts
        self._batch: list[_Reading] = []
        self.scores: list[list[TokenLogprob]] = []

    @property
    def finished(self) -> bool:
        return len(self.scores) == len(self._texts)

    def step(self) -> None:
        """One pass. Of the texts that begin alike one is read, the others copy; at the end nothing."""
        if self.finished:
            return
        if all(reading.finished for reading in self._batch):
            self._begin()
        self._copy()
        self._read([reading for reading in self._batch if reading.before is None and not reading.finished])
        if all(reading.finished for reading in self._batch):
            self.scores += [reading.logprobs for reading in self._batch]

    def _begin(self) -> None:
        """The next texts; the first of them may copy from the last of those before."""
        before, self._batch = self._batch[-1:], []
        start = len(self.scores)
        for row, (tokens, first) in enumerate(self._texts[start : start + self._rows]):
            reading = _Reading(row, tokens, first)
            for one in self._batch[-1:] or before:
                common = min(common_prefix(one.tokens, tokens), one.stop, first - 1)
                if common >= WORTH_A_PASS:
                    reading.before, reading.common = one, common
            self._batch.append(reading)

    def _copy(self) -> None:
        for reading in self._batch:
            before, common = reading.before, reading.common
            if before is not None and before.reached >= common:
                if before.row != reading.row:
                    self._decoder.copy_row(before.row, reading.row, common)
                reading.before, reading.reached = None, common

    def _read(self, readings: list[_Reading]) -> None:
        share = max(1, UNASKED_CHUNK // len(readings))
        spans = [(each, each.reached, min(each.stop, each.reached + share)) for each in readings]
        hidden = self._decoder.read_rows([(each.row, start, each.tokens[start:stop]) for each, start, stop in spans])
        asked: list[tuple[_Reading, int]] = []  # whose token, and which, follows the states in ``wanted``
        wanted: list[Tensor] = []
        for (each, start, stop), states in zip(spans, hidden, strict=True):
            each.reached, begin = stop, max(start, each.first - 1)
            if begin < stop:
                wanted.append(states[begin - start :])
                asked += [(each, place + 1) for place in range(begin, stop)]
        if wanted:
            self._note(torch.cat(wanted), asked)

    def _note(self, hidden: Tensor, asked: list[tuple[_Reading, int]]) -> None:
        for start in range(0, len(asked), CHUNK):
            some = asked[start : start + CHUNK]
            logits = self._decoder.logits(hidden[start : start + CHUNK])
            for (each, _), token in zip(some, told(logits, [e.tokens[at] for e, at in some], 1), strict=True):
                each.logprobs.append(token)


def told(logits: Tensor, drawn: Sequence[int], top: int) -> list[TokenLogprob]:
    """Logits [N, V], the tokens that follow, and how many of the most likely ones to tell."""
    law = logits.float().log_softmax(-1)
    own = law.gather(-1, torch.tensor(drawn, device=law.device)[:, None])[:, 0].tolist()
    values, ids = (table.tolist() for table in law.topk(min(top, law.shape[-1]), dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(likely, best, strict=True)))
        for token, value, best, likely in zip(drawn, own, values, ids, strict=True)
    ]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
