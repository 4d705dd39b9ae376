"""``auto`` where guesses may be copied, which is free, or drafted by a model: by what either brings.

Copies are looked up every round. Verifying the best n of them is expected to bring

    value = max over n   (sum of the best n's chances) - rate * (time(rows, n) - time(rows, 0))

tokens, where ``rate`` is what a millisecond gives lately in rounds of the draft model: what can be copied is there to
be copied however fast the rest goes, so it does not make the rest's time dearer. The draft model is expected to bring
what it brought lately, its passes paid for. The better one is played. Copies are judged whether they were verified or
not, so their chances stay known. A backlog that the draft model could not earn back before the rows end is not read.

Where the draft model does not pay at all, copies are chosen as if there were none (``budget``); probes of the draft
model go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.lengths.budget import BudgetLength
from paceline.lengths.confident import ConfidentLength
from paceline.lengths.cost import CostModel
from paceline.lengths.goodput import HOPE, LONGEST_AUTO
from paceline.lengths.judgement import judge
from paceline.lengths.timing import Clock, Mean
from paceline.reliability import Reliability


class HybridLength(ConfidentLength):
    """As ``ConfidentLength``, and each round copies or asks the draft model. costs, decoders, clock: as there."""

    name = "auto (copies or the draft model, whichever brings more)"

    def __init__(self, costs: CostModel, decoders: Sequence[Decoder] = (), clock: Clock = time.perf_counter) -> None:
        super().__init__(costs, decoders, clock)
        self._copies_alone = BudgetLength(self.costs, clock)
        self._resting = False  # whether the draft model does not pay: copies alone are played
        self._copied: Draft | None = None  # this round's copies
        self._copying = False  # whether they are what it verifies
        self._brought: dict[int, Mean] = {}  # tokens beyond a plain round that the draft model brought, by rows

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        self._copied, self._copying = None, False
        k = super().choose(batch)
        self._resting = self.k == 0 and not self._round.probe
        if self._resting:
            batch.instead = lambda _batch, _copied: 0
            return self._copies_alone.choose(batch)
        if not self._free(self._round):
            batch.instead = lambda _batch, _copied: k
            return k
        batch.instead = self._instead
        return LONGEST_AUTO

    def _instead(self, batch: Batch, copied: Draft) -> int:
        played = self._round
        self._copied, self._copying = copied.capped(batch.caps), True
        values = self._values(batch, self._copied)
        value, _ = self._value([value for line in values for value in line])
        self._copying = value > max(self._of_the_model(batch).value, 0.0) or self._too_late(batch)
        if self._copying:
            played.catch_up = 0.0
        return 0 if self._copying else played.k

    def _too_late(self, batch: Batch) -> bool:
        """Whether the draft model would save less than its backlog takes, by what is believed of k guesses a row.

        Where that is nothing, it is asked because little is known of it, which must come to be known: then by hope.
        """
        left = max(batch.limits[row] - batch.lengths[row] for row in range(batch.rows))
        tokens, plain, ms = self._tokens[self.k] / self._tokens[0], self._times[0], self._times[self.k]
        if ms >= plain * tokens:
            tokens = sum(HOPE**place for place in range(self.k + 1))
        return bool(self.costs.feed_ms(sum(self._backlog(batch))) > max(0.0, left * (plain - ms / tokens)))

    def _of_the_model(self, batch: Batch) -> Mean:
        if batch.rows not in self._brought:
            tokens, times = self._tokens[self.k] - self._tokens[0], self._times[self.k] - self._times[0]
            self._brought[batch.rows] = Mean(float(tokens - self._rate * times))
        return self._brought[batch.rows]

    def _record(self, batch: Batch) -> Reliability:
        return batch.copy_reliability if self._copying else super()._record(batch)

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The guesses worth verifying."""
        if self._resting:
            return self._copies_alone.select(batch, draft)
        return super().select(batch, draft)

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self._resting:
            self._copies_alone.observe(batch, verdict)
            self._rest()
            return
        if self._copied is not None:
            judged, right = judge(self._copied, verdict)
            batch.copy_reliability.update(self._copied.confidence or (), judged, right)
        if self._copying:
            guesses = round(self._in_flight * batch.rows)
            self._round.took = self._verify_ms[guesses] / self._verify_ms[0]
            self._round.evidence = [0] * batch.rows, [0] * batch.rows  # copies say nothing about the draft model
        super().observe(batch, verdict)
        self._off = self._off or self._copying

    def _rest(self) -> None:
        """A round without the draft model, though there may have been guesses."""
        ms = 1000 * (self.clock() - self._round.began)
        self.rounds += 1
        self.total_ms += ms
        self._save(ms)
        self._off = True

    def _learn_rate(self, verdict: Verdict, ms: float) -> None:
        if not self._copying:
            super()._learn_rate(verdict, ms - self._round.catch_up)

    def _learn_chances(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        if self._copying:
            return
        super()._learn_chances(batch, draft, verdict)
        if self._free(self._round):
            rows = batch.rows
            kept = sum(worth * good for worth, good in zip(self._worth, verdict.host.accepted, strict=True))
            ms = self._draft_ms(rows, draft.k) + self._verify_ms[round(self._in_flight * rows)] - self._verify_ms[0]
            self._of_the_model(batch).learn(kept - self._rate * ms)
