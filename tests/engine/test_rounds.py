"""The choice of a runner, round by round."""

from __future__ import annotations

from typing import cast

import pytest

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.draft import Verdict
from paceline.engine.rounds.choice import Runners
from paceline.engine.sequences import Sequence


class Scripted:
    """A runner that cannot run some rounds, and has one round in flight after each."""

    def __init__(self, name: str, reasons: list[str | None], events: list[str]) -> None:
        self.name, self._reasons, self._events = name, iter(reasons), events
        self.last_verdict: Verdict | None = None

    def why_not(self, batch: Batch) -> str | None:
        return next(self._reasons, None)

    def step(self) -> list[Sequence]:
        self._events.append(f"{self.name} runs")
        return []

    def drain(self) -> list[Sequence]:
        self._events.append(f"{self.name} drains")
        return [cast(Sequence, f"drained by {self.name}")]

    def forget(self) -> None:
        self._events.append(f"{self.name} forgets")


def batch_of(rows: int) -> Batch:
    return filled([RowStart([1], SamplingParams(), slot) for slot in range(rows)], 20, 10, free=2 - rows)


def test_the_first_runner_that_can_runs_the_round_and_a_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    device, host = Scripted("device", [None, "a grammar", "a grammar", None], events), Scripted("host", [], events)
    runners = Runners(batch_of(1), device, host)
    gained = [runners.step()[0] for _ in range(4)]
    assert events == ["device runs", "device drains", "host runs", "host runs", "host drains", "device runs"]
    assert gained == [[], ["drained by device"], [], ["drained by host"]]
    assert (runners.rounds, list(runners.reasons), runners.current) == (
        {"device": 2, "host": 2},
        ["a grammar"],
        "device",
    )
    (record,) = caplog.records
    assert record.getMessage() == (
        "rounds run on the host while a request needs it (a grammar); the device runs all others"
    )


def test_no_round_is_run_if_all_rows_end_with_those_in_flight() -> None:
    events: list[str] = []
    runners = Runners(batch_of(0), Scripted("device", ["a grammar"], events), Scripted("host", [], events))
    assert runners.step()[0] == ["drained by device"]
    assert (events, sum(runners.rounds.values())) == (["device drains"], 0)
