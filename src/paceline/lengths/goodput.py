"""``auto``: the length that gives the most tokens per millisecond at the present batch, acceptance and cost.

    k = argmax  sum over rows (1 + sum_j prod_{i <= j} a_i) / time(b, k, context),   k = 0 .. longest

a_i is the acceptance at position i, each row's own shrunk to the batch's (``history``); time comes from the cost model,
which real rounds correct. (Synergy 2310.18813 profiles k by batch size; SmartSpec 2406.14066 maximises the same ratio.)

What the present length does not show is found out by *probes*: now and then a round asks for more guesses than pays
(after k = 0: for any at all), or plays plain to see what that costs. A purse pays for them: PROBE_SHARE of the time
played goes in, and a probe is played when its price is there. A probe priced at c plain rounds therefore comes every
c / PROBE_SHARE rounds: every 53 for c = 0.4 and PROBE_SHARE = 0.75 %, but never sooner than MIN_INTERVAL rounds. One
that shows more than was believed is repeated at once, on credit (MAX_DEBT prices): two or three make a change believed.

A draft model must first read what it missed. To probe, only the row that missed least is caught up and asked, and its
backlog is part of the price. Of n rounds missed by one row, the draft model reads n tokens in one pass, at perhaps a
tenth of the time that it takes to guess them. Where that alone eats the share (a lone row with a large draft model),
probes are rarer than one in 100 rounds; new rows, whose prompt the draft model has read, are probed at once for less.
Switching on for all rows is charged their whole backlog, spread over HORIZON rounds. Where even a draft model that is
nearly always right would not pay (``hopeful``), it does not read the prompts either, until it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.batch import Batch, Verdict
from paceline.decoder import Decoder
from paceline.lengths.base import LengthPolicy
from paceline.lengths.cost import CostModel
from paceline.lengths.lateness import worth_of_tokens
from paceline.lengths.timing import Clock

LONGEST_AUTO = 16  # the longest draft that auto considers
LONGER = 1.01  # a longer draft must promise so much more than the present one
SHORTER = 1.005  # and a shorter one so much
DOUBT = 1.5  # standard errors of the acceptance by which speculation gets the benefit of the doubt
HORIZON = 64  # rounds over which the cost of switching on is spread
HOPE = 0.9  # acceptance that no draft model exceeds for long
PROBE_SHARE = 0.0075  # of the time
MIN_INTERVAL = 16  # rounds between two probes, however cheap
MAX_DEBT = 3  # probes on credit
FEW_TRIALS = 4  # of the first guess, before which speculation is not switched off
FIRST_REACH = 4  # the longest draft to begin with; from there on, at most twice the present length
FURTHER = 2  # guesses beyond the best length that a probe asks for
SURPRISE = 0.3  # a probe that keeps this much more of its guesses than believed is repeated at once
PLAIN_MARGIN = 1.25  # plain rounds are measured again while speculation promises less than this factor
REVIEW = 32  # plain rounds after which the decision is looked at again


@dataclass
class Round:
    """The round being played."""

    rows: int
    context: int
    k: int
    began: float
    probe: bool = False
    asked: range | None = None  # the rows asked for guesses; None: all
    evidence: tuple[list[int], list[int]] | None = None  # guesses judged and right of each row; None: asked for, kept
    catch_up: float = 0.0  # ms that the draft model needs to catch up first
    took: float | None = None  # expected time over that of a plain round; None: as believed of k guesses a row
    believed: float = 1.0  # acceptance at the first position that only a probe asks for

    @property
    def asked_of_each(self) -> int | list[int]:
        """Guesses asked of each row; a number if of all alike."""
        asked = self.asked
        return self.k if asked is None else [self.k if row in asked else 0 for row in range(self.rows)]


class GoodputLength(LengthPolicy):
    """Chooses every round's length; measures time from ``choose`` to ``observe`` (both on the host).

    costs: time(b, k, context). decoders: the drafter's, whose caches fall behind while k = 0. clock: seconds.
    """

    name = "auto"
    times = True

    def __init__(self, costs: CostModel, decoders: Sequence[Decoder] = (), clock: Clock = time.perf_counter) -> None:
        self.costs, self.decoders, self.clock = costs, decoders, clock
        self.k = 0  # the length in force; probes aside
        self.rounds = self.probes = 0
        self.probe_ms = self.total_ms = 0.0  # what probes cost beyond the rounds they replaced; all rounds
        self._purse = 0.0  # ms
        self._price = np.inf
        self._repeat = False
        self._review = 0  # plain rounds left before the decision is looked at again
        self._rows = -1
        self._off = False  # whether the last round was plain: switching on has a price
        self._turn = False  # probes take turns: further, plain
        self._round = Round(0, 0, 0, 0.0)

    # --- before the round --------------------------------------------------------

    def choose(self, batch: Batch) -> int:
        played = self._round = Round(batch.rows, batch.longest, self.k, self.clock())
        if self._needs_review(batch):
            self._decide(batch)
            played.k = self.k
            if probe := self._probe(batch):
                self._start_probe(batch, *probe)
        played.k = min(self._longest_draft(played), batch.room - 1)
        if self._off and played.k > 0 and played.asked is None:
            played.catch_up = self.costs.feed_ms(sum(self._backlog(batch)))
        return played.k

    def _longest_draft(self, played: Round) -> int:
        """Guesses that the round may ask of a row."""
        return played.k

    def _start_probe(self, batch: Batch, k: int, rows: range | None) -> None:
        if self.k == 0:
            batch.history.rest()
        played = self._round
        played.probe, played.k, played.asked = True, k, rows
        played.believed = float(batch.history.batch_acceptance(self.k + 1)[self.k])
        self._repeat = False
        if rows is not None:
            batch.caps = [k if row in rows else 0 for row in range(batch.rows)]

    def _needs_review(self, batch: Batch) -> bool:
        """While plain decoding goes on, next to nothing is spent on thinking about it."""
        self._review -= 1
        return bool(
            self.k > 0 or self._review < 0 or batch.rows != self._rows or self._repeat or self._purse >= self._price
        )

    def _decide(self, batch: Batch) -> None:
        """Set ``k`` to what pays best."""
        self._rows, self._review = batch.rows, REVIEW
        self._worth = worth_of_tokens(batch)
        self._tokens = expected_tokens(batch.history.acceptance(batch.rows, self.costs.longest), self._worth)
        self._times = self._round_times(batch.rows, batch.longest)
        charged = self._times
        if self._off and self.decoders:
            charged = self._times.copy()
            charged[1:] += self.costs.feed_ms(sum(self._backlog(batch))) / HORIZON
        rates = self._tokens / charged
        best = int(rates[: max(FIRST_REACH, 2 * self.k) + 1].argmax())  # what lies far beyond is not known from here
        if best == 0 and self.k > 0 and batch.history.all_tried[0] < FEW_TRIALS:
            best = 1
        present = rates[self.k]
        if best == 0 and self.k > 0:
            present *= self._benefit_of_doubt(batch)
        if rates[best] > present * (LONGER if best > self.k else SHORTER):
            self.k = best

    def _round_times(self, rows: int, context: float) -> NDArray[np.float64]:
        """[longest + 1]: milliseconds of a round with k = 0, 1, ... guesses a row."""
        return self.costs.times(rows, context)

    def _draft_ms(self, rows: int, k: int) -> float:
        """Milliseconds that a draft of k guesses for so many rows takes."""
        return self.costs.table.draft_ms(rows, k)

    def _benefit_of_doubt(self, batch: Batch) -> float:
        """How much more the present length would give were the first guess's acceptance DOUBT standard errors higher.

        Switching off loses the evidence that every round brings, so bad luck alone must not do it.
        """
        known, chance = batch.history.all_tried[0], batch.history.batch_acceptance(1)[0]
        error = (chance * (1 - chance) / (known + 1)) ** 0.5
        guesses = self._tokens[self.k] - self._tokens[0]
        return float(1 + guesses * (DOUBT * error / chance) / self._tokens[self.k])

    def _backlog(self, batch: Batch) -> list[int]:
        """Tokens that each row's caches lack, beyond the one that a draft feeds anyway."""
        lags = [decoder.lags(batch) for decoder in self.decoders]
        return [sum(each) - len(lags) for each in zip(*lags, strict=True)]

    def hopeful(self, rows: int) -> bool:
        """Whether so many rows could gain by good guesses: else a draft model need not read their prompts yet."""
        tokens = expected_tokens(np.full((rows, self.costs.longest), HOPE))
        rates = tokens / self._round_times(rows, self.costs.table.context)
        return bool(rates[1:].max() > rates[0])

    # --- probes -----------------------------------------------------------------

    def _probe(self, batch: Batch) -> tuple[int, range | None] | None:
        """The length to try and the rows to try it on (None: all), if there is something to try and it is paid for."""
        further = self._further()
        if self.k > 0 and (self._turn or further == self.k) and self._plain_unclear():
            k, rows, cost = 0, None, self._loss(0)
        elif self.k == 0 and self.decoders and batch.rows > 1:
            k, (rows, cost) = 1, self._one_row(batch)
        else:
            k, rows = further, None
            cost = self._loss(k)
            if self._off:
                cost += self.costs.feed_ms(sum(self._backlog(batch)))
        self._price = max(cost, MIN_INTERVAL * PROBE_SHARE * float(self._times[self.k]))
        if not self.rounds and self.hopeful(batch.rows):
            self._purse = self._price  # the first probe is free: nothing but tables has spoken yet
        if k == self.k or not (self._purse >= self._price or (self._repeat and self._purse > -MAX_DEBT * self._price)):
            return None
        return k, rows

    def _further(self) -> int:
        """The length that a probe asks for of all rows."""
        return min(self.k + (FURTHER if self.k else 1), self.costs.longest)

    def _plain_unclear(self) -> bool:
        return bool(self._tokens[self.k] / self._times[self.k] < PLAIN_MARGIN * self._tokens[0] / self._times[0])

    def _loss(self, k: int) -> float:
        """Milliseconds that a round of k guesses loses against one of the length in force, tokens counted."""
        rate = self._tokens[self.k] / self._times[self.k]
        return float(self._times[k] - self._tokens[k] / rate)

    def _one_row(self, batch: Batch) -> tuple[range, float]:
        """The row whose draft cache lacks least, and what probing it costs."""
        backlog = self._backlog(batch)
        row = min(range(batch.rows), key=backlog.__getitem__)
        table = self.costs.table
        drafting = self._draft_ms(1, 1) + table.verify_ms(batch.rows, 1) - table.verify_ms(batch.rows, 0)
        return range(row, row + 1), drafting + self.costs.feed_ms(backlog[row])

    # --- after the round ----------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        played, accepted = self._round, verdict.host.accepted
        if played.k > 0:
            batch.history.update(*(played.evidence or (played.asked_of_each, accepted)))
        ms = 1000 * (self.clock() - played.began)
        took = self._times[played.k] / self._times[0] if played.took is None else played.took
        batch.pace.update(accepted, float(took))
        self.rounds += 1
        self.total_ms += ms
        if played.asked is None and played.catch_up < ms / 2:  # else the time says little about such rounds
            self._learn_costs(played, ms - played.catch_up)
        if played.probe:
            self._pay(played, ms, accepted)
        else:
            self._save(ms)
        self._off = played.k == 0

    def _save(self, ms: float) -> None:
        """For probes, of the time of a round that was none."""
        self._purse = min(self._purse + PROBE_SHARE * ms, max(self._price, PROBE_SHARE * ms))

    def _learn_costs(self, played: Round, ms: float) -> None:
        """From a round that took ``ms``, catching up apart."""
        self.costs.observe(played.rows, played.k, played.context, ms)

    def _pay(self, played: Round, ms: float, accepted: Sequence[int]) -> None:
        """Take what the probe cost out of the purse; if it showed more than was believed, play another at once."""
        tokens = sum(worth * (kept + 1) for worth, kept in zip(self._worth, accepted, strict=False))
        cost = ms - float(self._times[self.k]) * tokens / float(self._tokens[self.k])
        self._purse -= max(cost, self._price / 2)
        if not self.probes:
            self._purse = max(self._purse, 0.0)  # the first is free, whatever came of it
        self.probes += 1
        self.probe_ms += cost
        self._turn = not self._turn
        self._review = 0
        tried = sum(kept >= self.k for kept in accepted) if played.asked is None else len(played.asked)
        kept = sum(kept > self.k for kept in accepted)
        self._repeat = played.k > self.k and tried > 0 and kept / tried > played.believed + SURPRISE


def expected_tokens(acceptance: NDArray[np.float64], worth: Sequence[float] | None = None) -> NDArray[np.float64]:
    """[rows, longest] acceptance by position -> [longest + 1]: tokens of a round with k = 0, 1, ... guesses a row.

    worth: [rows], what a token of each row counts; None: 1.
    """
    weights = np.ones(acceptance.shape[0]) if worth is None else np.array(worth)
    survival = weights @ acceptance.cumprod(axis=1)
    tokens = np.full(len(survival) + 1, weights.sum())
    tokens[1:] += survival.cumsum()
    return tokens
