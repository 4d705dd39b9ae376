"""Architecture of a decoder, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.core.recurrent_state import StateShape
from paceline.errors import ModelFormatError

# Hugging Face's name of an activation -> the name in kernels.gpu.steps. Models with others run through huggingface.py.
_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoPE): the angle of pair i at position p is p * inverse_frequencies[i].

    scaling: factor of cos and sin.
    """

    inverse_frequencies: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder that ``Transformer`` can run.

    windows: sliding window of each layer in positions, or None for full attention.
    scales: attention scale of each layer, or None for head_dim ** -0.5.
    max_positions: longest sequence in tokens that the model was trained for.
    embed_width: width of the token embedding, which may differ from ``width`` (OPT-350m).
    position_offset: offset added to the index into learned positions.
    norm_offset: added to the stored weights of norms (1 where they are stored around 0).
    output_gate: whether attention's output is multiplied by a gate, stored beside each query head.
    delta: heads of the gated delta nets, which the layers ``delta_layers`` are instead of attention.
    mtp_layers: layers of the model's own draft head.
    """

    family: str
    vocab_size: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    windows: tuple[int | None, ...]
    scales: tuple[float | None, ...]
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_first: bool = True
    norm_affine: bool = True
    final_norm: bool = True
    activation: str = "silu"
    gated: bool = True
    rotary: Rotary | None = None
    position_offset: int = 0
    embed_width: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    norm_offset: float = 0.0
    output_gate: bool = False
    delta: StateShape | None = None
    delta_layers: frozenset[int] = frozenset()
    mtp_layers: int = 0

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @staticmethod
    def from_huggingface(config: PretrainedConfig | Mapping[str, Any]) -> ModelConfig | None:
        """Convert a Hugging Face configuration; None if only transformers' own code can run that model.

        Raises ModelFormatError if a dictionary has an unknown ``model_type`` or values of a wrong type.
        """
        config = config if isinstance(config, PretrainedConfig) else _parse(config)
        family = _FAMILIES.get(config.model_type)
        if family is None or getattr(config, "quantization_config", None):
            return None
        return family(config)


def _parse(config: Mapping[str, Any]) -> PretrainedConfig:
    fields = dict(config)
    kind = fields.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # transformers raises many kinds for a bad field
        raise ModelFormatError(f"the model's configuration (model_type {kind!r}) cannot be used: {error}") from error


def longest_sequence(config: PretrainedConfig) -> int:
    """Return the longest sequence, in tokens, for which the rotary frequencies do not depend on its length.

    With longrope they change beyond the original length. The result of a row would then depend on the other rows of
    its batch, so longer sequences are not allowed.
    """
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _partial_rotary(config: PretrainedConfig) -> Rotary | None:
    """Return the rotary frequencies of a part of each head, its first elements; None if they are scaled."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        return None
    dim = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    return Rotary(tuple(frequencies.tolist()))


def _rotary(config: PretrainedConfig) -> Rotary | None:
    """Return the rotary frequencies; None if they cover only a part of each head or differ between layers."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
        return None
    dim = _head_dim(config)
    if kind == "default":
        frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        scaling = 1.0
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rotary(tuple(frequencies.tolist()), float(scaling)) if 2 * len(frequencies) == dim else None


def _windows(config: PretrainedConfig) -> tuple[int | None, ...] | None:
    """Return the window of each layer; None if a layer's attention is neither full nor sliding."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _llama_like(config: PretrainedConfig, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> ModelConfig | None:
    rotary, windows = _rotary(config), _windows(config)
    activation = _ACTIVATION_NAMES.get(config.hidden_act)
    if rotary is None or windows is None or activation is None:
        return None
    return ModelConfig(
        family=config.model_type,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        mlp_width=config.intermediate_size,
        max_positions=longest_sequence(config),
        windows=windows,
        scales=(None,) * config.num_hidden_layers,
        norm_eps=config.rms_norm_eps,
        activation=activation,
        rotary=rotary,
        embed_width=config.hidden_size,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=qk_norm,
        tied=bool(config.tie_word_embeddings),
    )


def _llama(config: PretrainedConfig) -> ModelConfig | None:
    biased = bool(config.attention_bias)
    return _llama_like(config, qkv_bias=biased, output_bias=biased, qk_norm=False)


def _mistral(config: PretrainedConfig) -> ModelConfig | None:
    if getattr(config, "layer_types", None):  # transformers' Mistral ignores them, so its own code runs the model
        return None
    return _llama_like(config, qkv_bias=False, output_bias=False, qk_norm=False)


def _qwen2(config: PretrainedConfig) -> ModelConfig | None:
    return _llama_like(config, qkv_bias=True, output_bias=False, qk_norm=False)


def _qwen3(config: PretrainedConfig) -> ModelConfig | None:
    biased = bool(config.attention_bias)
    return _llama_like(config, qkv_bias=biased, output_bias=biased, qk_norm=True)


def _qwen3_5(config: PretrainedConfig) -> ModelConfig | None:
    """The text part of a Qwen3.5: gated delta nets, and a full attention layer after every few of them."""
    text = config.get_text_config()
    rotary, kinds = _partial_rotary(text), text.layer_types
    if rotary is None or text.attention_bias or set(kinds) != {"full_attention", "linear_attention"}:
        return None
    if _ACTIVATION_NAMES.get(text.hidden_act) != "silu":
        return None
    recurrent = frozenset(index for index, kind in enumerate(kinds) if kind == "linear_attention")
    heads = text.linear_num_key_heads, text.linear_num_value_heads
    shape = StateShape(
        len(recurrent), *heads, text.linear_key_head_dim, text.linear_value_head_dim, text.linear_conv_kernel_dim
    )
    return ModelConfig(
        family="qwen3_5",
        vocab_size=text.vocab_size,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=_head_dim(text),
        mlp_width=text.intermediate_size,
        max_positions=text.max_position_embeddings,
        windows=(None,) * text.num_hidden_layers,
        scales=(None,) * text.num_hidden_layers,
        norm_eps=text.rms_norm_eps,
        rotary=rotary,
        embed_width=text.hidden_size,
        qk_norm=True,
        tied=bool(config.tie_word_embeddings),
        norm_offset=1.0,
        output_gate=True,
        delta=shape,
        delta_layers=recurrent,
        mtp_layers=int(getattr(text, "mtp_num_hidden_layers", 0) or 0),
    )


def _opt(config: PretrainedConfig) -> ModelConfig | None:
    activation = _ACTIVATION_NAMES.get(config.activation_function)
    if activation is None:
        return None
    first, biased, layers = bool(config.do_layer_norm_before), bool(config.enable_bias), config.num_hidden_layers
    return ModelConfig(
        family="opt",
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        mlp_width=config.ffn_dim,
        max_positions=config.max_position_embeddings,
        windows=(None,) * layers,
        scales=(None,) * layers,
        norm="layer",
        norm_eps=1e-5,
        norm_first=first,
        norm_affine=bool(config.layer_norm_elementwise_affine),
        final_norm=first and not config._remove_final_layer_norm,
        activation=activation,
        gated=False,
        position_offset=2,
        embed_width=config.word_embed_proj_dim,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        tied=bool(config.tie_word_embeddings),
    )


def _gpt2_scales(config: PretrainedConfig) -> tuple[float | None, ...]:
    base = float(config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        return tuple(base / (layer + 1) for layer in range(config.n_layer))
    return (None if config.scale_attn_weights else base,) * int(config.n_layer)


def _gpt2(config: PretrainedConfig) -> ModelConfig | None:
    activation = _ACTIVATION_NAMES.get(config.activation_function)
    if activation is None or config.add_cross_attention:
        return None
    return ModelConfig(
        family="gpt2",
        vocab_size=config.vocab_size,
        width=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        mlp_width=config.n_inner or 4 * config.n_embd,
        max_positions=config.n_positions,
        windows=(None,) * config.n_layer,
        scales=_gpt2_scales(config),
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=activation,
        gated=False,
        embed_width=config.n_embd,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=bool(config.tie_word_embeddings),
    )


_FAMILIES: dict[str, Callable[[PretrainedConfig], ModelConfig | None]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "opt": _opt,
    "gpt2": _gpt2,
}

NATIVE_FAMILIES = tuple(_FAMILIES)
