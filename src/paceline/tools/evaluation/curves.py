"""What n answers are worth by a certain time: Pass@First and Pass@All (BASS, section 4.2), pass@k beside them.

Nothing that an answer says depends on the budget, and while it lasts neither does the work. So one run with a long
budget tells what every shorter one would have given: the answers that had ended by then, and no others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.outputs import FinishReason


@dataclass(frozen=True)
class Answer:
    """One of n answers to a problem, and what its program did.

    seconds: from the request's arrival to the answer's end. mean_logprob: of its own tokens, None if it has none.
    """

    index: int
    text: str
    seconds: float
    finish_reason: FinishReason
    mean_logprob: float | None
    tokens: int
    drafted: int
    accepted: int
    passed: bool
    result: str

    @property
    def ended(self) -> bool:
        """Whether it was not cut by the budget: others never count, whatever their programs do."""
        return self.finish_reason in ("stop", "length")


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Those that ended by themselves first, then the likeliest by the mean of their tokens (BASS's ranking)."""
    return sorted(answers, key=lambda a: (a.finish_reason != "stop", -_likelihood(a), a.index))


def _likelihood(answer: Answer) -> float:
    return -math.inf if answer.mean_logprob is None else answer.mean_logprob


def within(answers: Sequence[Answer], budget: float) -> list[Answer]:
    """What a budget of so many seconds would have given, best first."""
    return ranked([answer for answer in answers if answer.ended and answer.seconds <= budget])


def pass_first(answers: Sequence[Answer], budget: float = math.inf) -> bool:
    """Whether the answer that is ranked first passes; no answer is no pass."""
    return any(answer.passed for answer in within(answers, budget)[:1])


def pass_all(answers: Sequence[Answer], budget: float = math.inf) -> bool:
    """Whether any passes."""
    return any(answer.passed for answer in within(answers, budget))


def pass_at_k(answers: Sequence[Answer], k: int) -> float:
    """The chance that one of k answers, chosen at random, passes: 1 - C(n - c, k) / C(n, k) (2107.03374, eq. 1)."""
    wrong = sum(not (answer.passed and answer.ended) for answer in answers)
    return 1 - math.comb(wrong, k) / math.comb(len(answers), k)


@dataclass(frozen=True)
class MeanWithError:
    """A mean over problems, and its standard error (None of a single problem)."""

    mean: float
    error: float | None


def mean_with_error(values: Sequence[float]) -> MeanWithError:
    """Problems are drawn independently; the error of a mean of differences is that of paired ones."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return MeanWithError(statistics.fmean(values), error)


def budget_of_half(problems: Sequence[Sequence[Answer]]) -> float | None:
    """The shortest budget that gives half of the unlimited Pass@First or more; None where that is 0."""
    wanted = sum(pass_first(answers) for answers in problems) / 2
    budgets = sorted({answer.seconds for answers in problems for answer in answers if answer.ended})
    enough = (budget for budget in budgets if sum(pass_first(answers, budget) for answers in problems) >= wanted)
    return next(enough, None) if wanted else None
