"""``auto`` where guesses cost nothing and each is paid for by itself: a budget for the whole batch, spent on the best.

All guesses of the batch are ranked by survival, the chance that a guess and all before it in its row are right, and
the best m are verified:

    m = argmax  (rows + survival of the best m) / time(rows, m, context),   m = 0, 1, ...

So rows speculate differently, and one with nothing to gain not at all. (TETRIS 2502.15197 and AdaServe 2501.12162
rank guesses under a given budget; here the measured cost sets it.) Needs a target whose time depends on the tokens in
flight, however they are spread over the rows, and a drafter that takes next to no time: n-gram.

In a batch that drains a token counts by how late its row will end (``lateness``), and every row keeps an account of the
rounds by which its guesses should have brought it ahead of plain decoding (bad luck is no debt, for to wait would not
pay it); m is such that none is expected to fall far behind (SLACK).

Which chance a guess has, its score and the row's luck say (``reliability``). What is not verified teaches, too: the
token that a row gains after its last verified guess says whether the next one would have been right. So plain rounds
need no probes to notice that guesses are good. What rounds do not show is the time of others: PROBE_SHARE of the time
goes into a purse, and when it holds what that loses, more guesses are verified than pay by what is believed, or none.
To look for guesses takes time, too: where looks lately brought less than that, only every eighth round does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.batch import Batch, Draft, Verdict
from paceline.lengths.base import LengthPolicy
from paceline.lengths.cost import CostModel, GuessTimes
from paceline.lengths.goodput import LONGEST_AUTO, PLAIN_MARGIN, PROBE_SHARE, REVIEW
from paceline.lengths.judgement import judge
from paceline.lengths.lateness import worth_of_tokens
from paceline.lengths.ranking import ranked
from paceline.lengths.timing import Clock

WORTH = 1.03  # guesses must promise so much more than plain decoding
HOPE = 0.5  # the true time of more guesses may be so much of the one believed: worth finding out
RISK = 0.25  # of the difference in time: what a round played to see what it takes costs at least
CAUTION = 0.2  # of a plain round: what guesses may cost more before any was judged, and for each that was
CLUELESS = 0.6  # confidence in the guesses of a drafter that has no score for them
LOOK_HOPE = 0.7  # plain rounds that looks for guesses may lose before they must have brought something
LOOK_MEMORY = 128  # looks over which what they bring is averaged
LOOK_REGRET = 0.002  # plain rounds that a look is believed to lose at most, so that one good look ends the rest
REST = 7  # rounds without a look for each that looks, where they bring less than they take
SLACK = 0.3  # plain rounds by which a row of such a batch may fall behind where a guess takes as long as a plain token;
# more where guesses are cheap, for what one row loses another gains: with the inverse square of their price


class BudgetLength(LengthPolicy):
    """Chooses how many guesses every row verifies; measures time from ``choose`` to ``observe`` (both on the host).

    costs: time(rows, mean guesses a row, context). clock: seconds.
    """

    name = "auto (a budget for all rows)"
    selects = True

    def __init__(self, costs: CostModel, clock: Clock = time.perf_counter) -> None:
        self.costs, self.clock = costs, clock
        self._began = 0.0
        self._context = 0
        self._purse = 0.0  # ms
        self._since_plain = 0  # rounds since one without guesses
        self._draft: Draft | None = None  # the whole of it, before anything was left out
        self._counts: list[int] = []  # its guesses, row by row
        self._confidence: Sequence[Sequence[float]] = []  # in them
        self._took = 1.0  # expected time of the round, over that of a plain one
        self._expected: list[float] | None = None  # guesses of each row that should be accepted in it
        self._looked = 0.0  # ms that the last look took which found guesses: to find them, to choose and to learn
        self._brings, self._looks = LOOK_HOPE, 1  # plain rounds that each gains: tokens, less all time that it takes
        self._rest = 0  # rounds before the next look
        self._price = 0.0  # of a guess, in plain tokens
        self._plain = 1.0  # ms of a plain round

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        self._began, self._context, self._draft, self._took = self.clock(), batch.longest, None, 1.0
        self._expected = None
        self._rest -= 1
        return 0 if self._rest >= 0 else LONGEST_AUTO

    def select(self, batch: Batch, draft: Draft) -> Draft:
        self._draft, self._counts, self._confidence = draft, list(map(len, draft.guesses)), _confidence(draft)
        chosen = draft.first(self._spend(batch))
        self._looked = 1000 * (self.clock() - self._began)
        return chosen

    def _spend(self, batch: Batch) -> list[int]:
        """Guesses to verify in each row."""
        weights = worth_of_tokens(batch)
        times = self.costs.times_of_guesses(batch.rows, self._context)
        self._price = _price(times.ms, sum(self._counts), batch.rows) or self._price
        order, gains, rates = self._candidates(batch, weights, times)
        m = self._best(gains, rates, times.ms)
        self._took, self._plain = times.ms[m] / times.ms[0], times.ms[0]
        counts, self._expected = [0] * batch.rows, [0.0] * batch.rows
        for row, survival in order[:m]:
            counts[row] += 1
            self._expected[row] += survival
        return counts

    def _candidates(
        self, batch: Batch, weights: list[float], times: GuessTimes
    ) -> tuple[list[tuple[int, float]], list[float], list[float]]:
        """Rows and survivals of the best guesses; what rounds with 0, 1, ... gain, and a millisecond (0: ruled out).

        Ends where any further guess would cost too much, leave a row behind that has none, or not be verified even if
        it took HOPE times what is believed.
        """
        order: list[tuple[int, float]] = []
        gains, rates = [sum(weights)], [sum(weights) / times.ms[0]]
        most = times.ms[0] * (1 + CAUTION * (1 + sum(batch.copy_reliability.tried)))
        standings = _Standings(batch, self._counts, times.ms[0], self._price)
        for value, survival, row in ranked(batch.copy_reliability, self._confidence, self._counts, weights):
            ms, cheapest = times.ms[len(order) + 1], times.cheapest[len(order)]
            behind, for_good = standings.after(row, survival, ms)
            if for_good or ms > most or value <= max(0.0, HOPE * rates[0] * cheapest):
                break
            order.append((row, survival))
            gains.append(gains[-1] + value)
            rates.append(0.0 if behind else gains[-1] / ms)
        return order, gains, rates

    def _best(self, gains: list[float], rates: list[float], times: list[float]) -> int:
        m = rates.index(max(rates))
        if rates[m] <= WORTH * rates[0]:
            m = 0
        other = self._to_try(m, gains, rates, times)
        if other is None:
            return m
        loss = max(times[other] - gains[other] / rates[m], RISK * abs(times[other] - times[m]))
        if self._purse <= loss:
            return m
        self._purse -= loss
        return other

    def _to_try(self, m: int, gains: list[float], rates: list[float], times: list[float]) -> int | None:
        """How many guesses to verify in place of m, to see what such rounds take: none, or more; None: m."""
        if self._since_plain >= REVIEW and rates[m] < PLAIN_MARGIN * rates[0]:
            return 0
        if not any(rates[m + 1 :]):
            return None
        more = rates.index(max(rates[m + 1 :]), m + 1)
        pays = gains[more] > rates[m] * (times[m] + HOPE * (times[more] - times[m]))
        return more if pays else None  # not if it took much less time than is believed

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        rows, guesses = len(verdict.host.drafted), sum(verdict.host.drafted)
        self._since_plain = self._since_plain + 1 if guesses else 0
        batch.pace.update(verdict.host.accepted, self._took, self._expected)
        ms = 1000 * (self.clock() - self._began)
        self._purse = min(self._purse + PROBE_SHARE * ms, ms)
        if self._draft is not None:
            self._learn(batch, self._draft, verdict)
        if self._rest < 0:  # the others are all alike
            self._learn_worth(sum(verdict.host.accepted) / rows)
            self._rest = REST if self._brings < 0 else 0
            self.costs.observe(rows, guesses / rows, self._context, ms)

    def _learn(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        """Guesses up to the first that was wrong, or was not verified, are judged by what the rows gained."""
        began = self.clock()
        judged, right = judge(draft, verdict)
        batch.copy_reliability.update(self._confidence, judged, right)
        self._looked += 1000 * (self.clock() - began)

    def _learn_worth(self, kept: float) -> None:
        """Of a look by which each row gained so many tokens more."""
        gained = kept - (self._took - 1) - min(self._looked / self._plain, 1.0)
        self._looks = min(self._looks + 1, LOOK_MEMORY)
        self._brings = max(self._brings + (gained - self._brings) / self._looks, -LOOK_REGRET)


def _confidence(draft: Draft) -> Sequence[Sequence[float]]:
    return [[CLUELESS] * draft.k] * draft.counts.shape[0] if draft.confidence is None else draft.confidence


def _price(ms: list[float], guesses: int, rows: int) -> float:
    """What a guess takes, of what a plain token takes; 0 if there is none."""
    return (ms[guesses] - ms[0]) / max(guesses, 1) * rows / ms[0]


class _Standings:
    """Where the rows of a batch that drains are expected to stand, guess by guess.

    plain: ms of a plain round. price: of a guess, in plain tokens.
    """

    def __init__(self, batch: Batch, counts: list[int], plain: float, price: float) -> None:
        self._draining, self._plain, self._left = batch.draining, plain, list(counts)
        self._slack = SLACK / max(price, 1e-3) ** 2
        self._ahead = [ahead + 1 for ahead in batch.pace.ahead[: batch.rows]]

    def after(self, row: int, survival: float, ms: float) -> tuple[bool, bool]:
        """One more guess for ``row``, in a round of ``ms``: whether some row is behind, and without a guess to come."""
        self._ahead[row] += survival
        self._left[row] -= 1
        least = min(self._ahead)
        behind = self._draining and least - ms / self._plain < -self._slack
        return behind, behind and not self._left[self._ahead.index(least)]
