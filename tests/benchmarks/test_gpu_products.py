"""The benchmark of 8-bit products."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.gpu.products import cases, makers
from benchmarks.gpu.run import app
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", makers(5))
def test_all_methods_compute_the_same_product_up_to_rounding(name: str) -> None:
    torch.manual_seed(1)
    matrix, x = torch.randn(32, 64), torch.randn(5, 64)
    (way,) = makers(5)[name]([matrix], x)
    mosts = {"16": 1e-5, "int8": 0.01, "int4": 0.12, "fp8 x fp8": 0.09}  # of the last, both factors are rounded
    most = next((most for start, most in mosts.items() if name.startswith(start)), 0.06)
    error = (way(x) - x @ matrix.T).norm() / (x @ matrix.T).norm()
    assert error < most
    assert error > most / 10 or name.startswith("16"), "weights of 8 bits are rounded"


def test_the_command_writes_its_document(tmp_path: Path) -> None:
    output = tmp_path / "products.json"
    done = CliRunner().invoke(app, ["products", "--device", "cpu", "--tiny", "--output", str(output)])
    assert done.exit_code == 0, done.output
    document = json.loads(output.read_text())
    assert len(document["cases"]) == len(cases(tiny=True))
    assert document["dropped"] == 0
