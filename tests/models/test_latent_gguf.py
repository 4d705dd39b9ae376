"""Latent attention from GGUF files, written here with the names, shapes and keys of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from gguf_support import begun, finish
from model_support import NATIVE, tiny
from paceline.errors import ModelFormatError
from paceline.models.load.loading import open_checkpoint

_GATING = {"deepseek_v2": gguf.ExpertGatingFuncType.SOFTMAX, "deepseek_v3": gguf.ExpertGatingFuncType.SIGMOID}


def write(
    path: Path, theirs: PreTrainedModel, *, joined: bool = False, head: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write a model. joined: with one matrix of keys and values, as before llama.cpp had the absorbed form.

    head: tensors of a draft head, named as one more layer.
    """
    config, kind = theirs.config, theirs.config.model_type
    own, rope = kind == "minicpm3", config.rope_parameters
    name = "minicpm3" if own else "deepseek2"
    joined = joined or own
    writer = begun(path, name, config, more_layers=int(head is not None))
    if head is not None:
        writer.add_nextn_predict_layers(1)
    if not joined:
        writer.kv_data[0].pop(f"{name}.attention.head_count_kv")
        writer.add_head_count_kv(1)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    widths = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if joined:
        writer.add_key_length(widths[0])
        writer.add_value_length(widths[1])
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(widths[0])
        writer.add_value_length_mla(widths[1])
    if kind in _GATING:
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(config.norm_topk_prob))
        writer.add_expert_gating_func(_GATING[kind])
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    elif not own:
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    add_by_name(writer, name, theirs, {**theirs.state_dict(), **(head or {})}, joined=joined)
    finish(writer)
    return path


def add_by_name(
    writer: gguf.GGUFWriter,
    architecture: str,
    theirs: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    *,
    joined: bool = True,
) -> None:
    """Add tensors by llama.cpp's own map of names. architecture: its name in ``MODEL_ARCH``."""
    blocks = theirs.config.num_hidden_layers + 1
    own, newer = (  # of heads of deepseek2, which llama.cpp has named since as those of glm4_moe
        gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), blocks) for name in (architecture, "glm4_moe")
    )
    for ours, values in tensors.items():
        for called, part in _stored(ours, values, theirs, joined=joined).items():
            mapped = own.get_name(called, (".weight", ".bias")) or newer.get_name(called, (".weight",))
            assert mapped is not None, called
            writer.add_tensor(mapped, part.contiguous().numpy())


def _stored(name: str, values: torch.Tensor, theirs: PreTrainedModel, *, joined: bool) -> dict[str, torch.Tensor]:
    """The tensors that the converter makes of one, by the names that it maps."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = values.chunk(2, 1)
        return {
            name.replace("gate_up_proj", f"{part}_proj.weight"): half for part, half in (("gate", gate), ("up", up))
        }
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": values}
    if name.endswith("e_score_correction_bias"):
        return {name.replace("e_score_correction_bias", "e_score_correction.bias"): values}
    if joined or not name.endswith("kv_b_proj.weight"):
        return {name: values}
    config = theirs.config
    heads = values.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, value = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    return {name.replace("kv_b_proj", "k_b_proj"): keys.mT, name.replace("kv_b_proj", "v_b_proj"): value}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2 with groups", "deepseek_v3", "youtu"])
def test_a_gguf_file_gives_the_model_of_its_original(name: str, joined: bool, tmp_path: Path) -> None:
    kind, fields = NATIVE[name]
    exact = {"rms_norm_eps": 2.0**-17, "routed_scaling_factor": 1.5}  # files have them in float32
    theirs = tiny(kind, fields | exact | {"tie_word_embeddings": False})
    found, original = (open_checkpoint(each) for each in (write(tmp_path / "tiny.gguf", theirs, joined=joined), theirs))
    assert found is not None
    assert original is not None
    assert [layer.mlp for layer in found.spec.layers] == [layer.mlp for layer in original.spec.layers]
    tensors, wanted = (each.tensors(torch.float32, torch.device("cpu")) for each in (found, original))
    assert tensors.keys() == wanted.keys()
    for weight in wanted:
        torch.testing.assert_close(tensors[weight], wanted[weight], rtol=0, atol=0, msg=weight)
    for ours, own in zip(found.spec.attentions, original.spec.attentions, strict=True):
        assert (ours.latent, ours.interleaved, ours.rotary) == (own.latent, own.interleaved, own.rotary)
        assert ours.scale == pytest.approx(own.scale, rel=1e-6)


def test_keys_of_another_shape_are_refused(tmp_path: Path) -> None:
    kind, fields = NATIVE["youtu"]
    theirs = tiny(kind, fields)
    theirs.config.qk_nope_head_dim += 2
    theirs.config.v_head_dim -= 2
    with pytest.raises(ModelFormatError, match="attn_"):
        open_checkpoint(write(tmp_path / "tiny.gguf", theirs))
