"""Drafting on a device, within a round's program: the host reads none of it.

Shapes: B rows of a program, k draft tokens, V vocabulary.

Trees have a fixed shape, so that the host need not read it. The first candidates of all depths form a chain. At each of
k depths, the W best candidates that follow the chain are draft tokens, depth by depth, so a tree has N = k W draft
tokens, and those with numbers 0, W, 2W, ... are the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import RowState, SamplingRows, StepFeatures
from paceline.core.values import DeviceAcceptance, Purpose
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.drafters.model import draw_chain
from paceline.engine.rounds.references import References
from paceline.kernels.gpu.lookup import copied, copied_from, suffix_of
from paceline.kernels.gpu.masks import TokenMasks
from paceline.kernels.gpu.ops import DeviceOps
from paceline.kernels.gpu.state import accepted_path, tree_parents
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import ComputeLogits, DraftDecoder

# Tokens per row that the draft model's first pass reads beside n-gram drafts, whose tokens it has not read. So few take
# a GPU as long as one.
_FED_AFTER_COPIES = 8


@dataclass(frozen=True)
class RoundRows:
    """The rows of a program before their round, what they ask for, and the rule and operations of the round.

    before: [B] int64, their lengths. caps: [B] int64, most draft tokens of each. least_matches: [B] int64, tokens that
        a match needs, so that the row's n-gram draft replaces the model's.
    references: texts that n-gram lookup searches beside the rows' own; None: no row has any.
    masks: made by the host; None: any token may come.
    """

    state: RowState
    before: Tensor
    caps: Tensor
    least_matches: Tensor
    features: StepFeatures
    sampling: SamplingRows
    rule: DeviceAcceptance
    ops: DeviceOps
    references: References | None = None
    masks: TokenMasks | None = None

    def shaped(self, logits: Tensor, draft_tokens: Tensor, first: int = 0) -> Tensor:
        """Apply the rows' masks, biases, penalties and cuts to logits [B, L, V].

        draft_tokens: [B, j] drafted so far.
        first: number of draft tokens before position 0 of the logits.
        """
        features = self.features
        if self.masks is not None:
            logits = self.ops.mask(logits, self.masks)
        if features.biases:
            logits = self.sampling.biased(logits, self.state.slots)
        asks = features.adjusts or features.cuts or features.truncates
        return self.ops.shape(logits, self.state, features, draft_tokens, first) if asks else logits


class DeviceDrafter:
    """Drafts no tokens; the base of those that do.

    decoder: of the draft model; None without one.
    longest: most draft tokens of a row; of trees their depth. width: W of trees; 1 for chains.
    fed_tokens: tokens per row that a draft feeds to the draft model before its first draft token.
    references: texts that it searches; None: it searches none.
    mixes: whether some rows' drafts are n-grams and others' a draft model's.
    """

    decoder: DraftDecoder | None = None
    longest = 0
    width = 1
    fed_tokens = 0
    references: References | None = None
    mixes = False

    def missing_after(self, k: int) -> int:
        """Return the most tokens of a row that the draft model's cache may miss after a round of ``k`` draft tokens."""
        return 0

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        """Draft up to k tokens per row. span: positions of a row that attention and lookup read."""
        return DraftTensors(rows.state.length.new_empty((rows.state.rows, 0)), torch.zeros_like(rows.state.length))

    def observe(self, rows: RoundRows, draft: DraftTensors, record: Tensor) -> None:
        """Let the drafter's state follow the rows after their round. record: the round's (``DeviceRound.run``)."""


class LookupDrafter(DeviceDrafter):
    """Drafts what followed the row's last tokens earlier in its own text (prompt lookup) or in its references."""

    longest = MAX_SPECULATION_LENGTH

    def __init__(self, batch: Batch) -> None:
        self.references = References(batch)

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        return ngram_draft(rows, k, span)[0]


class ChainDrafter(DeviceDrafter):
    """Samples draft tokens from the draft model, one after the other.

    Under the rejection rule it uses noise of its own, and reports the logits.
    """

    decoder: DraftDecoder

    def __init__(self, target: Decoder, decoder: DraftDecoder) -> None:
        self.decoder, self.fed_tokens = decoder, decoder.fed_tokens
        self.longest = MAX_SPECULATION_LENGTH if decoder.longest_draft is None else decoder.longest_draft
        self._target = target

    def missing_after(self, k: int) -> int:
        return self.decoder.missing_after(k)

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        step_logits: list[Tensor] = []
        purpose = Purpose.DRAFT if rows.rule.independent else Purpose.DRAW

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            logits = rows.shaped(logits, draft_tokens, draft_tokens.shape[1])
            step_logits.append(logits)
            return rows.ops.draw(logits, rows.state, draft_tokens.shape[1], purpose), True

        none = rows.before.new_empty((rows.state.rows, 0))
        tokens = draw_chain(none, k, self._drafting(rows, k, span), draw)
        counts = rows.caps.clamp(max=k) * self._can_draft(rows)
        return DraftTensors(tokens, counts, logits=torch.cat(step_logits, dim=1) if rows.rule.independent else None)

    def _drafting(self, rows: RoundRows, k: int, span: int) -> ComputeLogits:
        """Begin a draft of k tokens per row."""
        slots = rows.state.slots
        text = rows.state.text_from(slots.of(self.decoder.num_computed_tokens), self.fed_tokens)
        return self.decoder.drafting(text, rows.before, k, span, slots)

    def _can_draft(self, rows: RoundRows) -> Tensor:
        """Return [B] int64: 0 for rows whose head has no hidden states yet (nothing was read), else 1."""
        return (rows.before > (self._target.reader is not None)).long()

    def observe(self, rows: RoundRows, draft: DraftTensors, record: Tensor) -> None:
        """Cut the draft model's cache to the text before the round and the accepted draft tokens that it has read."""
        kept = self.decoder.read_after(rows.before, self._num_read(rows, draft, record))
        _set_num_computed(self.decoder, rows.state, kept)

    def _num_read(self, rows: RoundRows, draft: DraftTensors, record: Tensor) -> Tensor:
        """Return how many of each row's new tokens the draft model has read, [B]: it never reads its last draft token.

        The numbers may exceed the accepted tokens, which are counted later.
        """
        return rows.before.new_full((rows.state.rows,), draft.k - 1)


class MixedDrafter(ChainDrafter):
    """Drafts with the draft model, and replaces its draft by the n-gram draft in rows whose match is long enough."""

    mixes = True

    def __init__(self, target: Decoder, decoder: DraftDecoder, batch: Batch) -> None:
        super().__init__(target, decoder)
        self.longest, self._longest_chain = MAX_SPECULATION_LENGTH, self.longest
        self.fed_tokens = max(self.fed_tokens, _FED_AFTER_COPIES)
        self.references = References(batch)

    def missing_after(self, k: int) -> int:
        return max(super().missing_after(k), k + 1)  # none of an n-gram draft's tokens was read

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        chain = super().draft(rows, depth := min(k, self._longest_chain), span)
        tokens, logits = chain.tokens, chain.logits
        if depth < k:
            logits = None if logits is None else pad(logits, (0, 0, 0, k - depth))
            tokens = pad(tokens, (0, k - depth))
        copies, matched = ngram_draft(rows, k, span)
        takes = matched >= rows.least_matches
        mixed = torch.where(takes[:, None], copies.tokens, tokens)
        if logits is not None:  # a copied token was drawn with probability 1
            certain = torch.full_like(logits, -torch.inf).scatter_(2, copies.tokens[..., None], 0.0)
            logits = torch.where(takes[:, None, None], certain, logits)
        counts = torch.where(takes, copies.counts, chain.counts)
        return DraftTensors(mixed, counts, logits=logits, read=tokens, matched=matched * takes)

    def _num_read(self, rows: RoundRows, draft: DraftTensors, record: Tensor) -> Tensor:
        assert draft.read is not None
        return (record[:, : draft.k] == draft.read).long().cumprod(1).sum(1).clamp(max=draft.k - 1)


class TreeDrafter(ChainDrafter):
    """Drafts a tree per row, as deep as its limit and its free cache slots allow. k is the depth.

    It needs the coupled rule, and rows without penalties or log-probabilities.
    """

    def __init__(self, target: Decoder, decoder: DraftDecoder, width: int) -> None:
        super().__init__(target, decoder)
        self.width, self.longest = width, min(self.longest, MAX_SPECULATION_LENGTH // width)
        self._parents = torch.tensor(tree_parents(MAX_SPECULATION_LENGTH, width), device=target.cache.device)

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        chain = draft_tokens = rows.before.new_empty((rows.state.rows, 0))
        compute_logits = self._drafting(rows, k, span)
        for depth in range(k):
            logits = rows.shaped(compute_logits(chain), chain, depth)
            best = rows.ops.top_candidates(logits, rows.state, depth, self.width)
            chain, draft_tokens = torch.cat([chain, best[:, :1]], dim=1), torch.cat([draft_tokens, best], dim=1)
        slots = (self._target.cache.positions - rows.before).clamp(min=0) // self.width
        depths = torch.minimum(rows.caps.clamp(max=k), slots) * self._can_draft(rows)
        parents = self._parents[: k * self.width].expand(rows.state.rows, -1)
        return DraftTensors(draft_tokens, depths * self.width, parents=parents)

    def _num_read(self, rows: RoundRows, draft: DraftTensors, record: Tensor) -> Tensor:
        path, count = accepted_path(record)
        depth = torch.arange(k := draft.k // self.width, device=record.device)
        on_chain = (path[:, :k] == depth * self.width) & (depth < count[:, None])
        return on_chain.long().cumprod(1).sum(1).clamp(max=k - 1)


def device_drafter(
    target: Decoder, draft: DraftDecoder | None, batch: Batch, *, width: int = 1, copies: bool = False
) -> DeviceDrafter:
    """Return the drafter of a batch's rounds. draft: the draft model. width: W of trees. copies: looks n-grams up."""
    assert width == 1 or not copies, "n-gram drafts are chains"
    if draft is None:
        return LookupDrafter(batch) if copies else DeviceDrafter()
    if copies:
        return MixedDrafter(target, draft, batch)
    return TreeDrafter(target, draft, width) if width > 1 else ChainDrafter(target, draft)


def ngram_draft(rows: RoundRows, k: int, span: int) -> tuple[DraftTensors, Tensor]:
    """Draft up to k tokens per row from its own text or its references. Returns the tokens matched, [B], too.

    The longer match wins, and the own text's of equal ones. A row without a match has no draft tokens.
    """
    state, references, find = rows.state, rows.references, rows.ops.last_match
    text, slots = state.text[:, :span], state.slots
    tokens, matched = copied(text, slots, state.length, k, LONGEST_SUFFIX, find)
    real = torch.full_like(matched, k)
    if references is not None:
        suffix = suffix_of(text, slots, state.length, LONGEST_SUFFIX)
        others, count, longer = copied_from(references.table, slots, slots.of(references.size), suffix, k, find)
        tokens = torch.where((longer > matched)[:, None], others, tokens)
        real, matched = torch.where(longer > matched, count, real), torch.maximum(longer, matched)
    counts = torch.minimum(rows.caps, real) * (matched > 0)
    return DraftTensors(tokens, counts), matched


def catch_up(decoder: DraftDecoder, state: RowState, width: int, span: int) -> Tensor:
    """Feed the next ``width`` tokens of each row to a draft model. Returns the computed tokens [B] before."""
    computed = state.slots.of(decoder.num_computed_tokens)
    decoder.feed(state.text_from(computed, width), span, state.slots)
    _set_num_computed(decoder, state, computed + width)
    return computed


def _set_num_computed(decoder: DraftDecoder, state: RowState, computed: Tensor) -> None:
    """Set the computed tokens [B] of live rows, never the last one; idle rows may be in the middle of a prefill."""
    computed = torch.minimum(computed, state.length - 1)
    known = state.slots.of(decoder.num_computed_tokens)
    is_live = torch.arange(state.rows, device=computed.device) < state.live
    decoder.num_computed_tokens[state.slots.where] = torch.where(is_live, computed, known)
