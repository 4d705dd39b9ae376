"""The benchmark of attention alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import attention
from benchmarks.gpu.attention import BACKENDS, SDPA, Case, Heads, Spread, Tensors, backend_of, cases, measure, sweep
from benchmarks.gpu.run import app
from typer.testing import CliRunner

from paceline.kernels.attention.reference import ReferenceAttention

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")
GROUPED = Heads("grouped", 4, 2, 16)


@pytest.mark.parametrize(
    ("spread", "lengths"), [("equal", [64] * 5), ("mixed", [64, 56, 48, 40, 32]), ("one long", [64, 8, 8, 8, 8])]
)
def test_row_lengths_follow_the_spread(spread: Spread, lengths: list[int]) -> None:
    assert Case(GROUPED, 5, 4, 64, spread).lengths == lengths


def test_a_row_holds_at_least_its_queries() -> None:
    assert min(Case(GROUPED, 2, 8, 16, "one long").lengths) == 8


@pytest.mark.parametrize("spread", ["equal", "mixed", "one long"])
@pytest.mark.parametrize("name", BACKENDS)
def test_all_backends_compute_the_same(name: str, spread: Spread) -> None:
    tensors = Tensors(Case(GROUPED, 3, 2, 40, spread), CPU, torch.float32)
    ours, reference = (tensors.program(backend)() for backend in (backend_of(name, CPU), ReferenceAttention()))
    torch.testing.assert_close(ours, reference)


def test_the_floor_counts_visible_keys() -> None:
    case = Case(GROUPED, 3, 2, 40, "one long")
    assert Tensors(case, CPU, torch.float32).read_bytes == 2 * (40 + 5 + 5) * 2 * 16 * 4


def test_a_backend_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, device: torch.device) -> object:
        if name == "split":
            raise RuntimeError("no streams\nhere")
        return backend_of("padded", device)

    monkeypatch.setattr(attention, "backend_of", without)
    timed = measure(Case(GROUPED, 2, 1, 20, "equal"), CPU, torch.float32, 1e9, repeats=1)
    assert set(timed.us) == {"ragged", "padded", SDPA}
    assert timed.failed == {"split": "RuntimeError: no streams"}
    assert set(timed.over_ragged) == {"padded", SDPA}
    assert "split FAILED" in attention.describe(timed)


def test_cases_run_in_order_until_time_is_over() -> None:
    wanted = cases()
    assert len(set(wanted)) == len(wanted)
    assert wanted[0].context == 600
    assert list(sweep(wanted, CPU, torch.float32, 1e9, -1.0, 1)) == []


def test_the_command_writes_a_document_and_a_plot(tmp_path: Path) -> None:
    output, plot = tmp_path / "attention.json", tmp_path / "attention.png"
    arguments = ["attention", "--device", "cpu", "--tiny", "--output", str(output), "--plot", str(plot)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(output.read_text()) == document
    assert len(document["cases"]) == len(cases(tiny=True))
    assert all(set(case["us"]) == set(BACKENDS) for case in document["cases"])
    assert document["dropped"] == 0
    assert plot.stat().st_size > 1000
