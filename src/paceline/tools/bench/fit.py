"""Synergy's quantitative model (2310.18813), fitted to measurements: why the best length falls as the batch grows.

Verifying s draft tokens per row takes alpha_b * s + beta_b, drafting them takes s * t_S, and l(s) = c * s ** gamma of
them are accepted, so that a token takes (alpha_b s + beta_b + t_S s) / (c s ** gamma + 1).

The model is fitted to the rounds of the same sweep whose best lengths it is compared with. (Fitted to costs that were
measured separately, while memory was twice as fast, it found 2, 1, 1, 0, 0 where 4, 4, 2, 0, 0 was best.) The paper has
one beta for all batches, the time to read the weights; on a compute-bound CPU a plain round of 16 rows takes twice as
long as one of 1 row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.lengths.cost import CostTable


@dataclass(frozen=True)
class PaperFit:
    """The model's parameters in milliseconds (t_s; alpha and beta by batch size) and its errors.

    error: mean |fit / measured - 1| over the measured rounds. error_accepted: the same for l(s).
    """

    batch_sizes: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    t_s: tuple[float, ...]
    c: float
    gamma: float
    error: float
    error_accepted: float

    def accepted(self, s: float) -> float:
        """l(s): number of accepted draft tokens out of s."""
        return self.c * s**self.gamma if s > 0 else 0.0

    def ms_per_token(self, size: int, s: float) -> float:
        """Milliseconds per token of a row, in a batch of one of the fitted sizes."""
        place = self.batch_sizes.index(size)
        return ((self.alpha[place] + self.t_s[place]) * s + self.beta[place]) / (self.accepted(s) + 1)

    def best(self, size: int, longest: int) -> int:
        """The best integer number of draft tokens from 0 to ``longest``."""
        return min(range(longest + 1), key=lambda s: self.ms_per_token(size, s))


def fit_paper(table: CostTable, rounds: Sequence[Sequence[float]], accepted: Sequence[float]) -> PaperFit:
    """Fit by least squares.

    rounds[place][s]: milliseconds of rounds with s draft tokens per row, drafting included, at the table's batch sizes.
    table: says what part of that was drafting. accepted[s - 1]: mean number of accepted draft tokens out of s, for s =
        1, 2, ...
    """
    drafting = [k for k in table.lengths if k > 0]
    steps = [sum(table.draft_ms(size, k) / k for k in drafting) / max(1, len(drafting)) for size in table.batch_sizes]
    lines = [_line(times) for times in rounds]
    c, gamma, error_accepted = _fit_accepted(accepted)
    return PaperFit(
        batch_sizes=table.batch_sizes,
        alpha=tuple(slope - step for (slope, _, _), step in zip(lines, steps, strict=True)),
        beta=tuple(start for _, start, _ in lines),
        t_s=tuple(steps),
        c=c,
        gamma=gamma,
        error=float(np.mean([error for _, _, error in lines])),
        error_accepted=error_accepted,
    )


def _line(times: Sequence[float]) -> tuple[float, float, float]:
    """Slope, start and mean relative error of a line through times at 0, 1, 2, ..., weighted by relative error."""
    measured = np.array(times)
    relative = np.stack([np.arange(len(times)), np.ones(len(times))], axis=1) / measured[:, None]
    (slope, start), *_ = np.linalg.lstsq(relative, np.ones(len(times)), rcond=None)
    return float(slope), float(start), float(np.abs(relative @ (slope, start) - 1).mean())


def _fit_accepted(accepted: Sequence[float]) -> tuple[float, float, float]:
    """c and gamma of l(s) = c * s ** gamma, fitted in logarithms, and the mean relative error."""
    points = [(s, counts) for s, counts in enumerate(accepted, 1) if counts > 0]
    if not points:
        return 0.0, 0.0, 0.0
    if len(points) == 1:
        return points[0][1], 0.0, 0.0
    s, counts = np.array(points).T
    gamma, log_c = np.polyfit(np.log(s), np.log(counts), 1)
    error = np.abs(np.exp(log_c) * s**gamma / counts - 1).mean()
    return math.exp(float(log_c)), float(gamma), float(error)
