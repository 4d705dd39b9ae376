"""Verify, accept and commit as one call of the CPU kernels, for rounds in which nothing in between needs the host.

The same round as ``Speculation.play`` on the host: its parts are the same functions of the library, called from there.
Between two forward passes, which empty the processor's caches, a tensor operator takes 20 to 50 microseconds.
"""

from __future__ import annotations

from array import array

import torch

from paceline.acceptance import RULES, AcceptanceRule
from paceline.batch import Batch
from paceline.decoder import Decoder
from paceline.draft import Draft, HostVerdict, ReadVerdict, Verdict
from paceline.kernels.abi import CRound
from paceline.models.native import NativeModel
from paceline.params import MAX_SPECULATION_LENGTH
from paceline.sampling import Purpose


class NativeRound:
    """Plays rounds of the batch's decoding rows. The coupled rule, and the other one for guesses without a law."""

    def __init__(self, target: Decoder, model: NativeModel, batch: Batch, rule: AcceptanceRule) -> None:
        self._target, self._model, self._batch, self._rule = target, model, batch, rule
        rows = batch.length.shape[0]
        self._record = torch.zeros(rows * (MAX_SPECULATION_LENGTH + 3), dtype=torch.int64)
        self._numbers = self._record.numpy().data
        self._block = MAX_SPECULATION_LENGTH + 1
        tokens, size = self._record.data_ptr(), self._record.itemsize
        self._accepted, self._gained = rows * self._block, rows * (self._block + 1)
        self._call = CRound(
            text=batch.described,
            block=self._block,
            tokens=tokens,
            accepted=tokens + size * self._accepted,
            gained=tokens + size * self._gained,
            purpose=Purpose.DRAW,
        )

    @staticmethod
    def of(target: Decoder, batch: Batch, rule: AcceptanceRule) -> NativeRound | None:
        """None where the host plays the parts: on other models, and under rules that the kernels do not have."""
        model = target.model
        if not isinstance(model, NativeModel) or not model.plays_rounds or model.vocab_size != batch.vocab_size:
            return None
        return NativeRound(target, model, batch, rule) if rule in RULES.values() else None

    def suits(self, rule: AcceptanceRule, draft: Draft) -> bool:
        """Whether it can play the next round: no grammar, no log-probabilities; a chain whose guesses have no law."""
        rows = self._batch.sampling
        needs_host = rows.any_constraint or rows.logprobs is not None
        return rule is self._rule and not needs_host and draft.probabilities is None and draft.parents is None

    def play(self, draft: Draft) -> Verdict:
        """Raises ParameterError if a guess is no token; then no row has gained any."""
        batch, call, rows = self._batch, self._call, self._batch.rows
        places = array("q", self._target.places(rows))
        guesses = draft.tokens if draft.tokens.stride(-1) == 1 else draft.tokens.contiguous()
        call.by, call.rows = batch.sampling.drawing(batch.tokens, batch.length).described, rows
        call.places = places.buffer_info()[0]
        call.guesses, call.guess_stride, call.counts = guesses.data_ptr(), guesses.stride(0), draft.counts.data_ptr()
        self._model.play(call, self._target.cache)
        verdict = self._read(rows, draft.counts.tolist())
        batch.note_gains(verdict.gained)
        return ReadVerdict(verdict)

    def _read(self, rows: int, drafted: list[int]) -> HostVerdict:
        numbers, block = self._numbers, self._block
        accepted = numbers[self._accepted : self._accepted + rows].tolist()
        lines = [numbers[row * block : row * block + kept + 1].tolist() for row, kept in enumerate(accepted)]
        return HostVerdict(lines, accepted, drafted, numbers[self._gained : self._gained + rows].tolist())
