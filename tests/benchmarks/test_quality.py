"""``benchmarks.quality``: perplexity and agreement of two precisions."""

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks.quality import Predictions, app, compare
from typer.testing import CliRunner

from byte_model import byte_tokenizer, save_llama
from paceline.errors import ParameterError

pytestmark = pytest.mark.usefixtures("one_thread")


def predictions(logprobs: list[float], top: list[int], answers: list[list[int]]) -> Predictions:
    return Predictions(torch.tensor(logprobs), torch.tensor(top), answers)


def test_a_precision_compared_with_itself_loses_nothing() -> None:
    same = predictions([-1.0, -3.0], [4, 5], [[1, 2, 3]])
    quality = compare("bfloat16", same, same, 10)
    assert quality.perplexity == pytest.approx(math.exp(2))
    assert (quality.perplexity_change, quality.standard_error) == (0, 0)
    assert (quality.top_token_agreement, quality.greedy_agreement) == (1, 1)


def test_losses_are_counted() -> None:
    first = predictions([-1.0, -1.0, -1.0, -1.0], [1, 2, 3, 4], [[1, 2, 3, 4], [5, 6, 7, 8]])
    worse = predictions([-1.1, -1.3, -1.1, -1.3], [1, 2, 3, 9], [[1, 2, 9, 4], [5, 6, 7, 8]])
    quality = compare("int4", worse, first, 10)
    assert quality.perplexity_change == pytest.approx(math.exp(0.2) - 1)
    assert quality.standard_error == pytest.approx(math.exp(0.2) * math.sqrt(0.04 / 3) / 2)
    assert quality.top_token_agreement == 0.75
    assert quality.greedy_agreement == 6 / 8  # tokens after the first difference do not count


def test_the_command_ends_with_one_json_document(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1)
    (tmp_path / "text").write_text("the of " * 40)
    options = ["--text", str(tmp_path / "text"), "--tokens", "30", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [model, "--precisions", "float32,bfloat16,fp8,fp8-weights", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "out").read_text())
    fp32, bf16, fp8, fp8_weights = document["results"]
    assert fp32["perplexity_change"] == 0
    assert 0 < abs(bf16["perplexity_change"]) < 0.1
    assert fp8["weight_bytes"] == fp8_weights["weight_bytes"] < bf16["weight_bytes"] < fp32["weight_bytes"]
    assert len({each["perplexity"] for each in document["results"]}) == 4


def test_two_tokens_have_no_standard_error_and_one_is_no_text(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1)
    options = [model, "--precisions", "float32", "--text", str(tmp_path / "text")]
    (tmp_path / "text").write_text("ab")
    result = CliRunner().invoke(app, options)
    document = json.loads(result.stdout.splitlines()[-1], parse_constant=pytest.fail)  # NaN is no JSON
    assert document["tokens"] == 2
    assert document["results"][0]["standard_error"] is None
    (tmp_path / "text").write_text("a")
    with pytest.raises(ParameterError, match=r"^--text="):
        CliRunner().invoke(app, options, catch_exceptions=False)


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(ParameterError, match="int3"):
        CliRunner().invoke(app, ["no-model", "--precisions", "int3"], catch_exceptions=False)
