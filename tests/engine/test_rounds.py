"""The choice of a place, round by round, and the loop of launched and finished rounds."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import RoundTiming, Verdict
from paceline.drafters import NoDrafter
from paceline.engine.rounds.choice import STEP_BY_STEP, RoundChoice
from paceline.engine.rounds.loop import RoundLoop
from paceline.engine.rounds.place import Obstacle
from paceline.engine.rounds.round import Speculation
from paceline.engine.rounds.timing import RoundTimer
from paceline.lengths import FixedLength
from toy import make_engine, run, tiny_native


@dataclass
class Launched:
    """The ticket of a scripted round, in which each row gains one token."""

    name: str
    rows: int
    events: list[str]
    drafted_at: float | None

    def read(self) -> Verdict:
        self.events.append(f"{self.name} is read")
        return Verdict([[1]] * self.rows, [0] * self.rows, [0] * self.rows, [1] * self.rows)


class Scripted:
    """A place that cannot run some rounds. lag: as in ``RoundPlace``."""

    def __init__(self, name: str, lag: int, reasons: list[str | None], events: list[str]) -> None:
        self.name, self.lag, self._reasons, self._events = name, lag, iter(reasons), events

    def why_not(self, batch: Batch) -> Obstacle | None:
        reason = next(self._reasons, None)
        return None if reason is None else Obstacle(reason, f"Undo: {reason}")

    def needs_torch(self, batch: Batch) -> bool:
        return True

    def run(self, batch: Batch, plan: SpeculationPlan) -> Launched:
        self._events.append(f"{self.name} runs")
        return Launched(self.name, batch.rows, self._events, None if self.lag else 0.0)

    def pause(self) -> None:
        self._events.append(f"{self.name} pauses")


def batch_of(rows: int, tokens: int = 16) -> Batch:
    starts = [RowStart([1], SamplingParams(max_tokens=tokens), slot) for slot in range(rows)]
    return filled(starts, 20, 10, free=2 - rows)


def loop_of(choice: RoundChoice, batch: Batch) -> RoundLoop:
    """A loop whose steps return, for each finished round, its number of rows."""
    running = [SimpleNamespace(stay=(row, 0)) for row in range(batch.rows)]
    process: Any = lambda _verdict, rows: [len(rows)]  # noqa: E731
    scheduler: Any = SimpleNamespace(batch=batch, running=running, in_flight=0, process_outputs=process)
    nothing: Any = None
    return RoundLoop(Speculation(nothing, NoDrafter(), FixedLength(0), nothing), scheduler, choice)


def test_the_first_place_that_can_runs_the_round_and_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    device = Scripted("device", 1, [None, None, "a grammar", "a grammar", None], events)
    loop = loop_of(RoundChoice(Scripted("host", 0, [], events), graphs=[device]), batch_of(1))
    gained = [loop.step() for _ in range(5)]
    assert events == [
        *("device runs", "device runs", "device is read"),
        *("device pauses", "device is read", "host runs", "host is read", "host runs", "host is read"),
        *("host pauses", "device runs"),
    ]
    assert gained == [[], [1], [1, 1], [1], []], "a device's round is finished in the step after its launch"
    assert (loop.counts, list(loop.choice.reasons), loop.place.name) == (
        {"device": 3, "host": 2},
        ["a grammar"],
        "device",
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "rounds run on the host while a request needs it (a grammar); the device runs all others. Undo: a grammar"
    )
    assert record.levelname == "WARNING"


def test_the_kernels_run_what_they_can_and_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    kernels = Scripted("host", 0, ["log-probabilities", None, "log-probabilities", "another rule"], [])
    choice = RoundChoice(Scripted("host", 0, [], []), kernels)
    places = [choice.place_for(batch_of(1)) for _ in range(5)]
    assert [place is kernels for place in places] == [False, True, False, False, True]
    reasons = ("log-probabilities", "another rule")
    expected = [("INFO", f"{STEP_BY_STEP % reason}. Undo: {reason}") for reason in reasons]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == expected
    assert not choice.reasons, "of a device"


def test_why_the_kernels_cannot_verify_drafts_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    engine = make_engine(tiny_native(0), tiny_native(1), drafter="model", acceptance="rejection")
    run(engine, [[1, 2, 3]], [SamplingParams(temperature=1.0, max_tokens=8, seed=0)])
    lines = [record.getMessage() for record in caplog.records if "step by step" in record.getMessage()]
    assert lines == [STEP_BY_STEP % "draft tokens with probabilities" + ". Set acceptance='coupled'"]


def test_no_round_is_run_if_all_rows_end_with_those_in_flight() -> None:
    events: list[str] = []
    choice = RoundChoice(Scripted("host", 0, [], events), graphs=[Scripted("device", 1, [None, "a grammar"], events)])
    batch = batch_of(1)
    loop = loop_of(choice, batch)
    loop.step()
    process: Any = lambda _verdict, rows: [batch.set_live(())]  # noqa: E731
    loop._scheduler.process_outputs = process  # type: ignore[method-assign]
    assert loop.step() == [None]
    assert (events, loop.counts["host"]) == (["device runs", "device pauses", "device is read"], 0)
    assert loop.last_verdict is not None


def test_no_round_is_launched_that_no_row_needs() -> None:
    events: list[str] = []
    choice = RoundChoice(Scripted("host", 0, [], events), graphs=[Scripted("device", 1, [], events)])
    loop = loop_of(choice, batch_of(1, tokens=2))
    assert [loop.step() for _ in range(3)] == [[], [1], [1]]
    assert events == ["device runs", "device runs", "device is read", "device pauses", "device is read"]


def test_discarded_rounds_are_not_read() -> None:
    events: list[str] = []
    choice = RoundChoice(Scripted("host", 0, [], events), graphs=[Scripted("device", 1, [], events)])
    loop = loop_of(choice, batch_of(1))
    loop.step()
    assert loop._scheduler.in_flight == 1
    loop.forget()
    assert (events, loop._scheduler.in_flight) == (["device runs", "device pauses"], 0)
    assert loop.step() == []


def test_learning_is_timed_with_the_next_round_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    timer, found = RoundTimer(), []
    for drafts, learning in ((True, 0.5), (False, 0.25), (True, 0.0), (False, 0.0)):
        began, now = now, now + 4.0
        found.append(timer.ended(began, began + 1.0, drafts=drafts))
        now += learning
        timer.learned()
    expected = [RoundTiming(1000.0 + more, 3000.0) for more in (0.0, 0.0, 500.0, 250.0)]
    assert found == expected
    assert timer.ended(now, None, drafts=True) is None
