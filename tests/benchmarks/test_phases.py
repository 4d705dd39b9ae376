"""Phases with synthetic acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.phases import LENGTHS, PHASES, LoadPhase, Script, Stage, app, compare, draw
from typer.testing import CliRunner

from batches import filled
from byte_model import byte_tokenizer, save_llama
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.core.values import Accepted
from paceline.drafters import Drafter
from paceline.errors import ParameterError
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")


def all_wrong(draft: DraftTensors, logits: torch.Tensor, batch: Batch) -> Accepted:
    return Accepted(torch.full((batch.rows, draft.k + 1), 7), torch.zeros_like(draft.counts))


class Fives(Drafter):
    """Proposes token 5, with a given number of draft tokens per row."""

    name = "fives"

    def __init__(self, counts: list[int]) -> None:
        self.counts = torch.tensor(counts)

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return Draft(torch.full((batch.rows, plan.k), 5), self.counts)


@pytest.mark.parametrize("verified", [[3, 1], [2, 0], [0, 0]])
@pytest.mark.parametrize("real", [5, 7])
def test_draft_tokens_are_right_at_the_given_rate_verified_or_not(verified: list[int], real: int) -> None:
    def rule(draft: DraftTensors, logits: torch.Tensor, batch: Batch) -> Accepted:
        return Accepted(torch.full((batch.rows, draft.k + 1), real), torch.zeros_like(draft.counts))

    params = SamplingParams(temperature=0, max_tokens=30)
    batch = filled([RowStart([1, 2], params, row) for row in range(2)], 40, 8)
    script = Script(Fives([3, 1]), rule)
    script.rate = 0.5
    right = []
    for _ in range(2000):
        draft = script.propose(batch, SpeculationPlan(3)).first(verified)
        own = script.judge(DraftTensors.of(draft, batch.device), torch.zeros(2, 4, 8), batch)
        accepted = own.accepted.tolist()
        assert all(0 <= kept <= most for kept, most in zip(accepted, verified, strict=True))
        lines = [line[: kept + 1] for line, kept in zip(own.tokens.tolist(), accepted, strict=True)]
        right.append([sum(token == 5 for token in gained) for gained in lines])
        for gained, kept in zip(lines, accepted, strict=True):
            assert gained[:kept] == [5] * kept
            assert gained[kept:] in ([5], [6], [7])
    seen = [
        min(count, most + 1) for count, most in zip([3, 1], verified, strict=True)
    ]  # including the first token that is not verified
    expected = [sum(0.5 ** (place + 1) for place in range(count)) for count in seen]
    extra = [0.5**count if real == 5 and count < most + 1 else 0 for count, most in zip(seen, verified, strict=True)]
    means = torch.tensor(right).double().mean(0).tolist()
    assert means == pytest.approx([a + b for a, b in zip(expected, extra, strict=True)], abs=0.07)


def test_a_round_without_draft_tokens_has_the_real_verdict() -> None:
    batch = filled([RowStart([1, 2], SamplingParams(temperature=0, max_tokens=30), 0)], 40, 8)
    script = Script(Fives([3]), all_wrong)
    script.propose(batch, SpeculationPlan(3))
    proposed = script.propose(batch, SpeculationPlan(3))
    draft, none = (DraftTensors.of(each, batch.device) for each in (proposed, batch.empty_draft))
    script.judge(draft, torch.zeros(1, 4, 8), batch)
    assert script.judge(none, torch.zeros(1, 1, 8), batch).tokens.tolist() == [[7]]


@pytest.mark.parametrize("drafter", [None, "model"])
def test_every_policy_runs_all_phases(tmp_path: Path, drafter: str | None) -> None:
    stage = Stage(
        toy_llm(positions=400, drafter=drafter), [LoadPhase(1, 0.9), LoadPhase(3, 0.1), LoadPhase(1, 0.9)], tokens=12
    )
    comparison = compare(stage, 1, lambda steps: steps, ["0", "2", "auto"])
    assert all(len(run.seconds) == 3 and min(run.seconds) > 0 for run in comparison.runs.values())
    assert all(r.rows == 3 for run in comparison.runs.values() for r in run.rounds[1])
    fast = [run.seconds for name, run in comparison.runs.items() if name != "auto"]
    assert comparison.oracle == [min(a, b) for a, b in zip(*fast, strict=True)]
    draw(comparison, tmp_path / "phases.png", "a toy")
    assert (tmp_path / "phases.png").stat().st_size > 1000
    document = json.loads(json.dumps(comparison.as_json()))
    assert document["acceptance"] == "synthetic"
    for paces in document["ms_per_token"].values():
        assert len(paces) == 3
        assert all(0 < each["first"] <= each["all"] <= each["last"] for each in paces)
        assert all(each["first"] == each["last"] for each in (paces[0], paces[2])), "one row is first and last"


def test_rows_that_would_not_fit_are_refused() -> None:
    with pytest.raises(ParameterError, match="tokens"):
        Stage(toy_llm(), tokens=100)


def test_the_command_ends_with_one_json_document(tmp_path: Path) -> None:
    model, file = save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1), tmp_path / "phases.json"
    options = ["--max-tokens", "2", "--repeats", "1", "--dtype", "float32", "--output", str(file)]
    result = CliRunner().invoke(app, [model, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text())
    assert document["seconds"].keys() == {*map(str, LENGTHS), "bass", "auto"}
    assert len(document["oracle_seconds"]) == len(PHASES)
