"""``auto``: play what brings the most tokens beyond a plain round, at the going rate.

A draft token that survives with chance s (it and all before it in its row are right) brings w s tokens, w being what a
token of its row is worth. To verify a set of n draft tokens brings

    value = sum of w s - rate (time(n) - time(0))

where ``rate`` is what a millisecond gave lately in rounds of this kind, and never less than plain decoding gives. The
best draft tokens are verified, as many as make this greatest: nothing here asks whether they form chains.

* A draft goes on while one more draft token a row is expected to raise the value by more than rate times a pass.
* A source of draft tokens (a draft model; copies, which take a search) is asked while what it brought lately, with the
  benefit of the doubt, is more than rate times what it has to read first, spread over the rounds that are left.
* Copies are played in place of the draft model's draft tokens where their value is more than what those brought lately.
* What looks worthless is tried when a small share of the time, saved for that, pays for it; its record counts little
  then.

Draft tokens are judged by what the rows gained, verified or not. Under the rejection rule nothing that was drafted is
left
out: to drop a draft token for what it is would bend the distribution; to stop after it does not. Where nobody sees the
draft tokens before they are verified (rounds of the device), or all rows pay for the longest draft, their places in the
draft are their scores, and the length is chosen beforehand, by the same value.

(TETRIS 2502.15197 and AdaServe 2501.12162 rank draft tokens under a given budget, SpecDec++ 2405.19715 and EAGLE-2
2406.16858 stop by the drafter's confidence, SmartSpec 2406.14066 maximises the rate of a length for all.)
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
    CLUELESS,
    LONGEST_AUTO,
    Belief,
    Judged,
    Mean,
    Paces,
    Rate,
    Savings,
    bins_of,
    bins_of_draft,
    judge,
)
from paceline.lengths.cost import REFRESH, CostModel, RoundTimes
from paceline.models.decoder import Decoder

Clock: TypeAlias = Callable[[], float]  # seconds
# the draft token that each draft token of a row follows; None: the one before
Follows: TypeAlias = Sequence[int] | None

DOUBT = 1.5  # standard errors by which a draft model gets the benefit of the doubt: trials come seldom; copies get 1
TRIALS = 3.0  # what a record weighs at most when what it says is tried
# draft tokens that the chance of any draft token weighs at first, and most of a draft before any was right
CLUELESS_TRIALS = 4
FADE = 0.98  # what the evidence about any draft token is worth a round later
SEARCH_HOPE = 0.2  # tokens a row that a search for copies is believed to bring, before any
CAUTION = 0.2  # of a plain round: what draft tokens may take before any was judged, and for each that was
# plain rounds that draft tokens may cost a batch that drains: at 0 it often gives up draft tokens that pay
CREDIT = 0.5
CHEAPER = 0.5  # the true time of draft tokens may be so much of the one believed: worth finding out


class Source:
    """What is known of a kind of draft tokens.

    belief: what their scores are worth. judged, right: draft tokens lately. By rows: rates, tokens a millisecond of
    rounds that asked for them; brings, what a row of such a round gained beyond plain decoding, less what its time
    would have given.
    savings: for asking although that looks worthless.
    """

    def __init__(self) -> None:
        self.belief = Belief()
        self.judged = self.right = 0.0
        self.rates: dict[int, Rate] = {}
        self.brings: dict[int, Mean] = {}
        self.savings = Savings()

    @property
    def chance(self) -> float:
        """Of a draft token of which nothing else is known."""
        return (self.right + CLUELESS_TRIALS * CLUELESS) / (self.judged + CLUELESS_TRIALS)

    def learn(self, judged: Sequence[Sequence[Judged]]) -> None:
        """As ``Belief.learn``."""
        self.belief.learn(judged)
        self.judged = self.judged * FADE + sum(map(len, judged))
        self.right = self.right * FADE + sum(right for line in judged for _, right in line)

    def learn_of(self, draft: Draft, verdict: Verdict) -> None:
        """What a round shows of a draft, whose draft tokens may all have been left out."""
        bins = bins_of_draft(draft)
        judged = zip(bins, judge(draft, verdict), strict=True)
        self.learn([[(line[place], right) for place, right in known] for line, known in judged])


@dataclass
class Round:
    """The round being played. began, ready: seconds, when it and when its verification began; feed, passes: ms."""

    batch: Batch
    began: float
    ready: float
    times: RoundTimes
    worth: list[float]  # of a token of each row
    rows: int = 0
    context: int = 0
    source: Source | None = None  # whose draft tokens are verified
    rate: float = 0.0
    trial: bool = False
    reviews: bool = False  # played without draft tokens, to see what that takes
    asked: range | None = None  # rows; None: all
    k: int = 0  # draft tokens asked of each
    draft_tokens: int = 0  # verified, of all rows
    feed: float = 0.0  # what the draft model reads first takes
    passes: list[float] = field(default_factory=list)
    drafts: list[tuple[Source, Draft]] = field(default_factory=list)  # all that was seen of them

    def __post_init__(self) -> None:
        self.rows, self.context = self.batch.rows, self.batch.longest

    @property
    def scale(self) -> float:
        """What is asked of all rows, over what is asked of these."""
        return 1.0 if self.asked is None else self.rows / len(self.asked)


class AutoLength(RowKeepers, LengthPolicy):
    """Measures time from ``choose`` to ``observe`` (both on the host).

    costs: their ``whole`` says that drafts are not seen before they are verified. decoders: the drafter's, whose caches
    fall behind in rounds without them. copies: whether there are draft tokens without them, too. clock: seconds. times:
    else rounds may be observed one late, and take what the costs say.
    paying_rows: as of ``PolicyInputs``; with more rows the decoders are not asked, whatever the costs say.
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
        self.selects = not costs.whole
        self.drafted, self.copied = Source(), Source()
        self._shape: Follows = None  # of the trees that were drafted lately
        self._searches = self.selects and (copies or not decoders)
        self._sources = [self.drafted] if decoders or costs.whole else []
        self._sources += [self.copied] if self._searches else []
        self._paces = Paces()
        self._savings = Savings()  # for rounds that show what others take
        self._search_ms = 0.0  # what the last search for copies took
        # ms of a draft beside its passes: to choose among draft tokens, and to learn from them
        self._thinking = Mean(0.0)
        self._proposed = False  # whether draft tokens were verified in the last round
        self._unasked = 0  # rounds without draft tokens since the last with any
        self._rested = 0  # of the last rest, if nothing was asked for since
        self._rest = 0  # rounds in which nothing is asked for, as plain rounds change nothing that asking hangs on
        self._round: Round
        self._chosen: deque[Round] = deque()  # and not observed yet; the last is ``_round``

    @classmethod
    def build(cls, means: PolicyInputs, /) -> AutoLength:
        costs = CostModel(means.costs(), whole=not means.ragged)
        policy = cls(costs, means.decoders, means.copies, times=not means.overlaps)
        policy.paying_rows = means.paying_rows
        return policy

    def describe(self) -> str:
        return self.name if self.paying_rows is None else f"{self.name} (drafts for up to {self.paying_rows} rows)"

    def _drafts_pay(self, rows: int) -> bool:
        """Whether nothing was measured that says otherwise."""
        return self.paying_rows is None or rows <= self.paying_rows

    def _sources_for(self, rows: int) -> list[Source]:
        """Those that may be asked."""
        return self._sources if self._drafts_pay(rows) else [each for each in self._sources if each is not self.drafted]

    # --- before the round ------------------------------------------------------------

    def choose(self, batch: Batch) -> SpeculationPlan:
        if self._rest and self._round.rows == batch.rows:
            self._rest -= 1
            self._unasked += 1
            self._save(self._round.times.plain)
            return SpeculationPlan(0)
        self._rest, began = 0, self.clock()
        times = self.costs.times(batch.rows, batch.longest)
        self._round = Round(batch, began, began, times, self._paces.worth_of_tokens(batch))
        while len(self._chosen) > (not self.times):  # the round before failed
            self.lost()
        self._chosen.append(self._round)
        for source in self._sources_for(batch.rows):
            if self._pays(source):
                self._unasked = self._rested = 0
                return self._ask(source)
            if self._round.reviews:
                break
        self._unasked += 1
        return SpeculationPlan(0)

    def _pays(self, source: Source) -> bool:
        """Whether to ask for draft tokens: by what they brought lately, or because it is time to see."""
        now, brings = self._round, self._brings(source)
        now.source, now.rate = source, self._rate(source)
        backlog, spared, doubt = (*self._backlog(), DOUBT) if source is self.drafted else ([0], 0, 1.0)
        now.feed = self.costs.feed_ms(sum(backlog) - spared)
        left = max(now.batch.limits[row] - now.batch.lengths[row] for row in range(now.rows))
        value = self._best_length()[0] if self.costs.whole else (brings.value + doubt * brings.error) * now.rows
        if value > now.rate * now.feed / max(left, 1) and not self._is_held_up():
            now.reviews = self._reviews_plain(value / now.rate)
            if not now.reviews:
                return True
        else:
            now.trial = source.savings.pay(self._price(source, backlog))
            if now.trial:
                brings.doubt(TRIALS)
                return True
        now.source, now.asked, now.feed = None, None, 0.0
        return False

    def _is_held_up(self) -> bool:
        """Whether draft tokens have brought less than they took in a batch that drains: nothing repays it later."""
        now = self._round
        return now.batch.draining and now.rows > 1 and fmean(self._paces.ahead(now.rows)) < -CREDIT

    def _reviews_plain(self, loss: float) -> bool:
        """Whether to see what a plain round takes, which loses so many ms, unless that is far from what is believed."""
        unsure = self.times and loss < 2 * self._round.times.error and self._proposed
        return unsure and self._savings.pay(loss)

    def _price(self, source: Source, backlog: list[int]) -> float:
        """Milliseconds that a trial takes. A draft model reads for one row alone, the one of which it lacks least."""
        now = self._round
        if source is self.copied:
            return self._search_ms
        if self.decoders and now.rows > 1 and self.times:  # a device's rounds are for all rows
            row = min(range(now.rows), key=lambda row: (now.batch.max_draft_tokens[row] == 0, backlog[row]))
            now.asked = range(row, row + 1)
        now.feed = self.costs.feed_ms(min(backlog) if now.asked is None else backlog[now.asked.start])
        rows = round(now.rows / now.scale)
        return now.feed + self._passes_ms(rows, 1) + now.times.more(rows)

    def _ask(self, source: Source) -> SpeculationPlan:
        now = self._round
        if source is self.copied:
            return SpeculationPlan(LONGEST_AUTO, instead=lambda _batch, _copied: 0)
        if now.trial:
            source.belief.doubt()
        now.k = self._reach()
        caps = None if now.asked is None else [now.k if row in now.asked else 0 for row in range(now.rows)]
        if self.costs.whole:
            wish = SpeculationPlan(now.k, caps).within(now.batch)
            now.k, now.draft_tokens = wish.k, round(wish.k * now.rows / now.scale)
            return wish
        either = self._searches and not now.trial
        instead = self._instead if either else lambda _batch, _copied: now.k
        return SpeculationPlan(LONGEST_AUTO if either else now.k, caps, self._enough, instead)

    def _reach(self) -> int:
        """The longest draft to ask for."""
        if not self.costs.whole:
            return min(LONGEST_AUTO, CLUELESS_TRIALS + int(self.drafted.right))  # scores are trusted by their record
        return 1 if self._round.trial else self._best_length()[1]

    def _rate(self, source: Source) -> float:
        """Tokens a millisecond: reached lately, or plain decoding's."""
        now = self._round
        return max(source.rates.setdefault(now.rows, Rate()).value, sum(now.worth) / now.times.plain)

    def _brings(self, source: Source) -> Mean:
        """By rows, of a draft model; of copies, which anything can show, for all alike."""
        if source is self.copied:
            return source.brings.setdefault(0, Mean(SEARCH_HOPE))
        rows = self._round.rows
        if rows not in source.brings:
            source.brings[rows] = Mean(self._promise(rows, source.chance) / rows)
        return source.brings[rows]

    def _promise(self, rows: int, chance: float) -> float:
        """What a round brings whose draft tokens have this chance."""
        times = self.costs.times(rows, self.costs.table.context)
        gains = [rows * chance**k for k in range(1, LONGEST_AUTO + 1)]
        return self._best_depth(gains, rows, times, rows / times.plain)[0]

    def expects_to_draft(self, rows: int) -> bool:
        """By what draft tokens brought so many rows, as when they are asked for; before any by what those lately
        would.
        """
        if not self._drafts_pay(rows):
            return False
        brings = self.drafted.brings.get(rows) or Mean(self._promise(rows, self.drafted.chance))
        return brings.value + DOUBT * brings.error > 0

    def _best_length(self) -> tuple[float, int]:
        """By the places of draft tokens alone: the value of the best number of them a row, at least 1, and that number.

        The value has the benefit of the doubt.
        """
        now = self._round
        most = [min(LONGEST_AUTO, most) for most in now.batch.max_draft_tokens[: now.rows]]
        lines = self._lines(self.drafted, [bins_of(each) for each in most], [self._shape] * now.rows)
        gains = map(sum, zip_longest(*lines, fillvalue=0.0))
        value, tokens, k = self._best_depth(gains, now.rows, now.times, now.rate)
        return value + min(1.0, self.drafted.belief.error()) * tokens, k

    def _best_depth(
        self, gains: Iterable[float], rows: int, times: RoundTimes, rate: float
    ) -> tuple[float, float, int]:
        """Of drafts as deep for every row, by gains at each depth: the value of the best, its tokens and its depth."""
        values = [
            (tokens - rate * (times.more(rows * k) + self._passes_ms(rows, k)), tokens, k)
            for k, tokens in enumerate(accumulate(gains), 1)
        ]
        return max(values, key=itemgetter(0), default=(-math.inf, 0.0, 1))

    def _passes_ms(self, rows: int, passes: int) -> float:
        """Of a draft, where it is told apart from the round."""
        if self.costs.whole:
            return 0.0
        return self.costs.pass_ms(rows, first=True) + (passes - 1) * self.costs.pass_ms(rows, first=False)

    def _backlog(self) -> tuple[list[int], int]:
        """Tokens that each row's caches lack, beyond the one that a draft feeds anyway; and how many siblings spare."""
        now = self._round
        if not self.times:  # the device is not asked: a plain round gives each row a token
            return [len(self.decoders) * self._unasked] * now.rows, 0
        lags = [decoder.lags(now.batch) for decoder in self.decoders]
        spared = sum(decoder.spared(now.batch) for decoder in self.decoders)
        return [sum(each) - len(lags) for each in zip(*lags, strict=True)] or [0], spared

    # --- while it is played ----------------------------------------------------------

    def _instead(self, _batch: Batch, copied: Draft) -> int:
        """Copies, or a draft of so many draft tokens."""
        now = self._round
        now.drafts.append((self.copied, copied))
        value, _ = self._best(self._ranked(self.copied, copied)[1], self.copied)
        if value <= max(0.0, self._brings(self.drafted).value) * now.rows:
            return now.k
        now.source, now.feed = self.copied, 0.0
        return 0

    def _lines(
        self, source: Source, bins: Sequence[Sequence[int]], follows: Sequence[Follows], first: int = 0
    ) -> list[list[float]]:
        """What each draft token is expected to bring, row by row, from row ``first`` on."""
        worth, lines = self._round.worth, []
        for row, (line, parents) in enumerate(zip(bins, follows, strict=True), first):
            survivals = source.belief.survivals(row, line, parents)
            lines.append(survivals if worth[row] == 1 else [worth[row] * survival for survival in survivals])
        return lines

    def _ranked(self, source: Source, draft: Draft) -> tuple[Draft, list[list[float]]]:
        """The draft with each row's draft tokens in the order of what they bring, and that.

        Nothing brings more than what it follows: chains are in order, and the first draft tokens of a tree are a tree.
        """
        lines = self._lines(source, bins_of_draft(draft), draft.follows or [None] * len(draft.draft_tokens))
        if draft.follows is None:
            return draft, lines
        orders = [sorted(range(len(line)), key=line.__getitem__, reverse=True) for line in lines]
        return draft.ordered(orders), [sorted(line, reverse=True) for line in lines]

    def _best(self, lines: list[list[float]], source: Source, cheaper: float = 1.0) -> tuple[float, list[int]]:
        """The value of the best draft tokens, and how many of each row those are. cheaper: of the times believed."""
        now = self._round
        plain, rate = now.times.plain, now.rate * cheaper
        most = plain * (1 + CAUTION * (1 + source.judged / now.rows)) if source is self.copied else math.inf
        value, counts = now.times.best(lines, rate, now.batch.deadlines, most)
        if now.batch.draining and len(lines) == now.rows > 1:  # it ends with its last row, which must gain by them
            ahead = self._paces.ahead(now.rows)
            row = ahead.index(min(ahead))
            gain = max(0.0, ahead[row]) + sum(lines[row][: counts[row]]) / now.worth[row]
            value, counts = now.times.best(lines, rate, now.batch.deadlines, min(most, plain * (1 + gain)))
        return value, counts

    def _enough(
        self, batch: Batch, scores: Sequence[Sequence[float]], follows: Sequence[Sequence[int]] | None = None
    ) -> bool:
        """Whether one more pass is expected to bring less than it takes: a draft token after each that nothing
        follows.
        """
        now, clock = self._round, self.clock()
        now.passes.append(1000 * (clock - now.ready))
        now.ready = clock
        trees = follows or [range(-1, len(line) - 1) for line in scores]
        bins = [bins_of(len(line), line, tree) for line, tree in zip(scores, trees, strict=True)]
        lines, chance = self._lines(self.drafted, bins, trees, batch.first), self.drafted.chance
        new = [
            [chance * end for place, end in enumerate(line) if place not in tree]
            for line, tree in zip(lines, trees, strict=True)
        ]
        values = [
            self._best([sorted(line, reverse=True) for line in each], self.drafted)[0]
            for each in (lines, [[*line, *more] for line, more in zip(lines, new, strict=True)])
        ]
        gain = values[1] - values[0]
        return gain <= now.rate * self.costs.pass_ms(len(lines), first=False)

    def select(self, batch: Batch, draft: Draft) -> Draft:
        now = self._round
        if not self.selects and draft.follows is not None:  # of trees only the last one's shape is known beforehand
            shape = draft.follows[0]
            self._shape = [*shape, *range(len(shape) - 1, LONGEST_AUTO - 1)]
            now.drafts.append((self.drafted, replace(draft, confidence=None)))
        if not self.selects or now.source is None:
            return draft
        counts = draft.drafted
        if not now.drafts or now.source is self.drafted:
            now.drafts.append((now.source, draft))
        if draft.probabilities is None and not (now.trial and now.source is self.drafted):
            draft, lines = self._ranked(now.source, draft)
            counts = self._worth_verifying(now.source, lines)
        now.ready = self.clock()
        return draft.first(counts)

    def _worth_verifying(self, source: Source, lines: list[list[float]]) -> list[int]:
        """By what is believed; where that is nothing, now and then by what would be worth it if it took less."""
        now = self._round
        value, counts = self._best(lines, source)
        asks_decoders = self.decoders and self._drafts_pay(now.rows)
        if not (asks_decoders or source.rates[now.rows].value or now.batch.draining):  # this round says what it reaches
            more = now.times.more(sum(counts))
            now.rate = (sum(now.worth) + value + now.rate * more) / (now.times.plain + more)
            value, counts = self._best(lines, source)
        if any(counts):
            return counts
        value, hoped = self._best(lines, source, CHEAPER)
        price = (1 - CHEAPER) * now.times.more(sum(hoped)) - value / now.rate
        return hoped if any(hoped) and self._savings.pay(price) else counts

    # --- after the round ---------------------------------------------------------------

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if not self._chosen:  # a round of rest
            return
        now, ended = self._chosen.popleft(), self.clock()
        self._round = now
        accepted, ms = verdict.host.accepted, 1000 * (ended - now.began)
        drafting = 1000 * (now.ready - now.began)
        if not self.times:
            ms = now.feed + now.times.plain + now.times.more(now.draft_tokens)
        if self.selects:
            now.draft_tokens = sum(verdict.host.drafted)
        if self.times:
            self._learn_costs(ms - now.feed if self.costs.whole else ms - drafting)
        self._proposed = now.draft_tokens > 0
        spent = self._spent(drafting)
        self._paces.learn(accepted, 1 + (0.0 if now.trial else spent / now.times.plain))
        if now.source is not None:
            self._learn_worth(now.source, verdict, ms, spent)
            self._learn_chances(now.source, verdict)
        self._save(ms)
        if now.passes:
            thought = drafting - now.feed - sum(now.passes) + 1000 * (self.clock() - ended)
            self._thinking.learn(min(max(0.0, thought), now.times.plain))
        if now.source is self.copied:
            self._search_ms = drafting + 1000 * (self.clock() - ended)
        elif now.source is None and not now.reviews and self.times and self._sources:  # nothing more is known till then
            wait = min((source.savings.rounds(ms) for source in self._sources_for(now.rows)), default=REFRESH)
            self._rest = self._rested = min(REFRESH, max(wait, 2 * self._rested))  # prices rise as a draft model lags

    def _spent(self, drafting: float) -> float:
        """Milliseconds that draft tokens took; of one row, as if all had been asked. What is read first serves many."""
        now = self._round
        spent = now.times.more(round(now.scale * now.draft_tokens))
        if now.passes:
            return spent + self._passes_ms(now.rows, len(now.passes)) + self._thinking.value
        if now.source is self.copied:
            spent += min(drafting, self._search_ms)  # pauses of the machine hold up nobody
        return spent

    def _save(self, ms: float) -> None:
        for savings in (self._savings, *(source.savings for source in self._sources)):
            savings.save(ms)

    def _learn_costs(self, ms: float) -> None:
        now = self._round
        if now.passes:
            now.passes[0] = max(0.0, now.passes[0] - now.feed)
            self.costs.observe_passes(round(now.rows / now.scale), now.passes)
        if now.feed < ms:  # else the time says little about such rounds
            self.costs.observe(now.rows, now.draft_tokens, now.context, ms)

    def _learn_worth(self, source: Source, verdict: Verdict, ms: float, spent: float) -> None:
        """The rate that the round reached, and what it brought; of one row, as if all had been asked."""
        now, accepted = self._round, verdict.host.accepted
        kept = sum(worth * good for worth, good in zip(now.worth, accepted, strict=self.times))
        if not self.times:  # rows may have come and gone meanwhile
            kept *= now.rows / max(1, sum(map(bool, verdict.host.tokens)))
        if not now.trial:
            source.rates.setdefault(now.rows, Rate()).learn(sum(now.worth) + kept, ms - now.feed)
        self._brings(source).learn((now.scale * kept - now.rate * spent) / now.rows)

    def _learn_chances(self, source: Source, verdict: Verdict) -> None:
        """Of all draft tokens that were seen; else a draft token that was asked for and never came is wrong: it was
        paid for.
        """
        now, accepted = self._round, verdict.host.accepted
        for seen, draft in now.drafts:
            seen.learn_of(draft, verdict)
        if self.costs.whole and not now.drafts:
            most = verdict.host.depths if not self.times else self._asked_of_rows()
            source.learn(
                [
                    [(bin_, place < kept) for place, bin_ in enumerate(bins_of(min(kept + 1, count)))]
                    for kept, count in zip(accepted, most, strict=True)
                ]
            )

    def _asked_of_rows(self) -> list[int]:
        now = self._round
        asked, most = now.asked or range(now.rows), now.batch.max_draft_tokens[: now.rows]
        return [min(now.k, allowed) if row in asked else 0 for row, allowed in enumerate(most)]

    # --- rows ----------------------------------------------------------------------------

    def lost(self) -> None:
        if self._chosen:
            self._chosen.popleft()

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self._paces.rows, self.drafted.belief.rows, self.copied.belief.rows
