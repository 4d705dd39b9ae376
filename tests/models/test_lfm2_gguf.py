"""LFM2 from GGUF files, written here with the names and shapes of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gguf_support import finish
from model_support import assert_same_model, packed
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.models.load.loading import load_model
from recurrent_support import LFM2_SIZES, on_kernels, tiny_lfm2
from toy import VOCAB


def divided(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as llama.cpp's converter names them, gates and ups of experts apart."""
    found = {}
    for name, values in tensors.items():
        stem, _, part = name.removeprefix("model.").rpartition("experts.")
        if part == "gate_up_proj":
            found |= {
                f"{stem}experts.w{i}.weight": half for i, half in zip((1, 3), values.chunk(2, dim=1), strict=True)
            }
        elif stem and part == "down_proj":
            found[f"{stem}experts.w2.weight"] = values
        else:
            found[f"{name}.bias" if name.endswith("expert_bias") else name] = values
    return found


def write(path: Path, theirs: PreTrainedModel, key_heads: int = 2) -> Path:
    config, tensors = theirs.config, theirs.state_dict()
    attends = [kind == "full_attention" for kind in config.layer_types]
    mixture = config.model_type == "lfm2_moe"
    architecture = gguf.MODEL_ARCH.LFM2MOE if mixture else gguf.MODEL_ARCH.LFM2
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(len(tensors["model.layers.0.feed_forward.w1.weight"]))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([key_heads if attention else 0 for attention in attends])
    writer.add_key_length(config.hidden_size // config.num_attention_heads if mixture else config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_token_list([str(token) for token in range(VOCAB)])
    if mixture:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, values in divided(tensors).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = values.squeeze(1) if name.endswith("conv.conv.weight") else values
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        writer.add_tensor(called, values.contiguous().numpy())
    finish(writer)
    return path


@pytest.mark.parametrize("sizes", LFM2_SIZES)
def test_a_gguf_file_gives_the_model_of_its_original(sizes: str, tmp_path: Path) -> None:
    theirs = tiny_lfm2(2, **LFM2_SIZES[sizes])
    theirs.config.norm_eps = 2.0**-17  # files have it in float32
    assert_same_model(write(tmp_path / "model.gguf", theirs), theirs)


def test_an_impossible_number_of_key_heads_in_one_layer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", tiny_lfm2(), key_heads=2**30)
    with pytest.raises(ModelFormatError, match=r"attention\.head_count_kv=.* is impossible"):
        load_model(path, dtype=torch.float32)


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
def test_a_gguf_file_is_packed_like_its_original(tmp_path: Path) -> None:
    theirs = tiny_lfm2(2, **LFM2_SIZES["other"])
    models = packed(write(tmp_path / "model.gguf", theirs), "int8"), on_kernels(theirs)
    ours, original = (model.packed() for model in models)  # the models' memory
    assert ours is not None
    assert original is not None
    assert torch.equal(ours, original)
