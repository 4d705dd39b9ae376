"""Verify, accept and commit in one call of the CPU kernels, for rounds that need no host code in between.

If the length policy leaves the draft of a head or draft model as it was planned, the same call drafts first.

The call runs the same library functions as ``Speculation.verify_and_commit`` calls one by one, so the results are
equal. A forward pass leaves the CPU caches cold; a torch operator after it takes 20 to 50 microseconds, so the host
passes plain numbers in memory of its own, and no tensor is made.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from ctypes import pointer
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.values import DrawRows, Purpose
from paceline.drafters.heads.native import NativeFusedStates
from paceline.engine.rounds.choice import (
    STEP_BY_STEP,
    log_once,
    why_no_kernels,
    why_no_kernels_for,
    why_no_kernels_now,
)
from paceline.engine.rounds.place import FinishedRound, HostPlace
from paceline.engine.rounds.round import Speculation
from paceline.kernels import structs
from paceline.kernels.abi import CRoundCall
from paceline.kernels.cpu import described
from paceline.models.base import AnyModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.native_draft import PlannedDraft
from paceline.models.native.model import NativeModel

_BLOCK = MAX_SPECULATION_LENGTH + 1


class KernelsPlace(HostPlace):
    """Runs rounds on the CPU kernels (a ``RoundPlace``); a draft that they cannot verify is verified step by step."""

    def __init__(self, parts: Speculation, native: NativeRound) -> None:
        self.native, self._parts, self._rule = native, parts, parts.accept
        self.why_not = partial(why_no_kernels_now, parts, parts.accept)
        self._reasons: dict[str, None] = {}

    def needs_torch(self, batch: Batch) -> bool:
        needed = self._parts.drafter.uses_torch or batch.sampling.any_constraint
        return needed or self.why_not(batch) is not None

    def run(self, batch: Batch, plan: SpeculationPlan) -> FinishedRound:
        draft = self._parts.draft(batch, plan)
        drafted_at = time.perf_counter()
        if obstacle := why_no_kernels_for(draft, self._rule, batch):
            log_once(self._reasons, obstacle, STEP_BY_STEP)
            return FinishedRound(self._parts.verify_and_commit(batch, draft), drafted_at)
        verdict = self.native.run(draft)
        return FinishedRound(verdict, drafted_at + self.native.draft_seconds)


class NativeRound:
    """Runs rounds for the decoding rows of a batch, under the coupled rule.

    The rejection rule is included for draft tokens without probabilities, for which both rules are equal.

    draft_seconds: time that the last call took to make its draft; 0 if it got one that was made.
    """

    def __init__(self, target: Decoder, model: NativeModel, batch: Batch, threads: int | None) -> None:
        self._target, self._model, self._batch, self._threads = target, model, batch, threads
        rows = batch.max_rows
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
        self.draft_seconds, self._draft_seconds = 0.0, array("d", [0.0])
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
        return None if why_no_kernels(target, rule) else NativeRound(target, model, batch, threads)

    def run(self, draft: Draft) -> Verdict:
        """Verify the draft, accept, and commit to the batch.

        Raises ParameterError if a draft token is not in the vocabulary or comes before its parent; then no row has
        changed.
        """
        if isinstance(draft, PlannedDraft) and not draft.is_made and not self._model.is_part:
            self._begin_with(draft)  # other ranks must know the draft tokens before the round
            self.draft_seconds = self._draft_seconds[0]
        else:
            self._call_kernels(draft)
            self.draft_seconds = 0.0
        verdict = self._read(draft)
        self._batch.note_gains(verdict.gained)
        if self._batch.sampling.any_constraint:
            self._batch.sampling.advance(verdict.tokens)
        return verdict

    def _call_kernels(self, draft: Draft) -> None:
        batch, call, drafted = self._batch, self._call, draft.drafted
        rows, width = batch.rows, max(drafted)
        numbers = [*batch.slots, *drafted]
        for table in (draft.draft_tokens, draft.parents or ()):
            for line in table:
                numbers += line if len(line) == width else [*line[:width], *[0] * (width - len(line))]
        arguments = array("q", numbers)
        call.slots = start = arguments.buffer_info()[0]
        call.counts, call.draft_tokens = start + 8 * rows, start + 16 * rows
        call.parents = None if draft.parents is None else call.draft_tokens + 8 * rows * width
        call.draft_stride, call.draft = width, None
        self._run(drafted)

    def _begin_with(self, draft: PlannedDraft) -> None:
        """Run a round that makes the draft first, so that draft, verification and commit are one call."""
        call, made, drafting = self._call, draft.call, draft.drafting
        call.slots, call.counts, call.draft_tokens, call.parents = made.slots, made.drawn, made.draft_tokens, None
        call.draft_stride, call.draft = made.draft_stride, pointer(made)
        call.drafter, call.draft_cache = drafting.library.handle, pointer(drafting.cache)
        self._run(draft.planned)
        draft.note_made()

    def _run(self, drafted: Sequence[int]) -> None:
        """Run the call, which verifies at most ``drafted[i]`` draft tokens of each row."""
        batch = self._batch
        stops = [length + count for length, count in zip(batch.lengths, drafted, strict=True)]
        self._target.cache.cover(batch.slots, [length - 1 for length in batch.lengths], stops)
        self._describe_rows()
        self._make_room(batch.rows + sum(drafted))
        self._call.rows = batch.rows
        self._model.run_round(self._call, self._target.cache, self._threads)

    def _describe_rows(self) -> None:
        drawing = self._batch.sampling.drawing(self._batch.text, self._batch.length)
        if drawing is not self._drawing:
            self._drawing, self._call.by = drawing, described(drawing)

    def _make_room(self, tokens: int) -> None:
        """Grow the work tensors to ``tokens`` positions; kept and doubled, because new memory is cleared first."""
        call = self._call
        if tokens > call.room:
            call.room = min(max(tokens, 2 * call.room), self._batch.max_rows * _BLOCK)
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
        path = None if draft.parents is None else lists(self._path, width, 0)
        return Verdict(lists(0, _BLOCK, 1), accepted, drafted, gained, draft.parents, path)


def runs_native_rounds(model: AnyModel) -> TypeGuard[NativeModel]:
    """Whether the kernels can run rounds of this model."""
    return isinstance(model, NativeModel)


def workspace_bytes(model: AnyModel, tokens: int, taps: int = 0) -> int:
    """Return the bytes kept after rounds of up to ``tokens`` positions, with ``taps`` hidden states stored."""
    return 4 * tokens * ((1 + taps) * model.width + model.vocab_size) if runs_native_rounds(model) else 0
