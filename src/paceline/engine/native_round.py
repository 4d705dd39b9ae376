"""Verify, accept and commit as one call of the CPU kernels, for rounds in which nothing in between needs the host.

The same round as ``Speculation.play`` on the host: its parts are the same functions of the library, called from there.
Between two forward passes, which empty the processor's caches, a tensor operator takes 20 to 50 microseconds: so the
host gives and reads numbers in memory of its own, and no tensor is made.
"""

from __future__ import annotations

from array import array
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
from paceline.kernels.abi import CRound, CTextRows, address
from paceline.kernels.cpu import described
from paceline.models.base import AnyModel
from paceline.models.decoder import Decoder
from paceline.models.native import NativeModel

_BLOCK = MAX_SPECULATION_LENGTH + 1


class NativeRound:
    """Plays rounds of the batch's decoding rows. The coupled rule, and the other one for draft tokens without a
    distribution.
    """

    def __init__(
        self, target: Decoder, model: NativeModel, batch: Batch, rule: AcceptanceRule, threads: int | None
    ) -> None:
        self._target, self._model, self._batch, self._rule, self._threads = target, model, batch, rule, threads
        rows = batch.length.shape[0]
        record = array("q", bytes(8 * rows * (2 * _BLOCK + 2)))
        self._record = memoryview(record)
        self._accepted, self._gained, self._path = rows * _BLOCK, rows * (_BLOCK + 1), rows * (_BLOCK + 2)
        tokens, size = record.buffer_info()[0], record.itemsize
        self._call = CRound(
            text=CTextRows.of(*batch.text_rows),
            block=_BLOCK,
            tokens=tokens,
            accepted=tokens + size * self._accepted,
            gained=tokens + size * self._gained,
            path=tokens + size * self._path,
            purpose=Purpose.DRAW,
        )
        self._drawing: DrawRows | None = None  # whom the call describes
        self._work: tuple[Tensor, ...] = ()  # hidden states and so on of the largest round, or of a larger one
        self._taps = torch.empty(0, dtype=torch.int64)
        if isinstance(target.reader, NativeFusedStates):
            self._show(target.reader)

    def _show(self, streams: NativeFusedStates) -> None:
        """The call fuses and keeps what the head reads of each token."""
        call, self._taps = self._call, torch.tensor(streams.taps)
        call.head, call.kept = streams.model.decoder.handle, streams.described
        call.taps, call.tap_count = address(self._taps), len(streams.taps)

    @staticmethod
    def of(target: Decoder, batch: Batch, rule: AcceptanceRule, threads: int | None = None) -> NativeRound | None:
        """None where the host plays the parts: on other models, and under rules that the kernels do not have.

        threads: of the kernels, where nobody says otherwise (``kernel_threads``); None: the model's.
        """
        model = target.model
        if not plays_rounds(model) or model.vocab_size != batch.vocab_size:
            return None
        return None if why_host(target, rule) else NativeRound(target, model, batch, rule, threads)

    def suits(self, rule: AcceptanceRule, draft: Draft) -> bool:
        """Whether it can play the next round: one that needs no host, of draft tokens that have no distribution.

        Rules that know no trees say so on the host.
        """
        shape = draft.host_parents is None or supports_trees(rule)
        return shape and not self.needs_host(rule) and draft.probabilities is None

    def needs_host(self, rule: AcceptanceRule) -> bool:
        """Whether the rows want what only the host can do: another rule, a grammar, log-probabilities."""
        rows = self._batch.sampling
        return rule is not self._rule or rows.any_constraint or rows.logprobs is not None

    def play(self, draft: Draft) -> Verdict:
        """Raises ParameterError if a draft token is no token or follows none; then no row has gained any."""
        self._play(draft)
        verdict = self._read(draft)
        self._batch.note_gains(verdict.host.gained)
        verdict.note_trees(draft)
        return verdict

    def _play(self, draft: Draft) -> None:
        batch, call, drafted = self._batch, self._call, draft.drafted
        rows, width = batch.rows, max(drafted)
        numbers = [*self._target.places(rows), *drafted]
        for table in (draft.draft_tokens, draft.host_parents or ()):
            for line in table:
                numbers += line if len(line) == width else [*line[:width], *[0] * (width - len(line))]
        given = array("q", numbers)
        self._describe_rows()
        self._make_room(rows + sum(drafted))
        call.places = place = given.buffer_info()[0]
        call.counts, call.draft_tokens = place + 8 * rows, place + 16 * rows
        call.parents = None if draft.host_parents is None else call.draft_tokens + 8 * rows * width
        call.draft_stride, call.rows = width, rows
        self._model.play(call, self._target.cache, self._threads)

    def _describe_rows(self) -> None:
        drawing = self._batch.sampling.drawing(self._batch.tokens, self._batch.length)
        if drawing is not self._drawing:
            self._drawing, self._call.by = drawing, described(drawing)

    def _make_room(self, tokens: int) -> None:
        """Fresh memory is cleared by the system, so it is kept; by doubling it is seldom fresh."""
        call = self._call
        if tokens > call.room:
            call.room = min(max(tokens, 2 * call.room), len(self._batch.lengths) * _BLOCK)
            widths = self._model.width, self._model.vocab_size, len(self._taps) * self._model.width
            self._work = tuple(torch.empty(call.room, width, dtype=torch.float32) for width in widths)
            call.hidden, call.logits, call.features = (memory.data_ptr() for memory in self._work)

    def _read(self, draft: Draft) -> Verdict:
        record, drafted = self._record, draft.drafted
        rows, width = len(drafted), max(drafted)
        accepted = record[self._accepted : self._accepted + rows].tolist()

        def of_each(first: int, stride: int, more: int) -> list[list[int]]:
            starts = ((first + row * stride, kept + more) for row, kept in enumerate(accepted))
            return [record[start : start + size].tolist() for start, size in starts]

        gained = record[self._gained : self._gained + rows].tolist()
        host = HostVerdict(of_each(0, _BLOCK, 1), accepted, drafted, gained)
        return Verdict.of(host, None if draft.host_parents is None else of_each(self._path, width, 0))


def why_host(target: Decoder, rule: AcceptanceRule) -> str | None:
    """Why the host plays rounds of a model of which the kernels could; None if it does not."""
    if not isinstance(target.reader, NativeFusedStates | None):  # the call gives them to heads of the kernels alone
        return "the drafter reads the target's streams"
    return None if rule in RULES.values() else "the kernels do not have this acceptance rule"


def plays_rounds(model: AnyModel) -> TypeGuard[NativeModel]:
    """Whether the kernels can play rounds of this model."""
    return isinstance(model, NativeModel) and model.plays_rounds


def kept_bytes(model: AnyModel, tokens: int, taps: int = 0) -> int:
    """What stays allocated after rounds of so many tokens, of which so many streams are read, in bytes."""
    return 4 * tokens * ((1 + taps) * model.width + model.vocab_size) if plays_rounds(model) else 0
