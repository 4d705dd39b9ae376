"""The waiting queue: priorities, clients in turn, order of arrival; also through the engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.config import SamplingParams
from paceline.engine.engine import Request
from paceline.engine.waiting import Waiting
from paceline.errors import ParameterError
from toy import ToyModel, make_engine, slow_answer

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Answer:
    request_id: str
    client: str = ""
    priority: int = 0


def turns(waiting: Waiting[Answer], most: int = 99) -> list[str]:
    """Return the items in the order in which they start, turn by turn."""
    found = []
    while waiting:
        found.append("+".join(answer.request_id for answer in waiting.turn(most)))
    assert len(waiting) == 0
    return found


def of(*names: str, client: str = "", priority: int = 0) -> list[Answer]:
    return [Answer(name, client, priority) for name in names]


def test_a_clients_requests_keep_their_order() -> None:
    waiting: Waiting[Answer] = Waiting()
    waiting.extend(of("a", "b", "c"))
    assert waiting.first.request_id == "a"
    assert turns(waiting) == ["a", "b", "c"]


def test_a_single_request_waits_for_one_turn_of_a_client_that_has_a_hundred() -> None:
    waiting: Waiting[Answer] = Waiting()
    waiting.extend(of(*map(str, range(100)), client="greedy"))
    waiting.turn(99)
    waiting.extend(of("single", client="modest"))
    assert turns(waiting)[:3] == ["1", "single", "2"]


def test_clients_take_turns_in_any_order_of_arrival() -> None:
    waiting: Waiting[Answer] = Waiting()
    for client in "abc":
        waiting.extend(of(f"{client}1", f"{client}2", client=client))
    waiting.extend(of("a3", client="a"))
    assert turns(waiting) == ["a1", "b1", "c1", "a2", "b2", "c2", "a3"]


def test_a_lower_priority_value_goes_first_for_any_client() -> None:
    waiting: Waiting[Answer] = Waiting()
    waiting.extend(of("late", client="a", priority=5))
    waiting.extend(of("usual1", "usual2", client="a"))
    waiting.extend(of("first", client="a", priority=-1))
    waiting.extend(of("other", client="b"))
    assert turns(waiting) == ["first", "usual1", "other", "usual2", "late"]


def test_the_samples_of_a_request_are_one_turn_if_rows_suffice() -> None:
    waiting: Waiting[Answer] = Waiting()
    waiting.extend(of("many", "many", "many", "next", client="a"))
    waiting.extend(of("other", client="b"))
    assert turns(waiting, most=2) == ["many+many", "other", "many", "next"]


def test_kept_items_keep_their_turns() -> None:
    waiting: Waiting[Answer] = Waiting()
    waiting.extend([*of("a1", "a2", client="a"), *of("b1", "b2", client="b"), *of("soon", priority=-1)])
    waiting.keep(answer for answer in waiting if answer.request_id != "a1")
    assert (len(waiting), bool(waiting)) == (4, True)
    assert turns(waiting) == ["soon", "a2", "b1", "b2"]
    waiting.extend(of("x"))
    waiting.clear()
    assert (len(waiting), bool(waiting), list(waiting)) == (0, False, [])


def test_a_client_with_a_hundred_requests_delays_another_by_one_turn() -> None:
    """Every sample is one token, so a turn with one row is one step."""
    engine, one = make_engine(ToyModel(), max_batch_size=1), SamplingParams(temperature=0, max_tokens=1)
    for _ in range(100):
        engine.add(Request([1, 2], one, client="greedy"))
    engine.step()
    single = engine.add(Request([3, 4], one, client="modest"))
    urgent = engine.add(Request([5, 6], one, client="greedy", priority=-1))
    ended = [engine.step()[0].request_id for _ in range(3)]
    assert ended == [urgent.request_id, "request-1", single.request_id]
    assert single.outputs[0].token_ids == slow_answer(ToyModel(), [3, 4], one)


def test_waiting_requests_can_be_aborted_and_time_out() -> None:
    engine, one = make_engine(ToyModel(), max_batch_size=1), SamplingParams(temperature=0, max_tokens=1)
    outputs = [engine.add(Request([1, 2], one, client=client, request_id=client)) for client in "abcd"]
    engine.abort("b")
    next(row for row in engine.scheduler.waiting if row.request_id == "c").deadline = 0.0
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "abort", "deadline", "length"]


def test_a_priority_that_is_not_an_integer_is_refused() -> None:
    with pytest.raises(ParameterError, match="priority='high'"):
        make_engine(ToyModel()).add(Request([1], SamplingParams(), priority="high"))  # type: ignore[arg-type]
