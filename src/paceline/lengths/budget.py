"""``auto`` where guesses cost nothing and each is paid for by itself: a budget for the whole batch, spent on the best.

All guesses of the batch are ranked by survival, the chance that a guess and all before it in its row are right, and
the best m are verified:

    m = argmax  (rows + survival of the best m) / time(rows, m, context),   m = 0, 1, ...

So rows speculate differently, and one with nothing to gain not at all. (TETRIS 2502.15197 and AdaServe 2501.12162
rank guesses under a given budget; here the measured cost sets it.) Needs a target whose time depends on the tokens in
flight, however they are spread over the rows, and a drafter that takes next to no time: n-gram.

Tokens per millisecond are the goal while other requests wait or may come. A batch that only drains has ended when its
slowest row has, which gains nothing when the others hurry on at its expense. There a token counts by how late its row
will end (LATEST), and every row keeps an account of the rounds by which it is ahead of plain decoding; m is such that
none is expected to fall SLACK rounds behind.

Which chance a guess has, its score and the row's luck say (``reliability``). What is not verified teaches, too: the
token that a row gains after its last verified guess says whether the next one would have been right. So plain rounds
need no probes to notice that guesses are good. What they do not show is the time of other rounds: while no guess pays
by what is believed, PROBE_SHARE of the time goes into a purse, and the best guesses are verified when it holds what
they lose. Where guesses are dear and few were kept lately, only every eighth round looks for any, for that takes
time, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.batch import Batch, Draft, Verdict
from paceline.lengths.cost import CostModel, Milliseconds
from paceline.lengths.goodput import LONGEST_AUTO, PROBE_SHARE
from paceline.reliability import Bins

WORTH = 1.03  # guesses must promise so much more than plain decoding
HOPE = 0.5  # the true time of more guesses may be so much of the one believed: worth finding out
CAUTION = 0.2  # of a plain round: what guesses may cost more before any was judged, and for each that was
CLUELESS = 0.6  # confidence in the guesses of a drafter that has no score for them
LATEST = 3  # the power of a row's expected end that its tokens weigh in a batch that drains; more is the maximum
FRUIT = 0.1  # guesses kept for each row and look: with less, and dear guesses, most rounds do not even look for any
FRUIT_MEMORY = 4  # looks
REST = 7  # rounds without a look, for each that looks
DEAR = 0.4  # of a plain token's time: where a guess takes less, every round looks
SLACK = 1.5  # plain rounds by which a row of such a batch may fall behind

Floats = NDArray[np.float64]


class BudgetLength:
    """Chooses how many guesses every row verifies; measures time from ``choose`` to ``observe`` (both on the host).

    costs: time(rows, mean guesses a row, context). clock: seconds.
    """

    name = "auto (a budget for all rows)"

    def __init__(self, costs: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs, self.clock = costs, clock
        self._began = 0.0
        self._context = 0
        self._purse = 0.0  # ms
        self._draft: Draft | None = None  # the whole of it, before anything was left out
        self._bins: Bins = np.empty((0, 0), dtype=np.int64)  # of its confidences
        self._took = 1.0  # expected time of the round, over that of a plain one
        self._fruit = 1.0  # guesses kept for each row and look, lately
        self._rest = 0  # rounds before the next look
        self._price = 0.0  # of a guess, in plain tokens

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        self._began, self._context, self._draft, self._took = self.clock(), batch.longest, None, 1.0
        self._rest -= 1
        return 0 if self._rest >= 0 else LONGEST_AUTO

    def select(self, batch: Batch, draft: Draft) -> Draft:
        self._draft = draft
        self._bins = batch.reliability.bins(_confidence(draft))
        survival = batch.reliability.acceptance(self._bins).cumprod(1)
        survival[np.arange(draft.k) >= draft.counts.numpy()[:, None]] = 0
        return draft.first(self._spend(batch, survival))

    def _spend(self, batch: Batch, survival: Floats) -> list[int]:
        """Guesses to verify in each row, from survival [B, k]; 0 marks what is no guess."""
        weight = _lateness(batch) if batch.draining else np.ones(batch.rows)
        value = (survival * weight[:, None]).ravel()
        best = np.argsort(-value, kind="stable")  # of equals, a row's earlier guess first
        best = best[: np.count_nonzero(value)]
        times = self.costs.times_of_guesses(batch.rows, len(best), self._context)
        self._price = _price(times, batch.rows) if len(best) else self._price
        gains = np.full(len(best) + 1, weight.sum())
        gains[1:] += value[best].cumsum()
        rates = gains / times
        rates[times > times[0] * (1 + CAUTION * (1 + batch.reliability.tried.sum()))] = 0
        if batch.draining:
            rates[1:][_falls_behind(batch, survival, best, times)] = 0
        m = self._best(gains, rates, times)
        self._took = float(times[m] / times[0])
        return np.bincount(best[:m] // survival.shape[1], minlength=batch.rows).tolist()  # type: ignore[no-any-return]

    def _best(self, gains: Floats, rates: Floats, times: Milliseconds) -> int:
        m = int(rates.argmax())
        if rates[m] <= WORTH * rates[0]:
            m = 0
        if not rates[m + 1 :].any():
            return m
        more = m + 1 + int(rates[m + 1 :].argmax())
        if gains[more] <= rates[m] * (times[m] + HOPE * (times[more] - times[m])):
            return m  # it would not pay if it took much less time than is believed
        loss = max(0.0, float(times[more] - gains[more] / rates[m]))
        if self._purse <= loss:
            return m
        self._purse -= loss
        return more

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        rows, guesses = len(verdict.host.drafted), sum(verdict.host.drafted)
        batch.pace.update(verdict.host.accepted, self._took)
        ms = 1000 * (self.clock() - self._began)
        self._purse = min(self._purse + PROBE_SHARE * ms, ms)
        if self._rest < 0:  # the others are all alike
            self._fruit += (sum(verdict.host.accepted) / rows - self._fruit) / FRUIT_MEMORY
            self._rest = REST if self._fruit < FRUIT and self._price > DEAR else 0
            self.costs.observe(rows, guesses / rows, self._context, ms)
        if self._draft is not None:
            self._learn(batch, self._draft, verdict)

    def _learn(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        """Guesses up to the first that was wrong, or was not verified, are judged by what the rows gained."""
        accepted = np.array(verdict.host.accepted)
        place = np.arange(draft.k)
        judged = (place <= accepted[:, None]) & (place < draft.counts.numpy()[:, None])
        right = place < accepted[:, None]
        guesses = draft.tokens.numpy()
        for row, (count, tokens) in enumerate(zip(verdict.host.accepted, verdict.host.tokens, strict=True)):
            if count < draft.k:
                right[row, count] = guesses[row, count] == tokens[count]
        batch.reliability.update(self._bins, judged, judged & right)


def _confidence(draft: Draft) -> Floats:
    if draft.confidence is None:
        return np.full((draft.tokens.shape[0], draft.k), CLUELESS)
    return draft.confidence


def _price(times: Milliseconds, rows: int) -> float:
    """What a guess takes, of what a plain token takes."""
    return float((times[-1] - times[0]) / (len(times) - 1) * rows / times[0])


def _lateness(batch: Batch) -> Floats:
    """[B]: what a token of each row is worth towards an early end of all: (when it ends) ** LATEST / its pace."""
    rows = batch.rows
    left = np.array(batch.limits[:rows]) - np.array(batch.lengths[:rows])
    pace = batch.pace.tokens(rows)
    end = left / pace
    return (end / end.max()) ** LATEST / pace  # type: ignore[no-any-return]


def _falls_behind(batch: Batch, survival: Floats, best: NDArray[np.int64], times: Milliseconds) -> NDArray[np.bool_]:
    """For the best 1, 2, ... guesses: whether some row is then expected to be more than SLACK plain rounds behind."""
    rows, place = batch.rows, np.arange(len(best))
    gained = np.zeros((len(best), rows))
    gained[place, best // survival.shape[1]] = survival.ravel()[best]
    ahead = batch.pace.ahead[:rows] + 1 + gained.cumsum(0) - (times[1:] / times[0])[:, None]
    return ahead.min(1, initial=np.inf) < -SLACK  # type: ignore[no-any-return]
