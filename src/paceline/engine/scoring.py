"""Log-probabilities of given texts: what ``LLM.score``, and ``echo`` with ``logprobs``, ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

import torch
from torch import Tensor

from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import Stopwatch
from paceline.core.outputs import TokenLogprob
from paceline.engine.chunks import Part, PrefillChunker
from paceline.engine.prefixes import Scope, shared
from paceline.engine.waiting import Waiting
from paceline.models.decoder import Decoder

CHUNK = 32  # positions whose logits are alive at once
WIDEST_PASS = 256  # positions of all texts together, read at once
WORTH_A_PASS = 4  # tokens: for fewer in common a text does not wait until another has read them
_LEAST_POSITIONS = 64  # of the rows' caches: texts of about the same length do not need others each time


@dataclass(eq=False)
class Text:
    """A text, and the log-probabilities of its tokens as far as they are known: logprobs[i] is that of token first + i.

    first: the first token that is scored, from 1 on; those before it are only read. top: how many of the most likely
    tokens to tell. scope: whose texts it may begin with unread, and who may copy its own. request_id, client, priority:
    whose turn it is (``waiting``). prefilled: so many of its tokens have been read, or copied.

    before: a text that is being read, whose beginning is its own, too, as far as ``until``: it is copied then.
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
    before: Text | None = None
    until: int = 0
    over: bool = False  # it has ended, or nobody wants it any more

    @property
    def prefill_stop(self) -> int:
        """Nothing follows the last token: it is not read."""
        return len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        return self.first + len(self.logprobs) >= len(self.token_ids)

    @property
    def waits(self) -> bool:
        return self.before is not None

    @property
    def feeding_order(self) -> tuple[int, int]:
        return self.priority, self.prefill_stop - self.prefilled


class Scorer:
    """Scores texts, several in a pass, each in a row of its own; what two of them begin with is read once.

    Rows keep what they have read until another text needs them. make: a decoder of so many rows and positions, for
    these texts alone. room: for the rows' caches; they are made for the texts that come, few rows for long ones.
    chunks: how much is read in a pass. For the engine's thread.
    """

    def __init__(self, make: Callable[[int, int], Decoder], room: KVCacheBudget, chunks: PrefillChunker) -> None:
        self._make, self._room, self.chunks = make, room, chunks
        self.waiting: Waiting[Text] = Waiting()
        self._decoder: Decoder | None = None
        self._positions = 0
        self._held: list[Text | None] = []  # by row: the text whose keys and values lie there
        self._used: list[int] = []  # by row: when it was last begun in
        self._clock = count()
        self._last: Text | None = None  # of those that ended; what is known of it is kept, too

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or bool(self.begun)

    @property
    def begun(self) -> list[Text]:
        """Those that have a row and have not ended."""
        return [text for text in self._held if text is not None and not text.over]

    @property
    def bytes_held(self) -> int:
        """What the rows' caches take now: where they grow, as far as texts were read."""
        decoder = self._decoder
        if decoder is None:
            return 0
        held = [0 if text is None else text.prefilled for text in self._held]
        return sum(self._room.bytes_for(tokens if decoder.grows else self._positions) for tokens in held)

    def add(self, texts: Iterable[Text]) -> None:
        """They wait for a row."""
        self.waiting.extend(texts)

    def drop(self, texts: Collection[Text]) -> None:
        """Nobody wants them any more."""
        gone = set(map(id, texts))
        self.waiting.keep(text for text in self.waiting if id(text) not in gone)
        for text in self.begun:
            text.over = text.over or id(text) in gone

    def step(self, decoding: bool, seconds: float) -> list[Text]:
        """One pass over as many texts as it holds; those that ended. At the end nothing.

        decoding: whether rows of the engine decode, which wait for it. seconds: that its last step took.
        """
        self.chunks.rounds.last = seconds
        self._copy()
        self._begin()
        readable = [text for text in self.begun if not text.waits and not text.finished]
        if readable:
            self._read(readable, self.chunks.choose(readable, decoding))
        return self._end()

    def _end(self) -> list[Text]:
        ended = [text for text in self.begun if text.finished]
        for text in ended:
            text.over = True
            if (last := self._last) is not None and self._held[last.row] is last:
                self._held[last.row] = replace(last, logprobs=[])  # the list is its owner's
            self._last = text
        return ended

    # --- beginning ---------------------------------------------------------------

    def _begin(self) -> None:
        """Those whose turn it is, while there are rows; where one is too long for these, when all have ended."""
        while self.waiting:
            begun = self.begun
            if not begun and not self._suits():
                self._make_rows()
            free = [row for row, text in enumerate(self._held) if text is None or text.over]
            if not free or self.waiting.first.prefill_stop > self._positions:
                return
            (text,) = self.waiting.turn(1)
            self._take(text, free)

    def _suits(self) -> bool:
        """Whether there are rows long enough for whose turn it is, and as many as are of use."""
        longest = self._longest()
        return len(self._held) >= self._rows_of(longest) and longest <= self._positions

    def _longest(self) -> int:
        """Positions that those who wait need, who might have a row at once."""
        longest = max(text.prefill_stop for text in islice(self.waiting, self._room.rows))
        need = max(longest, self.waiting.first.prefill_stop, _LEAST_POSITIONS)
        return min(1 << (need - 1).bit_length(), self._room.positions)

    def _rows_of(self, positions: int) -> int:
        return max(1, min(self._room.rows, len(self.waiting), self._room.max_rows(positions)))

    def _make_rows(self) -> None:
        positions = self._longest()
        rows = max(1, min(self._room.rows, self._room.max_rows(positions)))
        self._decoder, self._held, self._last = None, [], None  # memory is free before new one is taken
        self._decoder, self._positions = self._make(rows, positions), positions
        self._held, self._used = [None] * rows, [-1] * rows

    def _take(self, text: Text, free: Sequence[int]) -> None:
        """A row, and what any row holds of its beginning. The row it comes from is the last to be overwritten."""
        source = self._source(text)
        text.row = min(free, key=lambda row: (source is not None and row == source.row, self._used[row]))
        self._held[text.row], self._used[text.row] = text, next(self._clock)  # it is begun, whatever comes of copying
        if source is not None and not source.over:
            text.before, text.until = source, min(self._common(text, source), source.prefill_stop)
        elif source is not None:
            self._copy_from(source, text)

    def _source(self, text: Text) -> Text | None:
        """The text of a row from which most is copied, if that is worth it."""
        sources = [held for held in self._held if held is not None and text.scope.may_copy(held.scope)]
        gains = [self._start(text, source) for source in sources]
        best = max(range(len(sources)), key=gains.__getitem__, default=None)
        if best is None or gains[best] < (1 if sources[best].over else WORTH_A_PASS):
            return None
        return sources[best]

    def _common(self, text: Text, source: Text) -> int:
        return shared(source.token_ids, text.token_ids, len(text.token_ids))

    def _start(self, text: Text, source: Text) -> int:
        """How many tokens need not be read: the state that the first unknown log-probability comes from must be."""
        common = self._common(text, source)
        reach = min(common, source.prefilled if source.over else source.prefill_stop)
        told = source.first + len(source.logprobs) if source.over else len(source.token_ids)
        known = min(common, told) - text.first if self._tells(text, source) else 0
        return min(reach, text.first + max(0, known) - 1)

    def _tells(self, text: Text, source: Text) -> bool:
        return source.top == text.top and source.first <= text.first

    # --- copying -----------------------------------------------------------------

    def _copy(self) -> None:
        """Those whose wait has ended copy what they waited for, as far as it came."""
        for text in self.begun:
            source = text.before
            if source is not None and (source.over or source.prefilled >= text.until):
                self._copy_from(source, text)
                text.before = None

    def _copy_from(self, source: Text, text: Text) -> None:
        assert self._decoder is not None
        known: list[TokenLogprob] = []
        if self._tells(text, source):
            told = max(self._common(text, source), text.first) - source.first
            known = source.logprobs[text.first - source.first : told]
        start = min(self._common(text, source), source.prefilled, text.first + len(known) - 1)
        if source.row != text.row and start:
            self._decoder.copy_row(source.row, text.row, start)
        text.logprobs[:], text.prefilled = known, start  # last: whoever could not copy tries again

    # --- reading -----------------------------------------------------------------

    def _read(self, texts: Sequence[Text], parts: Sequence[Part]) -> None:
        """Parts of texts. After an exception in the middle they are read again, from the first unknown token on."""
        assert self._decoder is not None
        watch = Stopwatch(self._decoder.model.device)
        order = sorted(parts, key=lambda part: texts[part.place].row)
        read = [texts[part.place] for part in order]
        hidden = self._decoder.read_rows(
            [
                (text.row, part.start, text.token_ids[part.start : part.stop])
                for text, part in zip(read, order, strict=True)
            ]
        )
        asked: list[tuple[Text, int]] = []  # whose token, and which, follows the states in ``wanted``
        wanted: list[Tensor] = []
        for text, part, states in zip(read, order, hidden, strict=True):
            begin = max(part.start, text.first + len(text.logprobs) - 1)
            if begin < part.stop:
                wanted.append(states[begin - part.start :])
                asked += [(text, place + 1) for place in range(begin, part.stop)]
        if wanted:
            self._note(self._decoder, torch.cat(wanted), asked)
        for text, part in zip(read, order, strict=True):
            text.prefilled = part.stop
        watch.stop()
        self.chunks.watch(parts, watch)

    def _note(self, decoder: Decoder, hidden: Tensor, asked: Sequence[tuple[Text, int]]) -> None:
        for start in range(0, len(asked), CHUNK):
            some = asked[start : start + CHUNK]
            logits = decoder.logits(hidden[start : start + CHUNK])
            tokens, tops = [text.token_ids[at] for text, at in some], [text.top for text, _ in some]
            for (text, _), token in zip(some, told(logits, tokens, tops), strict=True):
                text.logprobs.append(token)


def told(logits: Tensor, drawn: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Logits [N, V], the tokens that follow, and how many of the most likely ones to tell of each."""
    distribution = logits.float().log_softmax(-1)
    own = distribution.gather(-1, torch.tensor(drawn, device=distribution.device)[:, None])[:, 0].tolist()
    values, ids = (table.tolist() for table in distribution.topk(min(max(tops), distribution.shape[-1]), dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(likely[:top], best[:top], strict=True)))
        for token, value, best, likely, top in zip(drawn, own, values, ids, tops, strict=True)
    ]
