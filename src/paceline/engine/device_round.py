"""A round as one tensor program that the host never interrupts: draft, verify, accept, commit, stop tests.

The same round as ``round.py``, for rows without a grammar or a bias: lengths, ends and draft tokens are device tensors
alone. On CUDA a program is captured as one graph for each (bucket of rows, k, what the rows ask for); on a CPU it runs
as it is.

B rows (a bucket: live rows and others, which are masked), k draft tokens, L = k + 1.

Trees have one shape, so that nothing of it must be read: at each of k depths the W leading candidates after the chain
of the first ones, depth by depth; N = k W draft tokens, and the chain's are those with numbers 0, W, 2W, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.rows import LOGPROB_SIZES, NOTHING, RowState, StepFeatures
from paceline.core.rules import accept_matching
from paceline.core.sampling import Purpose
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.drafters.model import draw_chain
from paceline.kernels.gpu.ahead import Ahead, Progress, capture_ahead
from paceline.kernels.gpu.graphs import Graphs, Named, Ring, Ticket, Upload
from paceline.kernels.gpu.lookup import copied
from paceline.kernels.gpu.ops import RoundOps, committed, likeliest, ops_for
from paceline.kernels.gpu.state import RECORD_TAIL, what_follows, with_logprobs
from paceline.models.base import SharedModel
from paceline.models.decoder import Decoder

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SPAN = 256  # attention that pays for the longest row's positions is captured for multiples of so many
MISSED = (1, 2, 4, 8, 16, 32, 64)  # tokens that a draft model is likely to lack after plain rounds, as buckets


@dataclass(frozen=True)
class Rule:
    """How draft tokens are judged: "coupled" or "rejection" (``independent``), or by chance (``synthetic``: the
    rate).
    """

    independent: bool = False
    synthetic: float | None = None


class DeviceRound:
    """Plays rounds on the first rows of a batch, of which its decoding ones live; ``play`` returns before it is played.

    draft: None plays plain rounds (k = 0), or draft tokens with ``copies``: what followed the row's last tokens in its
    own text. ops: the kernels, or their twins; chosen by the device if None.
    capture: False runs the program eagerly on CUDA, too. width: W, of trees; they need the coupled rule, and rows that
    ask for neither penalties nor log-probabilities.
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
        width: int = 1,
        copies: bool = False,
    ) -> None:
        assert width == 1 or rule == Rule(), "the others know chains alone"
        self.draft_tokens = draft is not None or copies
        self.target, self.draft, self.batch, self.rule, self.width = target, draft, batch, rule, width
        self.ops = ops_for(batch.device) if ops is None else ops
        self.capacity = batch.length.shape[0]
        self._caps = Upload(batch.device, [MAX_SPECULATION_LENGTH] * self.capacity)
        fellows = target.model if isinstance(target.model, SharedModel) else None
        self.graphs = Graphs(batch.device, self._nobody_lives, capture=capture, fellows=fellows)
        told = 2 + 2 * LOGPROB_SIZES[-1]  # of a place: its token and the likely ones, each with its log-probability
        self._ring = Ring(batch.device, self.capacity * (told * (MAX_SPECULATION_LENGTH + 1) + RECORD_TAIL))
        self._follows = torch.tensor(what_follows(MAX_SPECULATION_LENGTH, width), device=batch.device)

    @contextmanager
    def _nobody_lives(self) -> Iterator[None]:
        """Rows at rest gain nothing and keep what counts of their caches: a program may run for practice."""
        live = self.batch.live.clone()
        self.batch.live.zero_()
        try:
            yield
        finally:
            self.batch.live.copy_(live)

    def bucket(self, rows: int) -> int:
        """How many rows a program plays for so many live ones."""
        return min(self.capacity, next((size for size in ROW_BUCKETS if size >= rows), self.capacity))

    def cap_draft_tokens(self, most: Sequence[int]) -> None:
        """From now on no more draft tokens than these, row by row. An upload, if anything changed."""
        self._caps.set([*most, *[0] * (self.capacity - len(most))])

    def play(self, rows: int, k: int, longest: int, asks: StepFeatures = NOTHING, lag: int = 0) -> Ticket:
        """A round of k draft tokens for ``rows`` live rows; no row is longer than ``longest`` before it.

        The record [bucket, k + 4]: tokens, accepted, drafted, gained (``gpu.state.read_record``); behind them the
        log-probabilities that rows ask for (``gpu.state.read_logprobs``). Of trees k is their depth, and the record
        [bucket, 2 N + 4]: tokens, path, then likewise (``gpu.state.read_trees``). lag: most tokens that the draft
        model lacks of a row; after a round with draft tokens a round is one program, one launch.
        """
        k = self._playable(k)
        if k > 0 and self.draft is not None:
            self.catch_up(rows, lag, longest)
        record = self.graphs.run(*self._round(self.bucket(rows), k, self._span(longest + k * self.width), asks))
        return self._ring.push(record)

    def _playable(self, k: int) -> int:
        """Draft tokens of a round that is asked for k."""
        return min(k, MAX_SPECULATION_LENGTH // self.width) if self.draft_tokens else 0

    def _round(self, bucket: int, k: int, span: int, asks: StepFeatures) -> Named:
        return (bucket, k, span, asks), lambda: self.program(bucket, k, span, asks)

    def catch_up(self, rows: int, lag: int, longest: int) -> None:
        """Feed the draft model what it lacks, at most ``lag`` tokens a row, but for those that a round itself feeds."""
        assert self.draft is not None, "nobody lags"
        if lag <= self.draft.reads:
            return
        width = 1 << (lag - self.draft.reads - 1).bit_length()
        self.graphs.run(*self._reading(self.bucket(rows), width, self._span(longest)))

    def _reading(self, bucket: int, width: int, span: int) -> Named:
        return ("catch up", bucket, width, span), lambda: self._catch_up(bucket, width, span)

    def capture_ahead(
        self, lengths: Callable[[int], Sequence[int]], seconds: float, progress: Progress = iter
    ) -> Ahead | None:
        """Capture what ``likely`` lists, until a limit is reached (``gpu.ahead``). None where nothing is captured.

        Nobody lives while a program is captured, so no row changes. What is left out is captured at its first use.
        """
        if not self.graphs.captures:
            return None
        return capture_ahead(self.graphs, self.likely(lengths), seconds, progress)

    def likely(self, lengths: Callable[[int], Sequence[int]]) -> Iterator[Named]:
        """The programs that requests will need, the likeliest first. lengths: of rounds for so many rows, likewise.

        Short texts come before long ones, where attention makes a difference between them. Of each, requests that ask
        for a temperature at most come first, then what a draft model missed meanwhile, then requests with cuts, which
        chats often bring (top-p). What rows ask for otherwise (penalties, log-probabilities) is rare.

        Of each of these every bucket is captured for its likeliest length, then every bucket for its next: how many
        rows there are changes with every request that comes or ends, while other lengths mostly come as rows end.
        """
        for span in self._spans():
            yield from self._likely_rounds(lengths, span, NOTHING)
            yield from self._likely_readings(lengths, span)
            yield from self._likely_rounds(lengths, span, StepFeatures(cuts=True))

    def _likely_rounds(self, lengths: Callable[[int], Sequence[int]], span: int, asks: StepFeatures) -> Iterator[Named]:
        buckets = self._buckets()
        ks = [dict.fromkeys(map(self._playable, lengths(bucket))) for bucket in buckets]
        for of_each in zip_longest(*ks):
            for bucket, k in zip(buckets, of_each, strict=True):
                if k is not None:
                    yield self._round(bucket, k, span, asks)

    def _likely_readings(self, lengths: Callable[[int], Sequence[int]], span: int) -> Iterator[Named]:
        """Only where plain rounds come first, with draft tokens to follow them, does a draft model fall behind."""
        for width in MISSED if self.draft is not None else ():
            for bucket in self._buckets():
                first, *others = lengths(bucket)
                if first == 0 and others:
                    yield self._reading(bucket, width, span)

    def _buckets(self) -> list[int]:
        """One row, as the first request has and the last one left; all rows, as under load; then the others."""
        known = sorted({self.bucket(rows) for rows in (*ROW_BUCKETS, self.capacity)})
        return list(dict.fromkeys((known[0], known[-1], *known)))

    def _span(self, longest: int) -> int:
        """Positions that attention may look at: all of them where each row pays for its own alone."""
        most = self.target.cache.positions + 1
        return most if self.target.backend.name == "ragged" else min(most, -(-longest // SPAN) * SPAN)

    def _spans(self) -> list[int]:
        """All that there are, the shortest first."""
        most = self.target.cache.positions + 1
        return list(dict.fromkeys(map(self._span, range(SPAN, most + SPAN, SPAN))))

    def program(self, rows: int, k: int, span: int, asks: StepFeatures = NOTHING) -> Tensor:
        """The round itself, on the first ``rows`` rows -> the record; nothing in it reads the device."""
        state = self.batch.state(rows, may_sync=False)
        before = state.length.clone()
        if self.width > 1 and k > 0:
            return self._tree_program(state, before, k, span, asks)
        draft = self._copy(state, k, span) if self.draft is None else self._draft_token(state, before, k, span, asks)
        logits = self._verify(state, before, draft, span)
        record = self._judge(draft, self._shaped(logits, state, asks, draft.tokens), state)
        if k > 0 and self.draft is not None:
            self._rewind(state, before, before.new_full((state.rows,), k - 1))
        return record if asks.logprobs is None else self._with_logprobs(record, logits, asks.logprobs)

    def _shaped(
        self, logits: Tensor, state: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int = 0
    ) -> Tensor:
        """What the rows' own penalties and cuts make of the logits [B, L, V] that follow their first draft tokens."""
        return self.ops.shaped(logits, state, asks, draft_tokens, first) if asks.adjusts or asks.cuts else logits

    def _with_logprobs(self, record: Tensor, logits: Tensor, most: int) -> Tensor:
        """The record, and the log-probabilities of its tokens and of the ``most`` likely ones."""
        own = self.ops.own_logprobs(logits, record)
        return with_logprobs(record, own, *likeliest(logits, most)) if most else with_logprobs(record, own)

    def _copy(self, state: RowState, k: int, span: int) -> Draft:
        """k draft tokens a row from its own text; none where nothing in it ends as it does."""
        tokens, matched = copied(state.text[:, :span], state.length, k, LONGEST_SUFFIX)
        return Draft(tokens, self._caps.device[: state.rows].clamp(max=k) * (matched > 0))

    def _draft_token(self, state: RowState, before: Tensor, k: int, span: int, asks: StepFeatures) -> Draft:
        """k draft tokens a row, drawn one after the other by the draft model."""
        distributions: list[Tensor] = []
        purpose = Purpose.DRAFT if self.rule.independent else Purpose.DRAW

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            logits = self._shaped(logits, state, asks, draft_tokens, draft_tokens.shape[1])
            distributions.append(logits)
            return self.ops.draw(logits, state, draft_tokens.shape[1], purpose), True

        none = before.new_empty((state.rows, 0))
        tokens = draw_chain(none, k, lambda draft_tokens: self._draft_logits(state, before, draft_tokens, span), draw)
        counts = self._caps.device[: state.rows].clamp(max=k) * self._can_draft(before)
        return Draft(
            tokens, counts, logits=torch.cat(distributions, dim=1) if distributions and self.rule.independent else None
        )

    def _tree_program(self, state: RowState, before: Tensor, k: int, span: int, asks: StepFeatures) -> Tensor:
        draft = self._draft_trees(state, before, k, span, asks)
        logits = self._verify(state, before, draft, span)
        verdict = accept_matching(draft, self._draws_of_tree(self._shaped(logits, state, asks, draft.tokens), state))
        assert verdict.path is not None, "of trees there is one"
        rows = torch.arange(state.rows, device=before.device)
        self.target.cache.keep(rows, before, verdict.path)
        if self.target.reader is not None:
            self.target.reader.keep_paths(rows, before, verdict.path)
        chain = torch.arange(k, device=before.device) * self.width
        of_chain = (verdict.path[:, :k] == chain) & (torch.arange(k, device=before.device) < verdict.accepted[:, None])
        record = committed(verdict, state)
        read = of_chain.long().cumprod(1).sum(1).clamp(max=k - 1)  # the draft model has read its chain, but the last
        self._rewind(state, before, read)
        return torch.cat([record[:, :-RECORD_TAIL], verdict.path, record[:, -RECORD_TAIL:]], dim=1)

    def _draft_trees(self, state: RowState, before: Tensor, k: int, span: int, asks: StepFeatures) -> Draft:
        """Of each row as deep as it may and as its slots reach."""
        chain, draft_tokens = before.new_empty((state.rows, 0)), before.new_empty((state.rows, 0))
        for depth in range(k):
            logits = self._shaped(self._draft_logits(state, before, chain, span), state, asks, chain, depth)
            best = self._leaders(logits, state, depth)
            chain, draft_tokens = torch.cat([chain, best[:, :1]], dim=1), torch.cat([draft_tokens, best], dim=1)
        slots = (self.target.cache.positions - before).clamp(min=0) // self.width
        deep = torch.minimum(self._caps.device[: state.rows].clamp(max=k), slots) * self._can_draft(before)
        return Draft(draft_tokens, deep * self.width, parents=self._follows[: k * self.width].expand(state.rows, -1))

    def _leaders(self, logits: Tensor, state: RowState, depth: int) -> Tensor:
        """[B, W] of logits [B, 1, V]: each drawn as the target will draw, without those before it."""
        found: list[Tensor] = []
        for _ in range(self.width):
            drawn = self.ops.draw(logits, state, depth, Purpose.DRAW)
            found.append(drawn)
            logits = logits.scatter(2, drawn[..., None], -torch.inf)
        return torch.cat(found, dim=1)

    def _draws_of_tree(self, logits: Tensor, state: RowState) -> Tensor:
        """[B, N + 1] of logits [B, N + 1, V]: those that stand side by side draw for the same position."""
        draws = logits.new_empty(logits.shape[:2], dtype=torch.int64)
        draws[:, :1] = self.ops.draw(logits[:, :1], state, 0, Purpose.DRAW)
        for place in range(1, 1 + self.width):
            draws[:, place :: self.width] = self.ops.draw(
                logits[:, place :: self.width].contiguous(), state, 1, Purpose.DRAW
            )
        return draws

    def _can_draft(self, before: Tensor) -> Tensor:
        """[B]: 0 where a head has read nothing yet, which has no streams of a first token; else 1."""
        return (before > (self.target.reader is not None)).long()

    def _draft_logits(self, state: RowState, before: Tensor, proposed: Tensor, span: int) -> Tensor:
        """[B, 1, V]: after the text and the draft tokens so far."""
        assert self.draft is not None, "guesses need a draft model"
        step = proposed.shape[1]
        if step > 0:
            return self.draft.logits(self.draft.go_on_drafting(proposed[:, -1:], step, before, span))
        text = _text(state, self.draft.seen[: state.rows], self.draft.reads)
        return self.draft.logits(self.draft.begin_draft(text, before, span))

    def _verify(self, state: RowState, before: Tensor, draft: Draft, span: int) -> Tensor:
        """[B, k + 1, V] of the tokens that follow the unseen token and the draft tokens."""
        start = (before - 1).clamp(min=0)
        tokens = torch.cat([_text(state, start, 1), draft.tokens], dim=1)
        return self.target.logits(self.target.forward(tokens, start, span, tree=draft.tree))

    def _judge(self, draft: Draft, logits: Tensor, state: RowState) -> Tensor:
        if self.rule.independent:
            return self.ops.rejection(draft, logits, state)
        return self.ops.coupled(draft, logits, state, self.rule.synthetic)

    def _rewind(self, state: RowState, before: Tensor, kept: Tensor) -> None:
        """The draft model's cache knows the text before the round and the draft tokens that it read, as far as they
        live.
        """
        assert self.draft is not None
        self._now_seen(state, torch.minimum(self.draft.read_after(before, kept), state.length - 1))

    def _catch_up(self, rows: int, width: int, span: int) -> Tensor:
        assert self.draft is not None, "nobody lags"
        state = self.batch.state(rows, may_sync=False)
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
