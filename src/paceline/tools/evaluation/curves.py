"""Pass@First and Pass@All of n answers within a time budget (BASS, section 4.2), and pass@k.

An answer's text and timing do not depend on the budget as long as it lasts. One run with a long budget therefore gives
the results of all shorter budgets: exactly the answers that had ended by then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.outputs import FinishReason


@dataclass(frozen=True)
class Answer:
    """One of n answers to a problem, with the result of its program.

    seconds: from the request's arrival to the answer's end. mean_logprob: mean log-probability of its tokens, None for
    an empty answer. drafted, accepted: draft tokens. result: see ``ProgramResult``.
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
        """Whether the answer ended before the budget. Answers that the budget cut never count as passed."""
        return self.finish_reason in ("stop", "length")


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Rank answers as BASS does: those that stopped before max_tokens first, then by mean log-probability."""
    return sorted(answers, key=lambda a: (a.finish_reason != "stop", -_likelihood(a), a.index))


def _likelihood(answer: Answer) -> float:
    return -math.inf if answer.mean_logprob is None else answer.mean_logprob


def within(answers: Sequence[Answer], budget: float) -> list[Answer]:
    """The answers that had ended within a budget in seconds, best first."""
    return ranked([answer for answer in answers if answer.ended and answer.seconds <= budget])


def pass_first(answers: Sequence[Answer], budget: float = math.inf) -> bool:
    """Whether the answer ranked first passes. False if there is no answer."""
    return any(answer.passed for answer in within(answers, budget)[:1])


def pass_all(answers: Sequence[Answer], budget: float = math.inf) -> bool:
    """Whether any answer passes."""
    return any(answer.passed for answer in within(answers, budget))


def pass_at_k(answers: Sequence[Answer], k: int) -> float:
    """The probability that one of k randomly chosen answers passes: 1 - C(n - c, k) / C(n, k) (2107.03374, eq. 1)."""
    wrong = sum(not (answer.passed and answer.ended) for answer in answers)
    return 1 - math.comb(wrong, k) / math.comb(len(answers), k)


@dataclass(frozen=True)
class MeanWithError:
    """A mean over problems, and its standard error; None for a single problem."""

    mean: float
    error: float | None


def mean_with_error(values: Sequence[float]) -> MeanWithError:
    """The mean of one value per problem. Values that are paired differences give the error of a paired comparison."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return MeanWithError(statistics.fmean(values), error)


def budget_of_half(problems: Sequence[Sequence[Answer]]) -> float | None:
    """The shortest budget in seconds with at least half of the unlimited Pass@First; None if that is 0."""
    half = sum(pass_first(answers) for answers in problems) / 2
    budgets = sorted({answer.seconds for answers in problems for answer in answers if answer.ended})
    enough = (budget for budget in budgets if sum(pass_first(answers, budget) for answers in problems) >= half)
    return next(enough, None) if half else None
