"""What another package may bring: a drafter and a length policy, named in its entry points."""

from __future__ import annotations

import torch

from paceline.batch import Batch, Wish
from paceline.draft import Draft, Verdict
from paceline.drafters import Drafter
from paceline.lengths import LengthPolicy

NOT_A_DRAFTER = 3


class Echo(Drafter):
    """Guesses that each row repeats what it said ``period`` tokens before."""

    name = "echo"

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self.rounds = 0

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        back = torch.arange(wish.k, device=batch.device) % self.period - self.period
        place = (batch.live_length[:, None] + back).clamp(min=0)
        return Draft(batch.tokens[: batch.rows].gather(1, place), torch.full_like(batch.live_length, wish.k))

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.rounds += 1


class Careful(LengthPolicy):
    """One guess more than some row kept in the round before."""

    name = "careful"
    most_guesses = 5

    def __init__(self) -> None:
        self.k = 1

    def choose(self, batch: Batch) -> Wish:
        return Wish(self.k)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.k = min(max(verdict.host.accepted) + 1, self.most_guesses)
