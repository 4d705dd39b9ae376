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
from torch.nn.functional import pad

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import LOGPROB_SIZES, NOTHING, RowState, StepFeatures
from paceline.core.values import DeviceAcceptance, Purpose
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.drafters.model import draw_chain
from paceline.drafters.ngram import STRONG_MATCH
from paceline.engine.rounds.references import References
from paceline.kernels.gpu.ahead import Ahead, Progress, capture_ahead
from paceline.kernels.gpu.graphs import Graphs, Named, Ring, Ticket, Upload
from paceline.kernels.gpu.lookup import copied, copied_from, suffix_of
from paceline.kernels.gpu.masks import RowMasks, TokenMasks
from paceline.kernels.gpu.ops import DeviceOps, ops_for
from paceline.kernels.gpu.state import RECORD_TAIL, accepted_path, tree_parents, with_logprobs
from paceline.models.base import SharedModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import ComputeLogits, DraftDecoder

# A step is at most half of the rows, from 8 rows on a quarter or 16: 33 rows as 64 took 1.35 times as long as 33
ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)
# Tokens per row that the draft model's first pass reads beside n-gram drafts, whose tokens it has not read. So few take
# a GPU as long as one.
_FED_AFTER_COPIES = 8
SPAN = 256  # positions: padded attention is captured for multiples of this
MISSED = (1, 2, 4, 8, 16, 32, 64)  # buckets of tokens likely to be missing in a draft model's cache after plain rounds


class DeviceRound:
    """Runs rounds for the live rows of a batch; ``run`` returns before the device has finished.

    draft: the draft model; None runs rounds without draft tokens, or with n-gram drafts if ``copies``. With both, an
        n-gram draft replaces the model's in rows with a match that is long enough (``replace_drafts_from``).
    ops: the kernels, or their reference implementation; None chooses by device.
    capture: False runs the programs uncaptured on CUDA, too.
    width: W of trees; 1 drafts chains. Trees need the coupled rule, and rows without penalties or log-probabilities.
    copies: draft what followed the row's last tokens earlier in its own text (prompt lookup) or in its references.
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
        self.can_draft, self.copies = draft is not None or copies, copies
        self.mixes = copies and draft is not None
        self._references = References(batch) if copies else None
        self._least_matches = Upload(batch.device, [STRONG_MATCH] * batch.capacity)
        self.target, self.draft, self.batch, self.rule, self.width = target, draft, batch, rule, width
        self.ops = ops_for(batch.device) if ops is None else ops
        self.capacity = batch.capacity
        longest = None if draft is None else draft.longest_draft
        self._longest_draft = MAX_SPECULATION_LENGTH if longest is None else longest  # of the draft model
        self._caps = Upload(batch.device, [MAX_SPECULATION_LENGTH] * self.capacity)
        ranks = target.model if isinstance(target.model, SharedModel) else None
        self.graphs = Graphs(batch.device, self._all_rows_idle, capture=capture, other_ranks=ranks)
        per_position = 2 + 2 * LOGPROB_SIZES[-1]  # token and log-probability: of the token itself and of the likeliest
        per_row = per_position * (MAX_SPECULATION_LENGTH + 1) + RECORD_TAIL + 1  # one more: tokens matched
        self._ring = Ring(batch.device, self.capacity * per_row)
        self._masks: TokenMasks | None = None  # made for the first row that needs them
        self._hidden: Tensor | None = None
        size = (self.capacity, MAX_SPECULATION_LENGTH)
        tokens, counts, read, matched = (
            torch.zeros(s, dtype=torch.int64, device=batch.device) for s in (size, size[:1], size, size[:1])
        )
        self._drafted = DraftTensors(tokens, counts, read=read, matched=matched)
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

    def replace_drafts_from(self, least_matches: Sequence[int] | None) -> None:
        """Set the tokens that a match needs in each live row, so that its n-gram draft replaces the model's.

        None: ``STRONG_MATCH``. Uploads only if a number has changed.
        """
        known = [] if least_matches is None else least_matches
        self._least_matches.set([*known, *[STRONG_MATCH] * (self.capacity - len(known))])

    @property
    def fed_tokens(self) -> int:
        """Tokens per row that a round feeds to the draft model before its first draft token."""
        if self.draft is None:
            return 0
        return max(self.draft.fed_tokens, _FED_AFTER_COPIES) if self.mixes else self.draft.fed_tokens

    def missing_after(self, k: int) -> int:
        """Return the most tokens of a row that the draft model's cache may miss after a round of ``k`` draft tokens."""
        if self.draft is None:
            return 0
        missing = self.draft.missing_after(k)
        return max(missing, k + 1) if self.mixes else missing  # none of an n-gram draft's tokens was read

    def run(self, rows: int, k: int, longest: int, features: StepFeatures = NOTHING, missing: int = 0) -> Ticket:
        """Launch a round of k draft tokens for ``rows`` live rows. Return the ticket of its record.

        longest: upper bound of the rows' lengths before the round, in tokens: the longest of those that the host knows,
            and the tokens that a row may gain in rounds in flight.
        features: what the rows ask for.
        missing: upper bound of the tokens missing in a row of the draft model's cache. It is small after a round with
            draft tokens; then the round is one program, one launch.

        The record [bucket, k + 4] int64 holds tokens, accepted, drafted, gained (``gpu.state.read_record``). The
        log-probabilities that rows ask for follow (``gpu.state.read_logprobs``). For trees k is the depth, and the
        record [bucket, 2 N + 4] also holds the path (``gpu.state.read_trees``). With ``mixes`` and k > 0 the last
        column is the number of tokens matched in rows with an n-gram draft, 0 in others.
        """
        k = self.feasible_length(k)
        self._cover(k, longest, missing)
        if k > 0 and self.draft is not None:
            self.catch_up(rows, missing, longest)
        searches = k > 0 and self._references is not None and self._references.follow(self.batch)
        span = self._span(longest + k * self.width)
        record = self.graphs.run(*self._round(self.bucket(rows), k, span, features, searches))
        return self._ring.push(record)

    def begin_masked(self, rows: int, k: int, longest: int, features: StepFeatures, missing: int = 0) -> Ticket:
        """Launch the draft and the forward pass of a round, arguments as for ``run``; ``finish_masked`` ends it.

        Returns the ticket of the draft: [bucket, k + 1] int64, tokens and then each row's number of them.
        """
        k, bucket, span = self.feasible_length(k), self.bucket(rows), self._span(longest + k)
        self._cover(k, longest, missing)
        if k > 0 and self.draft is not None:
            self.catch_up(rows, missing, longest)
        size, unmasked = (bucket, k, span), replace(features, masks=False)
        searches = k > 0 and self._references is not None and self._references.follow(self.batch)
        key = "draft", *size, unmasked, searches
        draft = self.graphs.run(key, lambda: self._draft_apart(*size, unmasked, searches))
        ticket = self._ring.push(draft)
        adapted = features.adapters
        self.graphs.run(("forward", *size, adapted), lambda: self._forward_apart(*size, adapted))
        return ticket

    def finish_masked(self, rows: int, k: int, features: StepFeatures, masks: Sequence[RowMasks]) -> Ticket:
        """Launch the rest of a round that ``begin_masked`` began -> its record's ticket. masks: of the live rows."""
        k, bucket = self.feasible_length(k), self.bucket(rows)
        self._token_masks.set(masks)
        record = self.graphs.run(("accept", bucket, k, features), lambda: self._accept_apart(bucket, k, features))
        return self._ring.push(record)

    def _cover(self, k: int, longest: int, missing: int) -> None:
        """Give the live rows pages for the tokens of a round, wherever those in flight leave their ends.

        longest, missing: as for ``run``.
        """
        batch = self.batch
        stops = batch.ends_after(longest - batch.longest + k * self.width)
        self.target.cache.cover(batch.slots, [length - 1 for length in batch.lengths], stops)
        if k > 0 and self.draft is not None:
            firsts = [max(0, length - 1 - missing) for length in batch.lengths]
            self.draft.cache.cover(batch.slots, firsts, stops)

    @property
    def _token_masks(self) -> TokenMasks:
        if self._masks is None:
            positions, vocab_size = MAX_SPECULATION_LENGTH + 1, self.target.vocab_size
            self._masks = TokenMasks(self.capacity, positions, vocab_size, self.batch.device)
        return self._masks

    def feasible_length(self, k: int) -> int:
        """Return the draft length that a round planned with k draft tokens can have; n-gram drafts have any."""
        if not self.can_draft:
            return 0
        most = MAX_SPECULATION_LENGTH // self.width
        return min(k, most if self.copies else min(most, self._longest_draft))

    def _round(self, bucket: int, k: int, span: int, features: StepFeatures, references: bool = False) -> Named:
        key = bucket, k, span, features
        if references:
            return (*key, "references"), lambda: self.program(*key, references=True)
        return key, lambda: self.program(*key)

    def catch_up(self, rows: int, missing: int, longest: int) -> None:
        """Feed the draft model up to ``missing`` tokens per row, except the last ones, which the round itself feeds."""
        assert self.draft is not None, "there is no draft model"
        if missing <= self.fed_tokens:
            return
        width = 1 << (missing - self.fed_tokens - 1).bit_length()
        self.graphs.run(*self._catch_up_program(self.bucket(rows), width, self._span(longest)))

    def _catch_up_program(self, bucket: int, width: int, span: int) -> Named:
        return ("catch up", bucket, width, span), lambda: self._catch_up(bucket, width, span)

    @property
    def capture_ms(self) -> float:
        """Milliseconds of the fastest capture so far; infinity before the first."""
        return self.graphs.capture_ms

    def is_captured(self, k: int) -> bool:
        """Whether a round of k draft tokens for the batch's rows needs no capture first; the host's never need one."""
        batch, k = self.batch, self.feasible_length(k)
        if not self.graphs.captures or batch.sampling.needs_host:
            return True
        bucket, features = self.bucket(batch.rows), batch.sampling.step_features
        if features.masks:
            return ("accept", bucket, k, features) in self.graphs
        return (bucket, k, self._span(batch.longest + k * self.width), features) in self.graphs

    def capture_ahead(
        self,
        lengths: Callable[[int], Sequence[int]],
        seconds: float,
        progress: Progress = iter,
        rows: int | None = None,
    ) -> Ahead | None:
        """Capture the programs that ``likely`` lists until a limit is reached (``gpu.ahead``). None if nothing is.

        All rows are idle during a capture, so no row changes. Other programs are captured at their first use.
        """
        if not self.graphs.captures:
            return None
        return capture_ahead(self.graphs, self.likely(lengths, rows), seconds, progress)

    def likely(self, lengths: Callable[[int], Sequence[int]], rows: int | None = None) -> Iterator[Named]:
        """Yield the programs that requests will need, the likeliest first.

        lengths: returns the draft lengths for a number of rows, the likeliest first. rows: the most; None: all.

        Short spans come before long ones, if attention depends on the span. For each span, rounds for temperature alone
        come first, then catch-up programs of the draft model. Rounds with cuts (top-p, top-k, min-p) come later; chats
        often ask for them. Those with adapters come last. Penalties and log-probabilities are rare.

        All row buckets are captured for their likeliest length, then all for the next length. The number of rows
        changes with every request that comes or ends; other lengths occur mostly as rows end.
        """
        for span in self._spans():
            buckets = self._buckets(self.capacity if rows is None else rows)
            yield from self._likely_rounds(lengths, buckets, span, NOTHING)
            yield from self._likely_catch_ups(lengths, buckets, span)
            yield from self._likely_rounds(lengths, buckets, span, StepFeatures(cuts=True))
            if self.target.adapters is not None:
                yield from self._likely_rounds(lengths, buckets, span, StepFeatures(adapters=True))

    def _likely_rounds(
        self, lengths: Callable[[int], Sequence[int]], buckets: Sequence[int], span: int, features: StepFeatures
    ) -> Iterator[Named]:
        ks = [dict.fromkeys(map(self.feasible_length, lengths(bucket))) for bucket in buckets]
        for ks_of_buckets in zip_longest(*ks):
            for bucket, k in zip(buckets, ks_of_buckets, strict=True):
                if k is not None:
                    yield self._round(bucket, k, span, features)

    def _likely_catch_ups(
        self, lengths: Callable[[int], Sequence[int]], buckets: Sequence[int], span: int
    ) -> Iterator[Named]:
        """Yield catch-up programs for the buckets whose likeliest round is plain, but which may draft later."""
        for width in MISSED if self.draft is not None else ():
            for bucket in buckets:
                first, *others = lengths(bucket)
                if first == 0 and others:
                    yield self._catch_up_program(bucket, width, span)

    def _buckets(self, rows: int) -> list[int]:
        """Return the buckets of up to ``rows`` rows: one row first (an idle server), then all, then the others."""
        known = sorted({self.bucket(size) for size in (*ROW_BUCKETS, rows) if size <= rows})
        return list(dict.fromkeys((known[0], known[-1], *known)))

    def _span(self, longest: int) -> int:
        """Return the number of positions that attention reads; all of them if each row pays only for its own length."""
        limit = self.target.cache.positions + 1
        return limit if self.target.backend.name == "ragged" else min(limit, -(-longest // SPAN) * SPAN)

    def _spans(self) -> list[int]:
        """Return all spans, the shortest first."""
        limit = self.target.cache.positions + 1
        return list(dict.fromkeys(map(self._span, range(SPAN, limit + SPAN, SPAN))))

    def program(
        self, rows: int, k: int, span: int, features: StepFeatures = NOTHING, *, references: bool = False
    ) -> Tensor:
        """The round itself, on the first ``rows`` of ``Batch.slot_order``. Returns the record.

        It reads nothing back to the host. references: whether the rows' references are searched, too.
        """
        state = self.batch.state(rows)
        before = state.length.clone()
        draft = self._draft(state, before, k, span, features, references)
        hidden = self._forward(state, before, draft, span, features.adapters)
        return self._accept(state, before, draft, hidden, features)

    def _draft_apart(self, rows: int, k: int, span: int, features: StepFeatures, references: bool = False) -> Tensor:
        """The draft of a round in parts -> [B, k + 1] int64, as ``begin_masked`` says."""
        state = self.batch.state(rows)
        draft = self._draft(state, state.length.clone(), k, span, features, references)
        self._drafted.tokens[:rows, :k], self._drafted.counts[:rows] = draft.tokens, draft.counts
        if self._drafted.read is not None and draft.read is not None:
            self._drafted.read[:rows, :k] = draft.read
        if self._drafted.matched is not None and draft.matched is not None:
            self._drafted.matched[:rows] = draft.matched
        return torch.cat([draft.tokens, draft.counts[:, None]], dim=1)

    def _forward_apart(self, rows: int, k: int, span: int, adapted: bool = True) -> Tensor:
        """The forward pass of a round in parts -> hidden states [B * (k + 1), width], which stay."""
        state = self.batch.state(rows)
        hidden = self._forward(state, state.length.clone(), self._held_draft(rows, k), span, adapted).flatten(0, 1)
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(self.capacity * (MAX_SPECULATION_LENGTH + 1), hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)

    def _accept_apart(self, rows: int, k: int, features: StepFeatures) -> Tensor:
        """The rest of a round in parts -> the record."""
        assert self._hidden is not None, "the forward pass comes first"
        state, hidden = self.batch.state(rows), self._hidden[: rows * (k + 1)].view(rows, k + 1, -1)
        return self._accept(state, state.length.clone(), self._held_draft(rows, k), hidden, features)

    def _held_draft(self, rows: int, k: int) -> DraftTensors:
        held = self._drafted
        tokens, counts = held.tokens[:rows, :k].contiguous(), held.counts[:rows]
        if not self.mixes or held.read is None or held.matched is None or k == 0:
            return DraftTensors(tokens, counts)
        return DraftTensors(tokens, counts, read=held.read[:rows, :k], matched=held.matched[:rows])

    def _accept(
        self, state: RowState, before: Tensor, draft: DraftTensors, hidden: Tensor, features: StepFeatures
    ) -> Tensor:
        """Accept and commit, given the target's hidden states [B, N + 1, width] at the draft -> the record."""
        logits = self.target.logits(hidden)
        shaped = self._shaped(logits, state, features, draft.tokens)
        record = found = self.ops.accept(draft, shaped, state, self.rule, self.width)
        if draft.k > 0 and self.draft is not None:
            self._rewind(state, before, self._kept(state, before, record, draft))
        if features.logprobs is not None:
            found = with_logprobs(record, self.ops.logprobs(logits, record, features.logprobs))
        return found if draft.matched is None else torch.cat([found, draft.matched[:, None]], dim=1)

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

    def _draft(
        self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures, references: bool
    ) -> DraftTensors:
        if k == 0 or not self.can_draft:
            return DraftTensors(state.length.new_empty((state.rows, 0)), torch.zeros_like(state.length))
        if self.draft is None:
            return self._copies(state, k, span, references)[0]
        drafts = self._draft_trees if self.width > 1 else self._draft_chain
        drafted = drafts(state, before, k, span, features)
        return self._mixed(drafted, *self._copies(state, k, span, references)) if self.copies else drafted

    def _copies(self, state: RowState, k: int, span: int, references: bool) -> tuple[DraftTensors, Tensor]:
        """Draft up to k tokens per row from its own text or its references. Returns the tokens matched, [B], too.

        The longer match wins, and the own text's of equal ones. A row without a match has no draft tokens.
        """
        text, rows, find = state.text[:, :span], state.slots, self.ops.last_match
        tokens, matched = copied(text, rows, state.length, k, LONGEST_SUFFIX, find)
        real = torch.full_like(matched, k)
        if references:
            assert self._references is not None
            suffix = suffix_of(text, rows, state.length, LONGEST_SUFFIX)
            size = rows.of(self._references.size)
            others, count, longer = copied_from(self._references.table, rows, size, suffix, k, find)
            tokens = torch.where((longer > matched)[:, None], others, tokens)
            real, matched = torch.where(longer > matched, count, real), torch.maximum(longer, matched)
        counts = torch.minimum(self._caps.device[: state.rows], real) * (matched > 0)
        return DraftTensors(tokens, counts), matched

    def _mixed(self, drafted: DraftTensors, copies: DraftTensors, matched: Tensor) -> DraftTensors:
        """Replace the model's draft by the n-gram draft in rows whose match is long enough."""
        takes = matched >= self._least_matches.device[: len(matched)]
        tokens = torch.where(takes[:, None], copies.tokens, drafted.tokens)
        logits = drafted.logits
        if logits is not None:  # a copied token was drawn with probability 1
            certain = torch.full_like(logits, -torch.inf).scatter_(2, copies.tokens[..., None], 0.0)
            logits = torch.where(takes[:, None, None], certain, logits)
        counts = torch.where(takes, copies.counts, drafted.counts)
        return DraftTensors(tokens, counts, logits=logits, read=drafted.tokens, matched=matched * takes)

    def _kept(self, state: RowState, before: Tensor, record: Tensor, draft: DraftTensors) -> Tensor:
        """Return how many of each row's new tokens the draft model has read, [B]: it never reads its last draft token.

        The numbers may exceed the accepted tokens, which are counted later.
        """
        if draft.parents is not None:
            return self._keep(state, before, record, draft.k // self.width)
        if draft.read is None:
            return before.new_full((state.rows,), draft.k - 1)
        return (record[:, : draft.k] == draft.read).long().cumprod(1).sum(1).clamp(max=draft.k - 1)

    def _draft_chain(self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures) -> DraftTensors:
        """Draft k tokens per row with the draft model, one after the other; as many as it can if these are fewer."""
        step_logits: list[Tensor] = []
        depth = min(k, self._longest_draft)
        purpose = Purpose.DRAFT if self.rule.independent else Purpose.DRAW

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            logits = self._shaped(logits, state, features, draft_tokens, draft_tokens.shape[1])
            step_logits.append(logits)
            return self.ops.draw(logits, state, draft_tokens.shape[1], purpose), True

        none = before.new_empty((state.rows, 0))
        tokens = draw_chain(none, depth, self._drafting(state, before, depth, span), draw)
        counts = self._caps.device[: state.rows].clamp(max=depth) * self._drafting_rows(before)
        logits = torch.cat(step_logits, dim=1) if self.rule.independent else None
        if depth == k:
            return DraftTensors(tokens, counts, logits=logits)
        wide = None if logits is None else pad(logits, (0, 0, 0, k - depth))
        return DraftTensors(pad(tokens, (0, k - depth)), counts, logits=wide)

    def _draft_trees(self, state: RowState, before: Tensor, k: int, span: int, features: StepFeatures) -> DraftTensors:
        """Draft a tree per row, as deep as its limit and its free cache slots allow."""
        chain, draft_tokens = before.new_empty((state.rows, 0)), before.new_empty((state.rows, 0))
        compute_logits = self._drafting(state, before, k, span)
        for depth in range(k):
            logits = self._shaped(compute_logits(chain), state, features, chain, depth)
            best = self.ops.top_candidates(logits, state, depth, self.width)
            chain, draft_tokens = torch.cat([chain, best[:, :1]], dim=1), torch.cat([draft_tokens, best], dim=1)
        slots = (self.target.cache.positions - before).clamp(min=0) // self.width
        depths = torch.minimum(self._caps.device[: state.rows].clamp(max=k), slots) * self._drafting_rows(before)
        parents = self._tree_parents[: k * self.width].expand(state.rows, -1)
        return DraftTensors(draft_tokens, depths * self.width, parents=parents)

    def _drafting_rows(self, before: Tensor) -> Tensor:
        """Return [B] int64: 0 for rows whose head has no hidden states yet (nothing was read), else 1."""
        return (before > (self.target.reader is not None)).long()

    def _drafting(self, state: RowState, before: Tensor, k: int, span: int) -> ComputeLogits:
        """Begin a draft of k tokens per row with the draft model."""
        assert self.draft is not None, "there is no draft model"
        text = _text(state, state.slots.of(self.draft.num_computed_tokens), self.fed_tokens)
        return self.draft.drafting(text, before, k, span, state.slots)

    def _forward(self, state: RowState, before: Tensor, draft: DraftTensors, span: int, adapted: bool) -> Tensor:
        """Return the target's hidden states [B, N + 1, width] at each row's last token and at its draft tokens.

        adapted: whether a row has an adapter.
        """
        start = (before - 1).clamp(min=0)
        tokens = torch.cat([_text(state, start, 1), draft.tokens], dim=1)
        # only recurrent states ask which tokens are real: keys and values of others are overwritten unread
        counts = None if self.target.cuts_anywhere else (draft.counts + 1).masked_fill(state.ended(), 0)
        return self.target.forward(tokens, start, span, state.slots, counts, draft.tree, adapted=adapted)

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
        self.draft.feed(_text(state, seen, width), span, state.slots)
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
