"""``auto``: draft with what is faster than plain decoding, and verify the draft tokens that pay at its speed.

*Speed* of a source of draft tokens, the draft model or the search for n-gram drafts: tokens per row over plain rounds
of time, in its recent rounds. Plain decoding has 1. A source is used while its speed is above 1, and reading what it
has missed is repaid before the rows end.

*Price* of a millisecond: the tokens that it would bring at the source's speed, and at least plain decoding's. The n
draft tokens with the largest w s are verified, for the n of the highest value:

    value = sum of w s - price (T(n) - T(0))        in tokens

* ``s``, survival: probability that a draft token and all its ancestors are accepted.
* ``w``, token weight: 1, or more for rows that will end last in a draining batch.
* ``T(n)``: milliseconds of a round that verifies n draft tokens.

Survival falls along a chain and down a tree, so the best tokens of a chain are a prefix and the best nodes of a tree
are a tree. Drafting goes on while one more draft token per row is expected to raise the value by more than the price of
a drafting pass. Beside a draft model, each row takes its n-gram draft or the model's, whichever has the higher value.

*Credit* of a source, in plain rounds: it pays for rounds with a source that looks slower than plain decoding, and for
plain rounds that show whether one that looks faster is. It begins with ``CREDIT`` and grows by ``CREDIT_SHARE`` of run
time, which bounds what such rounds cost. Two things are not charged to it: the first rounds of a source whose assumed
speed is above 1, and a search for n-gram drafts that takes less than about 2 % of a round, which the assumed speed
always allows.

Draft tokens are judged by the tokens that the row gained, verified or not. Under the rejection rule every drafted token
is verified, because dropping a token for its value would bias the distribution. Ending a draft early does not.

Where drafts are not seen before verification (rounds on a device), or every row takes as long as the longest draft, the
position in the draft is the score, and the same value gives one length for all rows. Between an n-gram draft and a
model's, which a device makes both, the length of the match decides (``by_match``).

Pricing time at the speed reached so far converges to the highest ratio of tokens to time (Dinkelbach 1967). Related:
TETRIS (arXiv 2502.15197) and AdaServe (2501.12162) rank draft tokens under a fixed budget; SpecDec++ (2405.19715) and
EAGLE-2 (2406.16858) stop by the drafter's confidence; SmartSpec (2406.14066) maximises the rate of one length for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, RoundTiming, Verdict
from paceline.core.row_keeper import PerRow, RowKeeper, RowKeepers
from paceline.lengths.auto_round import NOTHING_MISSING, AutoRound, Missing
from paceline.lengths.base import CapturedRounds, LengthPolicy, PolicyInputs, UnreadPrompt
from paceline.lengths.by_match import ChoiceByMatch
from paceline.lengths.by_position import DEPTHS, LengthsByPosition
from paceline.lengths.cost import CostModel, RoundKind, RoundTimes
from paceline.lengths.scores import LONGEST_AUTO, SLOW_FADE, bins_of, bins_of_draft
from paceline.lengths.sources import CREDIT, CREDIT_SHARE, FIRST_DRAFT, PRIOR_ROUNDS, DraftSource
from paceline.models.decoding.draft_decoder import DraftDecoder

SEARCH_GAIN = 0.2  # tokens per row that a search for n-gram drafts is assumed to gain, before the first
HURRY = 16.0  # rounds that a row must be behind the last one, in a draining batch, for its tokens to count 1 / e


class AutoLength(RowKeepers, LengthPolicy):
    """The policy of this module.

    costs: predicted times.
    decoders: the drafter's, whose caches fall behind in rounds without them.
    copies: whether the drafter has n-gram drafts, beside its decoders' if there are any.
    ranks: whether drafts are seen before verification, and each draft token pays for itself.
    device, paying_rows: as in ``PolicyInputs``. Batches of more than ``paying_rows`` rows never use the decoders,
        whatever the costs say.
    """

    name = "auto"
    reads_profile = True
    max_draft_tokens = LONGEST_AUTO

    def __init__(
        self,
        costs: CostModel,
        decoders: Sequence[DraftDecoder] = (),
        copies: bool = True,
        ranks: bool = True,
        device: CapturedRounds | None = None,
        paying_rows: int | None = None,
    ) -> None:
        self.costs, self.decoders, self._ranks, self._device = costs, decoders, ranks, device
        self.paying_rows = paying_rows
        self.model_drafts = DraftSource(self._assumed_speed, self._plain_ms)
        self.ngram_drafts = DraftSource(lambda _rows: 1 + SEARCH_GAIN, self._plain_ms)
        self._searches = ranks and (copies or not decoders)
        self._by_position = LengthsByPosition(costs, self.model_drafts, device)
        self._by_match = ChoiceByMatch() if device is not None and copies and decoders and not ranks else None
        self._sources = [self.model_drafts] if decoders or not ranks else []
        self._sources += [self.ngram_drafts] if self._searches else []
        self._paces: PerRow[tuple[float, float]] = PerRow()  # recent tokens and rounds
        self._assumed_speeds: dict[int, tuple[RoundTimes, float]] = {}  # by rows, with the times they are from
        self._search_ms = 0.0  # of the last search for n-gram drafts
        self._checked = False  # whether the last round was a plain one for the sake of its time
        self._undrafted = 0  # rounds since the draft model's last
        self._round: AutoRound  # the last that was chosen

    @classmethod
    def build(cls, inputs: PolicyInputs, /) -> AutoLength:
        costs = CostModel(inputs.costs())
        return cls(costs, inputs.decoders, inputs.copies, inputs.ragged, inputs.device, inputs.paying_rows)

    def describe(self) -> str:
        return self.name if self.paying_rows is None else f"{self.name} (drafts for up to {self.paying_rows} rows)"

    @property
    def reads_drafts(self) -> bool:
        return self._ranks

    @property
    def possible_lengths(self) -> Sequence[int]:
        return super().possible_lengths if self._ranks else (0, *DEPTHS)

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        of_match = () if self._by_match is None else self._by_match.keepers
        return self._paces, self.model_drafts.calibration.rows, self.ngram_drafts.calibration.rows, *of_match

    def expects_to_draft(self, rows: int) -> bool:
        return self._usable(self.model_drafts, rows) and self.model_drafts.speed(rows) > 1

    def reads_prompt(self, rows: int, prompt: UnreadPrompt) -> bool:
        if not self.expects_to_draft(rows):
            return False
        plain = self.costs.times(rows, self.costs.table.context).plain
        rounds = min(prompt.answer_tokens, 1000 * prompt.seconds / plain) * prompt.rows / rows
        return rounds * (1 - 1 / self.model_drafts.speed(rows)) > self.costs.feed_ms(prompt.tokens) / plain

    # --- before the round ------------------------------------------------------------

    def choose(self, batch: Batch) -> SpeculationPlan:
        rows, kind = batch.rows, RoundKind(batch.sampling.all_greedy, batch.sampling.step_features.cuts)
        times = self.costs.times(rows, batch.longest, kind)
        self._round = round_ = AutoRound(batch, kind, times, self._weights(batch), [None] * rows)
        self._undrafted += 1
        for source in self._sources:
            if not self._usable(source, rows):
                continue
            speed, missing = source.speed(rows), self._missing(batch, source)
            round_.feed_ms = self.costs.feed_ms(missing.total)
            if speed > 1 and round_.plain_rounds_left * (1 - 1 / speed) > round_.feed_ms / times.plain:
                if self._spend_on_plain_round(round_, source, speed - 1):
                    break
                round_.price = speed * rows / times.plain
                return self._plan(round_, source, range(rows))
            if (trial := self._affordable_rows(round_, source, missing)) is not None:
                round_.on_credit, round_.price = True, rows / times.plain
                return self._plan(round_, source, trial)
        return SpeculationPlan(0, note=round_)

    def _usable(self, source: DraftSource, rows: int) -> bool:
        may_draft = source is self.ngram_drafts or self.paying_rows is None or rows <= self.paying_rows
        return may_draft and source in self._sources

    def _spend_on_plain_round(self, round_: AutoRound, source: DraftSource, gain: float) -> bool:
        """Pay for a plain round if the gain lies within the doubt about its time. Returns whether one runs instead.

        Never twice in a row: the source's record goes on.
        """
        doubt = self.costs.plain_doubt(round_.rows, round_.kind)
        self._checked = not self._checked and source.is_known(round_.rows) and gain < min(source.credit, doubt)
        if self._checked:
            source.accrue(-gain)
        return self._checked

    def _affordable_rows(self, round_: AutoRound, source: DraftSource, missing: Missing) -> range | None:
        """Rows that the source may draft for on its credit; None: not any.

        All rows if that is affordable. Otherwise the one that lacks the fewest tokens in the draft model's cache, which
        has perhaps just joined.
        """
        everyone, plain = range(round_.rows), round_.times.plain
        ms = self._search_ms
        if source is self.model_drafts:
            ms = self.costs.draft_ms(round_.rows, 1) + round_.times.extra(round_.rows)
        left = source.credit - min(CREDIT, ms / plain)
        if left < 0 or left >= round_.feed_ms / plain:
            return None if left < 0 else everyone
        allowed = [row for row in everyone if round_.batch.max_draft_tokens[row] > 0]
        if not self._ranks or not allowed:
            return None
        row = min(allowed, key=missing.by_row.__getitem__)
        round_.feed_ms = self.costs.feed_ms(missing.by_row[row])
        return range(row, row + 1) if left >= round_.feed_ms / plain else None

    def _missing(self, batch: Batch, source: DraftSource) -> Missing:
        if source is self.ngram_drafts:
            return NOTHING_MISSING
        if self._device is not None:  # the host does not read its caches: each round without drafts adds a token
            tokens = len(self.decoders) * (self._undrafted - 1)
            return Missing([tokens] * batch.rows, tokens * batch.rows)
        by_row, spared = [0] * batch.rows, 0
        for decoder in self.decoders:
            by_row = [before + count - 1 for before, count in zip(by_row, decoder.missing_tokens(batch), strict=True)]
            spared += decoder.spared(batch)
        return Missing(by_row, sum(by_row) - spared)

    def _plain_ms(self, rows: int) -> float:
        """Milliseconds of a plain round at the table's context and speed of the machine: the unit of speeds.

        It changes as the table's errors are corrected, and not with the machine's speed.
        """
        times = self.costs.times(rows, self.costs.table.context)
        return times.plain / times.slowness

    def _assumed_speed(self, rows: int) -> float:
        """Speed of the best length, if all draft tokens are as good as the recent ones; renewed with the times."""
        times = self.costs.times(rows, self.costs.table.context)
        known = self._assumed_speeds.get(rows)
        if known is None or known[0] is not times:
            acceptance, draft_ms = self.model_drafts.acceptance, self.costs.draft_ms
            tokens = accumulate(acceptance**k for k in range(1, LONGEST_AUTO + 1))
            best = max((1 + gain) / (times.ms_of(rows * k) + draft_ms(rows, k)) for k, gain in enumerate(tokens, 1))
            known = self._assumed_speeds[rows] = times, times.plain * best
        return known[1]

    def _weights(self, batch: Batch) -> list[float]:
        """Token weight of each row, [B], 1 on average.

        While requests wait or may come, the goal is tokens per millisecond, and all tokens weigh the same. A draining
        batch ends with its slowest row: there the weights are those of a soft maximum of the rounds left in each row.
        """
        if not batch.draining or batch.rows == 1:
            return [1.0] * batch.rows
        left = []
        for slot, limit, length in zip(batch.slots, batch.limits, batch.lengths, strict=True):
            tokens, rounds = self._paces.get(slot, (PRIOR_ROUNDS, PRIOR_ROUNDS))
            left.append((limit - length) * rounds / tokens)
        weights = [math.exp((rounds - max(left)) / HURRY) for rounds in left]
        return [batch.rows * weight / sum(weights) for weight in weights]

    def _plan(self, round_: AutoRound, source: DraftSource, rows: range) -> SpeculationPlan:
        round_.sources = [source if row in rows else None for row in range(round_.rows)]
        if source is self.ngram_drafts:
            return SpeculationPlan(LONGEST_AUTO, fallback=lambda batch, _draft: [0] * batch.rows, note=round_)
        self._undrafted = 0
        if not self._ranks:
            best = 1 if round_.on_credit else self._by_position.best(round_)
            plan = SpeculationPlan(best, note=round_).within(round_.batch)
            round_.k = round_.passes = best if plan.k == best else self._by_position.at_most(plan.k)
            matches = None if self._by_match is None else self._by_match.least_matches(round_.slots, round_.k)
            return replace(plan, k=round_.k, least_matches=matches)
        if round_.on_credit:
            round_.k = 1 if len(rows) > 1 else FIRST_DRAFT
            caps = [round_.k if row in rows else 0 for row in range(round_.rows)]
            return SpeculationPlan(round_.k, caps, self._stop_drafting, lambda _batch, _draft: caps, round_)
        round_.k = min(LONGEST_AUTO, source.first_depth)
        if not self._searches:
            return SpeculationPlan(round_.k, None, self._stop_drafting, note=round_)
        return SpeculationPlan(LONGEST_AUTO, None, self._stop_drafting, self._fallback, round_)

    # --- during the round ------------------------------------------------------------

    def _gains(
        self,
        round_: AutoRound,
        source: DraftSource,
        bins: Sequence[Sequence[int]],
        trees: Sequence[Sequence[int]] | None,
        first: int = 0,
    ) -> list[list[float]]:
        """Expected tokens w s of each draft token, row by row. first: row of the batch that ``bins`` start at."""
        trust = source.trust if source is self.ngram_drafts else 1.0
        gains = []
        for row, line in enumerate(bins):
            factor, tree = trust * round_.weights[first + row], None if trees is None else trees[row]
            survivals = source.calibration.survivals(round_.slots[first + row], line, tree)
            gains.append(survivals if factor == 1 else [factor * survival for survival in survivals])
        return gains

    def _gains_of(
        self, round_: AutoRound, source: DraftSource, draft: Draft, bins: list[list[int]]
    ) -> list[list[float]]:
        """Note a draft that the policy has seen. Returns the expected tokens of each draft token, row by row."""
        round_.drafts.append((source, draft, bins))
        return self._gains(round_, source, bins, draft.parents)

    def _fallback(self, batch: Batch, draft: Draft) -> list[int]:
        """Draft tokens to request from the draft model in each row; 0 where the n-gram draft has the higher value.

        The draft model has to read what n-gram drafts gain, before it drafts the next time. Its drafting passes take
        about as long for one row as for all, so a row leaves it only if what it gains there is less, and all rows leave
        it if that saves more.
        """
        round_, model, rows = self._round, self.model_drafts, self._round.rows
        gains = self._gains_of(round_, self.ngram_drafts, draft, bins_of_draft(draft))
        round_.ngrams = [sorted(line, reverse=True) for line in gains]
        price = self._ngram_price(round_)
        _, counts = round_.times.best(round_.ngrams, price, batch.deadlines, self._max_ms(round_))
        step_ms = round_.times.extra(sum(counts)) / max(1, sum(counts))
        read_ms = self.costs.feed_ms(rows) / rows
        values = []
        for line, count in zip(round_.ngrams, counts, strict=True):
            gain = sum(line[:count])
            values.append(gain - price * (count * step_ms + gain * read_ms))
        speed = max(1.0, model.speed(rows))
        drafting = speed * model.drafting_ms(rows) / self._plain_ms(rows)
        of_model = [weight * (speed - 1 + drafting) for weight in round_.weights]  # before drafting is paid for
        best = [max(pair) for pair in zip(values, of_model, strict=True)]
        if sum(values) >= sum(best) - drafting * rows:
            return self._use_ngrams(round_, [True] * rows)
        return self._use_ngrams(round_, [value > other for value, other in zip(values, of_model, strict=True)])

    def _ngram_price(self, round_: AutoRound) -> float:
        """Price of time for n-gram drafts, in tokens per millisecond.

        The more of them are wrong, the less evenly rows advance, and a draining batch waits for its slowest row: there
        the price is divided by their acceptance.
        """
        uneven = round_.batch.draining and round_.rows > 1
        return round_.price / self.ngram_drafts.acceptance if uneven else round_.price

    def _max_ms(self, round_: AutoRound) -> float:
        """Longest round of n-gram drafts: one plain round longer, and one more for each draft token judged per row.

        Before any was judged nothing is known of them, and a wrong one costs eight rows up to ten plain rounds at once.
        """
        return round_.times.plain * (1 + CREDIT + self.ngram_drafts.judged / round_.rows)

    def _use_ngrams(self, round_: AutoRound, rows: list[bool]) -> list[int]:
        """Take the n-gram drafts in some rows. Returns the draft tokens to request from the draft model in each row."""
        round_.sources = [self.ngram_drafts if uses else self.model_drafts for uses in rows]
        if all(rows):
            round_.feed_ms = 0.0
        return [0 if uses else round_.k for uses in rows]

    def _stop_drafting(
        self, batch: Batch, scores: Sequence[Sequence[float]], parents: Sequence[Sequence[int]] | None = None
    ) -> bool:
        """Whether one more drafting pass is expected to raise the value by less than it costs.

        scores, parents: score and parent of each row's draft tokens so far; parents None: chains.
        """
        round_, model, first = self._round, self.model_drafts, batch.first
        round_.passes += 1
        drafting = [source is model for source in round_.sources[first : first + len(scores)]]
        trees = parents or [range(-1, len(line) - 1) for line in scores]
        bins = [bins_of(len(line), line, tree) for line, tree in zip(scores, trees, strict=True)]
        now = [
            list(line) if source is self.ngram_drafts else []
            for line, source in zip(round_.ngrams or [[]] * round_.rows, round_.sources, strict=True)
        ]
        longer = list(now)
        for row, (line, tree) in enumerate(zip(self._gains(round_, model, bins, parents, first), trees, strict=True)):
            if drafting[row]:
                children = [model.acceptance * gain for place, gain in enumerate(line) if place not in tree]
                now[first + row] = sorted(line, reverse=True)
                longer[first + row] = sorted(line + children, reverse=True)
        deadlines = round_.batch.deadlines
        before, after = (round_.times.best(lines, round_.price, deadlines)[0] for lines in (now, longer))
        return after - before <= round_.price * self.costs.next_pass_ms(sum(drafting))

    def select(self, batch: Batch, draft: Draft) -> Draft:
        round_ = self._round
        if not self._ranks or not any(round_.sources):
            return draft
        if draft.probabilities is not None:  # such drafts are of the draft model in all rows
            round_.sources = [self.model_drafts] * round_.rows
        model_rows, gains, bins = round_.rows_of(self.model_drafts), round_.ngrams, bins_of_draft(draft)
        if model_rows:
            by_model = [source is self.model_drafts for source in round_.sources]
            model_bins = [line if own else [] for line, own in zip(bins, by_model, strict=True)]
            model_gains = self._gains_of(round_, self.model_drafts, draft, model_bins)
            rows = zip(model_gains, gains or model_gains, by_model, strict=True)
            gains = [mine if own else other for mine, other, own in rows]
        elif not gains:
            gains = self._gains_of(round_, self.ngram_drafts, draft, bins)
        if draft.probabilities is not None or (round_.on_credit and model_rows):
            return draft.first(draft.drafted)
        if draft.parents is not None:
            orders = [sorted(range(len(line)), key=line.__getitem__, reverse=True) for line in gains]
            draft = draft.ordered(orders)
        gains = [sorted(line, reverse=True) for line in gains]
        price = round_.price if model_rows else self._ngram_price(round_)
        max_ms = math.inf if model_rows else self._max_ms(round_)
        _, counts = round_.times.best(gains, price, batch.deadlines, max_ms)
        round_.expected = sum(
            sum(line[:count]) / weight
            for line, count, weight, source in zip(gains, counts, round_.weights, round_.sources, strict=True)
            if source is self.ngram_drafts
        )
        return draft.first(counts)

    # --- after the round ---------------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        round_, timing = verdict.note, verdict.timing
        if not isinstance(round_, AutoRound):
            return
        drafted = verdict.drafted if self._ranks else [round_.k] * round_.rows
        model_rows = round_.rows_of(self.model_drafts)
        if timing:
            self.costs.observe(round_.rows, sum(drafted), round_.context, timing.verify_ms, round_.kind)
            if round_.passes and model_rows and self._ranks:
                self.costs.observe_draft(model_rows, round_.passes, timing.draft_ms - round_.feed_ms)
        accepted = _accepted_by_slot(batch, verdict)
        for slot, count in accepted.items():
            tokens, rounds = self._paces.get(slot, (PRIOR_ROUNDS, PRIOR_ROUNDS))
            tokens, rounds = (tokens - PRIOR_ROUNDS) * SLOW_FADE + count + 1, (rounds - PRIOR_ROUNDS) * SLOW_FADE + 1
            self._paces[slot] = PRIOR_ROUNDS + tokens, PRIOR_ROUNDS + rounds
        spent = self._learn_speeds(round_, drafted, accepted, timing)
        for source in self._sources:
            source.accrue(CREDIT_SHARE / len(self._sources) * (1 + spent))
        self._learn_calibration(round_, verdict, batch.slots)

    def _learn_speeds(
        self, round_: AutoRound, drafted: Sequence[int], accepted: dict[int, int], timing: RoundTiming | None
    ) -> float:
        """Learn what came of each source. Returns the plain rounds that the round took beyond one.

        A source that drafted for some rows learns as if it had drafted for all like that. Reading missing tokens does
        not count: later rounds use them, too.
        """
        times, spent = self.costs.times(round_.rows, round_.context, round_.kind), 0.0
        for source in {source for source in round_.sources if source}:
            rows = [row for row, each in enumerate(round_.sources) if each is source]
            accepted_by_row = {row: accepted[slot] for row in rows if (slot := round_.slots[row]) in accepted}
            # Squares: the last row to end decides when a batch does.
            shares = {row: round_.weights[row] ** 2 for row in accepted_by_row}
            gained = sum(shares[row] * count for row, count in accepted_by_row.items()) / (sum(shares.values()) or 1.0)
            drafts = sum(drafted[row] for row in rows)
            if source is self.ngram_drafts:
                source.learn_trust(round_.expected / source.trust, sum(accepted_by_row.values()))
            if source is self.model_drafts or len(rows) == round_.rows:
                verify_ms = times.ms_of(round(drafts * round_.rows / len(rows)))
                drafting_ms = self._drafting_ms(round_, source, round_.rows, timing)
                scale = self._plain_ms(round_.rows) / times.plain
                source.learn_speed(round_.rows, 1 + gained, scale * (verify_ms + drafting_ms), scale * drafting_ms)
            extra_ms = times.extra(drafts) + self._drafting_ms(round_, source, len(rows), timing)
            if round_.on_credit:
                source.accrue(gained * len(rows) / round_.rows - (extra_ms + round_.feed_ms) / times.plain)
            spent += extra_ms / times.plain
        if timing and self.ngram_drafts in round_.sources and self.model_drafts not in round_.sources:
            self._search_ms = timing.draft_ms
        return spent

    def _drafting_ms(self, round_: AutoRound, source: DraftSource, rows: int, timing: RoundTiming | None) -> float:
        """Milliseconds that drafting took: predicted for the draft model and ``rows`` rows, measured for a search."""
        if source is self.model_drafts:
            return self.costs.draft_ms(rows, round_.passes) if round_.passes else 0.0
        if timing is None or self.model_drafts in round_.sources:
            return 0.0
        return min(timing.draft_ms, self._search_ms or math.inf)  # ignores pauses of the machine

    def _learn_calibration(self, round_: AutoRound, verdict: Verdict, slots: Sequence[int]) -> None:
        """Learn from all drafts that were seen, or else from the accepted tokens by position."""
        for source, draft, bins in round_.drafts:
            source.learn_draft(draft, bins, verdict, slots)
        if not self._ranks and round_.k:
            judged = [
                [(bin_, place < count) for place, bin_ in enumerate(bins_of(min(count + 1, depth)))]
                for count, depth in zip(verdict.accepted, verdict.depths, strict=True)
            ]
            self.model_drafts.learn(judged, slots)
            if self._by_match is not None and verdict.matched is not None:
                self._by_match.learn(verdict, slots)


def _accepted_by_slot(batch: Batch, verdict: Verdict) -> dict[int, int]:
    """Accepted draft tokens of each row in the round. On a device, rows that have joined since have no tokens in it."""
    rows = zip(batch.slots, verdict.accepted, verdict.tokens, strict=True)
    return {slot: accepted for slot, accepted, tokens in rows if tokens}
