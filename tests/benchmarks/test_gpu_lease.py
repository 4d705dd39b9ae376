"""All figures in one command: its parts, resuming, and that rounds are those of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.cells import Axes, Setting, plan
from benchmarks.gpu.lease import Lease, Part, parts
from benchmarks.gpu.models import PAIRS, random_model, tiny
from benchmarks.gpu.run import app
from benchmarks.gpu.stage import Stage
from typer.testing import CliRunner

from paceline.config import EngineConfig, SamplingParams
from paceline.engine.engine import Engine, Models, Request
from paceline.errors import ParameterError
from paceline.kernels.gpu.graphs import Graphs

pytestmark = pytest.mark.usefixtures("one_thread")


def python(name: str, code: str, budget: float = 60, least: float = 1) -> Part:
    return Part(name, ("-c", code), budget, least, benchmark=False)


def lease(folder: Path, seconds: float = 100) -> tuple[Lease, list[str]]:
    said: list[str] = []
    return Lease(folder, "cpu", tiny=True, seconds=seconds, say=said.append), said


def test_a_call_continues_where_the_last_one_stopped(tmp_path: Path) -> None:
    first, second = python("first", "print('hello')"), python("second", "raise SystemExit(3)", least=70)
    call, _ = lease(tmp_path / "figures", 60)
    assert call.run([first, second]) == ["second"]
    assert call.done() == {"first": 0}
    call, said = lease(tmp_path / "figures", 100)
    assert call.run([first, second]) == []
    assert call.done() == {"first": 0, "second": 3}
    assert [line for line in said if line.startswith("first")] == []
    assert (tmp_path / "figures" / "first.log").read_text() == "hello\n"


@pytest.mark.parametrize("small", [True, False])
def test_parts_are_valid_commands(small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is parsed; all parts together fit into 13 minutes."""
    commands: list[list[str]] = []

    def note(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    call, _ = lease(tmp_path, 480)
    assert call.run(parts(tiny=small)) == []
    for _, module, *arguments in commands:
        assert module in ("pytest", "benchmarks.gpu.run", "benchmarks.cores")
        if module == "benchmarks.gpu.run":
            assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0
            options = dict(zip(arguments[1::2], arguments[2::2], strict=False))
            names = [options.get(f"--{name}") for name in ("pairs", "formats", "rows", "lengths")]
            assert plan(Axes().chosen(*names))
            assert options["--output"].startswith(str(tmp_path))
        else:
            assert all(Path(each).exists() for each in arguments if each.startswith("tests/"))
    assert small or sum(part.budget for part in parts(tiny=False)) <= 13 * 60
    assert [part.name for part in parts(tiny=True)] == [part.name for part in parts(tiny=False)]


@pytest.mark.parametrize(
    ("axis", "given", "message"),
    [
        ("pairs", "gpt", r"--pairs='gpt'.*gpt-7.8b,llama-8b"),
        ("rows", "0", r"--rows='0'.*from 1 to 64"),
        ("lengths", "0", r"--lengths='0'.*at least one length above 0"),
        ("attentions", "flat", r"--attentions='flat'.*ragged,padded,split"),
        ("autos", "0.8,", r"--autos='0.8,'.*fractions from 0 to 1"),
        ("autos", "nan", r"--autos="),
    ],
)
def test_unknown_axes_are_refused(axis: str, given: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Axes().chosen(**{axis: given})


@pytest.mark.parametrize("k", [0, 3])
def test_the_benchmark_launches_what_the_engine_launches(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs and nothing else; only attention's longest length follows the texts' lengths."""
    launched: list[Hashable] = []
    run_graph = Graphs.run

    def run_and_note(*given: Any) -> Any:
        launched.append(given[1])
        return run_graph(*given)

    monkeypatch.setattr(Graphs, "run", run_and_note)
    setting = Setting("llama-8b", "bf16", "padded", 20, 2)
    pair = tiny(PAIRS[setting.pair])
    target, draft = (
        random_model(config, setting.pair, "bf16", torch.float32, torch.device("cpu"))
        for config in (pair.target, pair.draft)
    )
    stage = Stage(target, draft, setting)
    with torch.inference_mode():
        stage.rounds(k, 3)
    benchmarked = list(launched)
    config = EngineConfig(
        drafter="model", num_speculative_tokens=k, attention="padded", rounds="device", max_batch_size=2,
        max_model_len=200, device="cpu", acceptance=f"synthetic:{setting.rate}", benchmark=True,
    )  # fmt: skip
    engine = Engine(Models(target, draft), config)
    for first in (3, 4):
        engine.add(Request([first] * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.step()
    launched.clear()
    for _ in range(3):
        engine.step()
    assert [_but_for_the_span(key) for key in launched] == [_but_for_the_span(key) for key in benchmarked]
    assert len(launched) == 3


def _but_for_the_span(key: Hashable) -> tuple[object, ...]:
    assert isinstance(key, tuple)
    rows, k, _, asks = key
    return rows, k, asks


@pytest.mark.slow
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.run", "lease", str(tmp_path), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "done.json").read_text()) == {part.name: 0 for part in parts(tiny=True)}, done.stderr
    for name in ("rounds-bf16", "rounds-8-bit"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["cells"]
    assert json.loads((tmp_path / "attention.json").read_text())["cases"]
