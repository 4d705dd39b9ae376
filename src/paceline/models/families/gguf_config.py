"""Description of a model from the metadata of its GGUF file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ModelFormatError
from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    Mamba2Spec,
    MLPSpec,
    RecurrentSpec,
    Rotary,
)
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families import FAMILIES, GGUF_FAMILIES, GGUF_MIXTURES, with_factors
from paceline.models.families.base import Family, GGUFForm
from paceline.models.files.boundary import brief
from paceline.models.files.gguf import GGUFFile, TextArray
from paceline.models.files.gguf_tensors import PackedTensor

# The file's key after "ARCHITECTURE." -> Hugging Face's field. Other fields are defaults or follow from the tensors.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
_NEEDED = ("context_length", "block_count", "embedding_length", "attention.head_count")
_WIDTHS = "feed_forward_length", "expert_feed_forward_length"  # a mixture of experts may have the second alone

# Limits that keep a damaged header from allocating large memory: no model is wider or has more experts, and each layer
# has own tensors. The least value of the second ones is 0: a layer, or the model, has none.
_SIZES = (
    *("embedding_length", "attention.head_count", "context_length", "full_attention_interval"),
    *("attention.key_length", "attention.value_length", "attention.key_length_swa", "rope.dimension_count"),
    *("attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla"),
    *("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size", "ssm.conv_kernel"),
    *("shortconv.l_cache", "expert_feed_forward_length", "expert_shared_feed_forward_length", "moe_latent_size"),
)
_OR_NONE = (
    *("attention.head_count_kv", "attention.shared_kv_layers", "attention.sliding_window"),
    *("embedding_length_per_layer_input", "expert_count", "expert_used_count", "feed_forward_length"),
)
_LARGEST = {
    **dict.fromkeys(("context_length", "attention.sliding_window"), 2**31),
    "expert_count": 2**16,
    "expert_used_count": 2**16,
}
_WIDEST = 2**20

_ROPE_FIELDS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

# Keys that change the computation: files with them are refused, unless their family reads them (``GGUFForm.reads``).
_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
)

# llama.cpp's list of tokens that end a text even if the metadata do not name them.
_ENDS = {
    "<|return|>",
    "<|call|>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
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
_SHORT_FACTORS = "rope_factors_short.weight"  # of longrope, for sequences up to the original length
_HARMONY_ENDS = "<|return|>", "<|call|>"  # where a vocabulary has both, "<|end|>" ends a message, and not the text
_TEXT_TYPES = 1, 6  # token types: ordinary ones and bytes


def check(file: GGUFFile) -> None:
    """Raise ModelFormatError if the file needs an unsupported feature. Cheap: reads only the metadata."""
    found = _metadata(file)
    reads = form(file).reads | ({"rope.scaling.attn_factor"} if _SHORT_FACTORS in file.tensors else set())
    refused = [key for key in _REFUSED if found.get(key) and key not in reads]
    if found.get("attention.causal") is False:
        refused.append("attention.causal=false")
    if refused:
        raise ModelFormatError(f"{file.path}: the metadata ask for {', '.join(refused)}, which is not supported")


def _family(file: GGUFFile) -> Family:
    name = file.metadata.get("general.architecture")
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    by_name = {**GGUF_FAMILIES, **GGUF_MIXTURES} if has_experts else GGUF_FAMILIES
    family = by_name.get(name) if isinstance(name, str) else None
    if family is None:
        raise ModelFormatError(
            f"{file.path}: GGUF files of architecture {name!r} cannot be run; known are {', '.join(GGUF_FAMILIES)}. "
            "Use the model's safetensors directory instead"
        )
    chosen = family.gguf and family.gguf.kind
    return FAMILIES[chosen(_metadata(file))] if chosen else family


def form(file: GGUFFile) -> GGUFForm:
    """Return how the file's family is stored. Raises ModelFormatError for an unknown architecture."""
    found = _family(file).gguf
    assert found is not None, "families without a form are not in GGUF_FAMILIES"
    return found


def _metadata(file: GGUFFile) -> dict[str, Any]:
    """Return the metadata of the architecture, without its name in the keys."""
    prefix = f"{file.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _fields(file: GGUFFile) -> dict[str, Any]:
    """Return the checked metadata of the architecture.

    Raises ModelFormatError if a key is missing, has an impossible value or needs an unsupported feature.
    """
    check(file)
    found = _metadata(file)
    missing = [key for key in _NEEDED if key not in found]
    if missing := missing + [key for key in _WIDTHS[:1] if not found.keys() & set(_WIDTHS)]:
        raise ModelFormatError(f"{file.path}: the metadata lack {', '.join(missing)}")
    _check_sizes(file, found)
    return found


def _check_sizes(file: GGUFFile, found: Mapping[str, Any]) -> None:
    layers = found["block_count"]
    for key in ("block_count", *_SIZES, *_OR_NONE):
        limit = len(file.tensors) if key == "block_count" else _LARGEST.get(key, _WIDEST)
        least, value = 0 if key in _OR_NONE else 1, found.get(key, 1)
        numbers = value if isinstance(value, list) else [value]  # a list has one for each layer
        if not all(type(number) in (int, float) and least <= number <= limit for number in numbers):
            allowed = f"from {least} to {limit}"
        elif isinstance(value, list) and len(value) != layers:
            allowed = f"one for each of {layers} layers"
        else:
            continue
        shown = brief(repr(value), 60)
        raise ModelFormatError(f"{file.path}: {key}={shown} is impossible ({allowed}); the file is broken")


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return Hugging Face's rope_parameters."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": found.get("rope.freq_base", 10000.0)}
    kind = found.get("rope.scaling.type", "none")
    if kind == "none":
        factor = found.get("rope.scale_linear", 1.0)
        return rope | ({"rope_type": "linear", "factor": factor} if factor != 1 else {})
    scaling = {ours: found[theirs] for theirs, ours in _ROPE_FIELDS.items() if theirs in found}
    return rope | {"rope_type": kind} | scaling


def huggingface_config(file: GGUFFile) -> PretrainedConfig:
    """Convert a file's metadata to a Hugging Face configuration.

    Rotary scaling that the file stores as a tensor (Llama 3.1) is only in ``describe``.
    Raises ModelFormatError for architectures outside ``GGUF_FAMILIES`` and for unsupported metadata.
    """
    found = _fields(file)
    try:
        config = _translated(file, found)
    except Exception as error:  # values of a wrong type, for which transformers raises errors of any kind
        raise ModelFormatError(f"{file.path}: the metadata cannot be used: {brief(repr(error))}") from error
    return config


def _translated(file: GGUFFile, found: Mapping[str, Any]) -> PretrainedConfig:
    fields = {ours: found[theirs] for theirs, ours in _FIELDS.items() if theirs in found}
    fields.setdefault("num_key_value_heads", found["attention.head_count"])
    if isinstance(heads := fields["num_key_value_heads"], list) and len(set(heads)) == 1:  # one for each layer
        fields["num_key_value_heads"] = heads[0]
    fields.setdefault("head_dim", found["embedding_length"] // found["attention.head_count"])
    rope, vocabulary = _rope(found), file.tensors["token_embd.weight"].shape[0]
    if (rotated := found.get("rope.dimension_count", fields["head_dim"])) != fields["head_dim"]:
        if not 0 < rotated < fields["head_dim"] or rotated % 2:
            raise ModelFormatError(f"rope.dimension_count={rotated} is no part of a head of {fields['head_dim']}")
        rope["partial_rotary_factor"] = rotated / fields["head_dim"]
    fields = {"rope_parameters": rope} | fields | form(file).fields({**found, "vocab_size": vocabulary}, rope)
    return AutoConfig.for_model(
        _family(file).model_type,
        **fields,
        vocab_size=vocabulary,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def describe(file: GGUFFile) -> DecoderSpec:
    """Return the description of the file's model, with biases and rotary scaling taken from the tensors.

    Raises the errors of ``huggingface_config``.
    """
    config = huggingface_config(file)
    spec = FAMILIES[config.model_type].describe(config)
    if spec is None:
        raise ModelFormatError(f"{file.path}: its rotary positions, activation or kinds of layers are not supported")
    windows = _scales_windows(spec)
    changed = {layer: _with_tensors(file, layer, scales_windows=windows) for layer in dict.fromkeys(spec.layers)}
    spec = dataclasses.replace(spec, layers=tuple(changed[layer] for layer in spec.layers))
    original = _metadata(file).get("rope.scaling.original_context_length")
    if _SHORT_FACTORS not in file.tensors or original is None:
        return spec
    return dataclasses.replace(spec, max_positions=min(spec.max_positions, int(original)))  # as ``longest_sequence``


def _scales_windows(spec: DecoderSpec) -> bool:
    """Whether the file's rotary factors are those of layers with a window, too: if no other layer has positions."""
    attentions = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    full = [of.rotary for of in attentions if of.window is None and of.rotary is not None]
    return not any(any(rotary.inverse_frequencies) for rotary in full)


def _with_tensors(file: GGUFFile, layer: LayerSpec, *, scales_windows: bool) -> LayerSpec:
    """Return the layer with the rotary scaling, the biases and the norms of queries and keys that the file has."""
    mlp = layer.mlp
    if isinstance(mlp, MLPSpec):
        mlp = dataclasses.replace(mlp, bias="blk.0.ffn_down.bias" in file.tensors)
    if not isinstance(layer.mixer, AttentionSpec):
        return dataclasses.replace(layer, mixer=_states_with_tensors(file, layer.mixer), mlp=mlp)
    factors = next((name for name in ("rope_freqs.weight", _SHORT_FACTORS) if name in file.tensors), None)
    rotary = layer.attention.rotary
    if rotary is not None and factors is not None and (scales_windows or layer.attention.window is None):
        rotary = _with_factors(rotary, factors, file.tensors[factors], _metadata(file))
    attention = dataclasses.replace(
        layer.attention,
        rotary=rotary,
        bias=any(f"blk.0.attn_{part}.bias" in file.tensors for part in ("q", "qkv")),
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm=layer.attention.qk_norm if any(".attn_q_norm." in name for name in file.tensors) else None,
    )
    return dataclasses.replace(layer, mixer=attention, mlp=mlp, beside=_states_with_tensors(file, layer.beside))


def _states_with_tensors(file: GGUFFile, spec: RecurrentSpec | None) -> RecurrentSpec | None:
    """Return the recurrent layer with the bias and the norm of Mamba-2 that the file has."""
    if not isinstance(spec, Mamba2Spec):
        return spec
    kinds = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")}
    return dataclasses.replace(spec, conv_bias="ssm_conv1d.bias" in kinds, normed="ssm_norm.weight" in kinds)


def _with_factors(rotary: Rotary, name: str, stored: PackedTensor, metadata: Mapping[str, Any]) -> Rotary:
    """Apply the rotary scaling of Llama 3.1, or of longrope, which llama.cpp stores as one divisor per frequency."""
    count = len(rotary.inverse_frequencies)
    if stored.shape != (count,):
        raise ModelFormatError(f"{name} has the shape {stored.shape}, the configuration asks for {(count,)}")
    factors = torch.empty(stored.shape, dtype=torch.float32)
    stored.unpack_into(factors)
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32) / factors
    scaling = rotary.scaling * float(metadata.get("rope.scaling.attn_factor", 1.0))
    return dataclasses.replace(rotary, inverse_frequencies=tuple(frequencies.tolist()), scaling=scaling)


def head_tensors(file: GGUFFile, spec: DecoderSpec | None = None) -> tuple[WeightNames, Mapping[str, StoredTensor]]:
    """Return the tensors of the file's own draft head, and their names; none if it has no head.

    spec: the head's layer, as which they are ordered; None: they are as the file has them.
    """
    names, block = form(file).head, _head_block(file)
    if names is None or block is None:
        return WeightNames({}), {}
    own = {name: stored for name, stored in file.tensors.items() if name.startswith(f"blk.{block}.")}
    tensors = {name: _ordered(name, stored, {}) for name, stored in own.items()}
    return names, tensors if spec is None else form(file).adapt_head(tensors, spec)


def is_head_alone(file: GGUFFile) -> bool:
    """Whether the file has a draft head without its model's layers (llama.cpp's ``mtp-*.gguf``)."""
    return _head_block(file) not in (None, 0) and not any(name.startswith("blk.0.") for name in file.tensors)


_HEAD_TENSOR = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")


def _head_block(file: GGUFFile) -> int | None:
    """Return the number of the block that is the draft head: that of the model's layers; None if there is none."""
    return next((int(found[1]) for name in file.tensors if (found := _HEAD_TENSOR.fullmatch(name))), None)


def tensors(file: GGUFFile, spec: DecoderSpec) -> Mapping[str, StoredTensor]:
    """Return the file's tensors, queries and keys in Hugging Face's order.

    llama.cpp reorders the query and key rows of some families; see ``PackedTensor.permuted``.
    """
    attention = spec.attentions[0]
    heads = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if form(file).paired else {}
    stored = {name: _ordered(name, stored, heads) for name, stored in file.tensors.items()}
    adapted = form(file).adapt(stored, spec)
    factors = form(file).factors(huggingface_config(file))
    return {**with_factors(adapted, form(file).names, factors), **form(file).constants(file.metadata, spec)}


def _ordered(name: str, stored: PackedTensor, heads: Mapping[str, int]) -> PackedTensor:
    if name.endswith(".ffn_gate_inp_shexp.weight") and len(stored.shape) == 1:
        return dataclasses.replace(stored, shape=(1, *stored.shape))  # llama.cpp drops dimensions of one
    if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")) and len(stored.shape) == 2:
        return dataclasses.replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))
    if name.endswith(".ssm_norm.weight") and len(stored.shape) == 2:
        return dataclasses.replace(stored, shape=(stored.shape[0] * stored.shape[1],))  # a line for each group
    part = next((part for part in heads if f".{part}." in name), None)
    if part is None:
        return stored
    if len(stored.rows) % (2 * heads[part]):
        raise ModelFormatError(
            f"{name} has {len(stored.rows)} rows, which cannot be the rotary pairs of {heads[part]} heads"
        )
    return stored.permuted(heads[part])


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the metadata, then known tokens that are no text, as in llama.cpp."""
    tokens, kinds = listed(file, "tokens"), listed(file, "token_type")
    named = [*(token_id(file, kind) for kind in ("eos", "eot", "eom")), *listed(file, "eos_token_ids")]
    special = [index for index, kind in enumerate(kinds[: len(tokens)]) if kind not in _TEXT_TYPES]
    known = {tokens[index]: index for index in special if tokens[index] in _ENDS}
    if known.keys() >= set(_HARMONY_ENDS):
        known.pop("<|end|>", None)
    return tuple(dict.fromkeys([*(_checked_id(file, token) for token in named if token is not None), *known.values()]))


def token_id(file: GGUFFile, role: str) -> int | None:
    """Return the token of a role ("bos", "eos" ...); None if the metadata name none.

    Raises ModelFormatError if the named id is outside the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    found = file.metadata.get(key)
    return None if found is None else _checked_id(file, found, key)


def _checked_id(file: GGUFFile, found: Any, key: str = "tokenizer.ggml.eos_token_ids") -> int:
    """Return the id of a token. Raises ModelFormatError if it is outside the vocabulary."""
    count = len(listed(file, "tokens"))
    if isinstance(found, int) and 0 <= found < count:
        return found
    raise ModelFormatError(f"{file.path}: {key}={found!r} is not one of its {count} tokens")


def listed(file: GGUFFile, key: str) -> Sequence[Any]:
    """Return a list of the tokenizer's metadata; empty if the file has none. Raises ModelFormatError."""
    found = file.metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, (list, TextArray)):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.{key} is not a list; the file is broken")
    return found
