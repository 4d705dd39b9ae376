"""The parts of a decoder as the kernels run it: plain tensors (float32 or bfloat16) and numbers, before packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from paceline.core.cache import KVHeads
from paceline.core.recurrent_state import StateShape
from paceline.kernels.experts import Routing
from paceline.kernels.pack import Format, Weight, quantise, reorder_rows

ReadWeight: TypeAlias = Callable[[Format], Weight]
"""Reads a matrix in a format."""


class ReadMatrix(Protocol):
    """Reads a matrix while it is packed.

    ordered: whether its codes of 4 bits may have inputs in an order (``Int4Weight.order``).
    """

    @property
    def ordered(self) -> bool: ...

    def __call__(self, to: Format) -> Weight: ...

    def of_expert(self, expert: int) -> ReadMatrix:
        """Return the matrix of one expert, of those that this one has side by side."""
        ...


@dataclass(frozen=True)
class LinearWeights:
    """y = x @ weight.T + bias; weight [outputs, inputs].

    read: makes the weight in a format when it is packed; ``weight`` then only gives the shape (device "meta").
    """

    weight: Tensor
    bias: Tensor | None = None
    read: ReadWeight | None = None

    def rounded(self, to: Format) -> Weight:
        """Return the weight in a format."""
        return quantise(self.weight, to) if self.read is None else self.read(to)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> LinearWeights:
        """Return the layer with its outputs in another order. order: moves the first dimension of a tensor."""
        read, bias = self.read, None if self.bias is None else order(self.bias)
        return LinearWeights(
            order(self.weight), bias, None if read is None else lambda to: reorder_rows(read(to), order)
        )


class RecurrentMixer(Protocol):
    """A recurrent layer between its two large matrices: small weights, and the computation in float32, token by token.

    n tokens. Each kind of recurrent layer implements it (``kernels.delta``, ``mamba2``, ``short_conv``).
    """

    @property
    def gates(self) -> LinearWeights | None:
        """A small matrix beside the large ones, of the layer's input; None if this kind has none."""
        ...

    def shape(self, layers: int) -> StateShape:
        """Return what a slot keeps of ``layers`` layers like this one."""
        ...

    def split(self, projected: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the state needs of the tokens [n, input_width], and what their outputs need [n, ...].

        projected: [n, outputs of the first matrix]. gates: [n, outputs of ``gates``]; None without such a matrix.
        """
        ...

    def append(self, state: Tensor, window: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a token [...], and the state after it [*shape.state].

        state: before it. window [taps, channels]: inputs of the convolution that end with its own. gates [shape.gates].
        """
        ...

    def finish(self, mixed: Tensor, kept: Tensor) -> Tensor:
        """Return the input of the second matrix. mixed: outputs of ``append`` [n, ...]. kept: as ``split`` gave it."""
        ...


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoPE): the angle of pair i at position p is p * inverse_frequencies[i].

    With n frequencies, pair i of a head is its elements i and n + i; the elements from 2 n on are not rotated.
    Frequencies of zero leave a head as it is (layers without positions).
    scaling: factor of cos and sin.
    """

    inverse_frequencies: tuple[float, ...]
    scaling: float = 1.0

    def table(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [positions, n] at every position, float32."""
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float32)
        angles = torch.arange(positions)[:, None] * frequencies
        return angles.cos() * self.scaling, angles.sin() * self.scaling


Activation = Literal["silu", "gelu_tanh", "clamped_silu", "gelu", "relu", "relu2", "xielu"]


class ExpertsNorms(NamedTuple):
    """Separate norms [width] of a mixture of experts and of the MLP beside it; both read the hidden states.

    They stand before the router, before the experts, after the experts and after the MLP. The norm before the MLP is
    ``post_norm`` of the layer.
    """

    router: Tensor
    before: Tensor
    after: Tensor
    shared_after: Tensor


@dataclass(frozen=True)
class ExpertsWeights:
    """A mixture of experts: a token runs through a few experts, whose outputs are added.

    router: [experts, width], and one more row if a sigmoid of its score multiplies the shared MLP's output. It is kept
        in float32.
    gate_up, down: of each expert, all of one shape; as in ``LayerWeights``.
    routing: how the experts and the weights of their outputs follow from the scores.
    router_bias: added to the scores. correction: [experts], float32, added to the probabilities for the choice alone.
    factors: [experts], of the experts' outputs; None: 1. shared_scale: factor of the MLP's output, without a gate.
    norms: None: router, experts and MLP read the layer's normed hidden states, and their outputs are added.
    latent: [L, width] and [width, L], where experts read and write vectors of L: the first makes them of the layer's
        normed hidden states, the second maps the sum of the outputs back; None: experts have the model's width.
    """

    router: Tensor
    gate_up: Sequence[LinearWeights]
    down: Sequence[LinearWeights]
    routing: Routing
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    factors: Tensor | None = None
    shared_scale: float = 1.0
    norms: ExpertsNorms | None = None
    latent: tuple[LinearWeights, LinearWeights] | None = None

    @property
    def shared_gate(self) -> bool:
        """Whether the router's last row is that of the shared MLP's gate."""
        return self.router.shape[0] > len(self.down)


@dataclass(frozen=True)
class RecurrentWeights:
    """A recurrent layer: what lies between its two large matrices, and these."""

    mixer: RecurrentMixer
    first: LinearWeights
    second: LinearWeights


@dataclass(frozen=True)
class LatentWeights:
    """Latent attention (MLA), in the absorbed form of ``models.description.latent``.

    All heads read one key of a token: ``rotary_dim`` rotated elements, then its vector behind a norm, [rank]. That
    vector is also its value. The layer's qkv has the rows of the queries, or of their vector, then those of the keys'
    vector and of the rotated elements.
    query_up: makes the queries from their vector, which then has the norm ``query_norm``; None: qkv has the queries. A
        head's query is ``key_dim`` elements, then the rotated ones.
    absorb, expand: of each head: [rank, key_dim], applied to a query; [value_dim, rank], to the weighted sum of
        vectors.
    """

    rotary_dim: int
    absorb: Sequence[LinearWeights]
    expand: Sequence[LinearWeights]
    norm: Tensor
    query_up: LinearWeights | None = None
    query_norm: Tensor | None = None
    epsilon: float = 1e-6

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """The matrices that every token is multiplied by."""
        return (*self.absorb, *self.expand, *([] if self.query_up is None else [self.query_up]))


class Heads(NamedTuple):
    """Number of query heads and of key heads, and their width. value_dim: width of a value; None: the same."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int | None = None

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class TokenInputWeights:
    """What a layer adds of its token's vector: norm(out(activation(gate(x)) * vector)). norm: [width]."""

    gate: LinearWeights
    out: LinearWeights
    norm: Tensor


@dataclass(frozen=True)
class TokenTableWeights:
    """A vector of every token for every layer; ``TokenInputsSpec`` of models/description/spec.py has the formula.

    table [vocabulary, layers * width]; project [layers * width, model's width]; norm [width].
    """

    table: LinearWeights
    project: LinearWeights
    norm: Tensor
    table_scale: float
    project_scale: float
    sum_scale: float

    @property
    def width(self) -> int:
        """Width of a vector."""
        return self.norm.shape[0]


class BlockConvWeights(NamedTuple):
    """A grouped convolution over a block, around attention or an MLP (``drafters.heads.block.GroupedConvolution``).

    base [2, taps, width]; project: to [2, taps, groups]. group: channels of a group.
    """

    base: Tensor
    project: LinearWeights
    group: int


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv: the rows of all q heads, then k, then v; gate_up: the rows of the gate, then of up.

    qkv and attention_out are None in layers without attention; reads_only is then true.

    plain: whether the MLP has no gate, so that gate_up is up alone. xielu: four numbers (``gpu.steps.xielu``).
    parallel: whether the MLP reads the layer's input instead of its sum with attention's output.
    cap: attention's scores are cap * tanh(scores / cap).
    experts: a mixture of experts; gate_up and down are then an MLP that all tokens run through besides, or None.
    gated: whether qkv ends with rows of a gate of attention's output, one for each of its inputs.
    sinks: [heads], one more score of each head in attention's softmax, without a value.
    recurrent: a recurrent layer, in place of attention or beside it: both read the same, and their outputs are added.
    input_norm, post_norm: before attention and before the MLP; attention_out_norm, mlp_out_norm: after them.
    q_norm, k_norm: [head_dim], or [heads * head_dim] and [kv_heads * head_dim] for a norm over all heads together.
    rotary, scale, heads: of this layer's attention; None: the model's.
    norm_after: whether the norms of queries and keys stand behind the rotation.
    v_norm: whether values have a norm without weight over each head.
    place: number of the cache's layer that it reads; None: one after the layer before that has one.
    reads_only: whether an earlier layer writes its keys and values; qkv then has queries only.
    input: what the layer adds of its token's vector (``NativeSpec.inputs``).
    scale_out: [1], a factor of the layer's output; the last part that is added must have a norm behind it.
    latent: of latent attention, whose heads are those of the absorbed form; None: keys and values of its own heads.
    looks_ahead: whether the tokens of a block see those behind them. convs: around attention, and around the MLP.
    """

    qkv: LinearWeights | None
    attention_out: LinearWeights | None
    gate_up: LinearWeights | None
    down: LinearWeights | None
    input_norm: Tensor | None = None
    post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None
    gated: bool = False
    recurrent: RecurrentWeights | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    rotary: Rotary | None = None
    scale: float | None = None
    activation: Activation = "silu"
    experts: ExpertsWeights | None = None
    sinks: Tensor | None = None
    heads: Heads | None = None
    norm_after: bool = False
    v_norm: bool = False
    place: int | None = None
    reads_only: bool = False
    input: TokenInputWeights | None = None
    scale_out: Tensor | None = None
    latent: LatentWeights | None = None
    plain: bool = False
    xielu: Tensor | None = None
    parallel: bool = False
    cap: float | None = None
    looks_ahead: bool = False
    convs: tuple[BlockConvWeights, BlockConvWeights] | None = None

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """The matrices that every token is multiplied by."""
        of_latent = () if self.latent is None else self.latent.linears
        of_states = () if self.recurrent is None else (self.recurrent.first, self.recurrent.second)
        of_experts = (self.experts.latent or ()) if self.experts is not None else ()
        linears = (self.qkv, self.attention_out, *of_states, *of_latent, *of_experts, self.gate_up, self.down)
        return tuple(linear for linear in linears if linear is not None)


@dataclass(frozen=True)
class FusionWeights:
    """Extra weights of a head that reads its target's hidden states; its first layer's qkv has twice the inputs.

    Those of a block drafter have as many as the other layers.

    fuse: all hidden states, concatenated, to the width.
    tap_norms: [taps, target width], or joint_norm [taps * target width]: norms applied before fuse.
    hidden_norm: [width], norm of the fused input beside the embedding.
    targets: [outputs of the head] int64, ascending: the target's token id of each of the head's tokens.
    vocabulary: size of the target's vocabulary, all of which the head reads.
    embedding_norm: [width], of a model's own head (MTP): ``fuse`` then maps the normed embedding, and the normed state
        behind it, to the first layer's input, and hidden states are kept as they are.
    block: whether it is a block drafter's: the first layer is as a model's, and ``hidden_norm`` is of the fused states.
    mask: [width], with mask_token: stand for draft tokens that do not exist yet; None: the head reads its own draft
        tokens.
    """

    fuse: LinearWeights
    hidden_norm: Tensor
    targets: Tensor
    vocabulary: int
    tap_count: int
    target_width: int
    tap_norms: Tensor | None = None
    joint_norm: Tensor | None = None
    mask: Tensor | None = None
    mask_token: int = 0
    normed_residual: bool = False
    normed_state: bool = False
    embedding_norm: Tensor | None = None
    block: bool = False


@dataclass(frozen=True)
class Division:
    """A model divided among ranks: the columns that each of them computes, as edges [ranks + 1].

    Rank i computes columns edges[i] to edges[i + 1] - 1. rank: the one whose weights a spec has.
    hidden: of the hidden states. tokens: of the logits, from multiples of 32 on; every rank has the whole output head.
    attended, activated: of what the second matrices of attention and of the MLP read, layer by layer.
    memory: uint8 [``native.exchange_bytes``], mapped by all ranks, at first zeros.
    patience: seconds to wait for another rank within a pass.
    """

    rank: int
    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    attended: tuple[tuple[int, ...], ...]
    activated: tuple[tuple[int, ...], ...]
    memory: Tensor
    patience: float = math.inf

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.hidden) - 1

    @property
    def numbers_at_once(self) -> int:
        """Numbers that a rank writes before others read them: of 64 tokens, or of one token's logits."""
        widest = max(map(_widest, (self.hidden, *self.attended, *self.activated)))
        return max(64 * widest, _widest(self.tokens))


def _widest(edges: Sequence[int]) -> int:
    return max(last - first for first, last in pairwise(edges))


@dataclass(frozen=True)
class NativeSpec:
    """A whole decoder. head None: tied to the embedding [vocab, width].

    centred: whether the norms of the hidden states are layer norms; their tensors are then weight and bias [2, width].
    positions: [max_positions, width], added to the embedding. embedding_norm: behind the embedding.
    rotary: of the layers that have none of their own.
    embed_scale: factor of the token embedding. tap_scale: factor of the hidden states that heads read.
    heads, kv_heads, head_dim: of the layers that have none of their own.
    logits_cap: the logits are cap * tanh(logits / cap); None: they are not capped.
    read_from: key heads of the layers of another model's cache, which all layers read; None: the model has its own.
    ahead: how many positions further than its last key a token stands: its rotation, not what it sees.
    division: of a rank's part of a model, whose layers have the heads and the outputs of that rank.
    ordered: whether matrices may be read whose 4-bit codes have inputs in an order (``Int4Weight.order``). In int4
        every matrix is then packed with an order, so that offsets follow from shapes.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rotary: Rotary
    embedding: Tensor
    final_norm: Tensor
    layers: Sequence[LayerWeights]
    head: LinearWeights | None = None
    epsilon: float = 1e-6
    embed_scale: float = 1.0
    tap_scale: float = 1.0
    fusion: FusionWeights | None = None
    inputs: TokenTableWeights | None = None
    logits_cap: float | None = None
    read_from: tuple[KVHeads, ...] | None = None
    ahead: int = 0
    centred: bool = False
    positions: Tensor | None = None
    embedding_norm: Tensor | None = None
    division: Division | None = None
    ordered: bool = False

    @property
    def kv_layers(self) -> tuple[KVHeads, ...]:
        """The key heads of every layer of the cache."""
        if self.read_from is not None:
            return self.read_from
        writers = (layer for layer in self.layers if not layer.reads_only)
        return tuple(self._cached(layer) for layer in writers)

    def _cached(self, layer: LayerWeights) -> KVHeads:
        heads = self.heads_of(layer)
        if layer.latent is None:
            return KVHeads(heads.kv_heads, heads.dim, heads.value_dim)
        return KVHeads(1, heads.dim, layer.latent.norm.shape[0], values_in_keys=True)

    @property
    def places(self) -> tuple[int, ...]:
        """The number of the cache's layer that each layer reads."""
        written = 0
        places = []
        for layer in self.layers:
            places.append(written if layer.place is None else layer.place)
            written += not layer.reads_only
        return tuple(places)

    def heads_of(self, layer: LayerWeights) -> Heads:
        """Heads of a layer's attention."""
        return layer.heads or Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def states(self) -> StateShape | None:
        """What a slot keeps of the recurrent layers, which have one shape; None if all layers are attention."""
        mixers = [layer.recurrent.mixer for layer in self.layers if layer.recurrent is not None]
        return mixers[0].shape(len(mixers)) if mixers else None

    def scale_of(self, layer: LayerWeights) -> float:
        """Scale of a layer's attention."""
        return self.heads_of(layer).dim ** -0.5 if layer.scale is None else layer.scale

    def norm_all(self, layer: LayerWeights) -> bool:
        """Whether a layer normalises queries and keys over all heads together."""
        return layer.q_norm is not None and layer.q_norm.numel() > self.heads_of(layer).dim
