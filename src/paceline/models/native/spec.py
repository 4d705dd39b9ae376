"""The kernels' spec of a model, from its description and its weights, and what the kernels cannot run, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import ModelFormatError
from paceline.kernels.abi import INPUT_MULTIPLE, MOST_TAPS
from paceline.kernels.delta import DeltaNet
from paceline.kernels.mamba2 import Mamba2
from paceline.kernels.spec import (
    Activation,
    ExpertsNorms,
    ExpertsWeights,
    FusionWeights,
    Heads,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    NativeSpec,
    ReadMatrix,
    RecurrentMixer,
    RecurrentWeights,
    Rotary,
    TokenInputWeights,
    TokenTableWeights,
)
from paceline.models.description.latent import by_head, queries_in_order
from paceline.models.description.mixers import in_order, mixer_of
from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    RecurrentSpec,
    TokenInputsSpec,
)
from paceline.models.description.weights import BESIDE, EXPERTS_NORMS, NORMS, shapes

GATED: dict[str, Activation] = {"silu": "silu", "gelu_tanh": "gelu_tanh", "clamped_silu": "clamped_silu"}
PLAIN: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Activations that the kernels have."""


def spec_of(
    spec: DecoderSpec,
    weights: Mapping[str, Tensor],
    readers: Mapping[str, ReadMatrix] | None = None,
    places: Sequence[int] | None = None,
) -> NativeSpec:
    """Return the kernels' spec of a model. weights: by the names of ``description.weights``.

    places: the cache's layer that each layer reads; None: as its description says.

    readers: makes matrices while they are packed, by the names of weights, which then only give the shapes.
    Raises ModelFormatError if neither the kernels nor their reference can run the model.
    """
    check_reference(spec)
    attention = spec.attentions[0]
    source = _WeightSource(spec, weights, readers or {})
    final_norm = source.norm("norm")
    assert final_norm is not None, "check_reference asks for it"
    positions = weights.get("positions.weight")
    return NativeSpec(
        width=spec.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        rotary=attention.rotary or _UNTURNED,
        embedding=weights["embed.weight"],
        final_norm=_scaled(final_norm, spec.logits_scale),
        layers=[
            _layer_of(spec, index, place, source)
            for index, place in enumerate(spec.places if places is None else places)
        ],
        head=source.linear("head") if "head.weight" in weights else None,
        epsilon=spec.norm.eps,
        embed_scale=spec.embed_scale,
        tap_scale=spec.residual_scale,
        inputs=_token_table_of(spec.token_inputs, weights, source.linear),
        logits_cap=spec.logits_cap,
        centred=spec.norm.kind == "layer",
        positions=None if positions is None else positions[spec.position_offset :],
        embedding_norm=source.norm("embed_norm") if spec.embed_norm else None,
        fusion=_mtp_fusion_of(spec, weights) if spec.mtp else None,
        ordered=any(reader.ordered for reader in source.readers.values()),
    )


_UNTURNED = Rotary(())


def _mtp_fusion_of(spec: DecoderSpec, weights: Mapping[str, Tensor]) -> FusionWeights:
    """Return what a target's own draft head reads: the target's embedding and its last hidden state."""
    return FusionWeights(
        fuse=halves_padded(LinearWeights(weights["mtp.fc.weight"])),
        hidden_norm=weights["mtp.hidden_norm.weight"],
        embedding_norm=weights["mtp.embedding_norm.weight"],
        targets=torch.arange(spec.vocab_size),
        vocabulary=spec.vocab_size,
        tap_count=1,
        target_width=spec.width,
        normed_state=True,
    )


def halves_padded(linear: LinearWeights) -> LinearWeights:
    """Pad both halves of a matrix's inputs, as the kernels pad the embedding and the hidden state that it reads."""
    halves = [pad(half, (0, -half.shape[1] % INPUT_MULTIPLE)) for half in linear.weight.chunk(2, dim=1)]
    return LinearWeights(torch.cat(halves, dim=1), linear.bias)


def _token_table_of(
    spec: TokenInputsSpec | None, weights: Mapping[str, Tensor], linear: Callable[[str], LinearWeights]
) -> TokenTableWeights | None:
    if spec is None:
        return None
    scales = spec.table_scale, spec.project_scale, spec.sum_scale
    return TokenTableWeights(linear("input_table"), linear("input_project"), weights["input_norm.weight"], *scales)


@dataclass(frozen=True)
class _WeightSource:
    """A model's tensors by the names of ``description.weights``, and what reads those that are not read yet."""

    spec: DecoderSpec
    weights: Mapping[str, Tensor]
    readers: Mapping[str, ReadMatrix]

    def linear(self, name: str) -> LinearWeights:
        """Return a matrix and its bias."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return LinearWeights(weight, bias, self.readers.get(f"{name}.weight"))

    def norm(self, name: str) -> Tensor | None:
        """Return a norm's weight [width], or weight and bias [2, width] of a layer norm; None if it is not stored."""
        spec, weight, bias = self.spec, self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        if weight is None and spec.norm.affine:
            return None
        weight = torch.ones(spec.width) if weight is None else weight
        if spec.norm.kind == "rms":
            return weight
        return torch.stack([weight, torch.zeros_like(weight) if bias is None else bias])

    def layer_norm(self, layer: LayerSpec, index: int, name: str) -> Tensor | None:
        """Return a norm of a layer; None if it has none in this place."""
        return self.norm(f"layers.{index}.{name}") if name in NORMS[layer.norms] else None

    def experts(self, name: str) -> list[LinearWeights]:
        """Return the matrix and the bias of each expert."""
        whole = self.linear(name)
        biases = [None] * len(whole.weight) if whole.bias is None else list(whole.bias)
        reader = self.readers.get(f"{name}.weight")
        return [
            LinearWeights(weight, bias, None if reader is None else reader.of_expert(expert))
            for expert, (weight, bias) in enumerate(zip(whole.weight, biases, strict=True))
        ]


def _experts_of(spec: ExpertsSpec, name: str, source: _WeightSource) -> ExpertsWeights:
    """Return the experts of a layer. name: of the layer, with a point."""
    router = source.linear(f"{name}router")
    gate = [source.weights[f"{name}shared_gate.weight"]] if spec.shared_gate else []
    norms = [source.weights[f"{name}{norm}.weight"] for norm in EXPERTS_NORMS] if spec.own_norms else []
    return ExpertsWeights(
        router=torch.cat([_scaled(router.weight, spec.scores_scale), *gate]),
        gate_up=source.experts(f"{name}experts_{'gate_up' if spec.expert.gated else 'up'}"),
        down=source.experts(f"{name}experts_down"),
        routing=spec.routing,
        shared_scale=spec.shared_scale,
        correction=source.weights.get(f"{name}router_correction.weight"),
        router_bias=None if router.bias is None else _scaled(router.bias, spec.scores_scale),
        factors=_factors_of(spec, source.weights.get(f"{name}experts_scale.weight")),
        norms=ExpertsNorms(*norms) if norms else None,
        latent=None if spec.latent is None else (source.linear(f"{name}latent_in"), source.linear(f"{name}latent_out")),
    )


def _factors_of(spec: ExpertsSpec, stored: Tensor | None) -> Tensor | None:
    """Return the factor of each expert's output; None if all are 1."""
    if spec.output_scale == 1.0:
        return stored
    return (torch.ones(spec.count) if stored is None else stored.float()) * spec.output_scale


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor.float() * factor  # on device "meta" it imports torch's compiler, 1 s


def _layer_of(spec: DecoderSpec, index: int, place: int, source: _WeightSource) -> LayerWeights:
    layer, name = spec.layers[index], f"layers.{index}."
    mlp, weights, linear = layer.mlp, source.weights, source.linear
    mixture = mlp if isinstance(mlp, ExpertsSpec) else None
    one = mlp.expert if isinstance(mlp, ExpertsSpec) else mlp
    attention = layer.mixer if isinstance(layer.mixer, AttentionSpec) else None
    reads = None if attention is None else attention.reads_layer
    has_ones = attention is not None and attention.qk_norm is not None and not attention.qk_affine
    ones = torch.ones(attention.head_dim) if attention is not None and has_ones else None
    return LayerWeights(
        qkv=None if attention is None else in_order(linear(f"{name}qkv"), attention),
        attention_out=None if attention is None else linear(f"{name}o"),
        gate_up=None if layer.shared is None else linear(f"{name}{'gate_up' if layer.shared.gated else 'up'}"),
        down=None if layer.shared is None else linear(f"{name}down"),
        input_norm=None if layer.mixer is None else source.layer_norm(layer, index, "attn_norm"),
        post_norm=source.layer_norm(layer, index, "attn_norm" if layer.mixer is None else "mlp_norm"),
        attention_out_norm=source.layer_norm(layer, index, "attn_out_norm"),
        mlp_out_norm=source.layer_norm(layer, index, "mlp_out_norm"),
        q_norm=weights.get(f"{name}q_norm.weight", ones),
        k_norm=weights.get(f"{name}k_norm.weight", ones),
        window=None if attention is None else attention.window,
        rotary=None if attention is None else attention.rotary or _UNTURNED,
        scale=None if attention is None else attention.scale,
        gated=attention is not None and attention.gated,
        recurrent=None if layer.recurrent is None else _recurrent_of(layer, layer.recurrent, name, source),
        activation="silu" if one is None else (GATED if one.gated else PLAIN)[one.activation],
        plain=one is not None and not one.gated,
        xielu=weights.get(f"{name}xielu.weight"),
        parallel=layer.norms == "parallel",
        cap=None if attention is None else attention.cap,
        experts=None if mixture is None else _experts_of(mixture, name, source),
        sinks=weights.get(f"{name}sinks.weight"),
        heads=None if attention is None else _heads_of(attention),
        norm_after=attention is not None and attention.norm_after,
        v_norm=attention is not None and attention.v_norm,
        place=place if attention is None or reads is not None else None,
        reads_only=attention is None or reads is not None,
        input=None if spec.token_inputs is None else _token_input_of(name, weights, linear),
        scale_out=weights.get(f"{name}scale.weight"),
        latent=None if attention is None else _latent_of(attention, name, source),
    )


def _heads_of(spec: AttentionSpec) -> Heads:
    return Heads(spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim)


def _recurrent_of(layer: LayerSpec, spec: RecurrentSpec, name: str, source: _WeightSource) -> RecurrentWeights:
    """Return a layer's recurrent part. name: of the layer, with a point."""
    name = f"{name}{BESIDE}" if layer.beside is not None else name
    return RecurrentWeights(
        mixer_of(spec, name, source.weights), source.linear(f"{name}qkv"), source.linear(f"{name}o")
    )


def _latent_of(spec: AttentionSpec, name: str, source: _WeightSource) -> LatentWeights | None:
    """Return what makes a layer's attention latent; None for other attention. name: of the layer, with a point."""
    latent, weights = spec.latent, source.weights
    if latent is None:
        return None
    absorb, expand = by_head(weights[f"{name}kv_b.weight"], spec)
    query_rank = latent.query_rank
    return LatentWeights(
        latent.rotary_dim,
        [LinearWeights(matrix) for matrix in absorb],
        [LinearWeights(matrix) for matrix in expand],
        weights[f"{name}kv_a_norm.weight"],
        query_up=None if query_rank is None else queries_in_order(source.linear(f"{name}q_b"), spec),
        query_norm=None if query_rank is None else weights[f"{name}q_a_norm.weight"],
        epsilon=latent.norm_eps,
    )


def _token_input_of(
    name: str, weights: Mapping[str, Tensor], linear: Callable[[str], LinearWeights]
) -> TokenInputWeights:
    norm = weights[f"{name}input_out_norm.weight"]
    return TokenInputWeights(linear(f"{name}input_gate"), linear(f"{name}input_out"), norm)


def obstacle_of(description: DecoderSpec) -> str | None:
    """Return why the kernels cannot run models of this description, whatever their weights; None if they can."""
    try:
        check_reference(description)
        check_spec(spec_of(description, shapes(description)))
    except ModelFormatError as error:
        return str(error)
    return None


_REFUSAL = "the CPU kernels cannot run a {} model without"


def check_reference(spec: DecoderSpec) -> None:
    """Raise ModelFormatError for a model that ``NativeSpec`` cannot express."""
    attentions, shapes = spec.attentions, {(a.heads, a.kv_heads, a.head_dim) for a in spec.attentions}
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)]
    shared = [layer.shared for layer in spec.layers if layer.shared is not None]
    mlps = [*shared, *(mixture.expert for mixture in experts)]
    wanted = {
        "norms before or after each part": spec.final_norm and all(layer.norms != "after_sum" for layer in spec.layers),
        f"activations among {', '.join(GATED)} behind a gate, and {', '.join(PLAIN)} without": all(
            mlp.activation in (GATED if mlp.gated else PLAIN) for mlp in mlps
        ),
        "gates in both a mixture and the MLP beside it, or in none": all(
            mixture.shared is None or mixture.shared.gated == mixture.expert.gated for mixture in experts
        ),
        "one activation in a mixture and the MLP beside it": all(
            mixture.shared is None or mixture.shared.activation == mixture.expert.activation for mixture in experts
        ),
        "experts of one shape in all layers": len({replace(mixture, shared=None) for mixture in experts}) <= 1,
        "heads of one shape beside recurrent layers": len(shapes) == 1 or not spec.recurrent,
        "recurrent layers of one shape": len(set(spec.recurrent)) <= 1,
        "norms before two mixers of a layer alone": all(
            layer.beside is None or layer.norms == "before" for layer in spec.layers
        ),
        "attention in some layer": bool(attentions),
        "vectors by token for its MLP's activation": spec.token_inputs is None
        or {mlp.activation for mlp in mlps} == {spec.token_inputs.activation},
        "a norm behind the last part of a scaled layer": all(
            not layer.scaled or layer.norms in ("after", "both") for layer in spec.layers
        ),
        "the same epsilon in all norms": all(a.qk_norm is None or a.qk_norm_eps == spec.norm.eps for a in attentions),
        "an embedding as wide as the model": spec.embed_width == spec.width,
        "latent attention of one shape": len({attention.latent for attention in attentions}) <= 1,
    }
    missing = [feature for feature, present in wanted.items() if not present]
    if missing:
        raise ModelFormatError(f"{_REFUSAL.format(spec.family)} {', '.join(missing)}")


def check_spec(spec: NativeSpec) -> None:
    """Raise ModelFormatError for a number or width of heads that the kernels do not support."""
    for layer in spec.layers:
        if layer.recurrent is not None:
            _check_recurrent(layer.recurrent.mixer)
    for layer in spec.layers:
        if layer.latent is not None and layer.latent.norm.shape[0] % 16:
            needed = "vectors of latent attention whose width is a multiple of 16"
            raise ModelFormatError(f"the CPU kernels need {needed}; not {layer.latent.norm.shape[0]}")
    for heads, latent in dict.fromkeys((spec.heads_of(layer), layer.latent is not None) for layer in spec.layers):
        too_many = heads.heads // heads.kv_heads > 64 and not latent  # whose one key serves groups of heads
        if heads.dim % 16 or heads.value_width % 16 or heads.heads % heads.kv_heads or too_many:
            values = "" if heads.value_dim is None else f" with values of {heads.value_dim}"
            shape = f"{heads.heads} heads of {heads.dim}{values} over {heads.kv_heads}"
            needed = "a head width that is a multiple of 16 and at most 64 query heads per key/value head"
            raise ModelFormatError(f"the CPU kernels need {needed}; not {shape}")
    for layer in spec.layers:
        rotated, dim = 2 * len((layer.rotary or spec.rotary).inverse_frequencies), spec.heads_of(layer).dim
        if layer.qkv is not None and rotated > dim:
            raise ModelFormatError(f"rotary positions turn {rotated} elements of heads of {dim}")
    if spec.inputs is not None and spec.inputs.width % 16:
        needed = "vectors by token whose width is a multiple of 16"
        raise ModelFormatError(f"the CPU kernels need {needed}; not {spec.inputs.width}")


def _check_recurrent(mixer: RecurrentMixer) -> None:
    """Raise ModelFormatError for a kind or sizes of recurrent layers that the kernels do not support."""
    shape = mixer.shape(1)
    wanted = {
        "widths that are multiples of 16": not shape.channels % 16,
        f"2 to {MOST_TAPS} taps": 1 < shape.taps <= MOST_TAPS,
    }
    if isinstance(mixer, DeltaNet):
        heads = mixer.heads
        wanted |= {
            "head widths that are multiples of 16": not heads.key_dim % 16 and not heads.value_dim % 16,
            "value heads shared evenly": heads.key_heads > 0 and heads.value_heads % heads.key_heads == 0,
        }
    if isinstance(mixer, Mamba2):
        sizes = mixer.heads
        wanted |= {
            "head widths that are multiples of 16": not sizes.head_dim % 16 and not sizes.state_dim % 16,
            "heads in equal groups": sizes.groups > 0 and sizes.heads % sizes.groups == 0,
        }
    if missing := [feature for feature, present in wanted.items() if not present]:
        raise ModelFormatError(f"the CPU kernels need recurrent layers of {' and '.join(missing)}; not {shape}")
