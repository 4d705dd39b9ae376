"""A tiny target with the eight layers that a head needs, and the output of one whole training run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from byte_model import byte_tokenizer, save_llama
from paceline.cli.main import app
from paceline.llm import LLM

SIZES = (
    "--tokens", "900", "--prompt-tokens", "8", "--answer-tokens", "24", "--held-out", "8", "--shard", "16",
    "--epochs", "2", "--vocab", "64", "--batch-tokens", "256", "--max-batch-size", "8", "--max-model-len", "96",
    "--quantization", "int8", "--dtype", "bfloat16", "--threads", "1", "--device", "cpu", "-q",
)  # fmt: skip


def save_target(path: Path, layers: int = 8) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "initializer_range": 0.1}
    return save_llama(path, byte_tokenizer(), seed=4, **sizes)


@pytest.fixture(autouse=True)
def _quick(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors need one thread. Plots take as long as the training, so only that of ``whole`` is drawn."""
    monkeypatch.setattr("paceline.tools.training.run.draw", lambda *_: True)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture
def llm(target: str) -> LLM:
    return LLM(
        target, drafter=None, num_speculative_tokens=0, quantization="int8", dtype="bfloat16", device="cpu", threads=1,
        max_batch_size=8, max_model_len=96, longest_pause=None,
    )  # fmt: skip


@pytest.fixture(scope="session")
def whole(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of one run of the command."""
    output = tmp_path_factory.mktemp("whole")
    result = CliRunner().invoke(app, ["train-draft", target, *SIZES, "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output
