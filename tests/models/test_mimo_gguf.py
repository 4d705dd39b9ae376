"""MiMo-V2 from GGUF files, written here with the names, keys and shapes of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gguf_support import begun, finish
from model_support import NATIVE, assert_same_model, packed, tiny
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.models.load.loading import load_model

_DRAFT_HEADS = 3  # of every published checkpoint


def tiny_mimo(**changes: object) -> PreTrainedModel:
    kind, fields = NATIVE["mimo_v2_flash"]
    sizes = {"hidden_size": 64, "head_dim": 48, "v_head_dim": 32, "routed_scaling_factor": 1.0}
    return tiny(kind, fields | sizes | {"rms_norm_eps": 2.0**-17} | changes)  # files have it in float32


def converted(theirs: PreTrainedModel, *, fused: bool) -> dict[str, Tensor]:
    """The tensors as llama.cpp's converter names them. fused: queries, keys and values are one matrix, as in V2.5."""
    tensors, found = theirs.state_dict(), {}
    for name, values in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            found |= {
                f"{stem}.{half}_proj.weight": own
                for half, own in zip(("gate", "up"), values.chunk(2, dim=1), strict=True)
            }
        elif stem.endswith("experts") or part == "sinks":
            found[f"{name}.weight"] = values
        elif fused and stem.endswith(("q_proj", "k_proj", "v_proj")):
            whole = stem.replace("q_proj", "qkv_proj")
            if whole != stem:
                parts = (tensors[f"{stem.removesuffix('q_proj')}{which}_proj.weight"] for which in "qkv")
                found[f"{whole}.weight"] = torch.cat(list(parts))
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def write(path: Path, theirs: PreTrainedModel, *, newer: bool = True, keys_of_windows: int = 2) -> Path:
    """newer: with the factor of the values, the draft heads and fused matrices, which files did not have at first."""
    config, heads = theirs.config, _DRAFT_HEADS if newer else 0
    near = [*(kind == "sliding_attention" for kind in config.layer_types), *[True] * heads]
    keys = config.num_key_value_heads
    writer = begun(path, "mimo2", config, more_layers=heads)
    del writer.kv_data[0]["mimo2.attention.head_count_kv"]
    writer.add_head_count_kv([keys_of_windows * keys if has_window else keys for has_window in near])
    writer.add_sliding_window(config.sliding_window - 1)
    writer.add_sliding_window_pattern(near)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    ropes = config.rope_parameters
    writer.add_rope_dimension_count(int(config.head_dim * ropes["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_float32("mimo2.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MIMO2, config.num_hidden_layers)
    tensors = converted(theirs, fused=newer)
    for name, values in tensors.items():
        called = names.get_name(name, try_suffixes=(".weight", ".bias")) or name.replace("model.layers", "blk").replace(
            "self_attn.qkv_proj", "attn_qkv"
        )  # a name of newer converters than the installed package
        writer.add_tensor(called, values.contiguous().numpy())
    if newer:
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
        writer.add_nextn_predict_layers(heads)
        norm = tensors["model.norm.weight"].numpy()
        for block in range(config.num_hidden_layers, len(near)):
            writer.add_tensor(f"blk.{block}.attn_norm.weight", norm)
            writer.add_tensor(f"blk.{block}.nextn.enorm.weight", norm)
    finish(writer)
    return path


@pytest.mark.parametrize("newer", [False, True])
def test_a_gguf_file_gives_the_model_of_its_original(newer: bool, tmp_path: Path) -> None:
    theirs = tiny_mimo(attention_value_scale=0.5) if newer else tiny_mimo()
    assert_same_model(write(tmp_path / "tiny.gguf", theirs, newer=newer), theirs)


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
def test_a_gguf_file_is_packed_like_its_original(tmp_path: Path) -> None:
    theirs = tiny_mimo()
    models = [packed(source, "int8") for source in (write(tmp_path / "tiny.gguf", theirs), theirs)]
    ours, original = (model.packed() for model in models)  # the models' memory
    assert ours is not None
    assert original is not None
    assert torch.equal(ours, original)


def test_another_number_of_key_heads_in_layers_with_a_window_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_mimo(), keys_of_windows=1)
    with pytest.raises(ModelFormatError, match=r"head_count_kv must be twice as large in layers with a window"):
        load_model(path, dtype=torch.float32)
