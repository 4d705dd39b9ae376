"""``auto`` with a draft model that says how sure it is: every draft ends where the next guess would not pay.

``goodput`` decides whether to speculate at all, by the acceptance and the cost of rounds. How far, each draft decides
for itself. After j guesses, row r survives with the chance S_r that all of them are right: the product of the draft
model's likelihoods, corrected by what became of guesses with such likelihoods (``reliability``). One more guess for
every row brings

    sum over rows of max(0, S_r a - rate * verify)    and costs    rate * draft

tokens, where a is the chance of guesses at large, ``verify`` and ``draft`` the milliseconds of another token in flight
and of another pass of the draft model, and ``rate`` the tokens that a millisecond gives otherwise. Of what was drafted,
the target verifies the guesses with S_r >= rate * verify. (Stopping on the drafter's confidence: SpecDec++ 2405.19715,
EAGLE-2 2406.16858. Here the threshold is what a guess costs at the present batch size.) A constant likelihood makes it
the fixed length that ``goodput`` would choose. In a batch that drains S_r counts by how late row r will end.

Needs a target whose time depends on the tokens in flight, however they are spread over the rows. Under the rejection
rule nothing that was drafted is left out: to drop a guess for what it is would bend the law. To stop after it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.lengths.cost import CostModel
from paceline.lengths.goodput import FIRST_REACH, GoodputLength, Round
from paceline.lengths.judgement import judge

CHANCE = 0.7  # of a guess at large, before any was judged
CHANCE_TRIALS = 4.0  # what that weighs
MEMORY = 0.98  # what the evidence about guesses at large is worth a round later


class ConfidentLength(GoodputLength):
    """As ``GoodputLength``, and the draft model's confidence ends each draft. costs, decoders, clock: as there."""

    name = "auto (the draft model's confidence ends a draft)"

    def __init__(
        self,
        costs: CostModel,
        decoders: Sequence[Decoder] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(costs, decoders, clock)
        self._judged = self._right = 0.0  # guesses at large, lately
        self._draft_price = self._verify_price = 0.0  # of a pass of the draft model and of a token verified, in tokens
        self._verify_ms = 0.0
        self._draft: Draft | None = None  # the whole of it, before anything was left out

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        self._draft = None
        k = super().choose(batch)
        if self._free(self._round):
            self._price_guesses(batch)
            batch.enough = self._enough
        return k

    def _free(self, played: Round) -> bool:
        """Whether the drafts of this round find their own ends."""
        return self.k > 0 and not played.probe

    def _longest_draft(self, played: Round) -> int:
        if not self._free(played):
            return played.k
        return min(self.costs.longest, FIRST_REACH + int(self._right))  # likelihoods are trusted by their record

    def _further(self) -> int:
        return self.k if self.k > 0 else 1  # drafts go as far as they pay without being probed

    def _price_guesses(self, batch: Batch) -> None:
        """Another guess takes what the corrected times say; the table says which part of that is the draft model's."""
        rows, table = batch.rows, self.costs.table
        far = min(2 * self.k + 1, self.costs.longest)
        ms = float(self._times[far] - self._times[0]) / far
        drafting = table.draft_ms(rows, far) / far
        verifying = (table.verify_ms(rows, far) - table.verify_ms(rows, 0)) / far
        share = drafting / max(drafting + verifying, 1e-9)
        rate = float(self._tokens[self.k] / self._times[self.k])
        self._verify_ms = (1 - share) * ms / rows
        self._draft_price, self._verify_price = rate * share * ms, rate * self._verify_ms

    def _enough(self, batch: Batch, confidence: Sequence[Sequence[float]]) -> bool:
        chance = (self._right + CHANCE_TRIALS * CHANCE) / (self._judged + CHANCE_TRIALS)
        first, worth = batch.first, self._worth
        gains = (
            worth[first + row] * self._survival(first + row, batch, scores)[-1] * chance
            for row, scores in enumerate(confidence)
        )
        return sum(max(0.0, gain - self._verify_price) for gain in gains) <= self._draft_price

    def _survival(self, row: int, batch: Batch, confidence: Sequence[float]) -> list[float]:
        """The chance that each guess of a row, and all before it, are right."""
        survival, chances = 1.0, []
        for score in confidence:
            survival *= batch.reliability.chance(row, score)
            chances.append(survival)
        return chances

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The guesses worth verifying."""
        played, counts = self._round, draft.counts.tolist()
        self._draft, played.k = draft, draft.k
        if draft.confidence is not None and draft.probabilities is None:
            worthy = zip(counts, self._worth, draft.confidence, strict=True)
            counts = [
                min(count, sum(worth * chance >= self._verify_price for chance in self._survival(row, batch, scores)))
                for row, (count, worth, scores) in enumerate(worthy)
            ]
        played.spared = (draft.k * batch.rows - sum(counts)) * self._verify_ms
        return draft.first(counts)

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self._draft is not None:
            judged, right = self._round.evidence = judge(self._draft, verdict)
            if self._draft.confidence is not None:
                batch.reliability.update(self._draft.confidence, judged, right)
                self._judged = self._judged * MEMORY + sum(judged)
                self._right = self._right * MEMORY + sum(right)
        super().observe(batch, verdict)
