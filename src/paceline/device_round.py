"""A round as one tensor program that the host never interrupts: draft, verify, accept, commit, stop tests.

The same round as ``round.py``, for rows that need nothing but a temperature: lengths, ends and guesses are device
tensors alone. On CUDA a program is captured as one graph for each (bucket of rows, k); on a CPU it runs as it is.

B rows (a bucket: live rows and others, which are masked), k guesses, L = k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batch import Batch
from paceline.decoder import Decoder
from paceline.gpu.graphs import Graphs, Ring, Ticket, Upload
from paceline.gpu.ops import RoundOps, ops_for
from paceline.gpu.state import RECORD_TAIL, Ends, Guesses, RowState
from paceline.params import MAX_SPECULATION_LENGTH
from paceline.sampling import Purpose

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MOST_STOPS = 8  # stop tokens of a row that the device knows; the host cuts at the others
USUAL_LAG = 2  # tokens that a draft model's cache lacks at most after a round with guesses
SPAN = 256  # attention that pays for the longest row's positions is captured for multiples of so many


@dataclass(frozen=True)
class Rule:
    """How guesses are judged: "coupled" or "rejection" (``independent``), or by chance (``synthetic``: the rate)."""

    independent: bool = False
    synthetic: float | None = None


@dataclass(frozen=True)
class RowControl:
    """What the host says of a live row: the length at which it must end, most guesses, tokens that end it."""

    limit: int
    most_guesses: int = MAX_SPECULATION_LENGTH
    stops: tuple[int, ...] = ()


class DeviceRound:
    """Plays rounds on the first rows of a batch. ``set_rows`` says which live; ``play`` returns before it is played.

    draft: None plays plain rounds (k = 0) alone. ops: the kernels, or their twins; chosen by the device if None.
    capture: False runs the program eagerly on CUDA, too.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        batch: Batch,
        rule: Rule,
        *,
        ops: RoundOps | None = None,
        capture: bool = True,
    ) -> None:
        self.target, self.draft, self.batch, self.rule = target, draft, batch, rule
        self.ops = ops_for(batch.device) if ops is None else ops
        self.capacity = batch.length.shape[0]
        self._control = Upload(batch.device, [0] * (1 + self.capacity * (2 + MOST_STOPS)))
        self._ends, self._caps = self._views(self._control.device)
        self.graphs = Graphs(batch.device, self._nobody_lives, capture=capture)
        self._ring = Ring(batch.device, self.capacity * (MAX_SPECULATION_LENGTH + 1 + RECORD_TAIL))

    def _views(self, control: Tensor) -> tuple[Ends, Tensor]:
        live, limit, caps, stops = torch.split(control, [1, self.capacity, self.capacity, self.capacity * MOST_STOPS])
        return Ends(limit, stops.view(self.capacity, MOST_STOPS), live), caps

    @contextmanager
    def _nobody_lives(self) -> Iterator[None]:
        """Rows at rest gain nothing and keep what counts of their caches: a program may run for practice."""
        live = self._ends.live.clone()
        self._ends.live.zero_()
        try:
            yield
        finally:
            self._ends.live.copy_(live)

    def bucket(self, rows: int) -> int:
        """How many rows a program plays for so many live ones."""
        return min(self.capacity, next((size for size in ROW_BUCKETS if size >= rows), self.capacity))

    def set_rows(self, rows: Sequence[RowControl]) -> None:
        """From now on these rows live: 0 .. len(rows) - 1. An upload, if anything changed."""
        spare = self.capacity - len(rows)
        stops = [[*row.stops[:MOST_STOPS], *[-1] * (MOST_STOPS - len(row.stops))] for row in rows]
        self._control.set(
            [
                len(rows),
                *(row.limit for row in rows), *[0] * spare,
                *(row.most_guesses for row in rows), *[0] * spare,
                *(token for line in stops for token in line), *[-1] * (spare * MOST_STOPS),
            ]
        )  # fmt: skip

    def play(self, rows: int, k: int, longest: int) -> Ticket:
        """A round of k guesses for ``rows`` live rows; no row is longer than ``longest`` before it.

        The record [bucket, k + 4]: tokens, accepted, drafted, gained (``gpu.state.read_record``).
        """
        bucket, span = self.bucket(rows), self._span(longest + k)
        record = self.graphs.run((bucket, k, span), lambda: self.program(bucket, k, span))
        return self._ring.push(record)

    def catch_up(self, rows: int, lag: int, longest: int) -> None:
        """Feed the draft model all but the last of the tokens it lacks, at most ``lag`` a row."""
        width = 1 << max(0, lag - 2).bit_length()
        bucket, span = self.bucket(rows), self._span(longest)
        self.graphs.run(("catch up", bucket, width, span), lambda: self._catch_up(bucket, width, span))

    def _span(self, longest: int) -> int:
        """Positions that attention may look at: all of them where each row pays for its own alone."""
        most = self.target.cache.positions + 1
        return most if self.target.backend.name == "ragged" else min(most, -(-longest // SPAN) * SPAN)

    def program(self, rows: int, k: int, span: int) -> Tensor:
        """The round itself, on the first ``rows`` rows -> the record; nothing in it reads the device."""
        state = RowState.of(self.batch, self._ends, rows)
        before = state.length.clone()
        guesses = self._guess(state, before, k, span)
        logits = self._verify(state, before, guesses, span)
        record = self._judge(guesses, logits, state)
        if k > 0:
            self._rewind(state, before, k)
        return record

    def _guess(self, state: RowState, before: Tensor, k: int, span: int) -> Guesses:
        """k guesses a row, drawn one after the other by the draft model."""
        tokens, laws = before.new_empty((state.rows, 0)), []
        purpose = Purpose.GUESS if self.rule.independent else Purpose.DRAW
        for step in range(k):
            logits = self._draft_logits(state, before, tokens, span)
            laws.append(logits)
            tokens = torch.cat([tokens, self.ops.draw(logits, state, step, purpose)], dim=1)
        counts = self._caps[: state.rows].clamp(max=k)
        return Guesses(tokens, counts, torch.cat(laws, dim=1) if laws and self.rule.independent else None)

    def _draft_logits(self, state: RowState, before: Tensor, guessed: Tensor, span: int) -> Tensor:
        """[B, 1, V]: after the text and the guesses so far."""
        assert self.draft is not None, "guesses need a draft model"
        step = guessed.shape[1]
        if step > 0:
            hidden = self.draft.forward(guessed[:, -1:], before + step - 1, span)
        else:
            seen = self.draft.seen[: state.rows]
            fed = self.draft.forward(_text(state, seen, USUAL_LAG), seen, span)
            last = (before - seen - 1).clamp(0, USUAL_LAG - 1)
            hidden = fed.gather(1, last[:, None, None].expand(-1, 1, fed.shape[-1]))
        return self.draft.logits(hidden)

    def _verify(self, state: RowState, before: Tensor, guesses: Guesses, span: int) -> Tensor:
        """[B, k + 1, V] of the tokens that follow the unseen token and the guesses."""
        start = (before - 1).clamp(min=0)
        tokens = torch.cat([_text(state, start, 1), guesses.tokens], dim=1)
        return self.target.logits(self.target.forward(tokens, start, span))

    def _judge(self, guesses: Guesses, logits: Tensor, state: RowState) -> Tensor:
        if self.rule.independent:
            return self.ops.rejection(guesses, logits, state)
        return self.ops.coupled(guesses, logits, state, self.rule.synthetic)

    def _rewind(self, state: RowState, before: Tensor, k: int) -> None:
        """The draft model's cache knows the text before the round and all guesses but the last, as far as they live."""
        assert self.draft is not None
        self._now_seen(state, torch.minimum(before + k - 1, state.length - 1))

    def _catch_up(self, rows: int, width: int, span: int) -> Tensor:
        assert self.draft is not None, "nobody lags"
        state = RowState.of(self.batch, self._ends, rows)
        seen = self.draft.seen[:rows]
        self.draft.forward(_text(state, seen, width), seen, span)
        self._now_seen(state, torch.minimum(seen + width, state.length - 1))
        return seen

    def _now_seen(self, state: RowState, seen: Tensor) -> None:
        """Of live rows; the others may be in the middle of a prefill."""
        assert self.draft is not None
        known = self.draft.seen[: state.rows]
        lives = torch.arange(state.rows, device=seen.device) < state.live
        known.copy_(torch.where(lives, seen, known))


def _text(state: RowState, start: Tensor, count: int) -> Tensor:
    """[B, count]: each row's tokens from position start [B] on; garbage beyond its length."""
    place = start[:, None] + torch.arange(count, device=start.device)
    return state.text.gather(1, place.clamp(max=state.text.shape[1] - 1))
