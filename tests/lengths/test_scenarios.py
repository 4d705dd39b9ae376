"""``auto`` beside what it was: the simulated seconds of 112 scenarios, means of six seeds, without a clock.

``scenarios.json`` holds those of the four policies before it (commit fe8a04d). Scores, chances and costs are given.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from scenarios import RUNNERS, SEEDS

pytestmark = pytest.mark.usefixtures("one_thread")
BEFORE = json.loads((Path(__file__).parent / "scenarios.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", RUNNERS)
def test_no_scenario_is_much_slower_and_all_together_hardly_at_all(drafter: str) -> None:
    scenarios, play = RUNNERS[drafter]
    speeds = {name: BEFORE[drafter][name] / mean(play(spec, seed) for seed in SEEDS) for name, spec in scenarios()}
    assert len(speeds) == len(BEFORE[drafter])
    assert min(speeds.values()) > 0.93, min(speeds, key=speeds.__getitem__)
    assert math.exp(mean(map(math.log, speeds.values()))) > 0.985
