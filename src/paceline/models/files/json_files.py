"""Reading of a model directory's JSON files. They are untrusted, so their size and their numbers are bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError

FETCH_AGAIN = "fetch it again and compare its size"
MODELOPT_FILE = "hf_quant_config.json"  # how a model is quantised, from modelopt's older versions
LARGEST = 64 << 20  # bytes of a file; the index of a model with 100 000 tensors has about ten million

# Fields from which libraries allocate lists and tensors before they are compared with the weights, and the largest
# value that any model could have. Other fields are not bounded. The names are listed one by one because they follow no
# pattern: vocab_size_per_layer_input is a vocabulary size, not a number of layers.
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers num_blocks layers depth depths encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_nextn_predict_layers num_dense_layers num_kv_shared_layers "
    "max_window_layers num_lstm_layers num_residual_layers num_res_blocks num_global_layers conf_num_hidden_layers "
    "n_layers_per_attn_res_block resampler_depth H_cycles L_cycles"
)
_HEADS_AND_EXPERTS = (
    "num_attention_heads num_key_value_heads num_heads num_kv_heads n_head n_heads kv_n_heads attention_heads head_dim "
    "encoder_attention_heads decoder_attention_heads conf_num_attention_heads swa_num_attention_heads "
    "swa_num_key_value_heads swa_head_dim v_head_dim qk_head_dim qk_rope_head_dim qk_nope_head_dim d_head dim_head "
    "attention_head_dim linear_num_key_heads linear_num_value_heads linear_num_heads linear_key_head_dim "
    "linear_value_head_dim linear_head_dim index_n_heads index_head_dim mamba_n_heads mamba_num_heads n_mamba_heads "
    "mamba_d_head mamba_head_dim mamba_headdim num_experts num_local_experts n_routed_experts n_shared_experts "
    "num_shared_experts moe_num_experts moe_num_shared_experts num_experts_per_tok num_experts_per_token n_group "
    "n_groups num_groups mamba_n_groups mamba_ngroups topk_group num_expert_group num_codebooks num_labels"
)
_SIZES = (
    "vocab_size decoder_vocab_size audio_vocab_size type_vocab_size vocab_size_per_layer_input unpadded_vocab_size "
    "additional_vocab_size codebook_size hidden_size hidden_sizes text_hidden_size "
    "vision_hidden_size encoder_hidden_size decoder_hidden_size projector_hidden_size out_hidden_size "
    "moe_hidden_size hidden_size_per_layer_input intermediate_size intermediate_size_mlp moe_intermediate_size "
    "dense_intermediate_size shared_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size ffn_hidden_size "
    "ffn_dim encoder_ffn_dim decoder_ffn_dim feed_forward_size mlp_dim dim_ff n_inner d_model n_embd embed_dim emb_dim "
    "embedding_dim embedding_size word_embed_proj_dim projection_dim rotary_dim kv_lora_rank q_lora_rank o_lora_rank "
    "laurel_rank lru_width state_size ssm_state_size mamba_d_state mamba_dt_rank time_step_rank conv_kernel_size "
    "linear_conv_kernel_dim kv_channels in_channels out_channels num_channels image_size patch_size "
    "temporal_patch_size window_size"
)
_LARGEST_VALUES = {
    **dict.fromkeys(_LAYERS.split(), 4096),
    **dict.fromkeys(_HEADS_AND_EXPERTS.split(), 1 << 16),
    **dict.fromkeys(_SIZES.split(), 1 << 24),
    "ngram_vocab_size_base": 1 << 28,  # its usual value is 20,000,000
}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist. Raises ModelFormatError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > LARGEST:
        raise ModelFormatError(f"{path} has more than {LARGEST >> 20} MiB, too much for such a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelFormatError(f"{path} is nested too deeply; {FETCH_AGAIN}") from error
    except (ValueError, OSError) as error:
        raise ModelFormatError(f"{path} is broken ({error}); {FETCH_AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{path} is broken (it is not a JSON object); {FETCH_AGAIN}")
    return found


def read_configuration(path: Path) -> dict[str, Any]:
    """Return a model's configuration. Raises ModelFormatError, also for a count or size that no model has."""
    found = read_object(path)
    for key, value in _numbers(found):
        limit = _LARGEST_VALUES.get(key)
        if limit is not None and abs(value) > limit:
            raise ModelFormatError(f"{path}: {key}={value:.6g} is impossible (at most {limit}); the file is broken")
    return found


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield every number with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, (int, float)):
        yield key, value
