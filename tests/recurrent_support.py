"""Tiny random Qwen3.5 models of transformers, and ours made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from paceline.drafters.heads.mtp import own_head
from paceline.drafters.heads.native import NativeHead
from paceline.models.loading import load_model
from paceline.models.native import NativeModel, Quantization
from paceline.models.recurrent import RecurrentModel
from paceline.models.weights import LoadedTensor
from toy import POSITIONS, VOCAB

SIZES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "ungrouped": {"key_heads": 3, "value_heads": 3, "key_dim": 32, "taps": 2, "kinds": "fdd"},
    "wide": {"key_heads": 1, "value_heads": 4, "value_dim": 48, "taps": 5, "kinds": "dfdf", "tied": True},
}


def tiny_config(
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    taps: int = 4,
    kinds: str = "ddf",
    *,
    tied: bool = False,
) -> Qwen3_5TextConfig:
    """Configuration with a layer for each letter of ``kinds``: d is a gated delta net, f full attention."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=taps,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        layer_types=["linear_attention" if kind == "d" else "full_attention" for kind in kinds],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        eos_token_id=None,
        bos_token_id=None,
    )


def tiny_qwen3_5(seed: int = 0, **sizes: Any) -> Qwen3_5ForCausalLM:
    """A random model, whose states decay slowly enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(tiny_config(**sizes)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                randomise(name, weight)
    return model


def randomise(name: str, weight: torch.Tensor) -> None:
    """Fill a parameter, at scales where every part of a layer changes the result."""
    if name.endswith("A_log"):
        weight.copy_((2 * torch.rand_like(weight) + 0.01).log())
    elif weight.dim() == 1:
        weight.normal_(float(name.endswith("linear_attn.norm.weight")), 0.3)
    else:
        weight.normal_(0, 0.5 if "conv" in name or "embed" in name or "lm_head" in name else 0.2)


def tiny_recurrent(seed: int = 0, **sizes: Any) -> RecurrentModel:
    """The same model, unrounded in torch."""
    model = load_model(tiny_qwen3_5(seed, **sizes), dtype=torch.float32)
    assert isinstance(model, RecurrentModel)
    return model


def tiny_native_recurrent(seed: int = 0, quantization: Quantization | None = "int8", **sizes: Any) -> NativeModel:
    """The same model on the CPU kernels."""
    model = tiny_recurrent(seed, **sizes)
    return NativeModel.from_weights(model.spec, model.weights, model.name, quantization=quantization, threads=1)


def theirs_with_head(seed: int = 0, **sizes: Any) -> tuple[Qwen3_5ForCausalLM, MtpModel]:
    """A random model of transformers, and a draft head for it."""
    model = tiny_qwen3_5(seed, **sizes)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = MtpModel(model, 1).eval()
        for name, weight in head.layers.named_parameters():
            randomise(name, weight)
    return model, head


_MTP_NAMES = {
    "0.mtp_block.": "mtp.layers.0.",
    "0.eh_proj.": "mtp.fc.",
    "0.enorm.": "mtp.pre_fc_norm_embedding.",
    "0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "0.post_norm.": "mtp.norm.",
}


def head_state(head: MtpModel) -> dict[str, torch.Tensor]:
    """A head's tensors by their names in published checkpoints."""
    found = {}
    for name, weight in head.layers.state_dict().items():
        theirs = next(theirs for theirs in _MTP_NAMES if name.startswith(theirs))
        found[_MTP_NAMES[theirs] + name.removeprefix(theirs)] = weight.contiguous()
    return found


def tiny_mtp(target: NativeModel, seed: int = 0) -> NativeHead:
    """A random head for ``tiny_native_recurrent``."""
    model, head = theirs_with_head(seed)
    stored = {name: LoadedTensor(weight) for name, weight in head_state(head).items()}
    shape = torch.empty(VOCAB, target.width, dtype=torch.bfloat16, device="meta")
    own = own_head(model.config, stored, (shape, shape), "tiny")
    return NativeHead(own, "tiny", (target.layers,), target.max_positions, quantization="int8", target=target)


def save_with_head(path: Path, seed: int = 0, **sizes: Any) -> tuple[Qwen3_5ForCausalLM, MtpModel]:
    """Save ``theirs_with_head`` as checkpoints are published, with a tokenizer whose tokens are numbers."""
    model, head = theirs_with_head(seed, **sizes)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors |= head_state(head)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return model, head
