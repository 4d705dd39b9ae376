"""The benchmark of attention alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.attention import BACKENDS, Case, Heads, Spread, Tensors, backend_of, cases
from benchmarks.gpu.run import app
from typer.testing import CliRunner

from paceline.kernels.attention.reference import ReferenceAttention

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")
GROUPED = Heads("grouped", 4, 2, 16)


@pytest.mark.parametrize("spread", ["equal", "mixed", "one long"])
@pytest.mark.parametrize("name", BACKENDS)
def test_all_backends_compute_the_same(name: str, spread: Spread) -> None:
    tensors = Tensors(Case(GROUPED, 3, 2, 40, spread), CPU, torch.float32)
    ours, reference = (tensors.program(backend)() for backend in (backend_of(name, CPU), ReferenceAttention()))
    torch.testing.assert_close(ours, reference)


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
