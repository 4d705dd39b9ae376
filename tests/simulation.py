"""Simulated rounds without a model, for length policies: acceptance and costs are given, time is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft, RoundTiming, Verdict
from paceline.core.values import Accepted
from paceline.lengths.base import LengthPolicy, UnreadPrompt
from paceline.lengths.cost import CostTable

SIZES, LENGTHS = (1, 2, 4, 8, 16), tuple(range(9))


def linear_costs(
    verify: float = 10.0, token: float = 0.25, draft_once: float = 0.0, draft_step: float = 0.0, **more: object
) -> CostTable:
    """A round takes verify + token * rows * (k + 1) + draft_once + draft_step * k milliseconds."""
    times = tuple(tuple(verify + token * b * (k + 1) for k in LENGTHS) for b in SIZES)
    n = len(SIZES)
    return CostTable(SIZES, LENGTHS, 100, times, (draft_once,) * n, (draft_step,) * n, **more)  # type: ignore[arg-type]


def with_timing(verdict: Verdict, plan: SpeculationPlan, draft_ms: float = 0.0, verify_ms: float = 10.0) -> Verdict:
    """The verdict with what the engine tells the policy of its round."""
    return replace(verdict, note=plan.note, timing=RoundTiming(draft_ms, verify_ms))


@dataclass
class Simulation:
    """Simulates rounds of a policy.

    costs: true costs of rounds. acceptance(row, place): probability that a draft token is accepted.
    """

    costs: CostTable
    acceptance: Callable[[int, int], float]
    capacity: int = 16
    seed: int = 0
    now: float = 0.0  # seconds
    tokens: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = new_batch(self.capacity, 100_000, 4)
        self.rng = random.Random(self.seed)

    def rows(self, count: int, context: int = 100) -> None:
        """Set the number of live rows. context: tokens of those that join."""
        params = SamplingParams(temperature=0, max_tokens=99_100 - context)
        for row in range(self.batch.rows, count):  # sequences that stay have the first slots
            self.batch.set_row(row, RowStart([1] * context, params, row))
        self.batch.set_live(range(count))

    def play(self, policy: LengthPolicy, rounds: int = 1) -> None:
        for _ in range(rounds):
            batch = self.batch
            plan = policy.choose(batch).within(batch)
            k, caps = plan.k, plan.caps or [plan.k] * batch.rows
            accepted = [self._kept(row, cap) for row, cap in enumerate(caps)]
            draft_ms, verify_ms = self.costs.draft_ms(batch.rows, k), self.costs.verify_ms(batch.rows, k, batch.longest)
            self.now += (draft_ms + verify_ms) / 1000
            tokens = torch.zeros(batch.rows, k + 1, dtype=torch.int64)
            verdict = batch.commit(Draft([[0] * cap for cap in caps]), Accepted(tokens, torch.tensor(accepted)))
            policy.observe(batch, with_timing(verdict, plan, draft_ms, verify_ms))
            self.tokens += sum(accepted) + batch.rows
            self.asked.append(k)

    def _kept(self, row: int, cap: int) -> int:
        kept = 0
        while kept < cap and self.rng.random() < self.acceptance(row, kept):
            kept += 1
        return kept

    @property
    def goodput(self) -> float:
        """Tokens per second so far."""
        return self.tokens / self.now


RIGHT, WRONG = 1, 2  # tokens; the target's text consists of RIGHT only


class Reader:
    """A drafter's cache as length policies see it: the number of computed tokens of each row.

    prompt: length of the prompt that all rows share; 0 if each row has its own.
    """

    prompt = 0

    def __init__(self, rows: int, prompt: int = 0) -> None:
        self.seen, self.prompt = [0] * rows, prompt

    def missing_tokens(self, batch: Batch) -> list[int]:
        return [length - self.seen[slot] for slot, length in zip(batch.slots, batch.lengths, strict=True)]

    def spared(self, batch: Batch) -> int:
        if not self.prompt:
            return 0
        return sum(sorted(max(0, self.prompt - 1 - seen) for seen in map(self.seen.__getitem__, batch.slots))[1:])


@dataclass
class DraftSimulation:
    """Simulates rounds whose draft tokens have confidences, until every row has gained ``tokens`` tokens.

    draft_token(row): draft tokens after a row's text, as (confidence, whether it is correct); called every round.
    copies(row): n-gram drafts in the same form, which cost nothing, and from which ``SpeculationPlan.fallback``
        chooses rows; None if there are none.
    look: time of an n-gram lookup in ms. prompt: length of each row's prompt in tokens.
    asks: whether the policy decides if the drafter reads prompts at once; otherwise reading costs nothing.
    one_prompt: whether all rows share a prompt.
    noise: sigma of lognormal noise of the times; with noise one round in 30 takes three times as long.
    ends[row]: time at which the row ended, in seconds.
    """

    costs: CostTable
    draft_token: Callable[[int], list[tuple[float, bool]]]
    rows: int
    tokens: int = 64
    noise: float = 0.0
    seed: int = 0
    now: float = 0.0  # seconds
    rounds: int = 0
    gained: int = 0
    copies: Callable[[int], list[tuple[float, bool]]] | None = None
    look: float = 0.0
    prompt: int = 8
    asks: bool = False
    one_prompt: bool = False
    read: int = 0  # tokens that the drafter has read, without its own accepted ones
    asked: list[int] = field(default_factory=list)  # draft tokens of the model per row, one entry per round
    verified: list[list[int]] = field(default_factory=list)
    drafting: list[list[int]] = field(default_factory=list)  # rows that the model drafted for, one entry per round

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.batch = new_batch(self.rows, self.prompt + self.tokens, 4)
        self.reader = Reader(self.rows, self.prompt if self.one_prompt else 0)

    def play(self, policy: LengthPolicy, draining: bool = False) -> float:
        """Run until all rows have ended; return the seconds. The batch shrinks as rows end."""
        batch, began = self.batch, self.now
        for row in range(self.rows):
            params = SamplingParams(temperature=0, max_tokens=self.tokens)
            batch.set_row(row, RowStart([RIGHT] * self.prompt, params, row))
            policy.join(row)
        batch.set_live(range(self.rows))
        self._begin(policy)
        self.ends: dict[int, float] = {}
        while batch.rows:
            batch.draining = draining
            self._round(policy)
            ended = [
                slot
                for slot, length, limit in zip(batch.slots, batch.lengths, batch.limits, strict=True)
                if length >= limit
            ]
            for slot in ended:
                self.ends[slot] = self.now - began
                policy.leave(slot)
            if ended:
                batch.set_live([slot for slot in batch.slots if slot not in ended])
        return self.now - began

    def _begin(self, policy: LengthPolicy) -> None:
        """Prefill; the drafter reads the prompts if the policy wants it."""
        prompt = UnreadPrompt(self.prompt - 1, self.rows if self.one_prompt else 1, self.tokens)
        reads = not self.asks or policy.reads_prompt(self.rows, prompt)
        self.reader.seen[: self.rows] = [self.prompt - 1 if reads else 0] * self.rows
        if self.asks and reads:
            self._reads((self.prompt - 1) * (1 if self.one_prompt else self.rows))

    def _reads(self, tokens: int) -> None:
        self.read += tokens
        self.now += self.costs.feed_ms(tokens) / 1000

    def _round(self, policy: LengthPolicy) -> None:
        batch, began = self.batch, self.now
        plan = policy.choose(batch).within(batch)
        self._who, self._drafting = batch.slots, list[int]()
        draft = self._propose(self._who, plan).capped(plan.caps)
        draft = policy.select(batch, draft) if draft.k else draft
        counts = draft.drafted
        lines = draft.draft_tokens
        accepted = [next((j for j, token in enumerate(line) if token != RIGHT), len(line)) for line in lines]
        ms = self.costs.verify_ms(batch.rows, sum(counts) / batch.rows)
        ready = self.now
        self.now += ms * self.rng.lognormvariate(0, self.noise) * (3 if self._spike() else 1) / 1000
        tokens = torch.full((batch.rows, draft.k + 1), RIGHT)
        verdict = batch.commit(draft, Accepted(tokens, torch.tensor(accepted)))
        for row in self._drafting:
            self.reader.seen[batch.slots[row]] = batch.lengths[row] - 1
        policy.observe(batch, with_timing(verdict, plan, 1000 * (ready - began), 1000 * (self.now - ready)))
        self.rounds += 1
        self.gained += sum(accepted) + len(accepted)
        self.verified.append(counts)
        self.drafting.append(self._drafting)

    def _propose(self, who: list[int], plan: SpeculationPlan) -> Draft:
        """The n-gram draft or the model's in each row, as ``plan.fallback`` chooses."""
        copied, counts = None, plan.counts(self.batch)
        self.now += self.look / 1000 if plan.k > 0 else 0
        if self.copies is not None and plan.k > 0:
            copied = [self.copies(row)[: plan.k] for row in who]
            if plan.fallback is not None:
                counts = [min(pair) for pair in zip(counts, plan.fallback(self.batch, _as_draft(copied)), strict=True)]
        self.asked.append(max(counts))
        copied = copied or [[] for _ in who]
        if not any(counts):
            return _as_draft(copied)
        plan = replace(plan, k=max(counts), caps=counts)
        first, stop = plan.stretch(self.batch.rows)
        missing = self.reader.missing_tokens(self.batch)
        self._drafting = [row for row in range(first, stop) if counts[row]]
        spared = self.reader.spared(self.batch) if len(self._drafting) == self.batch.rows else 0
        self._reads(sum(missing[row] - 1 for row in self._drafting) - spared)
        drafted = self._draft(who, plan)
        return _as_draft([mine if count else other for mine, other, count in zip(drafted, copied, counts, strict=True)])

    def place(self, row: int) -> int:
        """Number of tokens that a row has gained so far."""
        return self.batch.lengths[self._who.index(row)] - self.prompt

    def _end(self, draft_tokens: list[list[tuple[float, bool]]], plan: SpeculationPlan) -> int:
        """Number of draft steps until the policy stops; adds their time."""
        widest, before = max(map(len, draft_tokens)), 0.0
        first, stop = plan.stretch(self.batch.rows)
        for step in range(1, widest + 1):
            ms = self.costs.draft_ms(len(self._drafting), step)
            self.now += (ms - before) / 1000
            before = ms
            scores = [[score for score, _ in line[:step]] for line in draft_tokens[first:stop]]
            if plan.stop_drafting and plan.stop_drafting(self.batch.part(first, stop), scores):
                return step
        return widest

    def _spike(self) -> bool:
        return self.noise > 0 and self.rng.random() < 1 / 30

    def _draft(self, who: list[int], plan: SpeculationPlan) -> list[list[tuple[float, bool]]]:
        """The draft model's tokens, none in rows whose cap is 0."""
        counts = plan.counts(self.batch)
        draft_tokens = [self.draft_token(row)[:count] for row, count in zip(who, counts, strict=True)]
        widest = self._end(draft_tokens, plan)
        return [line[:widest] for line in draft_tokens]


def _as_draft(draft_tokens: list[list[tuple[float, bool]]]) -> Draft:
    tokens = [[RIGHT if right else WRONG for _, right in line] for line in draft_tokens]
    return Draft(tokens, confidence=[[score for score, _ in line] for line in draft_tokens])
