"""Multimodal checkpoints run as their text model: each of ``WRAPPERS`` beside transformers, and its published names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.model_survey import difference_in_float32, tried

from paceline.models.families import FAMILIES
from paceline.models.families.wrappers import WRAPPERS, in_wrapper
from paceline.models.load.prepare import would_run_natively

ON_KERNELS = sorted(WRAPPERS)[::5]


@pytest.mark.parametrize("model_type", sorted(WRAPPERS - {*ON_KERNELS}))
def test_a_wrapper_has_transformers_texts(model_type: str, tmp_path: Path) -> None:
    assert difference_in_float32(model_type, tmp_path) is None
    assert would_run_natively(tmp_path, torch.device("cpu"), "auto")


@pytest.mark.parametrize("model_type", ON_KERNELS)
def test_a_wrapper_runs_on_the_kernels_with_transformers_texts(model_type: str) -> None:
    assert tried(model_type) == {"state": "kernels"}


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.3.self_attn.q_proj.weight",  # LLaVA, InternVL, Mistral 3, Gemma 3
        "model.language_model.layers.3.self_attn.q_proj.weight",  # Qwen3-VL, and what transformers saves
        "model.text_model.layers.3.self_attn.q_proj.weight",  # Idefics 3, SmolVLM
        "model.layers.3.self_attn.q_proj.weight",  # Qwen2-VL
    ],
)
def test_a_published_name_is_that_of_the_text_model(name: str) -> None:
    names = in_wrapper(FAMILIES["llama"].safetensors)
    assert not names.ignored.fullmatch(name)
    assert names.ours(name) == "layers.3.q.weight"


def test_published_names_of_nemotron_omni_are_those_of_its_text_model() -> None:
    names = in_wrapper(FAMILIES["nemotron_h"].safetensors)
    assert names.ours("language_model.backbone.layers.3.mixer.q_proj.weight") == "layers.3.q.weight"
    assert names.ignored.fullmatch("language_model.mtp.layers.0.eh_proj.weight")


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_published_head_is_that_of_the_text_model(name: str) -> None:
    names = in_wrapper(FAMILIES["llama"].safetensors)
    assert not names.ignored.fullmatch(name)
    assert names.ours(name) == "head.weight"


@pytest.mark.parametrize(
    "name",
    [
        *("visual.blocks.0.attn.qkv.weight", "vision_tower.transformer.layers.0.attention.q_proj.weight"),
        *(
            "model.vision_tower.vision_model.embeddings.position_embedding.weight",
            "multi_modal_projector.linear_1.bias",
        ),
        *("model.connector.modality_projection.proj.weight", "mlp1.0.weight", "image_newline"),
    ],
)
def test_other_parts_are_ignored(name: str) -> None:
    assert in_wrapper(FAMILIES["llama"].safetensors).ignored.fullmatch(name)
