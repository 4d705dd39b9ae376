"""Phases with synthetic acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.batch import Batch, Draft, RowStart, Verdict
from paceline.bench.phases import Phase, Stage, SyntheticAcceptance, compare, draw
from paceline.errors import ParameterError
from paceline.params import SamplingParams
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")


def all_wrong(draft: Draft, logits: torch.Tensor, batch: Batch) -> Verdict:
    return Verdict(torch.full((batch.rows, draft.k + 1), 7), torch.zeros_like(draft.counts), draft.counts)


def test_acceptance_is_what_was_asked_for_and_never_more_than_was_guessed() -> None:
    batch = Batch(2, 40, 8)
    for row in range(2):
        batch.set_row(row, RowStart([1, 2], SamplingParams(temperature=0, max_tokens=30), row))
    batch.set_rows(2)
    accept = SyntheticAcceptance(all_wrong)
    accept.rate = 0.5
    draft = Draft(torch.full((2, 3), 5), torch.tensor([3, 1]))
    verdicts = [accept(draft, torch.zeros(2, 4, 8), batch) for _ in range(2000)]
    kept = torch.stack([v.accepted for v in verdicts])
    assert kept.max(0).values.tolist() == [3, 1]
    assert kept.double().mean(0).tolist() == pytest.approx([0.5 + 0.25 + 0.125, 0.5], abs=0.06)
    for verdict in verdicts[:20]:
        for row, count in enumerate(verdict.accepted.tolist()):
            assert verdict.tokens[row].tolist() == [5] * count + [7] * (4 - count)


@pytest.mark.parametrize("drafter", [None, "model"])
def test_everybody_plays_all_phases(tmp_path: Path, drafter: str | None) -> None:
    stage = Stage(toy_llm(positions=400, drafter=drafter), [Phase(1, 0.9), Phase(3, 0.1), Phase(1, 0.9)], tokens=12)
    comparison = compare(stage, 1, lambda steps: steps, ["0", "2", "auto"])
    assert all(len(run.seconds) == 3 and min(run.seconds) > 0 for run in comparison.runs.values())
    assert all(r.rows == 3 for run in comparison.runs.values() for r in run.rounds[1])
    fast = [run.seconds for name, run in comparison.runs.items() if name != "auto"]
    assert comparison.oracle == [min(a, b) for a, b in zip(*fast, strict=True)]
    draw(comparison, tmp_path / "phases.png", "a toy")
    assert (tmp_path / "phases.png").stat().st_size > 1000
    assert json.loads(json.dumps(comparison.as_json()))["acceptance"] == "synthetic"


def test_rows_that_would_not_fit_are_refused() -> None:
    with pytest.raises(ParameterError, match="tokens"):
        Stage(toy_llm(), tokens=100)
