"""``auto`` with a draft model that says how sure it is: every draft ends where the next guess would not pay.

``goodput`` decides whether to speculate at all, by the acceptance and the cost of rounds. How far, each draft decides
for itself. A guess of row r counts what its tokens are worth (1, or more in the late rows of a batch that drains) times
the chance that it and all before it are right: the product of the draft model's likelihoods, corrected by what became
of guesses with such likelihoods (``reliability``). Verifying the best n of them brings

    value(guesses) = max over n   (sum of the best n) - rate * (time(rows, n) - time(rows, 0))

tokens, where ``rate`` is what a millisecond gave lately, or plain decoding gives. The draft goes on while one more
guess a row, kept as often as guesses are at large, is expected to raise the value by more than rate * (a pass of the
draft model); then the best n are verified. Drafting and verifying are timed apart, for a slow memory and busy cores
change them differently. (Stopping on the drafter's confidence: SpecDec++ 2405.19715, EAGLE-2 2406.16858. Here the
threshold is what a guess costs at the present batch size.) A constant likelihood makes it the fixed length that
``goodput`` finds.

Needs a target whose time depends on the tokens in flight, however they are spread over the rows. Under the rejection
rule nothing that was drafted is left out: to drop a guess for what it is would bend the law. To stop after it does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.batch import Batch, Draft, Verdict
from paceline.decoder import Decoder
from paceline.lengths.cost import CostModel, lower_hull
from paceline.lengths.goodput import FIRST_REACH, GoodputLength, Round
from paceline.lengths.judgement import judge
from paceline.lengths.timing import Clock, DraftTimes, Rate
from paceline.reliability import Reliability

CHANCE = 0.7  # of a guess at large, before any was judged
CHANCE_TRIALS = 4.0  # what that weighs
MEMORY = 0.98  # what the evidence about guesses at large is worth a round later


class ConfidentLength(GoodputLength):
    """As ``GoodputLength``, and the draft model's confidence ends each draft. costs, decoders, clock: as there."""

    name = "auto (the draft model's confidence ends a draft)"
    selects = True

    def __init__(self, costs: CostModel, decoders: Sequence[Decoder] = (), clock: Clock = time.perf_counter) -> None:
        super().__init__(CostModel(costs.table.without_drafting(), costs.longest), decoders, clock)
        self._drafting = DraftTimes(costs.table)
        self._drafted_ms = 0.0
        self._in_flight = 0.0  # guesses a row that were verified
        self._judged = self._right = 0.0  # guesses at large, lately
        self._rate = 0.0  # tokens a millisecond
        self._by_rows: dict[int, Rate] = {}
        self._lately = Rate()  # of as many rows
        self._verify_ms: list[float] = []  # of rounds with 0, 1, ... guesses in flight
        self._passes: list[float] = []  # ms of each pass of the draft model
        self._passed = 0.0
        self._draft: Draft | None = None  # the whole of it, before anything was left out

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        self._draft, self._drafted_ms, self._in_flight = None, 0.0, 0.0
        k = super().choose(batch)
        if self._free(self._round):
            self._set_prices(batch)
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

    def _round_times(self, rows: int, context: float) -> NDArray[np.float64]:
        return self.costs.times(rows, context) + self._drafting.times(rows, self.costs.longest)

    def _draft_ms(self, rows: int, k: int) -> float:
        return float(self._drafting.times(rows, k)[k])

    def _set_prices(self, batch: Batch) -> None:
        rows = batch.rows
        self._lately = self._by_rows.setdefault(rows, Rate())
        self._rate = max(self._lately.value, float(self._tokens[0] / self._times[0]))
        self._verify_ms = lower_hull(self.costs.times_of_guesses(rows, batch.longest).ms)
        self._passes, self._passed = [], self._round.began

    def _enough(self, batch: Batch, confidence: Sequence[Sequence[float]]) -> bool:
        now = self.clock()
        self._passes.append(1000 * (now - self._passed))
        self._passed = now
        ends = [0.0] * len(confidence)
        values = []
        for row, worth, survival in self._survivals(batch, confidence):
            values += [worth * chance for chance in survival]
            ends[row] = worth * survival[-1]
        chance = (self._right + CHANCE_TRIALS * CHANCE) / (self._judged + CHANCE_TRIALS)
        more = values + [chance * end for end in ends]
        return self._value(more)[0] - self._value(values)[0] <= self._rate * self._drafting.step_ms(self._round.rows)

    def _survivals(
        self, batch: Batch, confidence: Sequence[Sequence[float]]
    ) -> Iterator[tuple[int, float, list[float]]]:
        """Row by row: its number, what its tokens are worth, the chance that each guess and all before it are right."""
        record = self._record(batch)
        for row, scores in enumerate(confidence):
            survival, chances = 1.0, []
            for place, score in enumerate(scores):
                survival *= record.chance(batch.first + row, score, place)
                chances.append(survival)
            yield row, self._worth[batch.first + row], chances

    def _record(self, batch: Batch) -> Reliability:
        """Of the guesses that this round verifies."""
        return batch.reliability

    def _values(self, batch: Batch, draft: Draft) -> list[list[float]]:
        """What each guess is expected to bring, row by row."""
        scores = zip(draft.confidence or (), draft.counts.tolist(), strict=True)
        known = [line[:count] for line, count in scores]
        return [[worth * chance for chance in chances] for _, worth, chances in self._survivals(batch, known)]

    def _value(self, guesses: Sequence[float]) -> tuple[float, float]:
        """What verifying the best of these guesses brings, and how much the least of them counts."""
        total = best = 0.0
        least, ms = float("inf"), self._verify_ms
        for number, worth in enumerate(sorted(guesses, reverse=True), 1):
            total += worth
            value = total - self._rate * (ms[min(number, len(ms) - 1)] - ms[0])
            if value > best:
                best, least = value, worth
        return best, least

    def select(self, batch: Batch, draft: Draft) -> Draft:
        """The guesses worth verifying."""
        played, counts = self._round, draft.counts.tolist()
        self._drafted_ms = 1000 * (self.clock() - played.began)
        self._draft, played.k = draft, draft.k
        if draft.confidence is not None and draft.probabilities is None:
            values = self._values(batch, draft)
            _, least = self._value([value for line in values for value in line])
            counts = [sum(value >= least for value in line) for line in values]
        self._in_flight = sum(counts) / batch.rows
        return draft.first(counts)

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self._draft is not None:
            self._learn_chances(batch, self._draft, verdict)
        if self._free(self._round):
            self._learn_rate(verdict, 1000 * (self.clock() - self._round.began))
        super().observe(batch, verdict)

    def _learn_rate(self, verdict: Verdict, ms: float) -> None:
        tokens = sum(worth * (kept + 1) for worth, kept in zip(self._worth, verdict.host.accepted, strict=True))
        self._lately.learn(tokens, ms)

    def _learn_chances(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        judged, right = self._round.evidence = judge(draft, verdict)
        if draft.confidence is not None:
            batch.reliability.update(draft.confidence, judged, right)
            self._judged = self._judged * MEMORY + sum(judged)
            self._right = self._right * MEMORY + sum(right)

    def _learn_costs(self, played: Round, ms: float) -> None:
        drafting = max(0.0, self._drafted_ms - played.catch_up)
        if self._passes:
            self._passes[0] = max(0.0, self._passes[0] - played.catch_up)
            self._drafting.observe(played.rows, self._passes)
            self._passes = []
        self.costs.observe(played.rows, self._in_flight, played.context, ms - drafting)
