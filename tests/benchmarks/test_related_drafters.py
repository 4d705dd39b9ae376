"""The bench of the related papers' drafters: on a tiny target, whose figures mean nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.drafters import PROMPTS, TASKS, Count
from benchmarks.related_drafters import (
    CHAT_BATCH_SIZES,
    DRAFT_TOKENS,
    main,
    summary,
    usable,
)
from typer.testing import CliRunner

from benchmarks import related_drafters
from paceline.cli.main import app
from tools.training.conftest import SIZES, save_target

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT_OUT = ("--tokens", "900", "--epochs", "2", "--quantization", "int8")  # the bench sets these
LONGER = {"96": "320"}  # positions: every byte is a token of the tiny target
TRAINING = [LONGER.get(each, each) for each in SIZES if each not in LEFT_OUT]


def test_prompts_of_the_six_tasks_are_never_trained_on() -> None:
    told = [PROMPTS[task][3] for task in TASKS]
    assert usable(["one ", "", *told, "two", "one", f" {told[0]}\n"]) == ["one", "two"]


def test_epochs_take_the_place_of_minutes() -> None:
    words = ["model", "--folder", "x", "--output", "y", "--kinds", "dspark", "feature"]
    options = related_drafters.arguments([*words, "--epochs", "3", "2.5"])
    assert [related_drafters.amount_of_training(kind, options)[1] for kind in options.kinds] == ["3.0", "2.5"]
    assert options.minutes is None
    assert related_drafters.amount_of_training("dspark", related_drafters.arguments(words)) == ["--minutes", "45.0"]
    with pytest.raises(SystemExit):
        related_drafters.arguments([*words, "--epochs", "3"])


def test_a_summary_is_the_mean_over_tasks() -> None:
    def counted(rates: tuple[float | None, ...], accepted: int, temperature: float = 0.0) -> Count:
        return Count("head", "code", temperature, 9, 10, 30, accepted, rates, 0.0)

    counts = [counted((0.5, 0.25, None), 10), counted((0.3, None, None), 6), counted((1.0, 1.0, 1.0), 30, 0.8)]
    assert summary(counts, 0) == "T=0: accepted 0.400 0.250 -, 1.80 tokens per round"


def run_here(line: list[str], **_: object) -> None:
    """Run a command of paceline as ``subprocess.run`` does, but in this process, which has torch already."""
    assert line[:3] == [sys.executable, "-m", "paceline.cli.main"]
    result = CliRunner().invoke(app, line[3:])
    assert result.exit_code == 0, result.output


def test_kinds_are_trained_counted_and_timed_in_several_sittings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.drafters.COST_SECONDS", 0.02)
    monkeypatch.setattr(related_drafters, "TOKENS_OF_A_CONVERSATION", 25)
    monkeypatch.setattr(related_drafters, "subprocess", SimpleNamespace(run=run_here, DEVNULL=None))
    monkeypatch.setattr("paceline.tools.training.run.draw", lambda *_: None)  # takes longer than the training
    target, folder, output = save_target(tmp_path / "tiny"), tmp_path / "trained", tmp_path / "found.json"
    common = [target, "--folder", str(folder), "--output", str(output), "--tokens", "300", "--prompts", "1"]
    common += ["--max-tokens", "6", *TRAINING]

    main([*common, "--minutes", "0.002", "--kinds", "chimera", "ngram"])
    made = [folder / "chimera" / "report.json", *(folder / "data").glob("*.safetensors")]
    written = [path.stat().st_mtime_ns for path in made]
    before = json.loads(output.read_text())["results"]
    main([*common, "--minutes", "0.002", "--kinds", "chimera", "model"])
    assert [path.stat().st_mtime_ns for path in made] == written, "neither data nor head were made again"
    assert len([*(folder / "data").glob("*.safetensors")]) == len(made) - 1 > 1
    results = json.loads(output.read_text())["results"]
    assert {name: results[name] for name in before} == before
    assert [*results] == ["chimera", "ngram", "model"]
    for kind in ("chimera", "model"):
        training = results[kind]["training"]
        assert training["minutes"] >= 0.002
        assert training["steps"] > 0
        assert training["cpu_seconds"] > 0
        assert len(training["held_out"]["conditional"]) == 4
        assert training["data"] == results["chimera"]["training"]["data"]
    assert "training" not in results["ngram"]
    for result in results.values():
        cells = {(each["task"], each["temperature"]): each for each in result["acceptance"]}
        assert [*cells] == [(task, heat) for task in TASKS for heat in (0, 0.8)]
        assert all(len(each["by_position"]) == DRAFT_TOKENS for each in cells.values())
    assert "drafter Chimera head chimera " in results["chimera"]["engine"]

    timing = ["--minutes", "0.002", "--times", "--batch-sizes", "2", "--repeats", "1"]
    main([*common, *timing, "--kinds", "chimera", "model", "ngram"])
    found = json.loads(output.read_text())["results"]
    assert {name: found[name] for name in results} == results
    timed = [(each["drafter"], each["batch_size"]) for each in found["times"]["draft_costs"]]
    assert timed == [(kind, rows) for kind in ("chimera", "model", "ngram") for rows in (2,)]
    assert all(each["ms"] > 0 for each in found["times"]["draft_costs"] if each["drafter"] != "ngram")
    assert {
        (each["drafter"], each["batch_size"], each["temperature"]) for each in found["times"]["auto_over_plain"]
    } == {(kind, rows, heat) for kind, rows in timed for heat in (0, 0.8)}
    in_chat = found["times"]["auto_over_plain_in_chat"]
    assert {(each["drafter"], each["batch_size"], each["temperature"]) for each in in_chat} == {
        (kind, rows, heat) for kind in ("chimera", "model", "ngram") for rows in CHAT_BATCH_SIZES for heat in (0, 0.8)
    }
    assert str(tmp_path) not in output.read_text()
    with pytest.raises(SystemExit, match="holds no drafter"):
        main([*common, *timing, "--kinds", "parallel"])
    with pytest.raises(SystemExit, match="other settings"):
        main([*common, "--minutes", "0.004", "--kinds", "ngram"])
