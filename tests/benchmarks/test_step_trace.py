"""The script that counts files and calls of a step."""

from __future__ import annotations

import pytest
from benchmarks.step_trace import traces_of_steps

from toy import FlatToy, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_step_enters_the_round_and_its_drafter(drafter: str) -> None:
    draft = FlatToy() if drafter == "model" else None
    engine = make_engine(FlatToy(), draft, drafter=drafter, num_speculative_tokens=4, attention="auto")
    traces = traces_of_steps(engine, [1, 2, 3] * 4)
    files = {"engine/engine.py", "engine/rounds/round.py", f"drafters/{drafter}.py"}
    assert all(files <= trace.python.keys() for trace in traces)
