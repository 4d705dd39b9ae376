"""A plan has the numbers of the engine that it stands for, and reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_support import NATIVE, tiny
from paceline.config import EngineConfig
from paceline.engine.memory import default_length, fit_memory, plan_memory, row_bytes
from paceline.engine.plan import plan_engine
from paceline.kernels import native
from paceline.models.load.prepare import ModelOptions, load
from paceline.models.native.model import NativeModel
from quantised_support import gptq, write

CPU = torch.device("cpu")
MEMORY = 40 << 20
_SIZES: dict[str, Any] = {**NATIVE["qwen2"][1], "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 6000}
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"needs the CPU kernels: {native.why_none()}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("qwen2", _SIZES).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "attention": "split", "kv_cache_dtype": "int8"},
        pytest.param({"max_batch_size": 3}, marks=needs_kernels),
        pytest.param({"quantization": "int8", "kv_cache_dtype": "int8", "max_model_len": 700}, marks=needs_kernels),
    ],
)
def test_a_plan_has_the_numbers_of_the_engine(files: Path, options: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", **options)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    model = load(files, ModelOptions(dtype, CPU, config.attention, config.quantization))
    planned, resolved = plan_engine(files, config, MEMORY), config.resolved(draft_model=False)
    positions = config.max_model_len or default_length(model, None, config, model.max_positions)
    fitted = fit_memory(model, None, resolved, positions, MEMORY - model.weight_bytes())
    memory = plan_memory(model, None, resolved, fitted.rows, fitted.positions)
    assert (planned.rows, planned.positions, planned.note) == (fitted.rows, fitted.positions, fitted.note)
    assert (planned.weights, planned.workspace) == (memory.weights, memory.workspace)
    assert planned.runs.endswith("on the CPU kernels") == isinstance(model, NativeModel)
    for each in planned.caches:
        of_dtype = EngineConfig(**options | {"kv_cache_dtype": each.kv_cache_dtype}).resolved(draft_model=False)
        assert each.row_bytes == row_bytes(model, None, of_dtype, each.tokens)
    assert [each.tokens for each in planned.caches if each.kv_cache_dtype == "int8"] == [512, 4096, 6000]


@needs_kernels
def test_orders_of_inputs_count(tmp_path: Path) -> None:
    sizes = _SIZES | {"intermediate_size": 96}
    write(tmp_path, tiny("qwen2", sizes), gptq(4, 32, symmetric=True, ordered=True))
    model = load(tmp_path, ModelOptions(torch.bfloat16, CPU, quantization="int4"))
    assert isinstance(model, NativeModel)
    assert model.ordered
    planned = plan_engine(tmp_path, EngineConfig(device="cpu", quantization="int4"), MEMORY)
    assert planned.weights == model.weight_bytes()


def test_int8_about_doubles_the_rows_that_fit(files: Path) -> None:
    planned = plan_engine(files, EngineConfig(device="cpu", prefill_chunk=64, dtype="bfloat16"), 400 << 20)
    rows = {each.kv_cache_dtype: each.rows_that_fit for each in planned.caches if each.tokens == 6000}
    assert 1.3 * rows["auto"] < rows["int8"] <= 2 * rows["auto"]


def test_a_gpu_that_is_not_here_can_be_planned_with_its_memory(files: Path) -> None:
    planned = plan_engine(files, EngineConfig(device="cuda"), 24 << 30)
    assert planned.rows == 16
    assert planned.runs.endswith("in torch on cuda")
    four_bits = plan_engine(files, EngineConfig(device="cuda", quantization="int4"), 24 << 30)
    assert four_bits.runs == "int4 weights, bfloat16 in torch on cuda"
    assert four_bits.weights < planned.weights


def test_no_weights_are_read(files: Path, tmp_path: Path) -> None:
    """A file whose last numbers are NaN, which loading refuses, has the same plan."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    size = (tmp_path / "model.safetensors").stat().st_size
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(size - 64)
        file.write(b"\xff" * 64)
    config = EngineConfig(device="cpu")
    plans = [plan_engine(path, config, MEMORY) for path in (files, tmp_path)]
    assert plans[0].caches == plans[1].caches
    assert plans[0].weights == plans[1].weights


def test_what_does_not_fit_is_said(files: Path) -> None:
    planned = plan_engine(files, EngineConfig(device="cpu", max_batch_size=64), 1 << 20)
    assert (planned.rows, planned.positions) == (0, 0)
    assert "lower max_batch_size or max_model_len" in planned.note
