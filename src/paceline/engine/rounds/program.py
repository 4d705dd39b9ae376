"""A round as a tensor program on the device: draft, verify, accept, commit, stop tests. The host never interrupts it.

It is the round of ``round.py``; lengths, ends and draft tokens stay on the device.

Shapes: B rows of a program (a bucket: live rows first, then idle ones, which are masked), k draft tokens per row; trees
of depth k have N = k W draft tokens (``device_drafters``), chains N = k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import NOTHING, StepFeatures
from paceline.core.values import DeviceAcceptance
from paceline.drafters.ngram import STRONG_MATCH
from paceline.engine.rounds.device_drafters import DeviceDrafter, RoundRows
from paceline.kernels.gpu.graphs import Upload
from paceline.kernels.gpu.masks import TokenMasks
from paceline.kernels.gpu.ops import DeviceOps, ops_for
from paceline.kernels.gpu.state import accepted_path, with_logprobs
from paceline.models.decoding.decoder import Decoder


class RoundProgram:
    """Runs rounds for the first rows of ``Batch.slot_order``; it reads nothing back to the host.

    ops: the kernels, or their reference implementation; None chooses by device.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: DeviceDrafter,
        batch: Batch,
        rule: DeviceAcceptance,
        ops: DeviceOps | None = None,
    ) -> None:
        assert drafter.width == 1 or rule == DeviceAcceptance(), "trees need the coupled rule"
        self.target, self.drafter, self.batch, self.rule = target, drafter, batch, rule
        self.ops = ops_for(batch.device) if ops is None else ops
        self._caps = Upload(batch.device, [MAX_SPECULATION_LENGTH] * batch.capacity)
        self._least_matches = Upload(batch.device, [STRONG_MATCH] * batch.capacity)

    @cached_property
    def masks(self) -> TokenMasks:
        """The rows' masks, made by the host; allocated for the first row that needs one."""
        batch = self.batch
        return TokenMasks(batch.capacity, MAX_SPECULATION_LENGTH + 1, self.target.vocab_size, batch.device)

    def set_limits(self, caps: Sequence[int], least_matches: Sequence[int] | None) -> None:
        """Set limits of each live row for the rounds that follow. Uploads only what has changed.

        caps: most draft tokens. least_matches: tokens that a match needs, so that the row's n-gram draft replaces the
            model's; None: ``STRONG_MATCH``.
        """
        known, capacity = least_matches or (), self.batch.capacity
        self._least_matches.set([*known, *[STRONG_MATCH] * (capacity - len(known))])
        self._caps.set([*caps, *[0] * (capacity - len(caps))])

    def run(
        self, bucket: int, k: int, span: int, features: StepFeatures = NOTHING, *, references: bool = False
    ) -> Tensor:
        """Run a whole round. Returns the record (``DeviceRound.run``).

        span: positions of a row that attention and lookup read. references: whether the rows' are searched, too.
        """
        rows = self.rows(bucket, features, references=references)
        draft = self.draft(rows, k, span)
        return self.accept_and_commit(rows, draft, self.verify(rows, draft, span))

    def rows(self, bucket: int, features: StepFeatures, *, references: bool = False) -> RoundRows:
        """Return the first ``bucket`` rows as they are before a round."""
        state = self.batch.state(bucket)
        return RoundRows(
            state,
            before=state.length.clone(),
            caps=self._caps.device[:bucket],
            least_matches=self._least_matches.device[:bucket],
            features=features,
            sampling=self.batch.sampling,
            rule=self.rule,
            ops=self.ops,
            references=self.drafter.references if references else None,
            masks=self.masks if features.masks else None,
        )

    def draft(self, rows: RoundRows, k: int, span: int) -> DraftTensors:
        """Draft up to k tokens per row."""
        drafter = self.drafter if k > 0 else DeviceDrafter()
        return drafter.draft(rows, k, span)

    def verify(self, rows: RoundRows, draft: DraftTensors, span: int) -> Tensor:
        """Return the target's hidden states [B, N + 1, width] at each row's last token and at its draft tokens."""
        start = (rows.before - 1).clamp(min=0)
        tokens = torch.cat([rows.state.text_from(start, 1), draft.tokens], dim=1)
        # only recurrent states ask which tokens are real: keys and values of others are overwritten unread
        counts = None if self.target.cuts_anywhere else (draft.counts + 1).masked_fill(rows.state.ended(), 0)
        adapted = rows.features.adapters
        return self.target.forward(tokens, start, span, rows.state.slots, counts, draft.tree, adapted=adapted)

    def accept_and_commit(self, rows: RoundRows, draft: DraftTensors, hidden: Tensor) -> Tensor:
        """Accept draft tokens and append them to the rows, given ``verify``'s hidden states -> the record."""
        logits = self.target.logits(hidden)
        shaped = rows.shaped(logits, draft.tokens)
        record = found = self.ops.accept(draft, shaped, rows.state, self.rule, self.drafter.width)
        if draft.parents is not None:  # moves the accepted path behind the text in the KV cache
            self.target.keep_paths(rows.state.slots.index, rows.before, accepted_path(record)[0])
        if draft.k > 0:
            self.drafter.observe(rows, draft, record)
        if rows.features.logprobs is not None:
            found = with_logprobs(record, self.ops.logprobs(logits, record, rows.features.logprobs))
        return found if draft.matched is None else torch.cat([found, draft.matched[:, None]], dim=1)


class MaskedProgram:
    """The round as three programs, for rows with a grammar: draft, forward pass, acceptance.

    The host reads the draft tokens and makes the rows' masks while the forward pass runs. What the programs pass on
    lies in memory of its own; it is the hidden states and not the logits, which are larger.
    """

    def __init__(self, program: RoundProgram) -> None:
        self._program, batch = program, program.batch
        size = batch.capacity, MAX_SPECULATION_LENGTH
        self._tokens, self._read = (torch.zeros(size, dtype=torch.int64, device=batch.device) for _ in range(2))
        self._counts, self._matched = self._tokens[:, 0].clone(), self._tokens[:, 0].clone()
        self._hidden: Tensor | None = None

    def draft(self, bucket: int, k: int, span: int, features: StepFeatures, references: bool = False) -> Tensor:
        """Draft -> [B, k + 1] int64: each row's draft tokens, and their number."""
        draft = self._program.draft(self._program.rows(bucket, features, references=references), k, span)
        self._tokens[:bucket, :k], self._counts[:bucket] = draft.tokens, draft.counts
        if draft.read is not None and draft.matched is not None:
            self._read[:bucket, :k], self._matched[:bucket] = draft.read, draft.matched
        return torch.cat([draft.tokens, draft.counts[:, None]], dim=1)

    def verify(self, bucket: int, k: int, span: int, adapted: bool = True) -> Tensor:
        """Run the target at the draft -> hidden states [B * (k + 1), width], which stay."""
        rows = self._program.rows(bucket, StepFeatures(adapters=adapted))
        hidden = self._program.verify(rows, self._drafted(bucket, k), span).flatten(0, 1)
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(len(self._tokens) * (MAX_SPECULATION_LENGTH + 1), hidden.shape[1])
        return self._hidden[: len(hidden)].copy_(hidden)

    def accept_and_commit(self, bucket: int, k: int, features: StepFeatures) -> Tensor:
        """Accept draft tokens and append them to the rows -> the record."""
        assert self._hidden is not None, "the forward pass comes first"
        rows = self._program.rows(bucket, features)
        hidden = self._hidden[: bucket * (k + 1)].view(bucket, k + 1, -1)
        return self._program.accept_and_commit(rows, self._drafted(bucket, k), hidden)

    def _drafted(self, bucket: int, k: int) -> DraftTensors:
        draft = DraftTensors(self._tokens[:bucket, :k].contiguous(), self._counts[:bucket])
        if not self._program.drafter.mixes or k == 0:
            return draft
        return replace(draft, read=self._read[:bucket, :k], matched=self._matched[:bucket])
