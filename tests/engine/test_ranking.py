"""n samples in a time budget: which are returned, in which order, and what the deadline cuts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput, Metrics, RequestOutput, is_outranked, ranked
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.server.metrics import Meter, TokenTimes
from toy import ToyModel, make_engine, run, slow_answer
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A text stream: token t is the letter t, and the sample ends at the first ``stop``."""

    def __init__(self, stop: str) -> None:
        self.stop, self.text, self.stopped = stop, "", None

    def push(self, token_id: int) -> str:
        self.text += LETTERS[token_id]
        if self.stop and self.stop in self.text:
            self.text, self.stopped = self.text[: self.text.index(self.stop)], self.stop  # type: ignore[assignment]
        return LETTERS[token_id]

    def finish(self) -> str:
        return ""


def answer(index: int, reason: Any, total: float, tokens: int) -> CompletionOutput:
    return CompletionOutput(index, token_ids=[1] * tokens, finish_reason=reason, cumulative_logprob=total)


def test_answers_that_ended_by_themselves_come_first_then_the_likelier() -> None:
    given = [
        answer(0, "length", -0.1, 10),
        answer(1, "stop", -4.0, 2),
        answer(2, "deadline", -0.1, 1),
        answer(3, "stop", -5.0, 5),
        answer(4, "deadline", 0.0, 0),
        answer(5, "stop", -5.0, 5),
    ]
    assert [each.index for each in ranked(given, "mean_logprob")] == [3, 5, 1, 0, 2, 4]
    assert [each.index for each in ranked(given, "logprob")] == [1, 3, 5, 0, 2, 4]


def test_the_default_ranking_is_mean_logprob() -> None:
    assert SamplingParams(n=2, best_of=4).ranking == "mean_logprob"
    assert SamplingParams(n=2, best_of=2).ranking is None
    assert SamplingParams(n=2, best_of=4, rank_by="logprob").ranking == "logprob"
    with pytest.raises(ParameterError, match=r"^best_of=3.*which is n"):
        SamplingParams(n=4, best_of=3)


def test_tokens_cut_by_a_stop_string_count_for_the_rank() -> None:
    """The whole sample was drawn, including the stop string."""
    params = SamplingParams(seed=1, max_tokens=40, n=3, rank_by="logprob", stop="b", logprobs=0)
    engine = make_engine(ToyModel())
    output = engine.add(Request([1, 2, 3], params, make_stream=lambda _: Letters("b")))
    while engine.busy:
        engine.step()
    assert any(each.finish_reason == "stop" for each in output.outputs)
    for each in output.outputs:
        assert each.logprobs is not None
        assert len(each.logprobs) == len(each.token_ids)
        assert each.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in each.logprobs))
        if each.finish_reason == "stop":
            assert each.token_ids[-1] == LETTERS.index("b"), "its token is the answer's last"
            assert "b" not in each.text


def test_samples_are_scored_only_if_asked_for() -> None:
    (output,) = run(make_engine(ToyModel()), [[1, 2]], [SamplingParams(n=2, max_tokens=3, seed=0)])
    assert [each.cumulative_logprob for each in output.outputs] == [None, None]
    assert output.outputs is output.candidates or output.outputs == output.candidates


def test_a_stream_has_all_answers_until_its_last_item_which_is_ranked() -> None:
    params = SamplingParams(n=2, best_of=3, seed=3, max_tokens=9)
    items = [[each.index for each in output.outputs] for output in toy_llm().stream([[1, 2, 3]], params)]
    assert all(item == [0, 1, 2] for item in items[:-1])
    (output,) = toy_llm().generate([[1, 2, 3]], params, use_tqdm=False)
    assert items[-1] == [each.index for each in output.outputs]
    assert len(items[-1]) == 2


def test_an_aborted_request_gives_back_no_more_answers_than_asked_for() -> None:
    engine = make_engine(ToyModel())
    output = engine.add(Request([1, 2], SamplingParams(n=1, best_of=3, max_tokens=50, seed=1), request_id="x"))
    engine.step()
    engine.abort("x")
    assert (len(output.outputs), len(output.candidates)) == (1, 3)


def test_a_sample_is_outranked_once_it_can_never_pass_n_others() -> None:
    ended = [answer(0, "stop", -2.0, 4), answer(1, "stop", -6.0, 6), answer(2, "length", -0.1, 9)]

    def leaves(total: float, tokens: int, n: int, by: Any) -> bool:
        return is_outranked(answer(3, None, total, tokens), ended, n, by, max_tokens=10)

    assert leaves(-2.1, 1, 1, "logprob")
    assert not leaves(-1.9, 1, 1, "logprob")
    assert not leaves(-5.9, 1, 2, "logprob")
    assert leaves(-5.1, 1, 1, "mean_logprob"), "with ten tokens in all the mean is below -0.5"
    assert not leaves(-4.9, 1, 1, "mean_logprob")
    assert not leaves(-100.0, 9, 3, "mean_logprob"), "samples that were cut outrank no other"


def test_an_outranked_sample_frees_its_row_at_once() -> None:
    engine = make_engine(ToyModel(), eos=(0, 22))
    output = engine.add(Request([1, 2, 3], SamplingParams(best_of=4, rank_by="logprob", max_tokens=60, seed=5)))
    seen = set()
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
        ended = [each for each in output.candidates if each.finish_reason == "stop"]
        best = max((each.score("logprob") for each in ended), default=-1e9)
        for row in engine.scheduler.running:
            assert (row.output.cumulative_logprob or 0.0) > best - 0.01
        seen |= {each.index for each in output.candidates if each.finish_reason == "outranked"}
    assert seen
    assert output.outputs[0].finish_reason == "stop"


# --- time -------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that advances only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def add(engine: Engine, **params: Any) -> RequestOutput:
    return engine.add(Request([1, 2, 3], SamplingParams(temperature=0, **params)))


def test_a_budget_counts_from_the_arrival_and_waiting_counts(clock: Clock) -> None:
    engine = make_engine(ToyModel(), max_batch_size=1)
    add(engine, max_tokens=10)
    waits = add(engine, max_tokens=10, time_budget=3.0)
    for _ in range(3):
        engine.step()
        assert not waits.finished
        clock.now += 1.0
    assert waits in engine.step()
    assert waits.outputs[0].finish_reason == "deadline"
    assert waits.outputs[0].token_ids == []
    assert waits.outputs[0].metrics.first_scheduled is None


def test_a_budget_may_count_from_the_row(clock: Clock) -> None:
    engine = make_engine(ToyModel(), max_batch_size=1)
    add(engine, max_tokens=10)
    params = SamplingParams(temperature=0, max_tokens=10, time_budget=3.0)
    waits = engine.add(Request([1, 2, 3], params, budget_from_row=True))
    while not waits.finished:
        engine.step()
        clock.now += 1.0
    assert waits.outputs[0].finish_reason == "deadline"
    assert 1 <= len(waits.outputs[0].token_ids) <= 3


def test_tokens_of_a_round_after_the_deadline_are_dropped(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that ended by itself did so within its budget, so one run gives the curve over all budgets."""
    engine = make_engine(ToyModel())
    output = add(engine, max_tokens=6, time_budget=2.0)
    process_outputs = engine.scheduler.process_outputs

    def slowly(verdict: Any, rows: Any) -> Any:
        clock.now += 0.75
        return process_outputs(verdict, rows)

    monkeypatch.setattr(engine.scheduler, "process_outputs", slowly)
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    assert output.outputs[0].finish_reason == "deadline"
    assert output.outputs[0].token_ids == slow_answer(
        ToyModel(), [1, 2, 3], SamplingParams(temperature=0, max_tokens=2)
    )
    assert output.outputs[0].metrics.rounds == 2


def test_a_time_budget_that_is_over_on_arrival_gives_no_tokens_at_once(clock: Clock) -> None:
    engine = make_engine(ToyModel())
    other = add(engine, max_tokens=4)
    params = SamplingParams(n=2, best_of=3, time_budget=1.0, seed=0)
    late = engine.add(Request([1, 2, 3], params, arrival=clock.now - 2))
    assert late in engine.step()
    assert [(each.finish_reason, each.token_ids) for each in late.outputs] == [("deadline", [])] * 2
    assert late.outputs[0].metrics.arrival_time == clock.now - 2
    while engine.busy:
        engine.step()
    assert len(other.outputs[0].token_ids) == 4


def test_answers_cut_by_time_come_after_those_that_ended(clock: Clock) -> None:
    engine = make_engine(ToyModel(), eos=(0, 22), max_batch_size=8)
    params = SamplingParams(n=8, rank_by="mean_logprob", time_budget=1.0, max_tokens=60, seed=5)
    output = engine.add(Request([1, 2, 3], params))
    while sum(each.finished for each in output.candidates) < 3:
        engine.step()
    clock.now += 2.0
    engine.step()
    reasons = [each.finish_reason for each in output.outputs]
    assert 3 <= reasons.count("stop") < 8
    assert reasons == ["stop"] * reasons.count("stop") + ["deadline"] * reasons.count("deadline")
    assert {each.index for each in output.outputs} == set(range(8))


def test_a_requests_first_last_and_all_answers_are_in_the_metrics() -> None:
    ended = [
        CompletionOutput(
            index,
            token_ids=[1] * 11,
            finish_reason="stop",
            metrics=Metrics(0.0, first_token=1.0, finished=1.0 + seconds, output_tokens=11),
        )
        for index, seconds in enumerate((1.0, 3.0, 2.0))
    ]
    output, meter = RequestOutput("x", None, [1], ended), Meter(10.0)
    meter.record_output(TokenTimes.of(output), output)
    for sequence, seconds in (("first", 0.1), ("last", 0.3), ("all", 0.2)):
        name, labels = "paceline:request_time_per_output_token_seconds_sum", {"sequence": sequence}
        assert meter.registry.get_sample_value(name, labels) == pytest.approx(seconds)
