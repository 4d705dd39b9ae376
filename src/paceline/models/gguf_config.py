"""What a GGUF file's metadata say about its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ModelFormatError
from paceline.models.boundary import brief
from paceline.models.config import ModelConfig, Rotary
from paceline.models.gguf import GGUFFile, PackedTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# The file's key after "ARCHITECTURE.": Hugging Face's. What is not here is either a default or said by the tensors.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NEEDED = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")

# A broken header must not make us allocate: no model is wider, and every layer has tensors of its own.
_WIDTHS = ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
_HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_WIDEST = 2**20

_ROPE_FIELDS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

# Keys that change what is computed and that no native family has: refused, never ignored.
_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)

# llama.cpp's list of tokens that end a text whatever the metadata say, where the file marks them as control tokens.
_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "< EOT >",
    "_<EOT>",
}
_CONTROL = 3


def check(file: GGUFFile) -> None:
    """Raise ModelFormatError if it asks for what no native family has: before anything large is done for it."""
    found = _metadata(file)
    if refused := [key for key in _REFUSED if found.get(key)]:
        asks = f"the metadata ask for {', '.join(refused)}, which is not supported"
        raise ModelFormatError(f"{file.path}: {asks}")
    parts = file.metadata.get("split.count", 1)
    if not isinstance(parts, (int, float)) or parts > 1:
        raise ModelFormatError(f"{file.path} is a part of a split model: join the parts with llama-gguf-split --merge")


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelFormatError(
            f"{file.path}: GGUF files of architecture {name!r} cannot be run; known are {', '.join(ARCHITECTURES)}. "
            "Take the model's safetensors directory instead"
        )
    return str(name)


def _metadata(file: GGUFFile) -> dict[str, Any]:
    """The architecture's keys, without its name."""
    prefix = f"{_architecture(file)}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _fields(file: GGUFFile) -> dict[str, Any]:
    """The architecture's keys. Raises if one is missing, cannot be true or asks for what no native family has."""
    check(file)
    found = _metadata(file)
    if missing := [key for key in _NEEDED if key not in found]:
        raise ModelFormatError(f"{file.path}: the metadata lack {', '.join(missing)}")
    _check_sizes(file, found)
    return found


def _check_sizes(file: GGUFFile, found: Mapping[str, Any]) -> None:
    limits = {"block_count": len(file.tensors)} | dict.fromkeys((*_WIDTHS, *_HEAD_WIDTHS), _WIDEST)
    for key, limit in limits.items():
        value = found.get(key, 1)
        if isinstance(value, int) and value > limit:
            raise ModelFormatError(f"{file.path}: {key}={value} cannot be true (at most {limit}); the file is broken")


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """Hugging Face's rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": found.get("rope.freq_base", 10000.0)}
    kind = found.get("rope.scaling.type", "none")
    if kind == "none":
        factor = found.get("rope.scale_linear", 1.0)
        return rope | ({"rope_type": "linear", "factor": factor} if factor != 1 else {})
    scaling = {ours: found[theirs] for theirs, ours in _ROPE_FIELDS.items() if theirs in found}
    return rope | {"rope_type": kind} | scaling


def huggingface_config(file: GGUFFile) -> PretrainedConfig:
    """The Hugging Face configuration that a file's metadata amount to.

    Scaled rotary frequencies that the file has as a tensor (Llama 3.1) are in ``native_config`` only.
    Raises ModelFormatError for other architectures than ``ARCHITECTURES`` and for metadata that cannot be honoured.
    """
    found = _fields(file)
    try:
        config = _translated(file, found)
    except Exception as error:  # values of a wrong kind, or any of the many errors that transformers raises
        raise ModelFormatError(f"{file.path}: the metadata cannot be used: {brief(repr(error))}") from error
    if found.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise ModelFormatError(f"{file.path}: rotary positions on a part of each head are not supported")
    return config


def _translated(file: GGUFFile, found: Mapping[str, Any]) -> PretrainedConfig:
    fields = {ours: found[theirs] for theirs, ours in _FIELDS.items() if theirs in found}
    fields.setdefault("num_key_value_heads", found["attention.head_count"])
    fields.setdefault("head_dim", found["embedding_length"] // found["attention.head_count"])
    return AutoConfig.for_model(
        _architecture(file),
        **fields,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        rope_parameters=_rope(found),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def native_config(file: GGUFFile) -> ModelConfig:
    """The native configuration: metadata, corrected by what the tensors say. Raises as ``huggingface_config``."""
    config = ModelConfig.from_huggingface(huggingface_config(file))
    if config is None or config.rotary is None:
        raise ModelFormatError(f"{file.path}: its kind of rotary positions is not supported")
    return dataclasses.replace(
        config,
        rotary=_with_factors(config.rotary, file.tensors.get("rope_freqs.weight")),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def _with_factors(rotary: Rotary, stored: PackedTensor | None) -> Rotary:
    """Llama 3.1's scaling, which llama.cpp stores as a divisor for each frequency."""
    if stored is None:
        return rotary
    count = len(rotary.inverse_frequencies)
    if stored.shape != (count,):
        raise ModelFormatError(f"rope_freqs.weight has the shape {stored.shape}, the configuration asks for {(count,)}")
    factors = torch.empty(stored.shape, dtype=torch.float32)
    stored.unpack_into(factors)
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32) / factors
    return dataclasses.replace(rotary, inverse_frequencies=tuple(frequencies.tolist()))


def tensors(file: GGUFFile, config: ModelConfig) -> dict[str, PackedTensor]:
    """The file's tensors with queries and keys in Hugging Face's order (llama.cpp reorders those of llama files)."""
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads} if config.family == "llama" else {}
    return {name: _ordered(name, stored, heads) for name, stored in file.tensors.items()}


def _ordered(name: str, stored: PackedTensor, heads: Mapping[str, int]) -> PackedTensor:
    part = next((part for part in heads if f".{part}." in name), None)
    if part is None:
        return stored
    if len(stored.rows) % (2 * heads[part]):
        raise ModelFormatError(f"{name} has {len(stored.rows)} rows, which are no pairs of {heads[part]} heads")
    return stored.permuted(heads[part])


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The tokens that end a text: those the metadata name, then control tokens whose name says so (as llama.cpp)."""
    tokens, kinds = listed(file, "tokens"), listed(file, "token_type")
    named = [token_id(file, kind) for kind in ("eos", "eot", "eom")]
    known = (
        i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and token in _ENDS
    )
    return tuple(dict.fromkeys([*(token for token in named if token is not None), *known]))


def token_id(file: GGUFFile, role: str) -> int | None:
    """The token of a role ("bos", "eos" ...), if the metadata name one. Raises ModelFormatError if there is none."""
    key = f"tokenizer.ggml.{role}_token_id"
    found, count = file.metadata.get(key), len(listed(file, "tokens"))
    if found is None or (isinstance(found, int) and 0 <= found < count):
        return found
    raise ModelFormatError(f"{file.path}: {key}={found!r} is none of its {count} tokens")


def listed(file: GGUFFile, key: str) -> list[Any]:
    """A list of the tokenizer's, empty where the file has none. Raises ModelFormatError."""
    found = file.metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, list):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.{key} is no list; the file is broken")
    return found
