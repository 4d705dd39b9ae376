"""Rounds without a model: acceptance and cost are given, time is a number; all that a length policy sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.batch import Batch, RowStart, Verdict
from paceline.lengths.base import LengthPolicy
from paceline.lengths.cost import CostTable
from paceline.params import SamplingParams

SIZES, LENGTHS = (1, 2, 4, 8, 16), tuple(range(9))


def linear_costs(
    verify: float = 10.0, token: float = 0.25, draft_once: float = 0.0, draft_step: float = 0.0, **more: object
) -> CostTable:
    """A round takes verify + token * rows * (k + 1) + draft_once + draft_step * k milliseconds."""
    times = tuple(tuple(verify + token * b * (k + 1) for k in LENGTHS) for b in SIZES)
    n = len(SIZES)
    return CostTable(SIZES, LENGTHS, 100, times, (draft_once,) * n, (draft_step,) * n, **more)  # type: ignore[arg-type]


@dataclass
class Simulation:
    """Plays rounds of ``policy``. costs: the true ones. acceptance(row, place): the chance to keep a guess."""

    costs: CostTable
    acceptance: Callable[[int, int], float]
    capacity: int = 16
    seed: int = 0
    now: float = 0.0  # seconds
    tokens: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = Batch(self.capacity, 100_000, 4)
        self.rng = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def rows(self, count: int) -> None:
        """From now on so many rows."""
        for row in range(self.batch.rows, count):
            self.batch.set_row(row, RowStart([1] * 100, SamplingParams(temperature=0, max_tokens=99_000), row))
        self.batch.set_rows(count)

    def play(self, policy: LengthPolicy, rounds: int = 1) -> None:
        for _ in range(rounds):
            batch = self.batch
            k = policy.choose(batch)
            caps = batch.caps or [k] * batch.rows
            accepted = [self._kept(row, cap) for row, cap in enumerate(caps)]
            self.now += self.costs.round_ms(batch.rows, k, batch.longest) / 1000
            tokens = torch.zeros(batch.rows, k + 1, dtype=torch.int64)
            verdict = Verdict(tokens, torch.tensor(accepted), torch.tensor(caps))
            batch.commit(verdict)
            policy.observe(batch, verdict)
            self.tokens += sum(accepted) + batch.rows
            self.asked.append(k)

    def _kept(self, row: int, cap: int) -> int:
        kept = 0
        while kept < cap and self.rng.random() < self.acceptance(row, kept):
            kept += 1
        return kept

    @property
    def goodput(self) -> float:
        """Tokens a second so far."""
        return self.tokens / self.now
