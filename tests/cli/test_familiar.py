"""Options that people know from other engines: translated, or answered with the right name."""

from __future__ import annotations

from typing import Any

import pytest

ENGINE = ("--dtype", "float32", "--quiet")


def test_options_of_llama_cpp_and_vllm_are_translated(paceline: Any, tiny: str) -> None:
    own = ("--max-model-len", "64", "--max-tokens", "5", "--temperature", "0", "--max-batch-size", "2")
    others = ("--ctx-size=64", "--max-new-tokens", "5", "--temp", "0", "--max-num-seqs", "2")
    expected = paceline("generate", tiny, "-p", "one", *own, *ENGINE)
    result = paceline("generate", tiny, "-p", "one", *others, *ENGINE)
    assert (result.exit_code, result.stdout) == (0, expected.stdout), result.stderr
    refused = paceline("generate", tiny, "-p", "one", "--ctx-size", "1", *ENGINE)
    assert refused.stderr.startswith("error: max_model_len=1 is not allowed: a whole number from 2 ")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpu-memory-utilization=0.9", "--memory-limit, in bytes"),
        ("--speculative-config={}", "--draft-model, --drafter and --num-speculative-tokens"),
        ("--enforce-eager", "--rounds='host'"),
        ("--repeat-penalty", "--repetition-penalty, which counts"),
        ("--n-gpu-layers", "--device: a model"),
        ("--enable-lora", "--adapter NAME=DIRECTORY"),
        ("--model", "the model's name as the first argument"),
        ("--num-beams", "there is no beam search here"),
    ],
)
def test_an_option_that_means_nearly_the_same_is_answered_with_it(
    paceline: Any, tiny: str, option: str, said: str
) -> None:
    result = paceline("generate", tiny, "-p", "one", option)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: there is no option {option.partition('=')[0]} here; instead: ")
    assert said in result.stderr


def test_a_prompt_that_looks_like_an_option_stays_one(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "--json", "-p", "--temp", "--max-tokens", "2", *ENGINE)
    assert '"prompt": "--temp"' in result.stdout


def test_an_unknown_option_is_refused_as_ever(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "--temprature", "1")
    assert result.exit_code == 2
    assert "No such option: --temprature" in result.stderr
