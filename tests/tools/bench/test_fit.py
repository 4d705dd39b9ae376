"""Synergy's model, fitted to measurements."""

from __future__ import annotations

import pytest

from paceline.lengths.cost import CostTable
from paceline.tools.bench.fit import PaperFit, fit_paper
from simulation import SIZES


def paper_table(alpha: dict[int, float], beta: float, t_s: float) -> CostTable:
    lengths = tuple(range(9))
    verify = tuple(tuple(alpha[b] * s + beta for s in lengths) for b in SIZES)
    return CostTable(SIZES, lengths, 100, verify, (0.0,) * len(SIZES), (t_s,) * len(SIZES))


ALPHA = {1: 0.2, 2: 0.4, 4: 0.8, 8: 1.6, 16: 3.2}
ROUNDS = [[(ALPHA[b] + 0.5) * s + 20.0 + b for s in range(9)] for b in SIZES]
CALIBRATED = paper_table(
    {b: 3 * alpha for b, alpha in ALPHA.items()}, 7.0, 0.5
)  # measured while the machine was slower
FIT = fit_paper(CALIBRATED, ROUNDS, [0.9 * s**0.548 for s in range(1, 9)])


def test_the_fit_finds_the_papers_parameters() -> None:
    assert FIT.alpha == pytest.approx(list(ALPHA.values()))
    assert FIT.beta == pytest.approx([20 + b for b in SIZES])
    assert (FIT.c, FIT.gamma) == pytest.approx((0.9, 0.548))
    assert FIT.t_s == pytest.approx([0.5] * 5)
    assert FIT.error == pytest.approx(0, abs=1e-9)
    assert FIT.error_accepted == pytest.approx(0, abs=1e-9)


def test_the_best_length_falls_as_the_batch_grows() -> None:
    optima = [FIT.best(size, 100) for size in SIZES]
    assert optima == sorted(optima, reverse=True)
    assert optima[0] > 2 * optima[-1]


@pytest.mark.parametrize("size", SIZES)
def test_the_best_length_is_beside_the_root_of_the_derivative(size: int) -> None:
    def grown(s: float) -> float:
        return (1 - FIT.gamma) * s + s ** (1 - FIT.gamma) / FIT.c

    place, best = FIT.batch_sizes.index(size), FIT.best(size, 100)
    goal = FIT.gamma * FIT.beta[place] / (FIT.alpha[place] + FIT.t_s[place])
    assert grown(best - 1) < goal < grown(best + 1)


def test_without_acceptance_speculation_never_pays() -> None:
    fit = fit_paper(CALIBRATED, ROUNDS, [0.0] * 8)
    assert fit.best(1, 8) == 0


def test_the_error_measures_the_fit() -> None:
    table = CostTable((1, 2), (0, 1, 2), 100, ((10, 10, 20), (10, 20, 20)), (0, 0), (1, 1))
    fit: PaperFit = fit_paper(table, [[10, 11, 22], [10, 21, 22]], [0.5, 0.6])
    assert 0.05 < fit.error < 0.5
