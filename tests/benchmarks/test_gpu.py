"""The benchmark of the GPU path, on a CPU: the same program, the kernels interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import auto
from benchmarks.gpu import bench as gpu
from benchmarks.gpu.bench import Bench, Options
from benchmarks.gpu.cells import Axes, Setting, plan
from benchmarks.gpu.floors import tokens_a_round
from benchmarks.gpu.models import PAIRS, random_model, tiny
from benchmarks.gpu.run import app
from benchmarks.gpu.stage import Effort, Stage
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SETTING = Setting("gpt-7.8b", "bf16", "padded", 20, 2)
FAST = Axes(("llama-8b",), ("bf16",), ("padded", "split"), (20,), (2,), (0, 2), (0.8,))  # nothing is interpreted


def stage_of(setting: Setting) -> Stage:
    pair = tiny(PAIRS[setting.pair])
    target, draft = (random_model(c, pair.name, "bf16", torch.float32, CPU) for c in (pair.target, pair.draft))
    return Stage(target, draft, setting)


def options(axes: Axes = FAST, budget: float = 600) -> Options:
    return replace(Options.tiny_on(CPU, budget), axes=axes)


def run(given: Options) -> tuple[Bench, list[dict[str, Any]], list[str]]:
    saved: list[dict[str, Any]] = []
    said: list[str] = []
    bench = Bench(given, "benchmarks.gpu.run rounds", said.append, saved.append)
    bench.run()
    return bench, saved, said


@pytest.fixture
def nothing_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone is left out; the test of all kinds measures it."""
    monkeypatch.setattr(Bench, "_attend", lambda _: None)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine runs once, not three times for a median."""
    monkeypatch.setattr(auto.in_turn, "__defaults__", (1,))


def test_rounds_accept_draft_tokens_at_the_synthetic_rate() -> None:
    rate = 0.8
    timed = stage_of(replace(SETTING, rows=4, rate=rate)).run(3, Effort(rounds=24, chunks=4, seconds=0))
    assert timed.rounds == 96
    assert timed.gained == pytest.approx(tokens_a_round(rate, 3), abs=0.25)
    assert timed.drafted == 96 * 4 * 3
    assert timed.accepted == pytest.approx(96 * 4 * (timed.gained - 1))


@pytest.mark.usefixtures("once")
def test_all_kinds_of_cells_are_measured() -> None:
    axes = Axes(("llama-8b",), ("bf16",), ("ragged",), (8,), (1,), (0, 1), (0.8,))
    _, saved, said = run(replace(options(axes), auto_tokens=4, effort=Effort(1, 1, 0.0, 1)))  # tokens are interpreted
    document = saved[-1]
    assert {cell["kind"] for cell in document["cells"]} == {"round", "verify", "auto"}
    assert {cell["attention"] for cell in document["cells"]} == {"ragged"}  # the other ones: below
    assert all(cell["ms"] > cell["floor_ms"] > 0 for cell in document["cells"] if cell["kind"] != "auto")
    assert [cell["kind"] for cell in document["failed"]] == ["trace"] * 2  # only CUDA devices can be traced
    assert document["attention"]
    assert document["dropped"] == []
    assert document["acceptance"] == "synthetic"
    assert len(saved) >= len(plan(axes))
    assert len(saved[0]["cells"]) == 1
    assert json.loads(json.dumps(document)) == document
    assert any("auto" in line and "x plain" in line for line in said)


@pytest.mark.usefixtures("nothing_interpreted")
def test_a_failing_cell_reports_its_error_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    time_rounds = Stage.run

    def broken(stage: Stage, k: int, effort: Effort) -> Any:
        if k == 2 and stage.setting.attention == "padded":
            raise torch.OutOfMemoryError("no more memory\nat all")
        return time_rounds(stage, k, effort)

    monkeypatch.setattr(Stage, "run", broken)
    monkeypatch.setattr(gpu, "auto_over_plain", lambda *_: (_ for _ in ()).throw(ValueError("no engine")))
    _, saved, said = run(options())
    failed = {(cell["kind"], cell["k"]): cell["error"] for cell in saved[-1]["failed"] if cell["kind"] != "trace"}
    assert failed == {("round", 2): "OutOfMemoryError: no more memory", ("auto", 0): "ValueError: no engine"}
    assert {cell["attention"] for cell in saved[-1]["cells"] if cell["k"] == 2} == {"padded", "split"}
    assert any("FAILED" in line for line in said)


LEAN = """
import sys
for name in ("gguf", "psutil", "fastapi", "uvicorn", "prometheus_client", "httpx", "scipy", "openai"):
    sys.modules[name] = None
from benchmarks.gpu.run import app
sys.argv = ["benchmarks.gpu.run", *sys.argv[1:]]
app()
"""


def lean(*arguments: str) -> Sequence[str]:
    """The command's lines on a machine that has only what running on its GPU takes."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LEAN, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_last_line_is_the_document_with_only_the_gpu_packages_installed(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    lines = lean("rounds", "--device", "cpu", "--tiny", "--budget", "1", "--output", str(output))
    document = json.loads(lines[-1])
    assert document["device"] == "cpu"
    assert document["copy_gb_s"] > 0
    assert document["show"]
    assert json.loads(output.read_text())["dropped"] == document["dropped"] != []


@pytest.mark.usefixtures("once")
def test_transformers_decodes_the_same_sizes_in_turn(tmp_path: Path) -> None:
    output = tmp_path / "transformers.json"
    options = ["--device", "cpu", "--tiny", "--rows", "2", "--tokens", "6", "--output", str(output)]
    result = CliRunner().invoke(app, ["transformers", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(output.read_text())
    assert document["acceptance"] == "synthetic"
    (case,) = document["cases"]
    assert (case["rows"], case["tokens"]) == (2, 6)
    assert case["tokens_a_second"].keys() == {"plain", "auto", "transformers"}
    assert min(case["tokens_a_second"].values()) > 0
