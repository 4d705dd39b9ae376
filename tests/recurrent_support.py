"""Tiny random models of transformers with every kind of recurrent layer, and ours made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpModel

from kernels.reference_model import ReferenceModel
from model_support import packed
from paceline.drafters.heads.mtp import MtpHead, own_checkpoint, own_config
from paceline.drafters.heads.native import NativeHead
from paceline.models.description.weights import LoadedTensor
from paceline.models.families import FAMILIES
from paceline.models.load.loading import Source, load_model, open_checkpoint
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of
from paceline.models.torch.transformer import Transformer
from toy import POSITIONS, VOCAB

SIZES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "ungrouped": {"key_heads": 3, "value_heads": 3, "key_dim": 32, "taps": 2, "kinds": "fdd"},
    "wide": {"key_heads": 1, "value_heads": 4, "value_dim": 48, "taps": 5, "kinds": "dfdf", "tied": True},
}
LFM2_SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "other": {"width": 80, "taps": 4, "kinds": "fcfcc", "tied": False},
}
GRANITE_SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "grouped": {"heads": 12, "head_dim": 16, "groups": 2, "state_dim": 32, "taps": 3, "kinds": "fmmf", "tied": True},
    "experts": {"experts": 5},
    "rotated": {"heads": 4, "head_dim": 80, "positions": "rope", "conv_bias": False},
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_KINDS = {
    "c": "conv",
    "d": "linear_attention",
    "m": "linear_attention",
    "f": "full_attention",
    "s": "sliding_attention",
}


def _layers(kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": [_KINDS[kind] for kind in kinds]}


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
        **_COMMON,
        **_layers(kinds),
        hidden_size=48,
        intermediate_size=80,
        head_dim=32,
        linear_conv_kernel_dim=taps,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    )


def tiny_qwen3_5(seed: int = 0, **sizes: Any) -> Qwen3_5ForCausalLM:
    """A random model, whose states decay slowly enough to matter."""
    return _randomised(Qwen3_5ForCausalLM, tiny_config(**sizes), seed)


def tiny_mixture(kind: str, seed: int = 0, kinds: str = "ddf", **fields: Any) -> Any:
    """A random model of Qwen's mixtures with gated delta nets. kind: its model_type."""
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes |= {"shared_expert_intermediate_size": 48, "hidden_size": 64, "head_dim": 16}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    heads |= {"linear_value_head_dim": 32}
    given = _COMMON | _layers(kinds) | sizes | heads | {"tie_word_embeddings": False} | fields
    config = AutoConfig.for_model(kind, **given)
    return _randomised(AutoModelForCausalLM.from_config, config, seed)


tiny_qwen3_5_moe = functools.partial(tiny_mixture, "qwen3_5_moe_text")
tiny_qwen3_next = functools.partial(tiny_mixture, "qwen3_next", intermediate_size=80)


def tiny_lfm2(
    seed: int = 0, width: int = 48, taps: int = 3, kinds: str = "ccf", *, tied: bool = True
) -> Lfm2ForCausalLM:
    """A random LFM2 with a layer for each letter of ``kinds``: c is a short convolution, f attention."""
    config = Lfm2Config(
        **_COMMON,
        **_layers(kinds),
        hidden_size=width,
        intermediate_size=100,
        block_multiple_of=16,
        head_dim=16,
        conv_L_cache=taps,
        tie_word_embeddings=tied,
    )
    return _randomised(Lfm2ForCausalLM, config, seed)


def tiny_lfm2_moe(seed: int = 0, kinds: str = "ccf", **fields: Any) -> Lfm2MoeForCausalLM:
    """A random LFM2 with experts in all but its first layer, whose corrections change the choice."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 48, "num_dense_layers": 1}
    experts = {"num_experts": 5, "num_experts_per_tok": 2}
    config = Lfm2MoeConfig(**(_COMMON | _layers(kinds) | sizes | experts | fields))
    made = _randomised(Lfm2MoeForCausalLM, config, seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for layer in made.model.layers[1:]:
            layer.feed_forward.expert_bias.normal_(0, 0.3)
    return made


def tiny_lfm3(seed: int = 0, kinds: str = "csf") -> Lfm3ForCausalLM:
    """A random LFM3 with a layer for each letter of ``kinds``: s is attention with a window of 4."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "head_dim": 16, "sliding_window": 4}
    return _randomised(Lfm3ForCausalLM, Lfm3Config(**_COMMON, **_layers(kinds), **sizes), seed)


def tiny_granite_hybrid(
    seed: int = 0,
    heads: int = 8,
    head_dim: int = 16,
    groups: int = 1,
    state_dim: int = 16,
    taps: int = 4,
    kinds: str = "mmf",
    positions: str | None = None,
    *,
    conv_bias: bool = True,
    tied: bool = False,
    experts: int = 0,
) -> GraniteMoeHybridForCausalLM:
    """A random Granite 4; m is a Mamba-2 layer, f attention. heads, head_dim: of the Mamba-2 layers."""
    config = GraniteMoeHybridConfig(
        **_COMMON,
        **_layers(kinds),
        hidden_size=64,
        shared_intermediate_size=80,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=groups,
        mamba_d_state=state_dim,
        mamba_d_conv=taps,
        mamba_expand=heads * head_dim // 64,
        mamba_conv_bias=conv_bias,
        position_embedding_type=positions,
        num_local_experts=experts,
        intermediate_size=48,
        tie_word_embeddings=tied,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=0.5,
    )
    return _randomised(GraniteMoeHybridForCausalLM, config, seed)


def tiny_bamba(seed: int = 0, kinds: str = "mmf", **fields: Any) -> BambaForCausalLM:
    """A random Bamba; m is a Mamba-2 layer, f attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
    layers = {"num_hidden_layers": len(kinds), "attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == "f"]}
    return _randomised(BambaForCausalLM, BambaConfig(**(_COMMON | sizes | layers | fields)), seed)


def tiny_falcon_h1(seed: int = 0, layers: int = 2, **fields: Any) -> FalconH1ForCausalLM:
    """A random Falcon-H1, whose factors all differ."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 80, "head_dim": 16}
    sizes |= {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2}
    factors = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7}
    factors |= {"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6, "ssm_in_multiplier": 1.2}
    factors |= {"ssm_out_multiplier": 0.5}
    several = {"ssm_multipliers": [0.8, 0.9, 1.1, 0.7, 1.4], "mlp_multipliers": [1.5, 0.3]}
    given = _COMMON | sizes | factors | several | {"mamba_norm_before_gate": False} | fields
    return _randomised(FalconH1ForCausalLM, FalconH1Config(**given), seed)


def tiny_nemotron(seed: int = 0, kinds: str = "me-fmme", **fields: Any) -> NemotronHForCausalLM:
    """A random Nemotron-H; m is a Mamba-2 layer, f attention, e a mixture, - an MLP. Steps reach their lower limit."""
    names = {"m": "linear_attention", "f": "full_attention", "e": "moe", "-": "mlp"}
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 80,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
    }
    sizes |= {"n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 6, "moe_intermediate_size": 48}
    sizes |= {"moe_shared_expert_intermediate_size": 32, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
    given = {"layers_block_type": [names[kind] for kind in kinds], "time_step_min": 0.5} | fields
    made = _randomised(NemotronHForCausalLM, NemotronHConfig(**(_COMMON | sizes | given)), seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for layer in made.model.layers:
            if layer.block_type == "moe":
                layer.mixer.gate.e_score_correction_bias.normal_(0, 0.3)
    return made


def _randomised(model: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        made = model(config).eval()
        for name, weight in made.named_parameters():
            randomise(name, weight)
    return made


def randomise(name: str, weight: torch.Tensor) -> None:
    """Fill a parameter, at scales where every part of a layer changes the result."""
    if name.endswith("A_log"):
        weight.copy_((2 * torch.rand_like(weight) + 0.01).log())
    elif weight.dim() == 1:
        weight.normal_(float(name.endswith("linear_attn.norm.weight")), 0.3)
    else:
        weight.normal_(0, 0.5 if "conv" in name or "embed" in name or "lm_head" in name else 0.2)


def reference_of(source: Source) -> ReferenceModel:
    """The same model as the kernels' reference implementation runs it, unrounded."""
    checkpoint = open_checkpoint(source)
    assert checkpoint is not None
    spec = spec_of(checkpoint.spec, checkpoint.tensors(torch.float32, torch.device("cpu")))
    return ReferenceModel(spec, checkpoint.name, quantization="fp32")


def on_kernels(theirs: PreTrainedModel, quantization: Quantization | None = "int8") -> NativeModel:
    """The same model on the CPU kernels."""
    return packed(theirs, quantization, threads=1)


def in_torch(theirs: PreTrainedModel) -> Transformer:
    """The same model in float32, in padded passes over states and caches."""
    loaded = load_model(theirs, dtype=torch.float32)
    assert isinstance(loaded, Transformer)
    return loaded


def tiny_recurrent(seed: int = 0, **sizes: Any) -> ReferenceModel:
    """A random Qwen3.5, unrounded."""
    return reference_of(tiny_qwen3_5(seed, **sizes))


def tiny_native_recurrent(seed: int = 0, quantization: Quantization | None = "int8", **sizes: Any) -> NativeModel:
    """The same model on the CPU kernels."""
    return on_kernels(tiny_qwen3_5(seed, **sizes), quantization)


def theirs_with_head(
    seed: int = 0, make: Callable[..., PreTrainedModel] = tiny_qwen3_5, **sizes: Any
) -> tuple[PreTrainedModel, MtpModel]:
    """A random model of transformers, and a draft head for it."""
    model = make(seed, **sizes)
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = getattr(model.config, "mtp_layer_types", None) or ["full_attention"]
    model.config.mtp_mlp_layer_types = ["sparse"]
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


_LAYER_NAMES = {
    "0.mtp_block.": "",
    "0.eh_proj.": "eh_proj.",
    "0.enorm.": "enorm.",
    "0.hnorm.": "hnorm.",
    "0.post_norm.": "shared_head.norm.",
}


def head_state(head: MtpModel, behind: int | None = None) -> dict[str, torch.Tensor]:
    """A head's tensors by their names in published checkpoints. behind: number of layers, if it is named as a layer."""
    names, found = _MTP_NAMES, {}
    if behind is not None:
        names = {theirs: f"model.layers.{behind}.{ours}" for theirs, ours in _LAYER_NAMES.items()}
        found = {f"model.layers.{behind}.embed_tokens.weight": torch.zeros(2, 2)}  # a copy, which is not read
    for name, weight in head.layers.state_dict().items():
        theirs = next(theirs for theirs in names if name.startswith(theirs))
        found[names[theirs] + name.removeprefix(theirs)] = weight.contiguous()
    return found


def experts_apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with those of all experts divided into each one's, as Qwen3-Next is published."""
    found = {}
    for name, weight in tensors.items():
        stem, _, part = name.rpartition("experts.")
        if part not in ("gate_up_proj", "down_proj"):
            found[name] = weight
            continue
        for expert, whole in enumerate(weight):
            halves = zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True)
            parts = dict(halves) if part == "gate_up_proj" else {part: whole}
            found |= {f"{stem}experts.{expert}.{each}.weight": half.contiguous() for each, half in parts.items()}
    return found


def tiny_mtp(target: NativeModel, seed: int = 0) -> NativeHead:
    """A random head for ``tiny_native_recurrent``."""
    model, head = theirs_with_head(seed)
    stored = {name: LoadedTensor(weight) for name, weight in head_state(head).items()}
    config, names = own_config(model.config), FAMILIES[model.config.model_type].head
    assert names is not None
    weights = own_checkpoint(config, names, stored, "tiny").tensors(torch.bfloat16, torch.device("cpu"))
    end = torch.empty(VOCAB, target.width, dtype=torch.bfloat16, device="meta")
    own = MtpHead(config, weights, (end, end))
    return NativeHead(own, "tiny", (target.layers,), target.max_positions, quantization="int8", target=target)


def save_with_head(
    path: Path, seed: int = 0, make: Callable[..., PreTrainedModel] = tiny_qwen3_5, **sizes: Any
) -> tuple[PreTrainedModel, MtpModel]:
    """Save ``theirs_with_head`` as checkpoints are published, with a tokenizer whose tokens are numbers."""
    model, head = theirs_with_head(seed, make, **sizes)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    is_layer = model.config.model_type in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    own = head_state(head, model.config.num_hidden_layers if is_layer else None)
    tensors |= experts_apart(own) if is_layer or model.config.model_type in ("qwen3_next", "mellum") else own
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(path)
    return model, head


def save_tokenizer(path: Path) -> None:
    """Save a tokenizer whose tokens are numbers."""
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
