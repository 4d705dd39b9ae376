"""Verify, accept and commit in one call of the CPU kernels, for rounds that need no host code in between.

If the length policy leaves the draft of a head or draft model as it was planned, the same call drafts first.

The call runs the same library functions as ``Speculation.verify_and_commit`` calls one by one, so the results are
equal. A forward pass leaves the CPU caches cold; a torch operator after it takes 20 to 50 microseconds, so the host
passes plain numbers in memory of its own, and no tensor is made.
"""

from __future__ import annotations

from array import array
from ctypes import pointer
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.acceptance import RULES, AcceptanceRule, supports_trees
from paceline.core.batch import Batch
from paceline.core.draft import Draft, HostVerdict, Verdict
from paceline.core.ops import DrawRows
from paceline.core.sampling import Purpose
from paceline.drafters.heads.native import NativeFusedStates
from paceline.kernels import structs
from paceline.kernels.abi import CRoundCall
from paceline.kernels.cpu import described
from paceline.models.base import AnyModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.native_draft import PlannedDraft
from paceline.models.native.model import NativeModel

_BLOCK = MAX_SPECULATION_LENGTH + 1


class NativeRound:
    """Runs rounds for the decoding rows of a batch, under the coupled rule.

    The rejection rule is included for draft tokens without probabilities, for which both rules are equal.
    """

    def __init__(
        self, target: Decoder, model: NativeModel, batch: Batch, rule: AcceptanceRule, threads: int | None
    ) -> None:
        self._target, self._model, self._batch, self._rule, self._threads = target, model, batch, rule, threads
        rows = batch.capacity
        record = array("q", bytes(8 * rows * (2 * _BLOCK + 2)))
        self._record = memoryview(record)
        self._accepted, self._gained, self._path = rows * _BLOCK, rows * (_BLOCK + 1), rows * (_BLOCK + 2)
        tokens, size = record.buffer_info()[0], record.itemsize
        self._call = CRoundCall(
            text=structs.text_rows(*batch.text_rows),
            block=_BLOCK,
            tokens=tokens,
            accepted=tokens + size * self._accepted,
            gained=tokens + size * self._gained,
            path=tokens + size * self._path,
            purpose=Purpose.DRAW,
        )
        self._draft_seconds = array("d", [0.0])
        self._call.draft_seconds = self._draft_seconds.buffer_info()[0]
        self._drawing: DrawRows | None = None  # the draw parameters that the call describes
        self._work: tuple[Tensor, ...] = ()  # hidden states, logits, taps; sized for the largest round so far
        self._taps = torch.empty(0, dtype=torch.int64)
        if isinstance(target.reader, NativeFusedStates):
            self._describe_head(target.reader)

    def _describe_head(self, states: NativeFusedStates) -> None:
        """Describe the draft head: the call fuses and stores the hidden states that the head reads."""
        call, self._taps = self._call, torch.tensor(self._model.tap_places(states.taps))
        call.head, call.kept = states.model.decoder.handle, states.described
        call.taps, call.tap_count = structs.address(self._taps), len(states.taps)

    @staticmethod
    def of(target: Decoder, batch: Batch, rule: AcceptanceRule, threads: int | None = None) -> NativeRound | None:
        """Return the native round of a batch; None for other models, or rules that the kernels do not have.

        threads: CPU threads of the kernels outside of ``kernel_threads``; None uses the model's number.
        """
        model = target.model
        if not runs_native_rounds(model) or model.vocab_size != batch.vocab_size:
            return None
        return None if why_not_kernels(target, rule) else NativeRound(target, model, batch, rule, threads)

    def can_run(self, rule: AcceptanceRule, draft: Draft) -> bool:
        """Whether the kernels can run the next round: no row needs the host, and the draft has no probabilities.

        A row with a constraint needs the host unless any token may come at all its positions. A tree under a rule
        without trees runs on the host, where that rule raises its error.
        """
        known_shape = draft.host_parents is None or supports_trees(rule)
        return known_shape and self._known(rule) and draft.probabilities is None and self._is_free(draft)

    def needs_host(self, rule: AcceptanceRule) -> bool:
        """Whether a round may need host code: another acceptance rule, a grammar or log-probabilities."""
        return not self._known(rule) or self._batch.sampling.any_constraint

    def _known(self, rule: AcceptanceRule) -> bool:
        return rule is self._rule and self._batch.sampling.logprobs is None

    def _is_free(self, draft: Draft) -> bool:
        """Whether no position of a chain needs a mask; trees with constraints are left to the host."""
        if not self._batch.sampling.any_constraint:
            return True
        rows = zip(self._batch.sampling.constraints, draft.draft_tokens, strict=True)
        return draft.host_parents is None and all(
            constraint is None or constraint.is_free(tokens) for constraint, tokens in rows
        )

    def run(self, draft: Draft) -> Verdict:
        """Verify the draft, accept, and commit to the batch.

        Raises ParameterError if a draft token is not in the vocabulary or comes before its parent; then no row has
        changed.
        """
        if isinstance(draft, PlannedDraft) and not draft.is_made:
            self._begin_with(draft)
        else:
            self._call_kernels(draft)
        verdict = self._read(draft)
        self._batch.note_gains(verdict.host.gained)
        if self._batch.sampling.any_constraint:
            self._batch.sampling.advance(verdict.host.tokens)
        verdict.note_trees(draft)
        return verdict

    def _call_kernels(self, draft: Draft) -> None:
        batch, call, drafted = self._batch, self._call, draft.drafted
        rows, width = batch.rows, max(drafted)
        numbers = [*batch.slots, *drafted]
        for table in (draft.draft_tokens, draft.host_parents or ()):
            for line in table:
                numbers += line if len(line) == width else [*line[:width], *[0] * (width - len(line))]
        arguments = array("q", numbers)
        call.slots = start = arguments.buffer_info()[0]
        call.counts, call.draft_tokens = start + 8 * rows, start + 16 * rows
        call.parents = None if draft.host_parents is None else call.draft_tokens + 8 * rows * width
        call.draft_stride, call.draft = width, None
        self._run(rows + sum(drafted))

    def _begin_with(self, draft: PlannedDraft) -> None:
        """Run a round that makes the draft first, so that draft, verification and commit are one call."""
        call, made, drafting = self._call, draft.call, draft.drafting
        call.slots, call.counts, call.draft_tokens, call.parents = made.slots, made.drawn, made.draft_tokens, None
        call.draft_stride, call.draft = made.draft_stride, pointer(made)
        call.drafter, call.draft_cache = drafting.library.handle, pointer(drafting.cache)
        self._run(self._batch.rows + sum(draft.planned))
        draft.note_made(self._draft_seconds[0])

    def _run(self, tokens: int) -> None:
        """Run the call, which verifies at most ``tokens`` tokens in all."""
        self._describe_rows()
        self._make_room(tokens)
        self._call.rows = self._batch.rows
        self._model.run_round(self._call, self._target.cache, self._threads)

    def _describe_rows(self) -> None:
        drawing = self._batch.sampling.drawing(self._batch.text, self._batch.length)
        if drawing is not self._drawing:
            self._drawing, self._call.by = drawing, described(drawing)

    def _make_room(self, tokens: int) -> None:
        """Grow the work tensors to ``tokens`` positions; kept and doubled, because new memory is cleared first."""
        call = self._call
        if tokens > call.room:
            call.room = min(max(tokens, 2 * call.room), self._batch.capacity * _BLOCK)
            widths = self._model.width, self._model.vocab_size, len(self._taps) * self._model.width
            self._work = tuple(torch.empty(call.room, width, dtype=torch.float32) for width in widths)
            call.hidden, call.logits, call.features = (memory.data_ptr() for memory in self._work)

    def _read(self, draft: Draft) -> Verdict:
        record, drafted = self._record, draft.drafted
        rows, width = len(drafted), max(drafted)
        accepted = record[self._accepted : self._accepted + rows].tolist()

        def lists(first: int, stride: int, extra: int) -> list[list[int]]:
            starts = ((first + row * stride, kept + extra) for row, kept in enumerate(accepted))
            return [record[start : start + size].tolist() for start, size in starts]

        gained = record[self._gained : self._gained + rows].tolist()
        host = HostVerdict(lists(0, _BLOCK, 1), accepted, drafted, gained)
        return Verdict.of(host, None if draft.host_parents is None else lists(self._path, width, 0))


def why_not_kernels(target: Decoder, rule: AcceptanceRule) -> str | None:
    """Return why the host runs the rounds of a kernel model step by step; None if the kernels run them."""
    if not isinstance(target.reader, NativeFusedStates | None):  # the call feeds only heads of the kernels
        return "the drafter reads the target's hidden states"
    return None if rule in RULES.values() else "the kernels do not have this acceptance rule"


def runs_native_rounds(model: AnyModel) -> TypeGuard[NativeModel]:
    """Whether the kernels can run rounds of this model."""
    return isinstance(model, NativeModel)


def workspace_bytes(model: AnyModel, tokens: int, taps: int = 0) -> int:
    """Return the bytes kept after rounds of up to ``tokens`` positions, with ``taps`` hidden states stored."""
    return 4 * tokens * ((1 + taps) * model.width + model.vocab_size) if runs_native_rounds(model) else 0
