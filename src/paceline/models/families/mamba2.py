"""What families with Mamba-2 layers share: their configuration, and the names and forms of their weights in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec, Mamba2Spec, check
from paceline.models.description.weights import StoredTensor
from paceline.models.families.base import LLAMA_GGUF_NAMES, ChangedTensor

KINDS = {"full_attention", "linear_attention"}
_NO_LIMIT = (0.0, float("inf"))


def mamba_of(config: PretrainedConfig) -> Mamba2Spec | None:
    """Describe the Mamba-2 layers of a configuration; None if they have biases or limited steps."""
    if config.mamba_proj_bias or config.time_step_limit not in (None, _NO_LIMIT):
        return None
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
    normed = bool(getattr(config, "mamba_rms_norm", True))
    return Mamba2Spec(*sizes, conv_bias=bool(config.mamba_conv_bias), norm_eps=config.rms_norm_eps, normed=normed)


MAMBA: Mapping[str, str] = {
    "layers.{}.mamba.in_proj": "layers.{}.in_proj",
    "layers.{}.mamba.conv1d": "layers.{}.conv",
    "layers.{}.mamba.A_log": "layers.{}.decay_rate.weight",
    "layers.{}.mamba.dt_bias": "layers.{}.step_bias.weight",
    "layers.{}.mamba.D": "layers.{}.skip.weight",
    "layers.{}.mamba.norm": "layers.{}.mamba_norm",
    "layers.{}.mamba.out_proj": "layers.{}.o",
}

GGUF_STATES: Mapping[str, str] = {
    "blk.{}.ssm_in": "layers.{}.in_proj",
    "blk.{}.ssm_conv1d": "layers.{}.conv",
    "blk.{}.ssm_a": "layers.{}.decay_rate.weight",
    "blk.{}.ssm_dt.bias": "layers.{}.step_bias.weight",
    "blk.{}.ssm_d": "layers.{}.skip.weight",
    "blk.{}.ssm_norm": "layers.{}.mamba_norm",
    "blk.{}.ssm_out": "layers.{}.o",
}

GGUF_NAMES: Mapping[str, str] = {**LLAMA_GGUF_NAMES, **GGUF_STATES}


def gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of layers and states: layers without key heads are Mamba-2."""
    counts = metadata["attention.head_count_kv"]
    check(isinstance(counts, list), f"attention.head_count_kv={counts!r}, which must tell the kinds of the layers")
    own = {
        "num_key_value_heads": max(int(count) for count in counts),
        "layer_types": ["full_attention" if count else "linear_attention" for count in counts],
        "mamba_expand": int(metadata["ssm.inner_size"]) // int(metadata["embedding_length"]),
    }
    return own | gguf_sizes(metadata)


def gguf_sizes(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of states."""
    heads, inner = int(metadata["ssm.time_step_rank"]), int(metadata["ssm.inner_size"])
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": int(metadata["ssm.group_count"]),
        "mamba_d_state": int(metadata["ssm.state_size"]),
        "mamba_d_conv": int(metadata["ssm.conv_kernel"]),
    }


def gguf_adapt(tensors: Mapping[str, StoredTensor], _: DecoderSpec) -> dict[str, StoredTensor]:
    """Return the tensors with decays as logarithms, which files have as -exp(A_log)."""
    return {
        name: ChangedTensor(stored, (stored.shape[0],), lambda values: (-values).log()) if ".ssm_a" in name else stored
        for name, stored in tensors.items()
    }
