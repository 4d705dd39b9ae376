"""A round as one tensor program on the device: draft, verify, accept, commit, stop tests. The host never interrupts it.

It is the round of ``round.py``; lengths, ends and draft tokens stay on the device. On CUDA a program is captured as one
graph per (row bucket, k, span, features). On a CPU it runs uncaptured.

Where a row has a grammar the round is three programs: draft, forward pass, acceptance. The host reads the draft tokens
and makes the rows' masks while the forward pass runs. What the programs pass on lies in memory of its own; it is the
hidden states and not the logits, which are larger.

Shapes: B rows (a bucket: live rows first, then idle ones, which are masked), k draft tokens, V vocabulary.

Trees have a fixed shape, so that the host need not read it. The first candidates of all depths form a chain. At each of
k depths, the W best candidates that follow the chain are draft tokens, depth by depth, so a tree has N = k W draft
tokens, and those with numbers 0, W, 2W, ... are the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import LOGPROB_SIZES, NOTHING, RowState, StepFeatures
from paceline.core.values import DeviceAcceptance, Purpose
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.drafters.model import draw_chain
from paceline.kernels.gpu.ahead import Ahead, Progress, capture_ahead
from paceline.kernels.gpu.graphs import Graphs, Named, Ring, Ticket, Upload
from paceline.kernels.gpu.lookup import copied
from paceline.kernels.gpu.masks import RowMasks, TokenMasks
from paceline.kernels.gpu.ops import DeviceOps, ops_for
from paceline.kernels.gpu.state import RECORD_TAIL, accepted_path, tree_parents, with_logprobs
from paceline.models.base import SharedModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SPAN = 256  # positions: padded attention is captured for multiples of this
MISSED = (1, 2, 4, 8, 16, 32, 64)  # buckets of tokens likely to be missing in a draft model's cache after plain rounds


class DeviceRound:
    """Runs rounds for the live rows of a batch; ``run`` returns before the device has finished.

    draft: the draft model; None runs rounds without draft tokens, or with n-gram drafts if ``copies``.
    ops: the kernels, or their reference implementation; None chooses by device.
    capture: False runs the programs uncaptured on CUDA, too.
    width: W of trees; 1 drafts chains. Trees need the coupled rule, and rows without penalties or log-probabilities.
    copies: draft what followed the row's last tokens earlier in its own text (prompt lookup).
    """

    def __init__(
        self,
        target: Decoder,
        draft: DraftDecoder | None,
        batch: Batch,
        rule: DeviceAcceptance,
        *,
        ops: DeviceOps | None = None,
        capture: bool = True,
        width: int = 1,
        copies: bool = False,
    ) -> None:
        assert width == 1 or rule == DeviceAcceptance(), "trees need the coupled rule"
        self.can_draft = draft is not None or copies
        self.target, self.draft, self.batch, self.rule, self.width = target, draft, batch, rule, width
        self.ops = ops_for(batch.device) if ops is None else ops
        self.capacity = batch.capacity
        self._caps = Upload(batch.device, [MAX_SPECULATION_LENGTH] * self.capacity)
        ranks = target.model if isinstance(target.model, SharedModel) else None
        self.graphs = Graphs(batch.device, self._all_rows_idle, capture=capture, other_ranks=ranks)
        per_position = 2 + 2 * LOGPROB_SIZES[-1]  # token and log-probability: of the token itself and of the likeliest
        self._ring = Ring(batch.device, self.capacity * (per_position * (MAX_SPECULATION_LENGTH + 1) + RECORD_TAIL))
        self._masks: TokenMasks | None = None  # made for the first row that needs them
        self._hidden: Tensor | None = None
        size = (self.capacity, MAX_SPECULATION_LENGTH)
        self._drafted = DraftTensors(
            *(torch.zeros(s, dtype=torch.int64, device=batch.device) for s in (size, size[:1]))
        )
        self._tree_parents = torch.tensor(tree_parents(MAX_SPECULATION_LENGTH, width), device=batch.device)

    @contextmanager
    def _all_rows_idle(self) -> Iterator[None]:
        """Mark all rows as idle while programs are run for capture: idle rows gain nothing and keep their caches."""
        live = self.batch.live.clone()
        self.batch.live.zero_()
        try:
            yield
        finally:
            self.batch.live.copy_(live)

    def bucket(self, rows: int) -> int:
        """Return the number of rows of the program that runs ``rows`` live rows."""
        return min(self.capacity, next((size for size in ROW_BUCKETS if size >= rows), self.capacity))

    def cap_draft_tokens(self, caps: Sequence[int]) -> None:
        """Set each row's limit of draft tokens for the rounds that follow. Uploads only if a limit has changed."""
        self._caps.set([*caps, *[0] * (self.capacity - len(caps))])

    def run(self, rows: int, k: int, longest: int, features: StepFeatures = NOTHING, missing: int = 0) -> Ticket:
        """Launch a round of k draft tokens for ``rows`` live rows. Return the ticket of its record.

        longest: upper bound of the rows' lengths before the round, in tokens.
        features: what the rows ask for.
        missing: upper bound of the tokens missing in a row of the draft model's cache. It is small after a round with
            draft tokens; then the round is one program, one launch.

        The record [bucket, k + 4] int64 holds tokens, accepted, drafted, gained (``gpu.state.read_record``). The
        log-probabilities that rows ask for follow (``gpu.state.read_logprobs``). For trees k is the depth, and the
        record [bucket, 2 N + 4] also holds the path (``gpu.state.read_trees``).
        """
        k = self._feasible_length(k)
        if k > 0 and self.draft is not None:
            self.catch_up(rows, missing, longest)
        record = self.graphs.run(*self._round(self.bucket(rows), k, self._span(longest + k * self.width), features))
        return self._ring.push(record)

    def begin_masked(self, rows: int, k: int, longest: int, features: StepFeatures, missing: int = 0) -> Ticket:
        """Launch the draft and the forward pass of a round, arguments as for ``run``; ``finish_masked`` ends it.

        Returns the ticket of the draft: [bucket, k + 1] int64, tokens and then each row's number of them.
        """
        k, bucket, span = self._feasible_length(k), self.bucket(rows), self._span(longest + k)
        if k > 0 and self.draft is not None:
            self.catch_up(rows, missing, longest)
        size, unmasked = (bucket, k, span), replace(features, masks=False)
        draft = self.graphs.run(("draft", *size, unmasked), lambda: self._draft_apart(*size, unmasked))
        ticket = self._ring.push(draft)
        self.graphs.run(("forward", *size), lambda: self._forward_apart(*size))
        return ticket

    def finish_masked(self, rows: int, k: int, features: StepFeatures, masks: Sequence[RowMasks]) -> Ticket:
        """Launch the rest of a round that ``begin_masked`` began -> its record's ticket. masks: of the live rows."""
        k, bucket = self._feasible_length(k), self.bucket(rows)
        self._token_masks.set(masks)
        record = self.graphs.run(("accept", bucket, k, features), lambda: self._accept_apart(bucket, k, features))
        return self._ring.push(record)

    @property
    def _token_masks(self) -> TokenMasks:
        if self._masks is None:
            positions, vocab_size = MAX_SPECULATION_LENGTH + 1, self.target.vocab_size
            self._masks = TokenMasks(self.capacity, positions, vocab_size, self.batch.device)
        return self._masks

    def _feasible_length(self, k: int) -> int:
        """Return the draft length that a round planned with k draft tokens can have."""
        return min(k, MAX_SPECULATION_LENGTH // self.width) if self.can_draft else 0

    def _round(self, bucket: int, k: int, span: int, features: StepFeatures) -> Named:
        return (bucket, k, span, features), lambda: self.program(bucket, k, span, features)

    def catch_up(self, rows: int, missing: int, longest: int) -> None:
        """Feed the draft model up to ``missing`` tokens per row, except the last ones, which the round itself feeds."""
        assert self.draft is not None, "there is no draft model"
        if missing <= self.draft.fed_tokens:
            return
        width = 1 << (missing - self.draft.fed_tokens - 1).bit_length()
        self.graphs.run(*self._catch_up_program(self.bucket(rows), width, self._span(longest)))

    def _catch_up_program(self, bucket: int, width: int, span: int) -> Named:
        return ("catch up", bucket, width, span), lambda: self._catch_up(bucket, width, span)

    @property
    def capture_ms(self) -> float:
        """Milliseconds of the fastest capture so far; infinity before the first."""
        return self.graphs.capture_ms

    def is_captured(self, k: int) -> bool:
        """Whether a round of k draft tokens for the batch's rows needs no capture first; the host's never need one."""
        batch, k = self.batch, self._feasible_length(k)
        if not self.graphs.captures or batch.sampling.needs_host:
            return True
        bucket, features = self.bucket(batch.rows), batch.sampling.step_features
        if features.masks:
            return ("accept", bucket, k, features) in self.graphs
        return (bucket, k, self._span(batch.longest + k * self.width), features) in self.graphs

    def capture_ahead(
        self, lengths: Callable[[int], Sequence[int]], seconds: float, progress: Progress = iter
    ) -> Ahead | None:
        """Capture the programs that ``likely`` lists until a limit is reached (``gpu.ahead``). None if nothing is.

        All rows are idle during a capture, so no row changes. Other programs are captured at their first use.
        """
        if not self.graphs.captures:
            return None
        return capture_ahead(self.graphs, self.likely(lengths), seconds, progress)

    def likely(self, lengths: Callable[[int], Sequence[int]]) -> Iterator[Named]:
        """Yield the programs that requests will need, the likeliest first.

        lengths: returns the draft lengths for a number of rows, the likeliest first.

        Short spans come before long ones, if attention depends on the span. For each span, rounds for temperature alone
        come first, then catch-up programs of the draft model. Rounds with cuts (top-p, top-k, min-p) come last; chats
        often ask for them. Penalties and log-probabilities are rare.

        All row buckets are captured for their likeliest length, then all for the next length. The number of rows
        changes with every request that comes or ends; other lengths occur mostly as rows end.
        """
        for span in self._spans():
            yield from self._likely_rounds(lengths, span, NOTHING)
            yield from self._likely_catch_ups(lengths, span)
            yield from self._likely_rounds(lengths, span, StepFeatures(cuts=True))

    def _likely_rounds(
        self, lengths: Callable[[int], Sequence[int]], span: int, features: StepFeatures
    ) -> Iterator[Named]:
        buckets = self._buckets()
        ks = [dict.fromkeys(map(self._feasible_length, lengths(bucket))) for bucket in buckets]
        for ks_of_buckets in zip_longest(*ks):
            for bucket, k in zip(buckets, ks_of_buckets, strict=True):
                if k is not None:
                    yield self._round(bucket, k, span, features)

    def _likely_catch_ups(self, lengths: Callable[[int], Sequence[int]], span: int) -> Iterator[Named]:
        """Yield catch-up programs for the buckets whose likeliest round is plain, but which may draft later."""
        for width in MISSED if self.draft is not None else ():
            for bucket in self._buckets():
                first, *others = lengths(bucket)
                if first == 0 and others:
                    yield self._catch_up_program(bucket, width, span)

    def _buckets(self) -> list[int]:
        """Return all buckets: one row first (an idle server), then all rows (full load), then the others."""
        known = sorted({self.bucket(rows) for rows in (*ROW_BUCKETS, self.capacity)})
        return list(dict.fromkeys((known[0], known[-1], *known)))

    def _span(self, longest: int) -> int:
        """Return the number of positions that attention reads; all of them if each row pays only for its own length."""
        limit = self.target.cache.positions + 1
        return limit if self.target.backend.name == "ragged" else min(limit, -(-longest // SPAN) * SPAN)

    def _spans(self) -> list[int]:
        """Return all spans, the shortest first."""
        limit = self.target.cache.positions + 1
        return list(dict.fromkeys(map(self._span, range(SPAN, limit + SPAN, SPAN))))

    def program(self, rows: int, k: int, span: int, features: StepFeatures = NOTHING) -> Tensor:
        """The round itself, on the first ``rows`` of ``Batch.slot_order``. Returns the record.

        It reads nothing back to the host.
        """
        state = self.batch.state(rows)
        before = state.length.clone()
        draft = self._draft(state, before, k, span, features)
        return self._accept(state, before, draft, self._forward(state, before, draft, span), features)

    def _draft_apart(self, rows: int, k: int, span: int, features: StepFeatures) -> Tensor:
        """The draft of a round in parts -> [B, k + 1] int64, as ``begin_masked`` says."""
        state = self.batch.state(rows)
        draft = self._draft(state, state.length.clone(), k, span, features)
        self._drafted.tokens[:rows, :k], self._drafted.counts[:rows] = draft.tokens, draft.counts
        return torch.cat([draft.tokens, draft.counts[:, None]], dim=1)

    def _forward_apart(self, rows: int, k: int, span: int) -> Tensor:
        """The forward pass of a round in parts -> hidden states [B * (k + 1), width], which stay."""
        state = self.batch.state(rows)
        hidden = self._forward(state, state.length.clone(), self._held_draft(rows, k), span).flatten(0, 1)
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(self.capacity * (MAX_SPECULATION_LENGTH + 1), hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)

    def _accept_apart(self, rows: int, k: int, features: StepFeatures) -> Tensor:
        """The rest of a round in parts -> the record."""
        assert self._hidden is not None, "the forward pass comes first"
        state, hidden = self.batch.state(rows), self._hidden[: rows * (k + 1)].view(rows, k + 1, -1)
        return self._accept(state, state.length.clone(), self._held_draft(rows, k), hidden, features)

    def _held_draft(self, rows: int, k: int) -> DraftTensors:
        return DraftTensors(self._drafted.tokens[:rows, :k].contiguous(), self._drafted.counts[:rows])

    def _accept(
        self, state: RowState, before: Tensor, draft: DraftTensors, hidden: Tensor, features: StepFeatures
    ) -> Tensor:
        """Accept and commit, given the target's hidden states [B, N + 1, width] at the draft -> the record."""
        logits, k = self.target.logits(hidden), draft.k // self.width
        shaped = self._shaped(logits, state, features, draft.tokens)
        record = self.ops.accept(draft, shaped, state, self.rule, self.width)
        kept = before.new_full((state.rows,), k - 1) if draft.parents is None else self._keep(state, before, record, k)
        if k > 0 and self.draft is not None:
            self._rewind(state, before, kept)
        if features.logprobs is None:
            return record
        return with_logprobs(record, self.ops.logprobs(logits, record, features.logprobs))

    def _shaped(
        self, logits: Tensor, state: RowState, features: StepFeatures, draft_tokens: Tensor, first: int = 0
    ) -> Tensor:
        """Apply the rows' masks, biases, penalties and cuts to logits [B, L, V].

        draft_tokens: [B, j] drafted so far.
        first: number of draft tokens before position 0 of the logits.
        """
        if features.masks:
            logits = self.ops.mask(logits, self._token_masks)
        if features.biases:
            logits = self.batch.sampling.biased(logits, state.slots)
        asks = features.adjusts or features.cuts or features.truncates
        return self.ops.shape(logits, state, features, draft_tokens, first) if asks else logits

    def _draft(self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures) -> DraftTensors:
        if self.draft is None:
            return self._draft_lookup(state, k, span)
        drafts = self._draft_trees if self.width > 1 and k > 0 else self._draft_chain
        return drafts(state, before, k, span, features)

    def _draft_lookup(self, state: RowState, k: int, span: int) -> DraftTensors:
        """Draft k tokens per row from its own text; none if its last tokens do not occur earlier."""
        if k == 0:
            return DraftTensors(state.length.new_empty((state.rows, 0)), torch.zeros_like(state.length))
        tokens, matched = copied(state.slots.of(state.text[:, :span]), state.length, k, LONGEST_SUFFIX)
        return DraftTensors(tokens, self._caps.device[: state.rows].clamp(max=k) * (matched > 0))

    def _draft_chain(self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures) -> DraftTensors:
        """Draft k tokens per row with the draft model, one after the other."""
        step_logits: list[Tensor] = []
        purpose = Purpose.DRAFT if self.rule.independent else Purpose.DRAW

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            logits = self._shaped(logits, state, features, draft_tokens, draft_tokens.shape[1])
            step_logits.append(logits)
            return self.ops.draw(logits, state, draft_tokens.shape[1], purpose), True

        none = before.new_empty((state.rows, 0))
        tokens = draw_chain(none, k, lambda draft_tokens: self._draft_logits(state, before, draft_tokens, span), draw)
        counts = self._caps.device[: state.rows].clamp(max=k) * self._drafting_rows(before)
        logits = torch.cat(step_logits, dim=1) if step_logits and self.rule.independent else None
        return DraftTensors(tokens, counts, logits=logits)

    def _draft_trees(self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures) -> DraftTensors:
        """Draft a tree per row, as deep as its limit and its free cache slots allow."""
        chain, draft_tokens = before.new_empty((state.rows, 0)), before.new_empty((state.rows, 0))
        for depth in range(k):
            logits = self._shaped(self._draft_logits(state, before, chain, span), state, features, chain, depth)
            best = self.ops.top_candidates(logits, state, depth, self.width)
            chain, draft_tokens = torch.cat([chain, best[:, :1]], dim=1), torch.cat([draft_tokens, best], dim=1)
        slots = (self.target.cache.positions - before).clamp(min=0) // self.width
        depths = torch.minimum(self._caps.device[: state.rows].clamp(max=k), slots) * self._drafting_rows(before)
        parents = self._tree_parents[: k * self.width].expand(state.rows, -1)
        return DraftTensors(draft_tokens, depths * self.width, parents=parents)

    def _drafting_rows(self, before: Tensor) -> Tensor:
        """Return [B] int64: 0 for rows whose head has no hidden states yet (nothing was read), else 1."""
        return (before > (self.target.reader is not None)).long()

    def _draft_logits(self, state: RowState, before: Tensor, proposed: Tensor, span: int) -> Tensor:
        """Return the draft model's logits [B, 1, V] after the text and the draft tokens ``proposed`` [B, step]."""
        assert self.draft is not None, "there is no draft model"
        step = proposed.shape[1]
        if step > 0:
            return self.draft.logits(self.draft.continue_draft(proposed[:, -1:], step, before, span, state.slots))
        text = _text(state, state.slots.of(self.draft.num_computed_tokens), self.draft.fed_tokens)
        return self.draft.logits(self.draft.begin_draft(text, before, span, state.slots))

    def _forward(self, state: RowState, before: Tensor, draft: DraftTensors, span: int) -> Tensor:
        """Return the target's hidden states [B, N + 1, width] at each row's last token and at its draft tokens."""
        start = (before - 1).clamp(min=0)
        tokens = torch.cat([_text(state, start, 1), draft.tokens], dim=1)
        # only recurrent states ask which tokens are real: keys and values of others are overwritten unread
        counts = None if self.target.cuts_anywhere else (draft.counts + 1).masked_fill(state.ended(), 0)
        return self.target.forward(tokens, start, span, state.slots, counts, draft.tree)

    def _keep(self, state: RowState, before: Tensor, record: Tensor, k: int) -> Tensor:
        """Move the accepted paths of trees behind the texts. Returns accepted tokens [B] that the draft model has read.

        It has read the chain of first candidates but the last.
        """
        path, count = accepted_path(record)
        self.target.keep_paths(state.slots.index, before, path)
        depth = torch.arange(k, device=before.device)
        on_chain = (path[:, :k] == depth * self.width) & (depth < count[:, None])
        return on_chain.long().cumprod(1).sum(1).clamp(max=k - 1)

    def _rewind(self, state: RowState, before: Tensor, kept: Tensor) -> None:
        """Cut the draft model's cache to the text before the round and the accepted draft tokens that it has read."""
        assert self.draft is not None
        self._set_num_cached(state, torch.minimum(self.draft.read_after(before, kept), state.length - 1))

    def _catch_up(self, rows: int, width: int, span: int) -> Tensor:
        assert self.draft is not None, "there is no draft model"
        state = self.batch.state(rows)
        seen = state.slots.of(self.draft.num_computed_tokens)
        self.draft.forward(_text(state, seen, width), seen, span, state.slots)
        self._set_num_cached(state, torch.minimum(seen + width, state.length - 1))
        return seen

    def _set_num_cached(self, state: RowState, seen: Tensor) -> None:
        """Set the number of cached tokens of live rows; idle rows may be in the middle of a prefill."""
        assert self.draft is not None
        known = state.slots.of(self.draft.num_computed_tokens)
        is_live = torch.arange(state.rows, device=seen.device) < state.live
        self.draft.num_computed_tokens[state.slots.where] = torch.where(is_live, seen, known)


def _text(state: RowState, start: Tensor, count: int) -> Tensor:
    """Return the tokens [B, count] of each row from position start [B] on; undefined beyond its length."""
    return state.text_at(start[:, None] + torch.arange(count, device=start.device))
