"""Acceptance by chance, for benchmarks: real speed, and a mark on everything it touches."""

from __future__ import annotations

import pytest

from paceline.config import SamplingParams
from toy import ToyModel, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("rate", "rounds"), [(0.0, "device"), (0.5, "host"), (0.5, "device"), (1.0, "host")])
def test_draft_tokens_are_accepted_by_chance_whatever_they_are(rate: float, rounds: str) -> None:
    engine = make_engine(
        ToyModel(), ToyModel(table_seed=9), drafter="model", acceptance=f"synthetic:{rate}", benchmark=True,
        num_speculative_tokens=3, rounds=rounds, attention="padded", max_batch_size=12,
    )  # fmt: skip
    params = [SamplingParams(seed=i, max_tokens=80) for i in range(12)]
    metrics = [output.outputs[0].metrics for output in run(engine, [[1, 2]] * 12, params)]
    each = sum(m.accepted for m in metrics) / sum(m.rounds for m in metrics)
    assert each == pytest.approx(rate + rate**2 + rate**3, abs=0.15)
    assert all(m.synthetic_acceptance == rate for m in metrics)
    assert "a benchmark: draft tokens are accepted at random, so the text is meaningless" in engine.describe()


def test_other_rules_leave_no_mark() -> None:
    engine = make_engine(ToyModel(), ToyModel(), drafter="model")
    assert run(engine, [[1]], [SamplingParams(max_tokens=3)])[0].outputs[0].metrics.synthetic_acceptance is None
    assert "benchmark" not in engine.describe()
