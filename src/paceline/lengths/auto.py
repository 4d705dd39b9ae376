"""``auto``: verify the draft tokens that yield the most tokens beyond a plain round, at the current rate.

The value of verifying a set of n draft tokens is

    value = sum of w s - rate (T(n) - T(0))        in tokens

* ``s``, survival: probability that a draft token and all its ancestors are accepted.
* ``w``, token weight: 1, or more for rows that will end last in a draining batch.
* ``rate``: tokens per millisecond of recent rounds of this kind, at least plain decoding's.
* ``T(n)``: milliseconds of a round that verifies n draft tokens.

The n draft tokens with the largest w s are verified, for the n of the highest value. Survival falls along a chain and
down a tree, so the best tokens of a chain are a prefix and the best nodes of a tree are a tree.

* Draft depth: drafting goes on while one more draft token per row is expected to raise the value by more than
  rate * (time of one drafting pass).
* Whether to draft: a source of draft tokens (a draft model, or the search for n-gram drafts) is used while its recent
  net gain, plus an allowance for its standard error, exceeds rate * F. F is the time to read what the draft model has
  missed, divided by the remaining rounds.
* n-gram drafts replace the draft model's where their value exceeds the draft model's recent net gain.
* Exploration: a share of run time pays for trials of a source that looks unprofitable. Its record counts little then.

Draft tokens are judged by the tokens that the row gained, verified or not. Under the rejection rule every drafted token
is verified, because dropping a token for its value would bias the distribution. Ending a draft early does not.

Sometimes the policy cannot choose among draft tokens: rounds on a device are not seen before verification, and some
kernels take as long as the longest draft in every row. Then the position in the draft is the score, and one length is
chosen beforehand, by the same value.

Related: TETRIS (arXiv 2502.15197) and AdaServe (2501.12162) rank draft tokens under a fixed budget; SpecDec++
(2405.19715) and EAGLE-2 (2406.16858) stop by the drafter's confidence; SmartSpec (2406.14066) maximises the rate of one
length for all rows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from operator import itemgetter
from statistics import fmean
from typing import TypeAlias

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.lengths.base import LengthPolicy, PolicyInputs
from paceline.lengths.belief import (
    LONGEST_AUTO,
    PRIOR_ACCEPTANCE,
    ExplorationBudget,
    JudgedToken,
    RowProgress,
    RunningMean,
    ScoreCalibration,
    TokenRate,
    bins_of,
    bins_of_draft,
    judge,
)
from paceline.lengths.cost import REFRESH_ROUNDS, CostModel, RoundTimes
from paceline.models.decoder import Decoder

Clock: TypeAlias = Callable[[], float]  # seconds
Parents: TypeAlias = Sequence[int] | None  # index of each draft token's parent in its row, -1 for none; None: a chain

# Standard errors added to a recent net gain. With 1 for draft models, a good one was given up for a whole answer in 3
# of 24 simulations: its trials are rare. With 0.5 for n-gram drafts, speed fell from 0.994 to 0.988 (docs/log.md).
DRAFT_MODEL_ALLOWANCE = 1.5
NGRAM_ALLOWANCE = 1.0
TRIAL_WEIGHT = 3.0  # rounds that a source's record counts as at most in a trial: one or two good trials are believed
# Draft tokens. Weight of the prior acceptance, and longest first draft: longer ones need accepted tokens. Drafts of 16
# from the start ran at 0.993 (docs/log.md).
PRIOR_TOKENS = 4
ACCEPTANCE_FADE = 0.98  # weight of the record of all draft tokens after one more round: about the last 50 rounds count
SEARCH_PRIOR = 0.2  # tokens per row that a search for n-gram drafts is assumed to gain, before the first
# Extra verification time of n-gram drafts, as a fraction of a plain round: allowed before any draft token was judged,
# and again for each one per row that was. Without this cap n-gram drafts lose 0.5 %; 0.1 gives 0.991 (docs/log.md).
NGRAM_TIME_CAP = 0.2
DRAIN_DEFICIT = 0.5  # plain rounds that drafts may cost a draining batch; with 0 it often gives up drafts that pay
RETRY_DISCOUNT = 0.5  # the retry of ``_counts_to_verify`` assumes that drafts cost this share of what is predicted


class DraftSource:
    """Record of one kind of draft tokens: the draft model's, or n-gram drafts.

    calibration: from scores to probabilities. judged, right: recent draft tokens, fading.
    rates: by number of rows, tokens per millisecond of rounds that used this source.
    gains: by number of rows, net gain in tokens per row of such a round: gained beyond plain decoding, minus rate times
        the extra time.
    budget: pays for using the source although its gain looks too low.
    """

    def __init__(self) -> None:
        self.calibration = ScoreCalibration()
        self.judged = self.right = 0.0
        self.rates: dict[int, TokenRate] = {}
        self.gains: dict[int, RunningMean] = {}
        self.budget = ExplorationBudget()

    @property
    def acceptance(self) -> float:
        """Probability that a draft token is right, without its score or position."""
        return (self.right + PRIOR_TOKENS * PRIOR_ACCEPTANCE) / (self.judged + PRIOR_TOKENS)

    def learn(self, judged: Sequence[Sequence[JudgedToken]], slots: Sequence[int] | None = None) -> None:
        """Learn from a round, as ``ScoreCalibration.learn`` does."""
        self.calibration.learn(judged, slots)
        self.judged = self.judged * ACCEPTANCE_FADE + sum(map(len, judged))
        self.right = self.right * ACCEPTANCE_FADE + sum(right for line in judged for _, right in line)

    def learn_draft(self, draft: Draft, verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn what the verdict says about a draft of the same round, even if none of its tokens was verified."""
        bins = bins_of_draft(draft)
        judged = zip(bins, judge(draft, verdict), strict=True)
        self.learn([[(line[place], right) for place, right in known] for line, known in judged], slots)


@dataclass
class PendingRound:
    """A round that was chosen and not yet observed.

    began, ready: when it and when its verification began, in seconds. token_weights: w of each row, [B].
    """

    batch: Batch
    began: float
    ready: float
    times: RoundTimes
    token_weights: list[float]
    rows: int = 0
    context: int = 0  # tokens of the longest row
    source: DraftSource | None = None  # of the draft tokens that are verified
    rate: float = 0.0  # tokens per millisecond
    trial: bool = False
    is_plain_check: bool = False  # runs without draft tokens, to measure a plain round
    trial_rows: range | None = None  # rows that get draft tokens; None: all
    k: int = 0  # draft tokens planned per row
    draft_tokens: int = 0  # verified, all rows together
    feed_ms: float = 0.0  # for reading what the draft model has missed
    passes: list[float] = field(default_factory=list)  # ms of each drafting pass
    drafts: list[tuple[DraftSource, Draft]] = field(default_factory=list)  # all drafts that the policy saw

    def __post_init__(self) -> None:
        self.rows, self.context = self.batch.rows, self.batch.longest

    @property
    def scale(self) -> float:
        """Rows of the batch per row with draft tokens: converts a trial's result to the whole batch."""
        return 1.0 if self.trial_rows is None else self.rows / len(self.trial_rows)


class AutoLength(RowKeepers, LengthPolicy):
    """The policy of this module. It measures time from ``choose`` to ``observe``, both on the host.

    costs: predicted times. With ``includes_drafting`` drafts are not seen before verification.
    decoders: the drafter's, whose caches fall behind in rounds without them.
    copies: whether the drafter has n-gram drafts, beside its decoders' if there are any.
    clock: returns seconds.
    times: whether rounds are timed. If not, each may be observed one round late, and its time is the predicted one.
    paying_rows: as in ``PolicyInputs``. Batches of more rows never use the decoders, whatever the costs say.
    """

    name = "auto"
    reads_profile = True
    max_draft_tokens = LONGEST_AUTO
    times = True
    paying_rows: int | None = None

    def __init__(
        self,
        costs: CostModel,
        decoders: Sequence[Decoder] = (),
        copies: bool = True,
        clock: Clock = time.perf_counter,
        times: bool = True,
    ) -> None:
        self.costs, self.decoders, self.clock, self.times = costs, decoders, clock, times
        self.selects = not costs.includes_drafting
        self.model_drafts, self.ngram_drafts = DraftSource(), DraftSource()
        self._shape: Parents = None  # of recent trees, where drafts are not seen before verification
        self._searches = self.selects and (copies or not decoders)
        self._sources = [self.model_drafts] if decoders or costs.includes_drafting else []
        self._sources += [self.ngram_drafts] if self._searches else []
        self._progress = RowProgress()
        self._budget = ExplorationBudget()  # for plain checks and retries, which tell what other rounds cost
        self._search_ms = 0.0  # of the last search for n-gram drafts
        self._overhead_ms = RunningMean(0.0)  # per draft, beside its passes: choosing and learning
        self._had_drafts = False  # whether draft tokens were verified in the last round
        self._rounds_without_drafts = 0  # since the last with any
        self._last_backoff = 0  # rounds; 0 once a source was used
        self._backoff = 0  # rounds left that are plain without a decision: nothing can change before
        self._current: PendingRound
        self._pending: deque[PendingRound] = deque()  # oldest first; the last is ``_current``

    @classmethod
    def build(cls, inputs: PolicyInputs, /) -> AutoLength:
        costs = CostModel(inputs.costs(), includes_drafting=not inputs.ragged)
        policy = cls(costs, inputs.decoders, inputs.copies, times=not inputs.overlaps)
        policy.paying_rows = inputs.paying_rows
        return policy

    def describe(self) -> str:
        return self.name if self.paying_rows is None else f"{self.name} (drafts for up to {self.paying_rows} rows)"

    def _may_use_decoders(self, rows: int) -> bool:
        return self.paying_rows is None or rows <= self.paying_rows

    def _sources_for(self, rows: int) -> list[DraftSource]:
        """Sources that may be used for ``rows`` rows."""
        if self._may_use_decoders(rows):
            return self._sources
        return [source for source in self._sources if source is not self.model_drafts]

    # --- before the round ------------------------------------------------------------

    def choose(self, batch: Batch) -> SpeculationPlan:
        if self._backoff and self._current.rows == batch.rows:
            self._backoff -= 1
            self._rounds_without_drafts += 1
            self._accrue_budgets(self._current.times.plain)
            return SpeculationPlan(0)
        self._backoff, began = 0, self.clock()
        times = self.costs.times(batch.rows, batch.longest)
        self._current = PendingRound(batch, began, began, times, self._progress.token_weights(batch))
        while len(self._pending) > (not self.times):  # the round before failed
            self.lost()
        self._pending.append(self._current)
        for source in self._sources_for(batch.rows):
            if self._decide(source):
                self._rounds_without_drafts = self._last_backoff = 0
                return self._plan(source)
            if self._current.is_plain_check:
                break
        self._rounds_without_drafts += 1
        return SpeculationPlan(0)

    def _decide(self, source: DraftSource) -> bool:
        """Whether this round uses the source: its recent gain pays, or a trial is affordable."""
        current, gain = self._current, self._gain_of(source)
        current.source, current.rate = source, self._rate_of(source)
        is_model = source is self.model_drafts
        backlog, shared, allowance = (
            (*self._backlog(), DRAFT_MODEL_ALLOWANCE) if is_model else ([0], 0, NGRAM_ALLOWANCE)
        )
        current.feed_ms = self.costs.feed_ms(sum(backlog) - shared)
        batch = current.batch
        rounds_left = max(limit - length for limit, length in zip(batch.limits, batch.lengths, strict=True))
        if self.costs.includes_drafting:
            value = self._best_length()[0]
        else:
            value = (gain.value + allowance * gain.error) * current.rows
        if value > current.rate * current.feed_ms / max(rounds_left, 1) and not self._is_behind_plain():
            current.is_plain_check = self._checks_plain(value / current.rate)
            if not current.is_plain_check:
                return True
        else:
            current.trial = source.budget.try_spend(self._prepare_trial(source, backlog))
            if current.trial:
                gain.doubt(TRIAL_WEIGHT)
                return True
        current.source, current.trial_rows, current.feed_ms = None, None, 0.0
        return False

    def _is_behind_plain(self) -> bool:
        """Whether drafts have cost a draining batch more than they gained. No later round would make up for it."""
        batch = self._current.batch
        return batch.draining and batch.rows > 1 and fmean(self._progress.leads(batch.slots)) < -DRAIN_DEFICIT

    def _checks_plain(self, loss_ms: float) -> bool:
        """Whether to run a plain round, which loses ``loss_ms``, to measure its time.

        Only if none ran just before and the loss is within the uncertainty of a plain round's predicted time.
        """
        is_unsure = self.times and loss_ms < 2 * self._current.times.error and self._had_drafts
        return is_unsure and self._budget.try_spend(loss_ms)

    def _prepare_trial(self, source: DraftSource, backlog: list[int]) -> float:
        """Price of a trial, in milliseconds. A draft model drafts for the one row with the fewest missing tokens."""
        current = self._current
        if source is self.ngram_drafts:
            return self._search_ms
        if self.decoders and current.rows > 1 and self.times:  # rounds on a device draft for all rows
            row = min(range(current.rows), key=lambda row: (current.batch.max_draft_tokens[row] == 0, backlog[row]))
            current.trial_rows = range(row, row + 1)
        missing = min(backlog) if current.trial_rows is None else backlog[current.trial_rows.start]
        current.feed_ms = self.costs.feed_ms(missing)
        rows = round(current.rows / current.scale)
        return current.feed_ms + self._drafting_ms(rows, 1) + current.times.extra(rows)

    def _plan(self, source: DraftSource) -> SpeculationPlan:
        current = self._current
        if source is self.ngram_drafts:
            return SpeculationPlan(LONGEST_AUTO, fallback=lambda _batch, _ngram_draft: 0)
        if current.trial:
            source.calibration.doubt()
        current.k = self._max_depth()
        caps = None
        if current.trial_rows is not None:
            caps = [current.k if row in current.trial_rows else 0 for row in range(current.rows)]
        if self.costs.includes_drafting:
            plan = SpeculationPlan(current.k, caps).within(current.batch)
            current.k, current.draft_tokens = plan.k, round(plan.k * current.rows / current.scale)
            return plan
        searches_first = self._searches and not current.trial
        fallback = self._fallback if searches_first else lambda _batch, _ngram_draft: current.k
        return SpeculationPlan(LONGEST_AUTO if searches_first else current.k, caps, self._stop_drafting, fallback)

    def _max_depth(self) -> int:
        """Draft tokens per row to plan for. With scores, drafts grow with the number of right draft tokens."""
        if not self.costs.includes_drafting:
            return min(LONGEST_AUTO, PRIOR_TOKENS + int(self.model_drafts.right))
        return 1 if self._current.trial else self._best_length()[1]

    def _rate_of(self, source: DraftSource) -> float:
        """Tokens per millisecond of the source's recent rounds, at least plain decoding's."""
        current = self._current
        plain = sum(current.token_weights) / current.times.plain
        return max(source.rates.setdefault(current.rows, TokenRate()).value, plain)

    def _gain_of(self, source: DraftSource) -> RunningMean:
        """Recent net gain per row: of a draft model by number of rows, of n-gram drafts one for all numbers."""
        if source is self.ngram_drafts:
            return source.gains.setdefault(0, RunningMean(SEARCH_PRIOR))
        rows = self._current.rows
        if rows not in source.gains:
            source.gains[rows] = RunningMean(self._expected_value(rows, source.acceptance) / rows)
        return source.gains[rows]

    def _expected_value(self, rows: int, acceptance: float) -> float:
        """Value of a round, in tokens, if every draft token is right with probability ``acceptance``."""
        times = self.costs.times(rows, self.costs.table.context)
        gains = [rows * acceptance**k for k in range(1, LONGEST_AUTO + 1)]
        return self._best_depth(gains, rows, times, rows / times.plain)[0]

    def expects_to_draft(self, rows: int) -> bool:
        if not self._may_use_decoders(rows):
            return False
        source = self.model_drafts
        gain = source.gains.get(rows) or RunningMean(self._expected_value(rows, source.acceptance))
        return gain.value + DRAFT_MODEL_ALLOWANCE * gain.error > 0

    def _best_length(self) -> tuple[float, int]:
        """Value of the best number of draft tokens per row, at least 1, and that number; by position alone.

        The value includes one standard error of the acceptance, at most doubling the tokens.
        """
        current = self._current
        allowed = [min(LONGEST_AUTO, most) for most in current.batch.max_draft_tokens]
        lines = self._lines(self.model_drafts, [bins_of(count) for count in allowed], [self._shape] * current.rows)
        gains = map(sum, zip_longest(*lines, fillvalue=0.0))
        value, tokens, k = self._best_depth(gains, current.rows, current.times, current.rate)
        return value + min(1.0, self.model_drafts.calibration.error()) * tokens, k

    def _best_depth(
        self, gains: Iterable[float], rows: int, times: RoundTimes, rate: float
    ) -> tuple[float, float, int]:
        """Value, expected tokens and depth of the best draft that is equally deep in every row.

        gains: expected tokens at depth 1, 2, ..., all rows together.
        """
        values = [
            (tokens - rate * (times.extra(rows * k) + self._drafting_ms(rows, k)), tokens, k)
            for k, tokens in enumerate(accumulate(gains), 1)
        ]
        return max(values, key=itemgetter(0), default=(-math.inf, 0.0, 1))

    def _drafting_ms(self, rows: int, passes: int) -> float:
        """Milliseconds of a draft of that many passes; 0 if round times include drafting."""
        if self.costs.includes_drafting:
            return 0.0
        return self.costs.pass_ms(rows, first=True) + (passes - 1) * self.costs.pass_ms(rows, first=False)

    def _backlog(self) -> tuple[list[int], int]:
        """Missing tokens of each row's caches, [B], beyond the one that every draft feeds, and how many are shared.

        Shared tokens are read once for all samples of a request. On a device the caches are not inspected: each plain
        round adds one token.
        """
        current = self._current
        if not self.times:
            return [len(self.decoders) * self._rounds_without_drafts] * current.rows, 0
        lags = [decoder.lags(current.batch) for decoder in self.decoders]
        shared = sum(decoder.spared(current.batch) for decoder in self.decoders)
        return [sum(of_row) - len(lags) for of_row in zip(*lags, strict=True)] or [0], shared

    # --- during the round ------------------------------------------------------------

    def _fallback(self, _batch: Batch, ngram_draft: Draft) -> int:
        """Draft tokens to request from the draft model; 0 if the n-gram draft has the higher value."""
        current = self._current
        current.drafts.append((self.ngram_drafts, ngram_draft))
        value, _ = self._best(self._ranked(self.ngram_drafts, ngram_draft)[1], self.ngram_drafts)
        if value <= max(0.0, self._gain_of(self.model_drafts).value) * current.rows:
            return current.k
        current.source, current.feed_ms = self.ngram_drafts, 0.0
        return 0

    def _lines(
        self, source: DraftSource, bins: Sequence[Sequence[int]], trees: Sequence[Parents], first: int = 0
    ) -> list[list[float]]:
        """Expected gain w s of each draft token, row by row. first: row of the batch that ``bins`` start at."""
        current, lines = self._current, []
        rows = zip(current.batch.slots[first:], current.token_weights[first:], bins, trees, strict=False)
        for slot, weight, line, parents in rows:
            survivals = source.calibration.survivals(slot, line, parents)
            lines.append(survivals if weight == 1 else [weight * survival for survival in survivals])
        return lines

    def _ranked(self, source: DraftSource, draft: Draft) -> tuple[Draft, list[list[float]]]:
        """The draft with each row's tokens in descending order of expected gain, and these gains.

        No token's gain exceeds its parent's. So chains are in order already, and any first tokens of a tree are a tree.
        """
        lines = self._lines(source, bins_of_draft(draft), draft.host_parents or [None] * len(draft.draft_tokens))
        if draft.host_parents is None:
            return draft, lines
        orders = [sorted(range(len(line)), key=line.__getitem__, reverse=True) for line in lines]
        return draft.ordered(orders), [sorted(line, reverse=True) for line in lines]

    def _best(self, lines: list[list[float]], source: DraftSource, discount: float = 1.0) -> tuple[float, list[int]]:
        """Highest value of a set of draft tokens, and the number of each line's. discount: factor on predicted times.

        A draining batch ends with its last row. So its draft tokens may take no longer than the row with the smallest
        lead is expected to gain.
        """
        current = self._current
        plain, rate = current.times.plain, current.rate * discount
        max_ms = math.inf
        if source is self.ngram_drafts:
            max_ms = plain * (1 + NGRAM_TIME_CAP * (1 + source.judged / current.rows))
        value, counts = current.times.best(lines, rate, current.batch.deadlines, max_ms)
        if current.batch.draining and len(lines) == current.rows > 1:
            leads = self._progress.leads(current.batch.slots)
            row = leads.index(min(leads))
            gain = max(0.0, leads[row]) + sum(lines[row][: counts[row]]) / current.token_weights[row]
            value, counts = current.times.best(lines, rate, current.batch.deadlines, min(max_ms, plain * (1 + gain)))
        return value, counts

    def _stop_drafting(
        self, batch: Batch, scores: Sequence[Sequence[float]], follows: Sequence[Sequence[int]] | None = None
    ) -> bool:
        """Whether one more drafting pass is expected to raise the value by less than it costs.

        It would add a child to every leaf. scores, follows: score and parent of each row's draft tokens so far; follows
        None: chains.
        """
        current, now = self._current, self.clock()
        current.passes.append(1000 * (now - current.ready))
        current.ready = now
        trees = follows or [range(-1, len(line) - 1) for line in scores]
        bins = [bins_of(len(line), line, tree) for line, tree in zip(scores, trees, strict=True)]
        lines, acceptance = self._lines(self.model_drafts, bins, trees, batch.first), self.model_drafts.acceptance
        children = [
            [acceptance * gain for place, gain in enumerate(line) if place not in tree]
            for line, tree in zip(lines, trees, strict=True)
        ]
        before, after = (
            self._best([sorted(line, reverse=True) for line in candidates], self.model_drafts)[0]
            for candidates in (lines, [[*line, *new] for line, new in zip(lines, children, strict=True)])
        )
        return after - before <= current.rate * self.costs.pass_ms(len(lines), first=False)

    def select(self, batch: Batch, draft: Draft) -> Draft:
        current = self._current
        if not self.selects and draft.host_parents is not None:
            shape = draft.host_parents[0]
            self._shape = [*shape, *range(len(shape) - 1, LONGEST_AUTO - 1)]
            current.drafts.append((self.model_drafts, replace(draft, confidence=None)))
        if not self.selects or current.source is None:
            return draft
        counts = draft.drafted
        if not current.drafts or current.source is self.model_drafts:
            current.drafts.append((current.source, draft))
        if draft.probabilities is None and not (current.trial and current.source is self.model_drafts):
            draft, lines = self._ranked(current.source, draft)
            counts = self._counts_to_verify(current.source, lines)
        current.ready = self.clock()
        return draft.first(counts)

    def _counts_to_verify(self, source: DraftSource, lines: list[list[float]]) -> list[int]:
        """Number of draft tokens to verify in each row.

        If no draft token pays, it retries now and then, assuming that drafts cost ``RETRY_DISCOUNT`` of what is
        predicted: only verified drafts show what they cost.
        """
        current = self._current
        value, counts = self._best(lines, source)
        uses_decoders = self.decoders and self._may_use_decoders(current.rows)
        if not (uses_decoders or source.rates[current.rows].value or current.batch.draining):
            # the source has no rate yet: take the one that this round is expected to reach
            extra = current.times.extra(sum(counts))
            current.rate = (sum(current.token_weights) + value + current.rate * extra) / (current.times.plain + extra)
            value, counts = self._best(lines, source)
        if any(counts):
            return counts
        value, retried = self._best(lines, source, RETRY_DISCOUNT)
        price = (1 - RETRY_DISCOUNT) * current.times.extra(sum(retried)) - value / current.rate
        return retried if any(retried) and self._budget.try_spend(price) else counts

    # --- after the round ---------------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if not self._pending:  # a round of the back-off
            return
        current, ended = self._pending.popleft(), self.clock()
        self._current = current
        accepted, ms = verdict.host.accepted, 1000 * (ended - current.began)
        drafting_ms = 1000 * (current.ready - current.began)
        if not self.times:
            ms = current.feed_ms + current.times.plain + current.times.extra(current.draft_tokens)
        if self.selects:
            current.draft_tokens = sum(verdict.host.drafted)
        if self.times:
            self._learn_costs(ms - current.feed_ms if self.costs.includes_drafting else ms - drafting_ms)
        self._had_drafts = current.draft_tokens > 0
        spent = self._spent_ms(drafting_ms)
        self._progress.learn(batch.slots, accepted, 1 + (0.0 if current.trial else spent / current.times.plain))
        if current.source is not None:
            self._learn_gain(current.source, verdict, ms, spent)
            self._learn_calibration(current.source, verdict, batch.slots)
        self._accrue_budgets(ms)
        if current.passes:
            overhead = drafting_ms - current.feed_ms - sum(current.passes) + 1000 * (self.clock() - ended)
            self._overhead_ms.learn(min(max(0.0, overhead), current.times.plain))
        if current.source is self.ngram_drafts:
            self._search_ms = drafting_ms + 1000 * (self.clock() - ended)
        elif current.source is None and not current.is_plain_check and self.times and self._sources:
            self._back_off(ms)

    def _back_off(self, ms: float) -> None:
        """Skip decisions until a trial is affordable, in rounds of ``ms`` milliseconds: nothing can change before.

        The back-off doubles if it was too short, because prices rise while a draft model falls behind.
        """
        sources = self._sources_for(self._current.rows)
        wait = min((source.budget.rounds_until_affordable(ms) for source in sources), default=REFRESH_ROUNDS)
        self._backoff = self._last_backoff = min(REFRESH_ROUNDS, max(wait, 2 * self._last_backoff))

    def _spent_ms(self, drafting_ms: float) -> float:
        """Milliseconds beyond a plain round that draft tokens took; a trial of one row counts as if for all rows.

        Reading missing tokens does not count: later rounds use them, too.
        """
        current = self._current
        spent = current.times.extra(round(current.scale * current.draft_tokens))
        if current.passes:
            return spent + self._drafting_ms(current.rows, len(current.passes)) + self._overhead_ms.value
        if current.source is self.ngram_drafts:
            spent += min(drafting_ms, self._search_ms)  # ignores pauses of the machine
        return spent

    def _accrue_budgets(self, ms: float) -> None:
        for budget in (self._budget, *(source.budget for source in self._sources)):
            budget.accrue(ms)

    def _learn_costs(self, ms: float) -> None:
        current = self._current
        if current.passes:
            current.passes[0] = max(0.0, current.passes[0] - current.feed_ms)
            self.costs.observe_passes(round(current.rows / current.scale), current.passes)
        if current.feed_ms < ms:  # else the time tells little about verification
            self.costs.observe(current.rows, current.draft_tokens, current.context, ms)

    def _learn_gain(self, source: DraftSource, verdict: Verdict, ms: float, spent: float) -> None:
        """Learn the rate of the round and its net gain; a trial of one row counts as if for all rows."""
        current, accepted = self._current, verdict.host.accepted
        kept = sum(weight * good for weight, good in zip(current.token_weights, accepted, strict=self.times))
        if not self.times:  # rows may have come and gone since ``choose``
            kept *= current.rows / max(1, sum(map(bool, verdict.host.tokens)))
        if not current.trial:
            rate = source.rates.setdefault(current.rows, TokenRate())
            rate.learn(sum(current.token_weights) + kept, ms - current.feed_ms)
        self._gain_of(source).learn((current.scale * kept - current.rate * spent) / current.rows)

    def _learn_calibration(self, source: DraftSource, verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn from all drafts that were seen. Without any, planned draft tokens that never came count as wrong."""
        current, accepted = self._current, verdict.host.accepted
        for seen, draft in current.drafts:
            seen.learn_draft(draft, verdict, slots)
        if self.costs.includes_drafting and not current.drafts:
            planned = verdict.host.depths if not self.times else self._planned_counts()
            source.learn(
                [
                    [(bin_, place < kept) for place, bin_ in enumerate(bins_of(min(kept + 1, count)))]
                    for kept, count in zip(accepted, planned, strict=True)
                ],
                slots,
            )

    def _planned_counts(self) -> list[int]:
        current = self._current
        rows, allowed = current.trial_rows or range(current.rows), current.batch.max_draft_tokens
        return [min(current.k, most) if row in rows else 0 for row, most in enumerate(allowed)]

    # --- rows ----------------------------------------------------------------------------

    def lost(self) -> None:
        if self._pending:
            self._pending.popleft()

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self._progress.rows, self.model_drafts.calibration.rows, self.ngram_drafts.calibration.rows
