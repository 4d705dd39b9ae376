"""A family of models: how its configurations translate into a description, and its weights' names in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NormPlaces,
    NormSpec,
)
from paceline.models.description.weight_names import WeightNames, ignoring
from paceline.models.description.weights import StoredTensor
from paceline.models.families.rotary import head_dim, longest_sequence, rotary_of, without_positions

# Hugging Face's name of an activation -> the name in kernels.gpu.steps. Models with others run through huggingface.py.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
PLAIN_ACTIVATION_NAMES = {**ACTIVATION_NAMES, "relu2": "relu2", "xielu": "xielu"}
"""Those that may stand without a gate."""


def _no_fields(_: Mapping[str, Any], __: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _as_they_are(tensors: Mapping[str, StoredTensor], _: DecoderSpec) -> Mapping[str, StoredTensor]:
    return tensors


def _no_factors(_: PretrainedConfig) -> Mapping[str, Tensor]:
    return {}


def _no_constants(_: Mapping[str, Any], __: DecoderSpec) -> Mapping[str, StoredTensor]:
    return {}


@dataclass(frozen=True)
class ChangedTensor:
    """A stored tensor whose values are changed when it is read. shape: afterwards."""

    stored: StoredTensor
    shape: tuple[int, ...]
    change: Callable[[Tensor], Tensor]

    def unpack_into(self, destination: Tensor) -> None:
        exact = torch.empty(self.stored.shape, dtype=torch.float32)
        self.stored.unpack_into(exact)
        destination.copy_(self.change(exact).view(self.shape))


@dataclass(frozen=True)
class GGUFForm:
    """How llama.cpp stores a family in a GGUF file.

    architectures: values of general.architecture; each is the prefix of its files' metadata.
    fields: metadata without that prefix, with vocab_size as the embedding has it, and rope_parameters -> fields of the
        Hugging Face configuration that ``gguf_config`` does not know or that differ.
    reads: metadata keys that change the computation and that ``fields`` takes into account.
    paired: whether rows of queries and keys are stored in the order of rotary pairs (i, i + 1).
    adapt: the file's tensors -> those of the decoder, ordered and scaled as in safetensors files.
    head: names of the weights of the draft head, one more block behind the layers; None: files have none.
    adapt_head: as ``adapt``, of the head's tensors, and the description of its one layer.
    factors: as ``Family.factors``, of files whose matrices are not multiplied yet.
    constants: all metadata and the description -> weights that the metadata hold, by the file's names.
    mixture: whether files of these architectures are of this family only if they have experts.
    kind: metadata without the prefix -> model_type of the file's family, where several have this form; None: one has.
    strips: whether control tokens of its SentencePiece vocabularies remove white space behind them, which files do not
        tell.
    """

    architectures: tuple[str, ...]
    names: WeightNames
    fields: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = _no_fields
    reads: frozenset[str] = frozenset()
    paired: bool = False
    adapt: Callable[[Mapping[str, StoredTensor], DecoderSpec], Mapping[str, StoredTensor]] = _as_they_are
    head: WeightNames | None = None
    adapt_head: Callable[[Mapping[str, StoredTensor], DecoderSpec], Mapping[str, StoredTensor]] = _as_they_are
    factors: Callable[[PretrainedConfig], Mapping[str, Tensor]] = _no_factors
    constants: Callable[[Mapping[str, Any], DecoderSpec], Mapping[str, StoredTensor]] = _no_constants
    mixture: bool = False
    kind: Callable[[Mapping[str, Any]], str] | None = None
    strips: bool = False


@dataclass(frozen=True)
class Family:
    """One family. model_type: Hugging Face's name of its configuration.

    other_types: model_type of other configurations of this family, such as those inside of multimodal ones.
    describe: configuration -> description; None if only transformers' own code can run that model.
    gguf: None if GGUF files of this family are not read.
    head: names of the weights of a draft head that checkpoints may have (``drafters.heads.mtp``); None: none has one.
    usual: fields of published configurations without which transformers' defaults are of another kind of model.
    factors: configuration -> what the rows of stored matrices are multiplied by, [rows] or [1], by paceline's names
        without the layer, in safetensors files and loaded models.
    """

    model_type: str
    describe: Callable[[PretrainedConfig], DecoderSpec | None]
    safetensors: WeightNames
    gguf: GGUFForm | None = None
    head: WeightNames | None = None
    other_types: tuple[str, ...] = ()
    usual: Mapping[str, Any] = field(default_factory=dict)
    factors: Callable[[PretrainedConfig], Mapping[str, Tensor]] = _no_factors


LLAMA_NAMES: Mapping[str, str] = {
    "embed_tokens": "embed",
    "norm": "norm",
    "lm_head": "head",
    "layers.{}.input_layernorm": "layers.{}.attn_norm",
    "layers.{}.self_attn.q_proj": "layers.{}.q",
    "layers.{}.self_attn.k_proj": "layers.{}.k",
    "layers.{}.self_attn.v_proj": "layers.{}.v",
    "layers.{}.self_attn.o_proj": "layers.{}.o",
    "layers.{}.self_attn.q_norm": "layers.{}.q_norm",
    "layers.{}.self_attn.k_norm": "layers.{}.k_norm",
    "layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
    "layers.{}.mlp.gate_proj": "layers.{}.gate",
    "layers.{}.mlp.up_proj": "layers.{}.up",
    "layers.{}.mlp.down_proj": "layers.{}.down",
}
"""Names that most families share."""

EXPERTS: Mapping[str, str] = {
    "layers.{}.mlp.gate": "layers.{}.router",
    "layers.{}.mlp.experts.{}.gate_proj": "layers.{}.expert.{}.gate",
    "layers.{}.mlp.experts.{}.up_proj": "layers.{}.expert.{}.up",
    "layers.{}.mlp.experts.{}.down_proj": "layers.{}.expert.{}.down",
    "layers.{}.mlp.experts.gate_up_proj": "layers.{}.experts_gate_up.weight",
    "layers.{}.mlp.experts.down_proj": "layers.{}.experts_down.weight",
}
"""Names of experts, one by one as files have them and together as loaded models have them."""


def gguf_expert_fields(metadata: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration's numbers of experts from GGUF metadata."""
    return {"num_experts": metadata["expert_count"], "num_experts_per_tok": metadata["expert_used_count"]}


GGUF_EXPERTS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": "layers.{}.router",
    "blk.{}.ffn_gate_exps": "layers.{}.experts_gate",
    "blk.{}.ffn_up_exps": "layers.{}.experts_up",
    "blk.{}.ffn_down_exps": "layers.{}.experts_down",
}

GGUF_JOINED_EXPERTS: Mapping[str, str] = {"blk.{}.ffn_gate_up_exps": "layers.{}.experts_gate_up"}
"""The gates and first matrices of all experts in one tensor, as newer converters write them."""


def mtp_names(names: WeightNames) -> WeightNames:
    """Return the names of the draft head ``mtp.*`` in safetensors files, whose layer is named as the model's layers."""
    parts = {
        **names.parts,
        "fc": "mtp.fc",
        "pre_fc_norm_embedding": "mtp.embedding_norm",
        "pre_fc_norm_hidden": "mtp.hidden_norm",
    }
    less_one = {"embedding_norm", "hidden_norm"} if "norm" in names.plus_one else set()
    return WeightNames(parts, prefixes=("mtp.",), plus_one=names.plus_one | less_one)


def mtp_layer_names(names: WeightNames) -> WeightNames:
    """Return the names of a draft head in safetensors files that is named like one more layer, as DeepSeek-V3's."""
    layer = {
        theirs.removeprefix("layers.{}."): ours.replace("{}", "0", 1)
        for theirs, ours in names.parts.items()
        if theirs.startswith("layers.{}.")
    }
    parts = {"eh_proj": "mtp.fc", "enorm": "mtp.embedding_norm", "hnorm": "mtp.hidden_norm", "shared_head.norm": "norm"}
    copies = ignoring(r".*\.(embed_tokens|shared_head\.head)\.weight")  # of the model's embedding and output head
    return WeightNames(layer | parts, prefixes=("model.layers.{layers}.",), ignored=copies)


def gguf_mtp_names(names: WeightNames) -> WeightNames:
    """Return the names of the draft head in GGUF files: those of a layer of the model, and ``nextn``."""
    layer = {theirs: ours.replace("{}", "0") for theirs, ours in names.parts.items() if theirs.startswith("blk.")}
    copies = ignoring(r"blk\.\d+\.nextn\.(embed_tokens|shared_head_head)\.weight")  # see ``mtp_layer_names``
    return WeightNames(layer | _GGUF_MTP, ignored=copies)


_GGUF_MTP = {
    "blk.{}.nextn.eh_proj": "mtp.fc",
    "blk.{}.nextn.enorm": "mtp.embedding_norm",
    "blk.{}.nextn.hnorm": "mtp.hidden_norm",
    "blk.{}.nextn.shared_head_norm": "norm",
}

W_EXPERTS: Mapping[str, str] = {
    "layers.{}.block_sparse_moe.gate": "layers.{}.router",
    "layers.{}.block_sparse_moe.experts.{}.w1": "layers.{}.expert.{}.gate",
    "layers.{}.block_sparse_moe.experts.{}.w3": "layers.{}.expert.{}.up",
    "layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.expert.{}.down",
}
"""Mixtral's names of experts in files."""


def mlp_beside(module: str) -> dict[str, str]:
    """Return the names of the MLP that every token runs through beside experts."""
    return {f"layers.{{}}.mlp.{module}.{part}_proj": f"layers.{{}}.{part}" for part in ("gate", "up", "down")}


GGUF_MLP_BESIDE: Mapping[str, str] = {
    f"blk.{{}}.ffn_{part}_shexp": f"layers.{{}}.{part}" for part in ("gate", "up", "down")
}
GGUF_CORRECTION: Mapping[str, str] = {"blk.{}.exp_probs_b.bias": "layers.{}.router_correction.weight"}

NORMS_AFTER: Mapping[str, str] = {
    "layers.{}.post_attention_layernorm": "layers.{}.attn_out_norm",
    "layers.{}.post_feedforward_layernorm": "layers.{}.mlp_out_norm",
}
"""Names of norms after each part, where they replace ``LLAMA_NAMES``."""

GGUF_NORMS_AFTER: Mapping[str, str] = {
    "blk.{}.post_attention_norm": "layers.{}.attn_out_norm",
    "blk.{}.post_ffw_norm": "layers.{}.mlp_out_norm",
}

LLAMA_GGUF_NAMES: Mapping[str, str] = {
    "token_embd": "embed",
    "output_norm": "norm",
    "output": "head",
    "blk.{}.attn_norm": "layers.{}.attn_norm",
    "blk.{}.attn_q": "layers.{}.q",
    "blk.{}.attn_k": "layers.{}.k",
    "blk.{}.attn_v": "layers.{}.v",
    "blk.{}.attn_output": "layers.{}.o",
    "blk.{}.attn_q_norm": "layers.{}.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.k_norm",
    "blk.{}.ffn_norm": "layers.{}.mlp_norm",
    "blk.{}.ffn_gate": "layers.{}.gate",
    "blk.{}.ffn_up": "layers.{}.up",
    "blk.{}.ffn_down": "layers.{}.down",
}


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...] | None:
    """Return the window of each layer; None if a layer's attention is neither full nor sliding."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def biases_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the biases of ``AttentionSpec`` by Hugging Face's ``attention_bias``, which is of all four matrices."""
    return dict.fromkeys(("bias", "output_bias"), bool(config.attention_bias))


def llama_like(
    config: PretrainedConfig,
    norms: NormPlaces = "before",
    rotated: Sequence[bool] | None = None,
    *,
    norm: NormSpec | None = None,
    mlp: MLPSpec | None = None,
    **attention: Any,
) -> DecoderSpec | None:
    """Describe a decoder with one kind of rotary positions and no experts.

    rotated: whether each layer has rotary positions; None: all have. norm, mlp: None: an RMS norm, and a gated MLP.
    attention: fields of every layer's ``AttentionSpec`` besides heads, rotary positions and window.
    """
    rotary, windows = rotary_of(config), windows_of(config)
    if rotary is None or windows is None:
        return None
    rotaries = [rotary if turns else without_positions(rotary) for turns in rotated or [True] * len(windows)]
    attentions = [
        attention_of(config, rotary=of_layer, window=window, **attention)
        for of_layer, window in zip(rotaries, windows, strict=True)
    ]
    return dense_decoder_of(config, attentions, norms, norm, mlp)


def plain_like(config: PretrainedConfig, **options: Any) -> DecoderSpec | None:
    """Describe a decoder like ``llama_like``'s, with its options, whose MLPs have no gate."""
    mlp = plain_mlp(config, config.hidden_act, bias=bool(getattr(config, "mlp_bias", False)))
    return None if mlp is None else llama_like(config, mlp=mlp, **options)


def by_kind_of_layer(config: PretrainedConfig, norms: NormPlaces = "before", **attention: Any) -> DecoderSpec | None:
    """Describe a decoder like ``llama_like``'s, whose rotary positions differ by ``layer_types``."""
    windows = windows_of(config)
    if windows is None:
        return None
    rotaries = [rotary_of(config, kind) for kind in config.layer_types]
    if None in rotaries:
        return None
    attentions = [
        attention_of(config, rotary=rotary, window=window, **attention)
        for rotary, window in zip(rotaries, windows, strict=True)
    ]
    return dense_decoder_of(config, attentions, norms)


def attention_of(config: PretrainedConfig, **fields: Any) -> AttentionSpec:
    """Describe the attention of a layer. fields: of ``AttentionSpec``, besides heads and epsilon."""
    heads = config.num_attention_heads
    sizes = heads, getattr(config, "num_key_value_heads", None) or heads, head_dim(config)
    return AttentionSpec(*sizes, qk_norm_eps=getattr(config, "rms_norm_eps", 1e-6), **fields)


def with_experts(
    spec: DecoderSpec,
    sizes: tuple[int, int, int],
    beside: int = 0,
    sparse: Sequence[bool] | None = None,
    **routing: Any,
) -> DecoderSpec:
    """Return the decoder with a mixture of experts in place of MLPs.

    sizes: experts, experts of a token, their inner width. beside: inner width of the MLP that every token runs
    through, too; 0: none. sparse: the layers with experts; None: all. routing: other fields of ``ExpertsSpec``.
    """
    count, used, width = sizes

    def mixture(layer: LayerSpec) -> LayerSpec:
        shared = replace(layer.dense, width=beside) if beside else None
        return replace(layer, mlp=ExpertsSpec(count, used, replace(layer.dense, width=width), shared=shared, **routing))

    chosen = zip(spec.layers, sparse or [True] * len(spec.layers), strict=True)
    return replace(spec, layers=tuple(mixture(layer) if has else layer for layer, has in chosen))


def _gated_mlp(config: PretrainedConfig) -> MLPSpec | None:
    activation = ACTIVATION_NAMES.get(config.hidden_act)
    width = (
        getattr(config, "intermediate_size", None) or config.moe_intermediate_size
    )  # none has an MLP without experts
    return None if activation is None else MLPSpec(width, activation, bias=bool(getattr(config, "mlp_bias", False)))


def plain_mlp(config: PretrainedConfig, activation: str, *, bias: bool) -> MLPSpec | None:
    """Describe an MLP without a gate. activation: Hugging Face's name; None if it is unknown."""
    known = PLAIN_ACTIVATION_NAMES.get(activation)
    return None if known is None else MLPSpec(config.intermediate_size, known, gated=False, bias=bias)


def with_one_norm(spec: DecoderSpec | None) -> DecoderSpec | None:
    """Return the decoder with MLPs beside attention, both behind the same norm."""
    return spec and replace(
        spec, layers=tuple(replace(layer, norms="parallel", one_norm=True) for layer in spec.layers)
    )


def dense_decoder_of(
    config: PretrainedConfig,
    attentions: Sequence[AttentionSpec],
    norms: NormPlaces = "before",
    norm: NormSpec | None = None,
    mlp: MLPSpec | None = None,
) -> DecoderSpec | None:
    """Describe a decoder with an MLP in every layer; None if its activation is unknown.

    norm, mlp: None: an RMS norm, and a gated MLP.
    """
    mlp = mlp or _gated_mlp(config)
    if mlp is None:
        return None
    return decoder_of(config, (LayerSpec(attention, mlp, norms) for attention in attentions), norm=norm)


def decoder_of(config: PretrainedConfig, layers: Iterable[LayerSpec], **fields: Any) -> DecoderSpec:
    """Describe a decoder of these layers. fields: of ``DecoderSpec``, which replace those of the configuration."""
    usual = {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "max_positions": longest_sequence(config),
        "embed_width": config.hidden_size,
        "tied": bool(getattr(config, "tie_word_embeddings", False)),  # parts of multimodal ones may not say
    }
    norm = fields.pop("norm", None) or NormSpec("rms", config.rms_norm_eps)
    return DecoderSpec(layers=tuple(layers), norm=norm, **usual | fields)
