"""Plots of Pass@First and Pass@All over the time budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.tools.bench.plots import Axes, new_figure, save
from paceline.tools.evaluation.run import ConfigurationResult


def draw(results: Sequence[ConfigurationResult], path: Path, title: str) -> None:
    """Plot all results, one colour per n, plain decoding dashed. Raises PacelineError without matplotlib."""
    figure, (first, every) = new_figure(columns=2)
    colours = {n: f"C{number}" for number, n in enumerate(dict.fromkeys(result.n for result in results))}
    for result in results:
        _draw_configuration(first, result, colours[result.n], result.curve.first)
        _draw_configuration(every, result, colours[result.n], result.curve.all)
    highest = max(value for result in results for value in result.curve.all)
    for axes, name in ((first, "Pass@First"), (every, "Pass@All")):
        axes.set(xlabel="budget, seconds", ylabel=name, xlim=(0, None), ylim=(0, max(0.05, 1.1 * highest)))
        axes.legend(fontsize=8)
        if not highest:
            axes.text(0.5, 0.5, "no answer passed", transform=axes.transAxes, ha="center")  # the curves lie on the axis
    save(figure, path, title)


def _draw_configuration(axes: Axes, result: ConfigurationResult, colour: str, values: Sequence[float]) -> None:
    style = "--" if result.mode == "plain" else "-"
    budgets = result.curve.budgets
    axes.step(
        [0.0, *budgets], [0.0, *values], style, where="post", color=colour, label=f"{result.mode}, n = {result.n}"
    )
