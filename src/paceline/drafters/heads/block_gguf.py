"""Block drafters in llama.cpp's GGUF files, of the architecture ``dflash``: all three kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.fields import list_of, number_of, real_of
from paceline.errors import ModelFormatError
from paceline.models.files.boundary import brief
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.gguf_tensors import PackedTensor

_ARCHITECTURE = "dflash"
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_BLOCK = ("block_size", "target_layers", "sample_from_anchor", "has_confidence_head", "final_logit_softcapping")
_KNOWN = {
    *_FIELDS,
    *_BLOCK,
    *("context_length", "vocab_size", "attention.value_length", "attention.layer_norm_rms_epsilon"),
    *("attention.causal", "attention.sliding_window", "attention.sliding_window_pattern", "logit_scale"),
    *("rope.freq_base", "rope.dimension_sections", "rope.dimension_count"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
_TENSORS = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector.hidden_proj.weight": "candidate_selector.hidden_projection.weight",  # these three in older files
    "selector.pred_codebook": "candidate_selector.predecessor_codebook",
    "selector.succ_codebook": "candidate_selector.successor_codebook",
}
_OF_LAYERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def is_block_file(path: Path) -> bool:
    """Whether a GGUF file holds a block drafter."""
    return path.is_file() and _is_block(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _is_block(path: Path, _changed: int) -> bool:
    """See ``is_block_file``; remembered, because a start asks more than once."""
    return GGUFFile(path).metadata.get("general.architecture") == _ARCHITECTURE


def read_block_file(file: GGUFFile, vocab_size: int | None = None) -> HeadConfig:
    """The configuration in a file's metadata. vocab_size: the target's, for files without an embedding.

    Raises ModelFormatError, which says what is wrong.
    """
    prefix = f"{_ARCHITECTURE}."
    found = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if others := sorted(found.keys() - _KNOWN):
        raise ModelFormatError(f"{file.path}: the metadata have the unknown keys {brief(', '.join(others))}")
    if found.get("logit_scale") not in (None, 0.0, 1.0):
        raise ModelFormatError(f"{file.path}: logit_scale={found['logit_scale']!r} is not supported")
    if missing := [key for key in (*_FIELDS, "block_size", "target_layers") if key not in found]:
        raise ModelFormatError(f"{file.path}: the metadata lack {', '.join(missing)}")
    if "d2t" not in file.tensors and "token_embd.weight" in file.tensors:
        vocab_size = file.tensors["token_embd.weight"].shape[0]
    drafted = file.tensors["d2t"].shape[0] if "d2t" in file.tensors else vocab_size
    layers = _layers(found) | {"vocab_size": vocab_size}
    width, taps = number_of(layers, "hidden_size", 0), tuple(list_of(found, "target_layers"))
    block = _block(found, file.tensors, file.metadata.get("tokenizer.ggml.mask_token_id"))
    read = file.tensors["fc.weight"].shape[-1] // max(1, len(taps)) if "fc.weight" in file.tensors else width
    return HeadConfig(layers, read, drafted or 0, taps, block=block)


def _layers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' shape as a Qwen3 configuration."""
    fields: dict[str, Any] = {"model_type": "qwen3", **{ours: found[theirs] for theirs, ours in _FIELDS.items()}}
    if found.get("attention.value_length", fields["head_dim"]) != fields["head_dim"]:
        raise ModelFormatError("attention.value_length differs from attention.key_length, which is not supported")
    fields["rms_norm_eps"] = real_of(found, "attention.layer_norm_rms_epsilon", 1e-6)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": real_of(found, "rope.freq_base", 10000.0)}
    fields["max_position_embeddings"] = number_of(found, "context_length", 32768)
    window, count = number_of(found, "attention.sliding_window", 0), number_of(fields, "num_hidden_layers", 0)
    pattern = found.get("attention.sliding_window_pattern", [window > 0] * count)
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ModelFormatError("attention.sliding_window_pattern does not have a value for each layer")
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    return fields | {"layer_types": kinds, "sliding_window": window or None, "use_sliding_window": window > 0}


def _block(found: Mapping[str, Any], tensors: Mapping[str, PackedTensor], mask: object) -> BlockSpec:
    if not isinstance(mask, int):
        raise ModelFormatError("the metadata lack tokenizer.ggml.mask_token_id")
    markov = tensors["markov_w1.weight"].shape[-1] if "markov_w1.weight" in tensors else 0
    confidence = tensors["conf_proj.weight"].shape[-1] if "conf_proj.weight" in tensors else 0
    anchor = found.get("sample_from_anchor", "true" if markov else "false")
    if anchor not in ("true", "false"):
        raise ModelFormatError(f"sample_from_anchor must be 'true' or 'false', not {brief(repr(anchor))}")
    return BlockSpec(
        size=number_of(found, "block_size", 0),
        mask_token=mask,
        anchor_first=anchor == "true",
        causal=found.get("attention.causal"),
        markov_rank=markov,
        confidence=confidence > 0,
        confidence_reads_token=confidence > number_of(found, "embedding_length", 0),
        selector_rank=number_of(found, "selector_rank", 0),
        selector_top_k=number_of(found, "selector_top_k", 0),
        conv_kernel=number_of(found, "conv_kernel_size", 0),
        conv_group=number_of(found, "conv_group_size", 0),
        logits_cap=real_of(found, "final_logit_softcapping", 0.0) or None,
    )


def block_tensors(file: GGUFFile) -> dict[str, Tensor]:
    """A file's tensors in float32, by their names in the state dict; unknown names stay. d2t becomes an offset."""
    return {_named(name): _read(name, stored) for name, stored in file.tensors.items()}


def block_names(file: GGUFFile) -> list[str]:
    """Names of a file's tensors in the state dict."""
    return list(map(_named, file.tensors))


def _named(name: str) -> str:
    if not (layer := _LAYER.fullmatch(name)):
        return _TENSORS.get(name, name)
    return f"layers.{layer[1]}.{_OF_LAYERS.get(layer[2], layer[2])}"


def _read(name: str, stored: PackedTensor) -> Tensor:
    if stored.kind == GGMLQuantizationType.I64:  # the target's ids themselves
        targets = torch.from_numpy(stored.rows.copy()).view(torch.int64).flatten()
        return targets - torch.arange(len(targets))
    values = torch.empty(stored.shape, dtype=torch.float32)
    stored.unpack_into(values)
    return values[None] if name == "conf_proj.weight" and values.dim() == 1 else values
