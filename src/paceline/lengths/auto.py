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
  missed, divided by the tokens that a row is expected to gain yet. The same decides whether it reads a new prompt.
* n-gram drafts replace the draft model's where their value exceeds the draft model's recent net gain.
* Exploration: a share of run time pays for trials of a source that looks unprofitable. Its record counts little then.

Draft tokens are judged by the tokens that the row gained, verified or not. Under the rejection rule every drafted token
is verified, because dropping a token for its value would bias the distribution. Ending a draft early does not.

Where drafts are not seen before verification (rounds on a device), or every row takes as long as the longest draft, the
position in the draft is the score, and the same value gives one length for all rows.

Related: TETRIS (arXiv 2502.15197) and AdaServe (2501.12162) rank draft tokens under a fixed budget; SpecDec++
(2405.19715) and EAGLE-2 (2406.16858) stop by the drafter's confidence; SmartSpec (2406.14066) maximises the rate of one
length for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from statistics import fmean

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, RoundTiming, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.lengths.base import CapturedRounds, LengthPolicy, PolicyInputs, UnreadPrompt
from paceline.lengths.cost import CostModel
from paceline.lengths.records import REFRESH_ROUNDS, Backoff, ExplorationBudget, RowProgress, RunningMean
from paceline.lengths.rounds import AutoRound, Parents, best_depth
from paceline.lengths.scores import LONGEST_AUTO, MAX_DOUBTED, bins_of
from paceline.lengths.sources import NOTHING_MISSING, Backlog, CacheBacklog, CountedBacklog, DraftSource, MissingTokens
from paceline.models.draft_decoder import DraftDecoder

# Standard errors added to a recent net gain. With 1 for draft models, a good one was given up for a whole answer in 3
# of 24 simulations: its trials are rare. With 0.5 for n-gram drafts, speed fell from 0.994 to 0.988 (docs/log.md).
DRAFT_MODEL_ALLOWANCE = 1.5
NGRAM_ALLOWANCE = 1.0
SEARCH_PRIOR = 0.2  # tokens per row that a search for n-gram drafts is assumed to gain, before the first
NGRAM_TIME_CAP = 0.2  # without it n-gram drafts lose 0.5 %; 0.1 gives 0.991 (docs/log.md)
DRAIN_DEFICIT = 0.5  # plain rounds that drafts may cost a draining batch; with 0 it often gives up drafts that pay
# Where one length serves all rows, these: a GPU captures each for each number of rows. They lose at most 1 % of the
# speed of all 16; 1, 2, 4, 8, 16 would lose up to 2.7 % (docs/log.md).
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
RETRY_DISCOUNT = 0.5  # the retry of ``_counts_to_verify`` assumes that drafts cost this share of what is predicted


@dataclass(frozen=True)
class Offer:
    """One way to get draft tokens for a round.

    rate: price of time, in tokens per millisecond. value: expected net gain in tokens, before ``feed_ms``. feed_ms: for
    reading what the draft model has missed.
    """

    source: DraftSource
    rate: float
    value: float
    missing: MissingTokens
    feed_ms: float

    @property
    def value_ms(self) -> float:
        """The value as milliseconds of plain decoding."""
        return self.value / self.rate


class AutoLength(RowKeepers, LengthPolicy):
    """The policy of this module.

    costs: predicted times.
    decoders: the drafter's, whose caches fall behind in rounds without them.
    copies: whether the drafter has n-gram drafts, beside its decoders' if there are any.
    ranks: whether drafts are seen before verification, and each draft token pays for itself.
    backlog: what the decoders' caches lack; None: read from them.
    device: as in ``PolicyInputs``.
    paying_rows: as in ``PolicyInputs``. Batches of more rows never use the decoders, whatever the costs say.
    """

    name = "auto"
    reads_profile = True
    max_draft_tokens = LONGEST_AUTO
    paying_rows: int | None = None

    def __init__(
        self,
        costs: CostModel,
        decoders: Sequence[DraftDecoder] = (),
        copies: bool = True,
        ranks: bool = True,
        backlog: Backlog | None = None,
        device: CapturedRounds | None = None,
    ) -> None:
        self.costs, self.decoders, self._ranks, self._device = costs, decoders, ranks, device
        self._missed_ms = 0.0  # what a better length that is not captured would have saved since the last capture
        self.model_drafts = DraftSource(DRAFT_MODEL_ALLOWANCE)
        self.ngram_drafts = DraftSource(NGRAM_ALLOWANCE, NGRAM_TIME_CAP, by_rows=False)
        self._backlog = backlog or CacheBacklog(decoders)
        self._shape: Parents = None  # of recent trees, where drafts are not ranked
        self._searches = ranks and (copies or not decoders)
        self._sources = [self.model_drafts] if decoders or not ranks else []
        self._sources += [self.ngram_drafts] if self._searches else []
        self._progress = RowProgress()
        self._budget = ExplorationBudget()  # for plain checks and retries, which tell what other rounds cost
        self._search_ms = 0.0  # of the last search for n-gram drafts
        self._had_drafts = False  # whether draft tokens were verified in the last round
        self._backoff = Backoff()
        self._round: AutoRound  # the last that was chosen

    @classmethod
    def build(cls, inputs: PolicyInputs, /) -> AutoLength:
        backlog = CountedBacklog(len(inputs.decoders)) if inputs.device else None
        policy = cls(CostModel(inputs.costs()), inputs.decoders, inputs.copies, inputs.ragged, backlog, inputs.device)
        policy.paying_rows = inputs.paying_rows
        return policy

    def describe(self) -> str:
        return self.name if self.paying_rows is None else f"{self.name} (drafts for up to {self.paying_rows} rows)"

    def expects_to_draft(self, rows: int) -> bool:
        return self._may_use_decoders(rows) and self._optimistic_gain(self.model_drafts, rows) > 0

    def reads_prompt(self, rows: int, prompt: UnreadPrompt) -> bool:
        if not self.expects_to_draft(rows):
            return False
        source, plain = self.model_drafts, self.costs.times(rows, self.costs.table.context).plain
        price = max(source.rate(rows), rows / plain) * self.costs.feed_ms(prompt.tokens)
        tokens = min(prompt.answer_tokens, 1000 * prompt.seconds / plain)
        return _repays(self._optimistic_gain(source, rows) * prompt.rows, tokens, price)

    @property
    def reads_drafts(self) -> bool:
        return self._ranks

    @property
    def possible_lengths(self) -> Sequence[int]:
        return super().possible_lengths if self._ranks else (0, *DEPTHS)

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self._progress.rows, self.model_drafts.calibration.rows, self.ngram_drafts.calibration.rows

    # --- before the round ------------------------------------------------------------

    def choose(self, batch: Batch) -> SpeculationPlan:
        if self._backoff.covers(batch.rows):
            self._backoff.use_up()
            return SpeculationPlan(0)
        times, drains = self.costs.times(batch.rows, batch.longest), batch.draining and batch.rows > 1
        leads = self._progress.leads(batch.slots) if drains else []
        self._round = AutoRound(batch, times, self._progress.token_weights(batch), leads)
        self._decide(self._round)
        self._backlog.count_round(self._round.source is not None)
        if self._round.source is None:
            return SpeculationPlan(0, note=self._round)
        self._backoff.reset()
        return self._plan(self._round, self._round.source)

    def _decide(self, round_: AutoRound) -> None:
        """Choose a source for the round: the first whose recent gain pays, or whose trial is affordable."""
        for source in self._usable_sources(round_.rows):
            offer = self._offer(round_, source)
            if self._pays(round_, offer):
                round_.is_plain_check = self._lacks_plain_time(round_, offer) and self._budget.try_spend(offer.value_ms)
                if not round_.is_plain_check:
                    round_.source, round_.rate, round_.feed_ms = source, offer.rate, offer.feed_ms
                return
            rows = self._trial_rows(round_, offer)
            feed_ms = self.costs.feed_ms(min(offer.missing.by_row[rows.start : rows.stop]))
            if source.budget.try_spend(self._trial_ms(round_, source, len(rows), feed_ms)):
                self._begin_trial(round_, offer, rows, feed_ms)
                return

    def _usable_sources(self, rows: int) -> list[DraftSource]:
        if self._may_use_decoders(rows):
            return self._sources
        return [source for source in self._sources if source is not self.model_drafts]

    def _may_use_decoders(self, rows: int) -> bool:
        return self.paying_rows is None or rows <= self.paying_rows

    def _offer(self, round_: AutoRound, source: DraftSource) -> Offer:
        missing = NOTHING_MISSING
        if source is self.model_drafts:
            missing = self._backlog.missing(round_.batch)
        rate = max(source.rate(round_.rows), sum(round_.token_weights) / round_.times.plain)
        value = self._optimistic_gain(source, round_.rows) * round_.rows
        if not self._ranks:
            value = self._best_length(round_, source, rate)[0]
        return Offer(source, rate, value, missing, self.costs.feed_ms(missing.total))

    def _pays(self, round_: AutoRound, offer: Offer) -> bool:
        """Whether the gain pays for reading what is missing, and the batch can still make up for a loss."""
        is_behind = bool(round_.leads) and fmean(round_.leads) < -DRAIN_DEFICIT
        return _repays(offer.value, round_.tokens_left, offer.rate * offer.feed_ms) and not is_behind

    def _lacks_plain_time(self, round_: AutoRound, offer: Offer) -> bool:
        """Whether the gain is within the uncertainty of a plain round's predicted time, and none ran just before."""
        return self._had_drafts and offer.value_ms < 2 * round_.times.error

    def _trial_rows(self, round_: AutoRound, offer: Offer) -> range:
        """Rows of a trial: for a draft model the one with the fewest missing tokens."""
        if offer.source is self.ngram_drafts or not self.decoders or not self._backlog.by_row:
            return range(round_.rows)
        allowed, missing = round_.batch.max_draft_tokens, offer.missing.by_row
        row = min(range(round_.rows), key=lambda row: (allowed[row] == 0, missing[row]))
        return range(row, row + 1)

    def _trial_ms(self, round_: AutoRound, source: DraftSource, rows: int, feed_ms: float) -> float:
        """Price of a trial, in milliseconds."""
        if source is self.ngram_drafts:
            return self._search_ms
        return feed_ms + self.costs.draft_ms(rows, 1) + round_.times.extra(rows)

    def _begin_trial(self, round_: AutoRound, offer: Offer, rows: range, feed_ms: float) -> None:
        """Use the source in this round although it looks unprofitable. Its record then counts little.

        Its rate of better times is forgotten: at that price it would have to be as good as then at once.
        """
        source = offer.source
        source.rates.pop(round_.rows, None)
        rate = sum(round_.token_weights) / round_.times.plain
        round_.source, round_.rate, round_.feed_ms = source, rate, feed_ms
        round_.trial, round_.trial_rows = True, None if len(rows) == round_.rows else rows
        self._gain(source, round_.rows).doubt(MAX_DOUBTED)
        if source is self.model_drafts:
            source.calibration.doubt()

    def _plan(self, round_: AutoRound, source: DraftSource) -> SpeculationPlan:
        if source is self.ngram_drafts:
            return SpeculationPlan(LONGEST_AUTO, fallback=lambda _batch, _ngram_draft: 0, note=round_)
        rows, caps = round_.trial_rows, None
        round_.k = self._depth(round_, source)
        if rows is not None:
            caps = [round_.k if row in rows else 0 for row in range(round_.rows)]
        if not self._ranks:
            plan = SpeculationPlan(round_.k, caps, note=round_).within(round_.batch)
            if plan.k < round_.k:  # near the rows' ends
                round_.k = max((k for k in self._captured_lengths() if k <= plan.k), default=0)
            round_.passes = round_.k
            return replace(plan, k=round_.k)
        searches_first = self._searches and not round_.trial
        fallback = self._fallback if searches_first else lambda _batch, _ngram_draft: round_.k
        k = LONGEST_AUTO if searches_first else round_.k
        return SpeculationPlan(k, caps, self._stop_drafting, fallback, round_)

    def _depth(self, round_: AutoRound, source: DraftSource) -> int:
        """Draft tokens per row to plan for."""
        if self._ranks:
            return min(LONGEST_AUTO, source.first_depth)
        return 1 if round_.trial else self._best_or_captured_length(round_, source)

    def _best_or_captured_length(self, round_: AutoRound, source: DraftSource) -> int:
        """The best length, or the best of the captured ones.

        The best one is captured once it would have saved, since the last capture, as much time as a capture takes.
        Captures therefore cost at most what they could have saved.
        """
        value, best = self._best_length(round_, source, round_.rate)
        if self._device is None or self._device.is_captured(best):
            return best
        captured_value, captured = self._best_length(round_, source, round_.rate, self._captured_lengths())
        self._missed_ms += (value - captured_value) / round_.rate
        if captured != best and self._missed_ms < self._device.capture_ms:
            return captured
        self._missed_ms = 0.0
        return best

    def _captured_lengths(self) -> Sequence[int]:
        """The lengths that need no capture first; all of them if there is none with draft tokens."""
        if self._device is None:
            return self.possible_lengths
        captured = [k for k in self.possible_lengths if self._device.is_captured(k)]
        return captured if any(captured) else self.possible_lengths

    def _best_length(
        self, round_: AutoRound, source: DraftSource, rate: float, lengths: Sequence[int] | None = None
    ) -> tuple[float, int]:
        """Value of the best number of draft tokens per row, at least 1, and that number; by position alone.

        The value includes one standard error of the acceptance, at most doubling the tokens. lengths: the possible ones
        if None.
        """
        allowed = [min(LONGEST_AUTO, most) for most in round_.batch.max_draft_tokens]
        lines = round_.lines(source, [bins_of(count) for count in allowed], [self._shape] * round_.rows)
        gains = map(sum, zip_longest(*lines, fillvalue=0.0))
        depths = self.possible_lengths if lengths is None else lengths
        value, tokens, k = best_depth(self.costs, gains, round_.times, round_.rows, rate, depths)
        return value + min(1.0, source.calibration.error()) * tokens, k

    def _gain(self, source: DraftSource, rows: int) -> RunningMean:
        """Recent net gain per row of rounds with the source."""
        return source.gain(rows, partial(self._prior_gain, source, rows))

    def _optimistic_gain(self, source: DraftSource, rows: int) -> float:
        """Recent net gain per row, plus the source's allowance for its standard error."""
        gain = self._gain(source, rows)
        return gain.value + source.allowance * gain.error

    def _prior_gain(self, source: DraftSource, rows: int) -> float:
        """Net gain per row, in tokens, that is assumed before the first round with the source."""
        if source is self.ngram_drafts:
            return SEARCH_PRIOR
        times, acceptance = self.costs.times(rows, self.costs.table.context), source.acceptance
        gains = [rows * acceptance**k for k in range(1, LONGEST_AUTO + 1)]
        return best_depth(self.costs, gains, times, rows, rows / times.plain)[0] / rows

    # --- during the round ------------------------------------------------------------

    def _fallback(self, _batch: Batch, ngram_draft: Draft) -> int:
        """Draft tokens to request from the draft model; 0 if the n-gram draft has the higher value."""
        round_, source = self._round, self.ngram_drafts
        round_.drafts.append((source, ngram_draft))
        value, _ = round_.best(source, round_.ranked(source, ngram_draft)[1])
        if value <= max(0.0, self._gain(self.model_drafts, round_.rows).value) * round_.rows:
            return round_.k
        round_.source, round_.feed_ms = source, 0.0
        return 0

    def _stop_drafting(
        self, batch: Batch, scores: Sequence[Sequence[float]], parents: Sequence[Sequence[int]] | None = None
    ) -> bool:
        """Whether one more drafting pass is expected to raise the value by less than it costs.

        scores, parents: score and parent of each row's draft tokens so far; parents None: chains.
        """
        round_, chains = self._round, [range(-1, len(line) - 1) for line in scores]
        round_.passes += 1
        value = round_.value_of_one_more(self.model_drafts, batch.first, scores, parents or chains)
        return value <= round_.rate * self.costs.next_pass_ms(len(scores))

    def select(self, batch: Batch, draft: Draft) -> Draft:
        round_, source = self._round, self._round.source
        if source is None or not self._ranks:
            self._note_shape(draft)
            return draft
        if not round_.drafts or source is self.model_drafts:
            round_.drafts.append((source, draft))
        if draft.probabilities is not None or (round_.trial and source is self.model_drafts):
            return draft.first(draft.drafted)
        draft, lines = round_.ranked(source, draft)
        return draft.first(self._counts_to_verify(round_, source, lines))

    def _note_shape(self, draft: Draft) -> None:
        if draft.host_parents is not None:
            shape = draft.host_parents[0]
            self._shape = [*shape, *range(len(shape) - 1, LONGEST_AUTO - 1)]
            self._round.drafts.append((self.model_drafts, replace(draft, confidence=None)))

    def _counts_to_verify(self, round_: AutoRound, source: DraftSource, lines: list[list[float]]) -> list[int]:
        """Number of draft tokens to verify in each row.

        If no draft token pays, it retries now and then, assuming that drafts cost ``RETRY_DISCOUNT`` of what is
        predicted: only verified drafts show what they cost.
        """
        value, counts = round_.best(source, lines)
        uses_decoders = self.decoders and self._may_use_decoders(round_.rows)
        if not (uses_decoders or source.rate(round_.rows) or round_.batch.draining):
            # the source has no rate yet: take the one that this round is expected to reach
            extra = round_.times.extra(sum(counts))
            round_.rate = (sum(round_.token_weights) + value + round_.rate * extra) / (round_.times.plain + extra)
            value, counts = round_.best(source, lines)
        if any(counts):
            return counts
        value, retried = round_.best(source, lines, RETRY_DISCOUNT)
        price = (1 - RETRY_DISCOUNT) * round_.times.extra(sum(retried)) - value / round_.rate
        return retried if any(retried) and self._budget.try_spend(price) else counts

    # --- after the round ---------------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        round_, timing = verdict.note, verdict.timing
        if not isinstance(round_, AutoRound):  # a round of the back-off
            self._accrue_budgets(timing.verify_ms if timing else 0.0)
            return
        drafted = sum(verdict.host.drafted) if self._ranks else round_.k * round_.drafting_rows
        if timing:
            self._learn_costs(round_, drafted, timing)
        else:
            timing = self._predicted(round_, drafted)
        spent_ms = self._spent_ms(round_, drafted, timing.draft_ms)
        took = 1 + (0.0 if round_.trial else spent_ms / round_.times.plain)
        accepted = _accepted_by_slot(batch, verdict)
        self._progress.learn(accepted, took)
        self._had_drafts = drafted > 0
        if round_.source is not None:
            self._learn_gain(round_, round_.source, accepted, timing.draft_ms + timing.verify_ms, spent_ms)
            self._learn_calibration(round_, round_.source, verdict, batch.slots)
        self._accrue_budgets(timing.draft_ms + timing.verify_ms)
        if round_.source is self.ngram_drafts:
            self._search_ms = timing.draft_ms
        elif round_.source is None and not round_.is_plain_check and verdict.timing and self._sources:
            self._back_off(round_.rows, timing.verify_ms)

    def _predicted(self, round_: AutoRound, drafted: int) -> RoundTiming:
        """Times of a round that was not measured."""
        draft_ms = round_.feed_ms + self.costs.draft_ms(round_.drafting_rows, round_.passes)
        return RoundTiming(draft_ms, round_.times.ms_of(drafted))

    def _back_off(self, rows: int, ms: float) -> None:
        """Skip decisions until a trial is affordable, in rounds of ``ms`` milliseconds: nothing can change before."""
        waits = [source.budget.rounds_until_affordable(ms) for source in self._usable_sources(rows)]
        self._backoff.begin(rows, min(waits, default=REFRESH_ROUNDS))

    def _spent_ms(self, round_: AutoRound, drafted: int, draft_ms: float) -> float:
        """Milliseconds beyond a plain round that draft tokens took; a trial of one row counts as if for all rows.

        Reading missing tokens does not count: later rounds use them, too.
        """
        spent = round_.times.extra(round(round_.scale * drafted))
        if round_.passes:
            return spent + self.costs.draft_ms(round_.rows, round_.passes)
        if round_.source is self.ngram_drafts:
            spent += min(draft_ms, self._search_ms)  # ignores pauses of the machine
        return spent

    def _accrue_budgets(self, ms: float) -> None:
        for budget in (self._budget, *(source.budget for source in self._sources)):
            budget.accrue(ms)

    def _learn_costs(self, round_: AutoRound, drafted: int, timing: RoundTiming) -> None:
        self.costs.observe(round_.rows, drafted, round_.context, timing.verify_ms)
        if round_.passes:
            self.costs.observe_draft(round_.drafting_rows, round_.passes, timing.draft_ms - round_.feed_ms)

    def _learn_gain(
        self, round_: AutoRound, source: DraftSource, accepted: Mapping[int, int], ms: float, spent_ms: float
    ) -> None:
        """Learn the rate of the round and its net gain; a trial of one row counts as if for all rows.

        accepted: accepted draft tokens of each row that is still there, by slot; these stand for all rows.
        """
        weights = dict(zip(round_.slots, round_.token_weights, strict=True))
        kept = sum(weights[slot] * count for slot, count in accepted.items()) * round_.rows / max(1, len(accepted))
        if not round_.trial:
            source.learn_rate(round_.rows, sum(round_.token_weights) + kept, ms - round_.feed_ms)
        gain = (round_.scale * kept - round_.rate * spent_ms) / round_.rows
        source.learn_gain(round_.rows, partial(self._prior_gain, source, round_.rows), gain)

    def _learn_calibration(
        self, round_: AutoRound, source: DraftSource, verdict: Verdict, slots: Sequence[int]
    ) -> None:
        """Learn from all drafts that were seen, or else from the accepted tokens by position."""
        for seen, draft in round_.drafts:
            seen.learn_draft(draft, verdict, slots)
        if not (self._ranks or round_.drafts):
            counts = zip(verdict.host.accepted, verdict.host.depths, strict=True)
            bins = [(kept, bins_of(min(kept + 1, depth))) for kept, depth in counts]
            source.learn([[(bin_, place < kept) for place, bin_ in enumerate(line)] for kept, line in bins], slots)


def _repays(gain: float, tokens_left: float, price: float) -> bool:
    """Whether a net gain for each token that a row has left is worth more than a price that is paid once, in tokens.

    At the rate of the rounds with draft tokens, the gain of one of them is what they save per token of a row.
    """
    return gain > 0 and gain * tokens_left > price


def _accepted_by_slot(batch: Batch, verdict: Verdict) -> dict[int, int]:
    """Accepted draft tokens of each row in the round. On a device, rows that have joined since have no tokens in it."""
    rows = zip(batch.slots, verdict.host.accepted, verdict.host.tokens, strict=True)
    return {slot: accepted for slot, accepted, tokens in rows if tokens}
