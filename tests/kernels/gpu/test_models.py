"""Tiny checkpoints of every family on a GPU, as a user loads them: answers equal those of plain decoding on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton", reason="triton is not installed")

from model_support import NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.models.load import kept_tiles
from recurrent_support import (
    save_tokenizer,
    save_with_head,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_qwen3_5,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of other packages
]

DEVICE = "cuda"
POSITIONS = 48
VOCAB = 20  # smaller than the smallest vocabulary
PROMPTS = [
    [(7 * row + 3 * place * place) % VOCAB for place in range(size)] for row, size in enumerate((1, 9, 17, 4, 12))
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, seed=0, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=20, seed=1, n=2, ignore_eos=True),
    SamplingParams(temperature=0.7, max_tokens=16, seed=2, top_k=5, presence_penalty=1.0, ignore_eos=True),
    SamplingParams(temperature=1.3, max_tokens=20, seed=3, top_p=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=20, seed=4, logit_bias={3: 2.0, 7: -4.0}, min_tokens=8),
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "n-gram on the device": {"drafter": "ngram", "num_speculative_tokens": 4, "rounds": "device"},
    "n-gram on the host": {"drafter": "ngram", "num_speculative_tokens": 4, "rounds": "host"},
    "default": {},
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(tiny, *NATIVE[name]) for name in NATIVE},
    "qwen3.5": tiny_qwen3_5,
    "lfm2": tiny_lfm2,
    "granite hybrid": tiny_granite_hybrid,
    "falcon": tiny_falcon_h1,
}


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the first tile of a product instead of compiling and timing all."""
    monkeypatch.setitem(kept_tiles.tune.__kwdefaults__, "seconds", 0.0)


def llm(path: Path, device: str, draft: Path | None = None, **options: Any) -> LLM:
    options = {"dtype": "float32", "max_batch_size": 3, "max_model_len": POSITIONS} | options
    return LLM(str(path), None if draft is None else str(draft), device=device, use_tqdm=False, **options)


def answers(model: LLM) -> list[list[list[int]]]:
    outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def saved(path: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def equal_on_device(path: Path, draft: Path | None = None, **options: Any) -> None:
    expected = answers(llm(path, "cpu", drafter=None))
    assert answers(llm(path, DEVICE, draft, **options)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_families_give_the_cpus_answers(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, MODELS[name]())
    expected = answers(llm(path, "cpu", drafter=None))
    found = {way: answers(llm(path, DEVICE, **options)) for way, options in WAYS.items()}
    assert {way: each == expected for way, each in found.items()} == dict.fromkeys(WAYS, True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("length", [0, 4, "auto"])
def test_draft_models_give_the_cpus_answers(name: str, length: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "target", MODELS[name]())
    for seed in (0, 1):  # the target itself, and another
        draft = saved(tmp_path / f"draft{seed}", tiny(*NATIVE[name], seed=seed))
        equal_on_device(path, draft, num_speculative_tokens=length)


@pytest.mark.parametrize("length", [1, 4, "auto"])
@pytest.mark.parametrize("rounds", ["auto", "host"])
def test_a_hybrids_own_head_gives_the_cpus_answers(rounds: Any, length: Any, tmp_path: Path) -> None:
    save_with_head(tmp_path)
    equal_on_device(tmp_path, rounds=rounds, num_speculative_tokens=length)


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen3.5", "qwen3_moe", "deepseek_v3"])
def test_quantised_weights_give_the_same_with_draft_tokens_as_without(name: str, to: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, MODELS[name]())
    found = [answers(llm(path, DEVICE, quantization=to, **WAYS[way])) for way in WAYS]
    assert found == [found[0]] * len(found)
