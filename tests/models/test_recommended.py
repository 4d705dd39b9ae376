"""The sampling parameters that a model's files recommend, and the calls that follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import GenerationConfig

from gguf_support import finish
from model_support import NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.errors import ModelFormatError, ParameterError
from paceline.models.files.recommended import recommended_pooling, recommended_sampling
from server_support import save_model
from toy import tiny_llama_of_transformers

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2}
OF_QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def test_a_directory_recommends_what_its_generation_config_names(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).config.save_pretrained(tmp_path)
    assert recommended_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN | {"min_p": None, "max_new_tokens": 9}))
    assert recommended_sampling(tmp_path) == OF_QWEN


def test_a_gguf_file_recommends_its_general_sampling_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    finish(writer)
    assert recommended_sampling(tmp_path / "model.gguf") == {"temperature": 0.5, "top_k": 20}


def test_a_loaded_model_recommends_what_differs_from_the_usual() -> None:
    model = tiny_llama_of_transformers()
    model.generation_config = GenerationConfig(temperature=0.6, top_p=0.95, pad_token_id=0)
    assert recommended_sampling(model) == {"temperature": 0.6, "top_p": 0.95}
    model.generation_config = None
    assert recommended_sampling(model) == {}


LAST = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


@pytest.mark.parametrize(
    ("files", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        (LAST, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_cls_token": True}, None),
        (LAST | {"pooling_mode_max_tokens": True}, None),
    ],
)
def test_embeddings_are_pooled_as_a_directory_says(tmp_path: Path, files: dict[str, Any], pooling: Any) -> None:
    save_model(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(files))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_batch_size=2, threads=1, use_tqdm=False)
    ids = [[5, 6, 7], [8]]
    if pooling is None:
        with pytest.raises(ParameterError, match=r"^pooling=.*the model's own, '(cls_token|last\+max_tokens)'"):
            llm.embed(ids, use_tqdm=False)
        return
    assert torch.equal(llm.plain().embed(ids, use_tqdm=False), llm.embed(ids, pooling=pooling, use_tqdm=False))


@pytest.mark.parametrize(("kind", "pooling"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"), (9, "9")])
def test_a_gguf_file_says_how_embeddings_are_pooled(tmp_path: Path, kind: int | None, pooling: str | None) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    if kind is not None:
        writer.add_uint32("qwen3.pooling_type", kind)
    finish(writer)
    assert recommended_pooling(tmp_path / "model.gguf") == pooling


def make(recommended: GenerationConfig) -> LLM:
    model = tiny_llama_of_transformers()
    model.generation_config = recommended
    return LLM(model, dtype="float32", device="cpu", max_batch_size=2, threads=1)


def test_calls_without_parameters_follow_the_recommendation() -> None:
    llm = make(GenerationConfig(repetition_penalty=1.5, top_k=1))
    expected = SamplingParams(repetition_penalty=1.5, top_k=1)
    assert llm.get_default_sampling_params() == llm.plain().get_default_sampling_params() == expected
    prompts = [[1, 2, 3], [4]]
    (said, _), (given, _) = llm.generate(prompts, use_tqdm=False), llm.generate(prompts, expected, use_tqdm=False)
    assert said.outputs[0].token_ids == given.outputs[0].token_ids
    (unlike, _) = llm.generate(prompts, SamplingParams(top_k=1), use_tqdm=False)
    assert unlike.outputs[0].token_ids != said.outputs[0].token_ids
    (streamed,) = [output for output in llm.stream([1, 2, 3]) if output.finished]
    assert streamed.outputs[0].token_ids == said.outputs[0].token_ids


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 2.0}, {"top_k": "many"}])
def test_an_impossible_recommendation_is_refused_where_it_would_be_followed(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_batch_size=2, threads=1)
    llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ModelFormatError, match=next(iter(wrong))):
        llm.generate([[1, 2]], use_tqdm=False)
