"""The benchmark of top-k and top-p: its ways keep the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.run import app
from benchmarks.gpu.sampling import cases
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_command_writes_its_document(tmp_path: Path) -> None:
    output = tmp_path / "sampling.json"
    done = CliRunner().invoke(app, ["sampling", "--device", "cpu", "--tiny", "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert [case["wrong"] for case in document["cases"]] == [[]] * len(cases(tiny=True))
    assert {name for case in document["cases"] for name in case["us"]} == {"cut", "bisection", "torch"}
