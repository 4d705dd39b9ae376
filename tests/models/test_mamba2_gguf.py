"""Granite 4, Bamba, Falcon-H1 and Nemotron-H from GGUF files, written as by llama.cpp's converter: names and shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gguf_support import begun, finish
from model_support import packed
from paceline.kernels import native
from paceline.models.load.loading import load_model, open_checkpoint
from recurrent_support import GRANITE_SIZES, on_kernels, tiny_bamba, tiny_falcon_h1, tiny_granite_hybrid, tiny_nemotron
from toy import VOCAB

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_{}_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "shared_mlp.input_linear": "ffn_{}SHARED",
    "shared_mlp.output_linear": "ffn_downSHARED",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def converted(name: str, values: Tensor, config: Any) -> Tensor:
    """A tensor's values as llama.cpp stores them."""
    for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
        if part in name:  # by rotary pairs (i, i + 1)
            return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)
    if "ssm_norm" in name and values.dim() == 1:
        return values.view(config.mamba_n_groups, -1)
    if name.endswith(("ssm_a", "ssm_d")):
        return (-values.exp() if name.endswith("ssm_a") else values)[:, None]
    return values.squeeze(1) if "conv1d.weight" in name else values


_NEMOTRON_NAMES = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "mixer.norm": "ssm_norm",
    **{f"mixer.{name.partition('.')[2]}": called for name, called in _NAMES.items() if name.startswith("mamba.")},
    **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{f"mixer.experts.{part}_proj": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
    **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
    ".norm.": ".attn_norm.",
}


def write_nemotron(path: Path, theirs: PreTrainedModel) -> Path:
    """A model with latent experts has a draft head behind its layers, as Nemotron 3 Super's files."""
    config, kinds = theirs.config, theirs.config.layer_types
    has_head = config.moe_latent_size is not None
    blocks = [*kinds, *["head"] * has_head]
    architecture = "nemotron_h_moe" if "moe" in kinds else "nemotron_h"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(len(blocks))
    writer.add_embedding_length(config.hidden_size)
    inner = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    writer.add_feed_forward_length([inner if kind in ("moe", "mlp", "head") else 0 for kind in blocks])
    writer.add_head_count(config.num_attention_heads)
    attends = [kind in ("full_attention", "head") for kind in blocks]
    writer.add_head_count_kv([config.num_key_value_heads if has_keys else 0 for has_keys in attends])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if "moe" in kinds:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
    if has_head:
        writer.add_moe_latent_size(config.moe_latent_size)
        writer.add_nextn_predict_layers(1)
        for part in ("attn_norm", "nextn.enorm"):
            writer.add_tensor(f"blk.{len(kinds)}.{part}.weight", torch.ones(config.hidden_size).numpy())
    writer.add_token_list([str(token) for token in range(VOCAB)])
    for name, values in theirs.state_dict().items():
        for theirs_name, called in _NEMOTRON_NAMES.items():
            name = name.replace(theirs_name, called)
        if "ssm_norm" in name:
            values = values.view(config.n_groups, -1)
        writer.add_tensor(name, converted(name, values, config).contiguous().numpy())
    finish(writer)
    return path


def multiplied(name: str, values: Tensor, config: Any) -> Tensor:
    """A tensor of Falcon-H1 with the factors of its configuration."""
    into, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    own, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    numbers = {
        "token_embd": config.embedding_multiplier,
        "output.": config.lm_head_multiplier,
        "attn_q.": into,
        "attn_k.": into * config.key_multiplier,
        "attn_v.": into,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": gate,
        "ffn_down": down,
    }
    if "ssm_in." in name:
        parts = values.split_with_sizes([own, own, shared, shared, config.mamba_n_heads])
        factors = [config.ssm_in_multiplier * factor for factor in config.ssm_multipliers]
        return torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)])
    own_name = name.split(".", 2)[2] if name.startswith("blk.") else name
    return values * next((number for part, number in numbers.items() if own_name.startswith(part)), 1.0)


def write_falcon(path: Path, theirs: PreTrainedModel) -> Path:
    config = theirs.config
    writer = begun(path, "falcon-h1", config)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_d_ssm)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([str(token) for token in range(VOCAB)])
    for name, values in theirs.state_dict().items():
        for theirs_name, called in _NAMES.items():
            name = name.replace(theirs_name, called)
        whole = converted(name, values, config) if ".ssm_" in name else values  # its rotary pairs stay apart
        writer.add_tensor(name, multiplied(name, whole, config).contiguous().numpy())
    finish(writer)
    return path


def write(path: Path, theirs: PreTrainedModel) -> Path:
    if theirs.config.model_type == "falcon_h1":
        return write_falcon(path, theirs)
    if theirs.config.model_type == "nemotron_h":
        return write_nemotron(path, theirs)
    config, tensors = theirs.config, theirs.state_dict()
    granite = config.model_type == "granitemoehybrid"
    writer = begun(path, "granitehybrid", config)
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    del writer.kv_data[0]["granitehybrid.attention.head_count_kv"]
    writer.add_head_count_kv(heads)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_rope_scaling_finetuned(not granite or config.position_embedding_type == "rope")
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([str(token) for token in range(VOCAB)])
    shared = ""
    if granite:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        shared = "_shexp" if config.num_local_experts else ""
    else:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)
    for name, values in tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for theirs_name, called in _NAMES.items():
            name = name.replace(theirs_name, called.replace("SHARED", shared))
        parts = dict(zip(("gate", "up"), values.chunk(2, dim=-2), strict=True)) if "{}" in name else {"": values}
        for part, half in parts.items():
            writer.add_tensor(name.format(part), converted(name, half, config).contiguous().numpy())
    finish(writer)
    return path


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": lambda: tiny_granite_hybrid(2, **GRANITE_SIZES["grouped"]),
    "experts": lambda: tiny_granite_hybrid(2, **GRANITE_SIZES["experts"]),
    "rotated": lambda: tiny_granite_hybrid(2, **GRANITE_SIZES["rotated"]),
    "bamba": lambda: tiny_bamba(2),
    "falcon": lambda: tiny_falcon_h1(2),
    "falcon normed": lambda: tiny_falcon_h1(2, mamba_rms_norm=True),
    "nemotron": lambda: tiny_nemotron(2, "m-fm-", time_step_min=0.001),
    "nemotron with experts": lambda: tiny_nemotron(2, "mefme", time_step_min=0.001, topk_group=1, n_group=1),
    "nemotron with latent experts": lambda: tiny_nemotron(
        2, "mefme", time_step_min=0.001, topk_group=1, n_group=1, moe_latent_size=40
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_gguf_file_gives_the_weights_of_its_original(kind: str, tmp_path: Path) -> None:
    theirs = MODELS[kind]()
    found, original = open_checkpoint(write(tmp_path / "model.gguf", theirs)), open_checkpoint(theirs)
    assert found is not None
    assert original is not None
    tensors, wanted = (each.tensors(torch.float32, torch.device("cpu")) for each in (found, original))
    wanted["embed.weight"] = wanted["embed.weight"] * (original.spec.embed_scale / found.spec.embed_scale)
    if "head.weight" in wanted:
        wanted["head.weight"] = wanted["head.weight"] * (original.spec.logits_scale / found.spec.logits_scale)
    assert tensors.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(tensors[name], weight, msg=name)
    mixers = [[layer.mixer for layer in each.spec.layers] for each in (found, original)]
    for ours, theirs_mixer in zip(*mixers, strict=True):
        assert type(ours) is type(theirs_mixer)
    assert load_model(tmp_path / "model.gguf", dtype=torch.float32).kv_heads == theirs.config.num_key_value_heads


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
def test_a_gguf_file_is_packed_like_its_original(tmp_path: Path) -> None:
    """One stored matrix of gates, channels and steps becomes two."""
    theirs = MODELS["bamba"]()
    models = packed(write(tmp_path / "model.gguf", theirs), "int8"), on_kernels(theirs)
    ours, original = (model.packed() for model in models)  # the models' memory
    assert ours is not None
    assert original is not None
    assert (ours == original).float().mean() > 0.999, "decays go through their exponentials"
