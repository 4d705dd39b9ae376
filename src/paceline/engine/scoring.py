"""Scores texts: log-probabilities of their tokens, for ``LLM.score`` and for ``echo`` with ``logprobs``.

Texts to embed are read in the same passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

import torch
from torch import Tensor
from torch.nn.functional import normalize

from paceline.config import PoolingName
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import Stopwatch
from paceline.core.outputs import TokenLogprob
from paceline.engine.chunks import PrefillChunker, PromptSlice
from paceline.engine.prefixes import Scope, common_prefix_length
from paceline.engine.waiting import Waiting
from paceline.models.decoder import Decoder

CHUNK = 32  # positions whose logits are in memory together
WIDEST_PASS = 256  # positions per pass, all texts together
WORTH_A_PASS = 4  # tokens: for a shorter common prefix a text does not wait for its reader
_LEAST_POSITIONS = 64  # least size of a row's cache, so that short texts of similar length reuse the rows


@dataclass(eq=False)
class ScoredText:
    """A text and the log-probabilities found so far: logprobs[i] is that of token first + i.

    top: number of likeliest tokens to report at each position.
    scope: which cached prefixes it may reuse, and who may reuse its own.
    first: index of the first token to score, at least 1; tokens before it are only read.
    request_id, client, priority: place in the queue (``waiting``).
    prefilled: number of tokens read or copied.
    row: index of its cache row; -1 before it has one.
    prefix_reader: another text, which is reading the first ``prefix_stop`` tokens for both; they are copied then.
    over: it has ended or was dropped.
    """

    token_ids: Sequence[int]
    top: int = 1
    scope: Scope = field(default_factory=Scope)
    first: int = 1
    request_id: str = ""
    client: str = ""
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prefilled: int = 0
    row: int = -1
    prefix_reader: ScoredText | None = None
    prefix_stop: int = 0
    over: bool = False

    @property
    def prefill_stop(self) -> int:
        """Tokens to read: all but the last one, as nothing follows it."""
        return len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        return self.first + len(self.logprobs) >= len(self.token_ids)

    @property
    def waits(self) -> bool:
        return self.prefix_reader is not None

    @property
    def feeding_order(self) -> tuple[int, int]:
        return self.priority, self.prefill_stop - self.prefilled


@dataclass(eq=False)
class EmbeddedText(ScoredText):
    """A text whose hidden states are pooled into one vector, instead of log-probabilities.

    pooling: "mean" of the states of all tokens, or that of the "last" token.
    total: sum of the states read so far, or the last state [width], float32; None before the first.
    It reads every token: the states of a copied prefix would be missing.
    """

    pooling: PoolingName = "mean"
    total: Tensor | None = None

    def __post_init__(self) -> None:
        self.first = len(self.token_ids) + 1  # no token is scored

    @property
    def prefill_stop(self) -> int:
        """Tokens to read: all of them."""
        return len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.prefilled >= len(self.token_ids)

    def pool(self, states: Tensor) -> None:
        """Take the states [tokens, width] of the next tokens."""
        if self.pooling == "last":
            self.total = states[-1].float().clone()  # not the whole pass
            return
        part = states.float().sum(0)
        self.total = part if self.total is None else self.total + part

    @property
    def vector(self) -> Tensor:
        """The pooled vector [width] of a finished text, of length 1, float32."""
        assert self.total is not None
        return normalize(self.total, dim=0)


class Scorer:
    """Scores several texts per pass, each in a cache row of its own; a common prefix of two texts is read once.

    Rows keep their caches until another text needs them. Call it from the engine's thread only.

    make: returns a decoder with a number of rows and positions, for scored texts only.
    room: memory of the rows' caches. The rows fit the texts that come: few rows for long texts.
    chunks: decides how much is read per pass.
    """

    def __init__(self, make: Callable[[int, int], Decoder], room: KVCacheBudget, chunks: PrefillChunker) -> None:
        self._make, self._room, self.chunks = make, room, chunks
        self.waiting: Waiting[ScoredText] = Waiting()
        self._decoder: Decoder | None = None
        self._positions = 0
        self._row_texts: list[ScoredText | None] = []  # by row: the text whose keys and values its cache holds
        self._last_start: list[int] = []  # by row: reading of _clock when a text last started in it
        self._clock = count()
        self._last: ScoredText | None = None  # the text that ended last; its log-probabilities are kept for reuse

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or bool(self.begun)

    @property
    def begun(self) -> list[ScoredText]:
        """Texts that have a row and have not ended."""
        return [text for text in self._row_texts if text is not None and not text.over]

    @property
    def bytes_held(self) -> int:
        """Bytes that the rows' caches hold now; where caches grow, only of tokens that were read."""
        decoder = self._decoder
        if decoder is None:
            return 0
        lengths = [0 if text is None else text.prefilled for text in self._row_texts]
        return sum(self._room.bytes_for(tokens if decoder.grows else self._positions) for tokens in lengths)

    def add(self, texts: Iterable[ScoredText]) -> None:
        """Queue texts."""
        self.waiting.extend(texts)

    def drop(self, texts: Collection[ScoredText]) -> None:
        """Drop texts, queued or begun."""
        dropped = set(map(id, texts))
        self.waiting.keep(text for text in self.waiting if id(text) not in dropped)
        for text in self.begun:
            text.over = text.over or id(text) in dropped

    def step(self, decoding: bool, seconds: float) -> list[ScoredText]:
        """Run one pass over as many texts as fit. Return the texts that have ended.

        decoding: whether rows of the engine decode, which the pass delays.
        seconds: duration of the engine's last step.
        """
        self.chunks.rounds.last = seconds
        self._copy()
        self._begin()
        readable = [text for text in self.begun if not text.waits and not text.finished]
        if readable:
            self._read(readable, self.chunks.choose(readable, decoding))
        return self._end()

    def _end(self) -> list[ScoredText]:
        ended = [text for text in self.begun if text.finished]
        for text in ended:
            text.over = True
            if (last := self._last) is not None and self._row_texts[last.row] is last:
                self._row_texts[last.row] = replace(last, logprobs=[])  # the list belongs to the caller
            self._last = text
        return ended

    # --- starting ----------------------------------------------------------------

    def _begin(self) -> None:
        """Start the next texts while there are rows.

        If a text is longer than the rows, new rows are made once all begun texts have ended.
        """
        while self.waiting:
            begun = self.begun
            if not begun and not self._rows_fit():
                self._make_rows()
            free = [row for row, text in enumerate(self._row_texts) if text is None or text.over]
            if not free or self.waiting.first.prefill_stop > self._positions:
                return
            (text,) = self.waiting.turn(1)
            self._take(text, free)

    def _rows_fit(self) -> bool:
        """Whether the rows are long enough for the next texts, and as many as are useful."""
        longest = self._longest()
        return len(self._row_texts) >= self._rows_of(longest) and longest <= self._positions

    def _longest(self) -> int:
        """Return the positions that a row needs for the next texts."""
        longest = max(text.prefill_stop for text in islice(self.waiting, self._room.rows))
        need = max(longest, self.waiting.first.prefill_stop, _LEAST_POSITIONS)
        return min(1 << (need - 1).bit_length(), self._room.positions)

    def _rows_of(self, positions: int) -> int:
        return max(1, min(self._room.rows, len(self.waiting), self._room.max_rows(positions)))

    def _make_rows(self) -> None:
        positions = self._longest()
        rows = max(1, min(self._room.rows, self._room.max_rows(positions)))
        self._decoder, self._row_texts, self._last = None, [], None  # free the old memory before the new is allocated
        self._decoder, self._positions = self._make(rows, positions), positions
        self._row_texts, self._last_start = [None] * rows, [-1] * rows

    def _take(self, text: ScoredText, free: Sequence[int]) -> None:
        """Give a row to a text, with the longest prefix that any row holds. The row copied from is overwritten last."""
        assert self._decoder is not None
        source = self._source(text)
        text.row = min(free, key=lambda row: (source is not None and row == source.row, self._last_start[row]))
        self._row_texts[text.row] = text  # it has begun, even if the copy below fails
        self._last_start[text.row] = next(self._clock)
        if source is not None and not source.over:
            text.prefix_reader, text.prefix_stop = source, min(self._common(text, source), source.prefill_stop)
        elif source is not None:
            self._copy_from(source, text)
        else:
            self._decoder.cut_row(text.row, 0)

    def _source(self, text: ScoredText) -> ScoredText | None:
        """Return the text with the longest prefix to copy; None if copying is not worth it."""
        sources = [other for other in self._row_texts if other is not None and text.scope.may_copy(other.scope)]
        gains = [self._start(text, source) for source in sources]
        best = max(range(len(sources)), key=gains.__getitem__, default=None)
        if best is None or gains[best] < (1 if sources[best].over else WORTH_A_PASS):
            return None
        return sources[best]

    def _common(self, text: ScoredText, source: ScoredText) -> int:
        return common_prefix_length(source.token_ids, text.token_ids, len(text.token_ids))

    def _start(self, text: ScoredText, source: ScoredText) -> int:
        """Return how many tokens need not be read: those before the first missing log-probability's hidden state."""
        common = self._common(text, source)
        reach = min(common, source.prefilled if source.over else source.prefill_stop)
        scored_stop = source.first + len(source.logprobs) if source.over else len(source.token_ids)
        known = min(common, scored_stop) - text.first if self._logprobs_fit(text, source) else 0
        return self._cut(source, min(reach, text.first + max(0, known) - 1))

    def _cut(self, source: ScoredText, tokens: int) -> int:
        """Return how many of the source's first ``tokens`` can be copied.

        A recurrent state can be cut only near the end of what was read, so such a source must have ended.
        """
        assert self._decoder is not None
        if self._decoder.cuts_anywhere:
            return tokens
        return self._decoder.reusable(source.row, tokens) if source.over else 0

    def _logprobs_fit(self, text: ScoredText, source: ScoredText) -> bool:
        """Whether the source's log-probabilities can be copied."""
        return source.top == text.top and source.first <= text.first

    # --- copying -----------------------------------------------------------------

    def _copy(self) -> None:
        """End the waits whose prefix has been read, or whose reader has ended, and copy what there is."""
        for text in self.begun:
            source = text.prefix_reader
            if source is not None and (source.over or source.prefilled >= text.prefix_stop):
                self._copy_from(source, text)
                text.prefix_reader = None

    def _copy_from(self, source: ScoredText, text: ScoredText) -> None:
        assert self._decoder is not None
        known: list[TokenLogprob] = []
        if self._logprobs_fit(text, source):
            stop = max(self._common(text, source), text.first) - source.first
            known = source.logprobs[text.first - source.first : stop]
        start = min(self._common(text, source), source.prefilled, text.first + len(known) - 1)
        start = self._decoder.reusable(source.row, start)
        self._decoder.cut_row(text.row, start if source.row == text.row else 0)
        if source.row != text.row and start:
            self._decoder.copy_row(source.row, text.row, start)
        text.logprobs[:], text.prefilled = known, start  # last, so that a failed copy is tried again

    # --- reading -----------------------------------------------------------------

    def _read(self, texts: Sequence[ScoredText], parts: Sequence[PromptSlice]) -> None:
        """Read parts of texts. After an exception they are read again, from the first unknown log-probability on."""
        assert self._decoder is not None
        timer = Stopwatch(self._decoder.model.device)
        order = sorted(parts, key=lambda part: texts[part.index].row)
        read = [texts[part.index] for part in order]
        hidden = self._decoder.read_rows(
            [
                (text.row, part.start, text.token_ids[part.start : part.stop])
                for text, part in zip(read, order, strict=True)
            ]
        )
        targets: list[tuple[ScoredText, int]] = []  # (text, token index) that each row of ``wanted`` predicts
        wanted: list[Tensor] = []
        for text, part, states in zip(read, order, hidden, strict=True):
            begin = max(part.start, text.first + len(text.logprobs) - 1)
            if begin < part.stop:
                wanted.append(states[begin - part.start :])
                targets += [(text, position + 1) for position in range(begin, part.stop)]
        if wanted:
            self._note(self._decoder, torch.cat(wanted), targets)
        for text, part, states in zip(read, order, hidden, strict=True):
            if isinstance(text, EmbeddedText):
                text.pool(states)
            text.prefilled = part.stop
        timer.stop()
        self.chunks.watch(parts, timer)

    def _note(self, decoder: Decoder, hidden: Tensor, targets: Sequence[tuple[ScoredText, int]]) -> None:
        for start in range(0, len(targets), CHUNK):
            chunk = targets[start : start + CHUNK]
            logits = decoder.logits(hidden[start : start + CHUNK])
            tokens, tops = [text.token_ids[at] for text, at in chunk], [text.top for text, _ in chunk]
            for (text, _), token in zip(chunk, token_logprobs(logits, tokens, tops), strict=True):
                text.logprobs.append(token)


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probabilities of ``tokens`` under logits [N, V], each with its ``tops[i]`` likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = (table.tolist() for table in logprobs.topk(min(max(tops), logprobs.shape[-1]), dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
        for token, value, top_values, top_ids, top in zip(tokens, own, values, ids, tops, strict=True)
    ]
