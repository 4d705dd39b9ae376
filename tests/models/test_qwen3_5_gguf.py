"""Qwen3.5 from GGUF files, written here as llama.cpp's converter orders and scales the tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_support import begun, finish
from paceline import LLM
from paceline.config import SamplingParams
from paceline.drafters.heads.decoder import TorchHead
from paceline.drafters.heads.loading import find_head, has_own_head, load_head_for, load_own_head
from paceline.errors import ModelFormatError
from paceline.models.base import state_shape_of
from paceline.models.load.loading import load_config, load_model, open_checkpoint
from recurrent_support import (
    SIZES,
    head_state,
    save_with_head,
    theirs_with_head,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
)
from toy import VOCAB, tiny_llama, tiny_llama_of_transformers

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mtp.fc": "blk.{}.nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "blk.{}.nextn.enorm",
    "mtp.pre_fc_norm_hidden": "blk.{}.nextn.hnorm",
    "mtp.norm": "blk.{}.nextn.shared_head_norm",
    "mtp.layers.0": "blk.{}",
}


def in_turns(values: Tensor, shape: tuple[int, int], dim: int, width: int) -> Tensor:
    """Order value heads as llama.cpp does: the first of every key head, then the second. shape: key and value heads."""
    keys, heads = shape
    sizes = *values.shape[:dim], keys, heads // keys, width, *values.shape[dim + 1 :]
    return values.reshape(sizes).transpose(dim, dim + 1).reshape(values.shape)


def divided(name: str, values: Tensor, config: Any) -> dict[str, Tensor]:
    """Qwen3-Next's first matrix as llama.cpp divides it, out of the order by key head. Other tensors stay."""
    if "in_proj_qkvz" not in name:
        return {name: values}
    keys, shared = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [shared * config.linear_value_head_dim] * 2
    q, k, v, z = (part.flatten(0, 1) for part in values.unflatten(0, (keys, -1)).split(sizes, dim=1))
    return {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z}


def converted(name: str, values: Tensor, config: Any) -> Tensor:
    shape = config.linear_num_key_heads, config.linear_num_value_heads
    keys, width = 2 * shape[0] * config.linear_key_head_dim, config.linear_value_head_dim
    if config.model_type == "qwen3_next":
        shape = shape[1], shape[1]  # whose value heads keep their order
    values = values.squeeze(1) if "conv1d" in name else values
    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat([values[:keys], in_turns(values[keys:], shape, 0, width)])
    if "shared_expert_gate" in name:
        return values[0]  # llama.cpp has a vector
    if "in_proj_z" in name:
        return in_turns(values, shape, 0, width)
    if "out_proj" in name:
        return in_turns(values, shape, 1, width)
    if any(part in name for part in ("in_proj_a.", "in_proj_b.", "dt_bias")):
        return in_turns(values, shape, 0, 1)
    if "A_log" in name:
        return in_turns(-values.exp(), shape, 0, 1)
    return values + 1 if values.dim() == 1 and "linear_attn.norm" not in name else values


ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}


def write(path: Path, tensors: dict[str, Tensor], config: Any, heads: int, *, whole: bool = False) -> Path:
    """Write a GGUF file. whole: whether Qwen3-Next's first matrix stays one, as in older files."""
    architecture = ARCHITECTURES[config.model_type]
    writer = begun(path, architecture, config, heads)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32(f"{architecture}.full_attention_interval", 1 + config.layer_types.index("full_attention"))
    writer.add_uint32(f"{architecture}.nextn_predict_layers", heads)
    writer.add_token_list([str(token) for token in range(VOCAB)])
    parts = {part: half for name, values in tensors.items() for part, half in divided(name, values, config).items()}
    for name, values in (tensors if whole else parts).items():
        ours = name
        for theirs, called in _NAMES.items():
            ours = ours.replace(theirs, called.format(config.num_hidden_layers))
        array = np.ascontiguousarray(converted(name, values, config).float().numpy())
        writer.add_tensor(ours, array, raw_dtype=gguf.GGMLQuantizationType.F32)
    finish(writer)
    return path


MAKERS: dict[str, Callable[..., Any]] = {"dense": tiny_qwen3_5, "experts": tiny_qwen3_5_moe}


@pytest.mark.parametrize("kind", ["grouped", "alone", "experts", "next", "next, whole"])
def test_a_gguf_file_gives_the_weights_of_its_original(kind: str, tmp_path: Path) -> None:
    shape = SIZES["grouped"] if kind == "grouped" else {"key_heads": 3, "value_heads": 3, "value_dim": 32}
    mixtures = {"experts": tiny_qwen3_5_moe, "next": tiny_qwen3_next, "next, whole": tiny_qwen3_next}
    theirs = mixtures[kind](2) if kind in mixtures else tiny_qwen3_5(2, **shape)
    path = write(tmp_path / "model.gguf", theirs.state_dict(), theirs.config, 0, whole="whole" in kind)
    found, original = open_checkpoint(path), open_checkpoint(theirs)
    assert found is not None
    assert original is not None
    models = [load_model(source, dtype=torch.float32) for source in (path, theirs)]
    assert state_shape_of(models[0]) == state_shape_of(models[1])
    assert found.spec.attentions[0].rotary == original.spec.attentions[0].rotary
    tensors, wanted = (each.tensors(torch.float32, torch.device("cpu")) for each in (found, original))
    assert tensors.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(tensors[name], weight, msg=name)
    assert not has_own_head(path)


def write_apart(path: Path, seed: int, kind: str = "dense") -> tuple[Path, Path]:
    """Write a model without its draft head, and the head in a file of its own."""
    theirs, head = theirs_with_head(seed, MAKERS[kind])
    model = write(path / "model.gguf", theirs.state_dict(), theirs.config, 0)
    return model, write(path / "mtp-model.gguf", head_state(head), theirs.config, 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_draft_head_in_a_file_of_its_own_is_that_of_the_original(kind: str, tmp_path: Path) -> None:
    save_with_head(tmp_path / "original", 4, MAKERS[kind])
    model, head = write_apart(tmp_path, 4, kind)
    assert not has_own_head(model)
    assert find_head(model) is None
    assert find_head(head) == head
    target = load_model(model, dtype=torch.float32)
    apart = load_head_for(target, model, head, dtype=torch.float32)
    together = load_own_head(load_model(tmp_path / "original", dtype=torch.float32), tmp_path / "original")
    assert isinstance(apart, TorchHead)
    assert isinstance(together, TorchHead)
    assert (apart.kind, apart.taps, apart.name) == ("mtp", together.taps, str(head))
    ours, original = apart.head.state_dict(), together.head.state_dict()
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(ours[name], weight, msg=name)


@pytest.mark.usefixtures("one_thread")
def test_an_llm_drafts_with_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    save_with_head(tmp_path / "original", seed=4)
    model, head = write_apart(tmp_path, seed=4)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "max_model_len": 60}
    options |= {"tokenizer": str(tmp_path / "original"), "use_tqdm": False, "num_speculative_tokens": 2}
    params, prompts = SamplingParams(temperature=0, max_tokens=9), [[1, 2, 3], [7, 5]]
    llm = LLM(str(model), draft_model=str(head), drafter="mtp", **options)
    assert "mtp-model.gguf" in llm.engine.describe()
    outputs = llm.generate(prompts, params)
    plain = llm.plain().generate(prompts, params)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.drafted for each in outputs) > 0


def test_a_head_in_a_file_of_its_own_is_refused_by_name_for_other_models(tmp_path: Path) -> None:
    _, head = write_apart(tmp_path, seed=4)
    with pytest.raises(ModelFormatError, match=r"mtp-model\.gguf.* of a family that has none"):
        load_head_for(tiny_llama(), tiny_llama_of_transformers(), head, dtype=torch.float32)
    wide = tiny_qwen3_5(2, key_heads=1, value_heads=4, value_dim=48, taps=5, kinds="dfdf")
    other = write(tmp_path / "other.gguf", wide.state_dict(), wide.config, 0)
    damaged = write(
        tmp_path / "mtp-damaged.gguf", {"mtp.fc.weight": torch.zeros(4, 4)}, theirs_with_head(0)[0].config, 1
    )
    with pytest.raises(ModelFormatError, match=r"mtp-damaged\.gguf: a qwen3_5_text draft head misses"):
        load_head_for(load_model(other, dtype=torch.float32), other, damaged, dtype=torch.float32)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_draft_head_of_a_gguf_file_is_that_of_the_original(kind: str, tmp_path: Path) -> None:
    theirs, head = theirs_with_head(4, MAKERS[kind])
    save_with_head(tmp_path, 4, MAKERS[kind])
    tensors = {**theirs.state_dict(), **head_state(head)}
    path = write(tmp_path / "model.gguf", tensors, theirs.config, 1)
    assert has_own_head(path)
    assert load_config(path).num_hidden_layers == 3
    models = [load_model(each, dtype=torch.float32) for each in (path, tmp_path)]
    heads = [load_own_head(model, each) for model, each in zip(models, (path, tmp_path), strict=True)]
    ours, original = (each.head.state_dict() for each in heads)  # type: ignore[attr-defined]
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(ours[name], weight, msg=name)
