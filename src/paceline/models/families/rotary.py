"""Rotary frequencies from a Hugging Face configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.models.description.spec import AttentionSpec, Rotary, check

UNLIMITED = 1 << 17  # tokens, of models whose configuration gives no longest sequence: ALiBi or recurrent ones
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


def configured_length(config: PretrainedConfig) -> int | None:
    """Return the longest sequence as a configuration gives it, in tokens; None if it gives none."""
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    return next((int(length) for length in lengths if length is not None), None)


def longest_sequence(config: PretrainedConfig) -> int:
    """Return the longest sequence, in tokens, for which the rotary frequencies do not depend on its length.

    With longrope they change beyond the original length. The result of a row would then depend on the other rows of
    its batch, so longer sequences are not allowed. Nor are they where queries grow with the position (Llama 4's
    scaling), which begins at the original length. With chunked attention (Llama 4) texts end with their first chunk, in
    which it is full attention. With yarn it is at least the original length times the factor:
    model cards add yarn to configurations whose ``max_position_embeddings`` is that of the model without it.
    """
    configured = configured_length(config)
    longest = UNLIMITED if configured is None else configured
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        longest = max(longest, int(rope["factor"] * rope["original_max_position_embeddings"]))
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        longest = min(longest, int(config.attention_chunk_size))
    if rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta"):
        return min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def why_shorter(config: PretrainedConfig) -> str:
    """Return why the longest sequence is shorter than the configured one, after "beyond that, "."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return (
            "its rotary frequencies (longrope) depend on the longest text of a batch, so a row's answer would depend "
            "on other rows"
        )
    if rope.get("llama_4_scaling_beta"):
        return "its queries grow with the position, which is not computed"
    return "its attention is in chunks, of which only the first is computed"


def head_dim(config: PretrainedConfig) -> int:
    """Width of an attention head: that of the configuration, else the model's width divided by the heads."""
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    check(width > 0, f"head_dim={width}")
    return width


def rotary_of(config: PretrainedConfig, layers: str | None = None) -> Rotary | None:
    """Return the rotary positions of the layers of a kind ("sliding_attention"), or of all layers.

    None if the type of rotary positions is unknown or layers differ where one kind is asked for.
    """
    rope: Mapping[str, Any] = config.rope_parameters if layers is None else config.rope_parameters[layers]
    kind = rope.get("rope_type", "default")
    if any(isinstance(value, dict) for value in rope.values()) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
        return None
    rotated = int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return plain_rotary(rope["rope_theta"], rotated)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        config, torch.device("cpu"), **({} if layers is None else {"layer_type": layers})
    )
    return Rotary(tuple(frequencies.tolist()), float(scaling)) if 2 * len(frequencies) <= head_dim(config) else None


def with_rope(config: PretrainedConfig, **rope: Any) -> PretrainedConfig:
    """Return a copy of the configuration with other rotary positions."""
    changed = copy.copy(config)
    changed.rope_parameters = rope
    return changed


def plain_rotary(base: float, rotated: int) -> Rotary:
    """Return rotary positions without scaling of the first ``rotated`` elements of a head."""
    frequencies = 1.0 / (base ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated))
    return Rotary(tuple(frequencies.tolist()))


def backwards(attention: AttentionSpec) -> AttentionSpec:
    """Return the attention with heads that turn the other way."""
    assert attention.rotary is not None, "they turn"
    frequencies = tuple(-frequency for frequency in attention.rotary.inverse_frequencies)
    return replace(attention, rotary=replace(attention.rotary, inverse_frequencies=frequencies))


def without_positions(rotary: Rotary) -> Rotary:
    """Return rotary positions of the same shape that leave every head as it is."""
    return Rotary((0.0,) * len(rotary.inverse_frequencies))
