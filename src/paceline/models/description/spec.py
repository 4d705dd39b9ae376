"""Description of a decoder: what every layer computes, without weights and without the name of a family.

A family (``models.families``) translates a configuration into a ``DecoderSpec``. Backends read the description only;
what one of them cannot run, it refuses by the name of the feature. Three things never appear here, because they are
undone where the weights are read: norms whose stored weight is one less than the factor (``WeightNames.plus_one``), and
multipliers of matrices (``Family.factors``) and of every residual branch (``without_residual_scale``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, TypeAlias

from paceline.core.cache import KVHeads
from paceline.errors import ModelFormatError
from paceline.kernels.delta import DeltaHeads
from paceline.kernels.experts import Routing
from paceline.kernels.mamba2 import Mamba2Heads
from paceline.kernels.spec import Rotary as Rotary


def check(possible: bool, what: str) -> None:
    """Raise ModelFormatError about a configuration. what: its fields and their values."""
    if not possible:
        raise ModelFormatError(f"the configuration is impossible: {what}")


@dataclass(frozen=True)
class NormSpec:
    """The norms of the hidden states: RMS norm, or layer norm.

    affine: whether they have weights, and layer norms biases, too. bias: False for layer norms with weights alone.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    affine: bool = True
    bias: bool = True


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): one vector of a token stands for all heads.

    A matrix makes each head's ``key_dim`` elements of a key and ``value_dim`` of a value from a vector of ``rank``
    elements behind an RMS norm. ``rotary_dim`` more elements of a key, which all heads share, hold the position.
    query_rank: width of the vector, behind an RMS norm, that a matrix makes the queries from; None: they are made from
        the hidden states.
    norm_eps: epsilon of both norms.
    """

    rank: int
    rotary_dim: int
    key_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = f"kv_lora_rank={self.rank}, qk_rope_head_dim={self.rotary_dim}, qk_nope_head_dim={self.key_dim}"
        widths = self.rank, self.rotary_dim, self.key_dim, self.value_dim, self.query_rank or 1
        check(min(widths) > 0, f"{sizes}, v_head_dim={self.value_dim}, q_lora_rank={self.query_rank}")

    @property
    def query_dim(self) -> int:
        """Width of a head's query as the weights make it: ``key_dim`` elements, then those that are rotated."""
        return self.key_dim + self.rotary_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer.

    rotary: None: queries and keys are not rotated.
    window: sliding window in positions; None: full attention.
    scale: factor of the scores; None: head_dim ** -0.5.
    bias: of queries, keys and values. output_bias: of the output projection.
    interleaved: whether neighbouring elements of a head turn together, (2 i, 2 i + 1), as the weights are stored;
        backends rotate (i, n + i), see ``mixers.in_order``.
    qk_norm: RMS norm of queries and keys, over each head ("head") or over all heads together ("all"); its epsilon is
        qk_norm_eps. It stands before the rotation, or behind it (norm_after). qk_affine: whether it has weights.
    cap: the scores are cap * tanh(scores / cap); None: they are not capped.
    sinks: whether each query head has one more score, a weight, that takes part in the softmax without a value.
    gated: whether the query projection also gives a gate per query element; sigmoid(gate) multiplies the output.
    gates_apart: whether the gates have a matrix of their own. gates_by_head: whether it has one row for each head, as a
        head's elements have one gate.
    v_norm: whether values have an RMS norm without weight over each head, with epsilon qk_norm_eps.
    keys_as_values: whether one projection, before its norms and rotation, gives keys and values.
    reads_layer: number of the earlier layer whose keys and values this layer reads; None: it has its own.
    value_dim: width of a head's value where it differs from ``head_dim``, which is then that of queries and keys.
    latent: latent attention, as it is computed: all heads read one key, a token's rotated elements and then its vector,
        which is also its value. kv_heads is 1 and head_dim is rotary_dim + rank (``description.latent``).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None = None
    window: int | None = None
    scale: float | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    qk_norm_eps: float = 1e-6
    norm_after: bool = False
    qk_affine: bool = True
    interleaved: bool = False
    cap: float | None = None
    sinks: bool = False
    gated: bool = False
    gates_apart: bool = False
    gates_by_head: bool = False
    v_norm: bool = False
    keys_as_values: bool = False
    reads_layer: int | None = None
    value_dim: int | None = None
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        sizes = f"num_attention_heads={self.heads}, num_key_value_heads={self.kv_heads}, head_dim={self.head_dim}"
        check(min(self.heads, self.kv_heads, self.head_dim) > 0, sizes)
        check(self.window is None or self.window > 0, f"sliding_window={self.window}")
        rotated = 0 if self.rotary is None else 2 * len(self.rotary.inverse_frequencies)
        check(rotated <= self.head_dim, f"partial_rotary_factor rotates {rotated} elements, head_dim={self.head_dim}")
        check(self.value_dim is None or self.value_dim > 0, f"v_head_dim={self.value_dim}")
        assert self.qk_norm is None or not self.interleaved, "the norms' weights are in the stored order"
        other = self.gated or self.keys_as_values or self.reads_layer is not None or self.latent is not None
        assert self.value_dim is None or not other, "no family has both"

    @property
    def cached(self) -> KVHeads:
        """What the cache holds of a token."""
        if self.latent is None:
            return KVHeads(self.kv_heads, self.head_dim, self.value_dim)
        return KVHeads(1, self.head_dim, self.latent.rank, values_in_keys=True)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class DeltaNetSpec(DeltaHeads):
    """A gated delta net: a recurrent state per value head instead of keys and values.

    norm_eps: epsilon of the gated RMS norm of the output.
    """

    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        heads = f"linear_num_key_heads={self.key_heads}, linear_num_value_heads={self.value_heads}"
        sizes = f"linear_key_head_dim={self.key_dim}, linear_value_head_dim={self.value_dim}"
        check(min(self.key_heads, self.value_heads) > 0 and self.value_heads % self.key_heads == 0, heads)
        check(min(self.key_dim, self.value_dim, self.taps) > 0, f"{sizes}, linear_conv_kernel_dim={self.taps}")


@dataclass(frozen=True)
class MLPSpec:
    """A dense MLP. width: inner width. gated: down(activation(gate(x)) * up(x)), else down(activation(up(x))).

    activation: a name in ``kernels.gpu.steps``, or "xielu", which has four stored numbers and no gate.
    """

    width: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts: a token runs through the ``used`` of ``count`` experts with the highest router scores.

    expert: one expert; all have the same shape.
    normalised, sigmoid, groups, used_groups, group_best, margin: see ``Routing``.
    router_bias: whether the router's scores have a bias. correction: whether the choice has one of its own (``route``).
    output_scale: factor of the weights of the outputs.
    shared: an MLP that every token runs through besides. shared_gate: whether sigmoid(gate(x)) multiplies its output.
    shared_scale: another factor of it.
    scores_scale: factor of the router's scores. scaled: whether each expert's output has a stored factor.
    latent: width of the vectors that the experts read and write, where one linear map makes them of the layer's input
        and another maps the sum of the outputs back (LatentMoE, arXiv 2601.18089); None: those of the layer.
    own_norms: whether the router, the experts and the shared MLP read the layer's hidden states through a norm each,
        and the outputs of the experts and of the MLP have a norm each before they are added.
    """

    count: int
    used: int
    expert: MLPSpec
    normalised: bool = False
    sigmoid: bool = False
    groups: int = 1
    used_groups: int = 1
    group_best: int = 2
    margin: float = 0.0
    router_bias: bool = False
    correction: bool = False
    output_scale: float = 1.0
    shared: MLPSpec | None = None
    shared_gate: bool = False
    shared_scale: float = 1.0
    scores_scale: float = 1.0
    scaled: bool = False
    own_norms: bool = False
    latent: int | None = None

    def __post_init__(self) -> None:
        possible = type(self.used) is int and type(self.count) is int and 0 < self.used <= self.count
        check(possible, f"{self.used} of {self.count} experts (num_experts_per_tok, num_experts)")
        groups = f"{self.used_groups} of {self.groups} groups of {self.count} experts (topk_group, n_group)"
        check(0 < self.used_groups <= self.groups and self.count % self.groups == 0, groups)
        check(self.latent is None or self.latent > 0, f"moe_latent_size={self.latent}")
        assert self.shared_scale == 1.0 or not self.shared_gate, "one factor of the MLP's output"
        check(self.used <= self.count // self.groups * self.used_groups, f"{groups} have {self.used} experts")

    @property
    def routing(self) -> Routing:
        """How a token's experts follow from the scores."""
        groups = self.groups, self.used_groups, self.group_best
        return Routing(self.used, self.normalised, self.sigmoid, *groups, self.margin)


@dataclass(frozen=True)
class Mamba2Spec(Mamba2Heads):
    """A Mamba-2 layer: a recurrent state per head. conv_bias: whether the convolution has a bias.

    norm_eps: epsilon of the gated RMS norm of the output, group by group. least_step: steps are at least this.
    normed: whether the output has that norm; without it, the output is only gated.
    """

    conv_bias: bool = True
    norm_eps: float = 1e-6
    least_step: float = 0.0
    normed: bool = True


@dataclass(frozen=True)
class ShortConvSpec:
    """A short causal convolution as wide as the model, of ``taps`` inputs, between two gates."""

    taps: int


RecurrentSpec: TypeAlias = DeltaNetSpec | Mamba2Spec | ShortConvSpec
MixerSpec: TypeAlias = AttentionSpec | RecurrentSpec
NormPlaces: TypeAlias = Literal["before", "after", "both", "after_sum", "parallel", "one_part"]


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer over tokens, then an MLP over each token's elements.

    norms: where the norms of both parts f stand:
        "before": x + f(norm(x)); "after": x + norm(f(x)); "both": x + norm(f(norm(x))); "after_sum": norm(x + f(x));
        "parallel": x + mixer(norm(x)) + mlp(norm(x)), each with a norm of its own or both with one (one_norm);
        "one_part": x + f(norm(x)), where the layer has a mixer or an MLP alone, and the other is None.
    scaled: whether a stored number multiplies the layer's output.
    beside: a recurrent layer that reads the same as the mixer, which is attention; both outputs are added.
    """

    mixer: MixerSpec | None
    mlp: MLPSpec | ExpertsSpec | None
    norms: NormPlaces = "before"
    scaled: bool = False
    one_norm: bool = False
    beside: RecurrentSpec | None = None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The recurrent part: the mixer itself, or what stands beside attention; None if there is none."""
        return self.beside if self.mixer is None or isinstance(self.mixer, AttentionSpec) else self.mixer

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, which the caller knows to be attention."""
        assert isinstance(self.mixer, AttentionSpec), "a recurrent layer has no attention"
        return self.mixer

    @property
    def shared(self) -> MLPSpec | None:
        """The MLP that every token runs through: the only one, or that beside a mixture's experts; None if none is."""
        return self.mlp.shared if isinstance(self.mlp, ExpertsSpec) else self.mlp

    @property
    def dense(self) -> MLPSpec:
        """The MLP, which the caller knows to be dense."""
        assert isinstance(self.mlp, MLPSpec), "a mixture of experts is not one MLP"
        return self.mlp


@dataclass(frozen=True)
class TokenInputsSpec:
    """A vector of every token for every layer, which enters behind the layer's MLP (per-layer embeddings).

    With the token embedding e after its scale, the vector of layer l is
    (norm(project(e) * project_scale) + table[token] * table_scale) * sum_scale, each a part of its matrix for layer l.
    The layer adds norm(out(activation(gate(x)) * vector)) to its output x.
    width: of a vector.
    """

    width: int
    activation: str
    table_scale: float
    project_scale: float
    sum_scale: float


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder. family: only for messages; no computation depends on it.

    max_positions: longest sequence in tokens that the model was trained for.
    learned_positions: whether a table of positions is added to the embedding; position_offset is added to its index.
    embed_width: width of the token embedding, which may differ from ``width`` (OPT-350m).
    embed_scale: factor of the token embedding. embed_norm: whether a norm stands behind it.
    residual_scale: the hidden states between layers are the published model's divided by this number.
    logits_scale: factor of the logits, before logits_cap.
    logits_cap: the logits are cap * tanh(logits / cap); None: they are not capped.
    tied: whether the output head is the token embedding. head_bias: whether the output head has a bias.
    headless: whether the checkpoint may lack an output head: its configuration names a model without one. The embedding
        then stands in its place, and texts are embedded only.
    token_inputs: what every layer reads of each token besides; None: nothing.
    mtp: whether it is a draft head of another model (multi-token prediction): its first layer's input is fc(norm of a
        token's embedding, norm of a hidden state); embedding and output head are the other model's.
    """

    family: str
    vocab_size: int
    width: int
    max_positions: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    embed_width: int
    final_norm: bool = True
    learned_positions: bool = False
    position_offset: int = 0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    tied: bool = False
    embed_norm: bool = False
    head_bias: bool = False
    headless: bool = False
    token_inputs: TokenInputsSpec | None = None
    mtp: bool = False

    def __post_init__(self) -> None:
        check(self.max_positions > 0, f"max_position_embeddings={self.max_positions}")

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of every layer that has one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def plain_attention(self) -> bool:
        """Whether every layer is attention with keys and values of its own heads, without gates or sinks.

        Keys and values have one width.
        """
        return not self.recurrent and not any(a.gated or a.sinks or a.latent or a.value_dim for a in self.attentions)

    @property
    def recurrent(self) -> tuple[RecurrentSpec, ...]:
        """The recurrent part of every layer that has one."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def kv_layers(self) -> tuple[KVHeads, ...]:
        """The key heads of every layer that has keys and values of its own, in the order of the cache's layers."""
        return tuple(attention.cached for attention in self.attentions if attention.reads_layer is None)

    @property
    def places(self) -> tuple[int, ...]:
        """The number of the keys that each layer reads, among ``kv_layers``; 0 of a layer without attention."""
        places: list[int] = []
        keys = count()
        for layer in self.layers:
            if not isinstance(layer.mixer, AttentionSpec):
                places.append(0)
            else:
                source = layer.mixer.reads_layer
                places.append(next(keys) if source is None else places[source])
        return tuple(places)

    @property
    def state_places(self) -> tuple[int, ...]:
        """The number of each layer's state, among ``recurrent``; 0 of a layer without one."""
        states = count()
        return tuple(0 if layer.recurrent is None else next(states) for layer in self.layers)


def without_residual_scale(spec: DecoderSpec, scale: float) -> DecoderSpec:
    """Return a model equal to ``spec`` with x + scale * f(norm(x)) in place of x + f(norm(x)) in every layer.

    An RMS norm does not depend on the length of x, except for its epsilon, so hidden states divided by ``scale`` give
    the same outputs, and the branches need no factor. All norms must be RMS norms before their parts.
    """
    assert spec.norm.kind == "rms", "a layer norm's bias would be scaled, too"
    assert spec.final_norm, "the last hidden states would stay scaled"
    assert all(layer.norms == "before" for layer in spec.layers), "norms after a part undo its scale"
    norm = replace(spec.norm, eps=spec.norm.eps / scale**2)
    return replace(spec, norm=norm, embed_scale=spec.embed_scale / scale, residual_scale=scale)
