"""The layers of a native decoder in torch: attention, MLPs, and inputs by token.

Internally the tokens of all rows form one matrix [N, width], N = B * L, so each linear layer is one matrix product.
Shapes: B rows, L new tokens per row, H heads, G key/value heads, D head width, V width of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.eight_bits import key_balance
from paceline.kernels.attention.base import Attend, AttendAgain, AttendPacked, AttentionTerms, HasStates
from paceline.kernels.experts import ExpertMatrices, Mixture
from paceline.kernels.gpu.state import Norm, PackedHeads
from paceline.kernels.gpu.steps import ACTIVATIONS, LayerSteps, xielu
from paceline.kernels.spec import LinearWeights, ReadMatrix, RecurrentMixer
from paceline.models.description.latent import by_head, queries_in_order
from paceline.models.description.mixers import in_order, mixer_of
from paceline.models.description.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    RecurrentSpec,
    Rotary,
    TokenInputsSpec,
)
from paceline.models.description.weights import BESIDE, EXPERTS_NORMS, NORMS
from paceline.models.torch.experts import Experts
from paceline.models.torch.latent import LatentAttention, LatentMatrices
from paceline.models.torch.linear import Linear, LinearFactory, dense
from paceline.models.torch.rotary import Rotation, rotate


class WeightSource:
    """Makes the parts of a layer from the named weights, and records the tensors in use, except those of linears."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        linear: LinearFactory,
        readers: Mapping[str, ReadMatrix] | None = None,
        experts: LinearFactory | None = None,
        exact: LinearFactory = dense,
    ) -> None:
        """readers: read matrices in a format, by the names of weights, which then only give the shapes.

        experts: factory of the matrices of experts; None: ``linear``. exact: of those that are never rounded.
        """
        self.exact = exact
        self._experts = linear if experts is None else experts
        self._spec, self._weights, self._linear, self._readers = spec, weights, linear, readers or {}
        self.kept: list[Tensor] = []

    def find(self, name: str) -> Tensor | None:
        tensor = self._weights.get(name)
        if tensor is not None:
            self.kept.append(tensor)
        return tensor

    def linear(self, name: str, by: LinearFactory | None = None) -> Linear:
        """Return a linear layer. by: its factory; None: that of all layers."""
        return (self._linear if by is None else by)(self._stored(name))

    def qkv(self, spec: AttentionSpec, layer: str) -> Linear:
        """Return the linear layer of queries, keys and values, with the gates of gated attention behind them."""
        return self._linear(in_order(self._stored(f"{layer}.qkv"), spec))

    def key_balance(self, spec: AttentionSpec, layer: str) -> Tensor | None:
        """Return the layer's ``AttentionTerms.balance``; None where keys have no bias, or a norm behind it."""
        bias = self._weights.get(f"{layer}.qkv.bias")
        shared = any(each.reads_layer is not None for each in self._spec.attentions)
        if bias is None or spec.qk_norm is not None or shared:
            return None
        ordered = in_order(LinearWeights(bias[:, None]), spec).weight[:, 0]
        heads = ordered[: (spec.heads + spec.kv_heads) * spec.head_dim].view(-1, spec.head_dim)
        rotated = 0 if spec.rotary is None else 2 * len(spec.rotary.inverse_frequencies)
        return key_balance(heads[spec.heads :], rotated)

    def latent(self, spec: AttentionSpec, layer: str, place: int, rotary: int) -> LatentAttention:
        """Return a layer of latent attention. place: its layer of the cache. rotary: number of its positions."""
        ordered = [in_order(self._stored(f"{layer}.qkv"), spec)]
        if f"{layer}.q_b.weight" in self._weights:
            ordered.append(queries_in_order(self._stored(f"{layer}.q_b"), spec))
        first, *query_up = map(self._linear, ordered)
        both, norm = self.find(f"{layer}.kv_b.weight"), self.find(f"{layer}.kv_a_norm.weight")
        assert both is not None
        assert norm is not None
        matrices = LatentMatrices(*by_head(both, spec), norm, self.find(f"{layer}.q_a_norm.weight"))
        linears = first, query_up[0] if query_up else None, self.linear(f"{layer}.o")
        return LatentAttention(spec, place, rotary, linears, matrices)

    def _stored(self, name: str) -> LinearWeights:
        weight = f"{name}.weight"
        return LinearWeights(self._weights[weight], self._weights.get(f"{name}.bias"), self._readers.get(weight))

    def experts(self, name: str) -> ExpertMatrices:
        """Return a matrix of all experts, as one linear layer keeps it: weights [E, N, K], biases [E, N]."""
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        reader, (count, outputs, _) = self._readers.get(f"{name}.weight"), weight.shape
        bias = None if bias is None else bias.flatten()
        if reader is None:
            linear = self._experts(LinearWeights(weight.flatten(0, 1), bias))
            self.kept += linear.tensors()
            return ExpertMatrices(linear.weight, linear.bias, count, outputs)
        of_experts = (
            self._experts(LinearWeights(weight[expert], read=reader.of_expert(expert))) for expert in range(count)
        )
        first, *others = (linear.weight for linear in of_experts if not isinstance(linear.weight, Tensor))
        stacked = first.stacked(others)
        self.kept += (*stacked.tensors(), *(() if bias is None else (bias,)))
        return ExpertMatrices(stacked, bias, count, outputs)

    def mixer(self, spec: RecurrentSpec, name: str) -> RecurrentMixer:
        """Return a recurrent layer between its matrices. name: of its weights, up to the last point."""
        mixer = mixer_of(spec, name, self._weights)
        self.kept += [part for part in vars(mixer).values() if isinstance(part, Tensor)]
        self.kept += [] if mixer.gates is None else [mixer.gates.weight]
        return mixer

    def norm(self, name: str) -> Norm:
        norm, weight = self._spec.norm, self.find(f"{name}.weight")
        if norm.kind == "rms":
            return Norm(self._spec.width, norm.eps, weight)
        return Norm(self._spec.width, norm.eps, weight, self.find(f"{name}.bias"), centred=True)

    def qk_norm(self, spec: AttentionSpec, layer: str) -> Tensor | None:
        """Return the weights of the query and key norms, one row per head [H + G, D]; None if there are none.

        Layers that read another layer's keys have rows for their queries only.
        """
        q, k = self.find(f"{layer}.q_norm.weight"), self.find(f"{layer}.k_norm.weight")
        if spec.qk_norm is not None and not spec.qk_affine:
            return self._weights["embed.weight"].new_ones(spec.heads + spec.kv_heads, spec.head_dim)
        if q is None:
            return None
        if k is None:
            return q.view(-1, spec.head_dim).expand(spec.heads, -1)
        if spec.qk_norm == "all":
            return torch.cat((q, k)).view(-1, spec.head_dim)
        return torch.cat((q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)))


@dataclass(frozen=True)
class ForwardContext:
    """Arguments common to all layers of a forward pass. rows: B, for N = B * L tokens.

    rotations: by number of the rotary positions, in the order of ``Transformer.rotaries``.
    token_inputs: [layers, N, width], or None; see ``TokenInputsSpec``.
    """

    rows: int
    rotations: Sequence[Rotation]
    attend: Attend
    steps: LayerSteps
    token_inputs: Tensor | None = None


class _Attention:
    linears = ("qkv", "output")

    def __init__(
        self, spec: AttentionSpec, parts: WeightSource, index: int, place: int, rotaries: Mapping[Rotary, int]
    ) -> None:
        """index: of the layer. place: its layer of the cache. rotaries: the numbers of rotary positions."""
        layer = f"layers.{index}"
        self.spec, self.place = spec, place
        self.rotary = None if spec.rotary is None else rotaries[spec.rotary]
        own = spec.kv_heads if spec.reads_layer is None else 0
        self.split = [spec.heads, own]  # heads of queries, and of keys and values
        self.widths = [(spec.heads + own) * spec.head_dim, own * spec.value_width]  # of queries and keys, and of values
        kept_apart = spec.norm_after or spec.v_norm or spec.value_dim is not None
        self.packs = spec.qk_norm != "all" and not kept_apart and spec.reads_layer is None
        self.qkv, self.output = parts.qkv(spec, layer), parts.linear(f"{layer}.o")
        self.qk_norm = parts.qk_norm(spec, layer)
        sinks, balance = parts.find(f"{layer}.sinks.weight"), parts.key_balance(spec, layer)
        self.terms = AttentionTerms(spec.scale, spec.window, spec.cap, sinks, balance)

    def __call__(self, x: Tensor, forward: ForwardContext) -> Tensor:
        """Attention over the cache: x [N, width] -> [N, width]."""
        spec, attend = self.spec, forward.attend
        projected = self.qkv(x)
        qkv, gate = projected.view(forward.rows, -1, projected.shape[-1]).tensor_split([sum(self.widths)], dim=2)
        rotation = None if self.rotary is None else forward.rotations[self.rotary]
        if isinstance(attend, AttendPacked) and self.packs:
            heads = qkv.view(*qkv.shape[:2], -1, spec.head_dim)
            packed = PackedHeads(heads, spec.heads, spec.kv_heads, rotation, self.qk_norm, spec.qk_norm_eps)
            out = attend.packed(self.place, packed, self.terms)
        else:
            q, k, v = (part.transpose(1, 2) for part in self._heads(qkv, rotation))
            if spec.reads_layer is None:
                out = attend(self.place, q, k, v, self.terms)
            else:
                assert isinstance(attend, AttendAgain), "a cache keeps what layers share"
                out = attend.again(self.place, q, self.terms)
        attended = out.transpose(1, 2).reshape(x.shape[0], -1)
        return self.output(attended * gate.reshape_as(attended).sigmoid() if spec.gated else attended)

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [B, L, outputs] -> q [B, L, H, D], k [B, L, G, D], v [B, L, G, V], normed and rotated."""
        shape, (heads, kv_heads) = qkv.shape[:2], self.split
        qk, v = qkv.split_with_sizes(self.widths, dim=2)
        qk, v = qk.view(*shape, heads + kv_heads, self.spec.head_dim), v.view(*shape, kv_heads, self.spec.value_width)
        if self.qk_norm is not None and not self.spec.norm_after:
            qk = self._normed(qk, self.qk_norm)
        if rotation is not None:
            qk = rotate(qk, rotation)
        if self.qk_norm is not None and self.spec.norm_after:
            qk = self._normed(qk, self.qk_norm)
        if self.spec.v_norm:
            v = functional.rms_norm(v, v.shape[-1:], None, self.spec.qk_norm_eps)
        q, k = qk.split_with_sizes([heads, kv_heads], dim=2)
        return q, k, v

    def _normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Norm queries and keys [B, L, H + G, D]."""
        eps = self.spec.qk_norm_eps
        if self.spec.qk_norm == "head":
            return functional.rms_norm(qk, qk.shape[-1:], None, eps) * weight
        parts = qk.split_with_sizes(self.split, dim=2)
        return torch.cat([functional.rms_norm(part, part.shape[-2:], None, eps) for part in parts], 2) * weight


class RecurrentLayer:
    """A recurrent layer (``RecurrentMixer``) between its matrices."""

    linears = ("qkv", "output")

    def __init__(self, spec: RecurrentSpec, parts: WeightSource, name: str, place: int) -> None:
        """name: of its weights, up to the last point. place: of its state."""
        self.place, self.mixer = place, parts.mixer(spec, name)
        self.gates = None if self.mixer.gates is None else parts.exact(self.mixer.gates)
        self.qkv, self.output = parts.linear(f"{name}qkv"), parts.linear(f"{name}o")

    def __call__(self, x: Tensor, forward: ForwardContext) -> Tensor:
        """Run the rows' tokens through their states: x [N, width] -> [N, width]."""
        attend = forward.attend
        assert isinstance(attend, HasStates), "a cache of the model has its states"
        assert attend.states is not None
        gates = None if self.gates is None else self.gates(x)
        return self.output(forward.steps.recurrent(self.mixer, attend.states, self.place, self.qkv(x), gates))


class GatedMLP:
    """A gated MLP whose gate and up projections are one matrix."""

    linears = ("gate_up", "down")

    def __init__(self, spec: MLPSpec, parts: WeightSource, layer: str) -> None:
        self.activation = spec.activation
        self.gate_up, self.down = parts.linear(f"{layer}.gate_up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(steps.gate(self.gate_up(x), self.activation))


class _PlainMLP:
    linears = ("up", "down")

    def __init__(self, spec: MLPSpec, parts: WeightSource, layer: str) -> None:
        shape = parts.find(f"{layer}.xielu.weight")
        self.activation = ACTIVATIONS[spec.activation] if shape is None else partial(xielu, shape=shape)
        self.up, self.down = parts.linear(f"{layer}.up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(self.activation(self.up(x)))


def _dense(spec: MLPSpec, parts: WeightSource, layer: str) -> GatedMLP | _PlainMLP:
    return (GatedMLP if spec.gated else _PlainMLP)(spec, parts, layer)


def _mlp(spec: LayerSpec, parts: WeightSource, layer: str) -> GatedMLP | _PlainMLP | Experts | None:
    if spec.mlp is None:
        return None
    if isinstance(spec.mlp, ExpertsSpec):
        return _experts(spec.mlp, parts, layer)
    return _dense(spec.mlp, parts, layer)


def _experts(spec: ExpertsSpec, parts: WeightSource, layer: str) -> Experts:
    first = parts.experts(f"{layer}.experts_{'gate_up' if spec.expert.gated else 'up'}")
    mixture = Mixture(
        spec.routing,
        first,
        parts.experts(f"{layer}.experts_down"),
        spec.expert.activation,
        spec.expert.gated,
        parts.find(f"{layer}.router_correction.weight"),
        parts.find(f"{layer}.experts_scale.weight"),
        spec.scores_scale,
        spec.output_scale,
    )
    gate = parts.linear(f"{layer}.shared_gate", parts.exact) if spec.shared_gate else None
    shared = None if spec.shared is None else (_dense(spec.shared, parts, layer), gate)
    norms = {name: parts.norm(f"{layer}.{name}") for name in (EXPERTS_NORMS if spec.own_norms else ())}
    router = parts.linear(f"{layer}.router", parts.exact)  # a rounded one would choose other experts
    maps = f"{layer}.latent_in", f"{layer}.latent_out"
    latent = None if spec.latent is None else (parts.linear(maps[0]), parts.linear(maps[1]))
    return Experts(spec, router, mixture, shared, norms, latent)


class _TokenInput:
    """What a layer adds of its token's vector (``TokenInputsSpec``)."""

    linears = ("input_gate", "input_out")

    def __init__(self, spec: TokenInputsSpec, parts: WeightSource, layer: str) -> None:
        self.activation = ACTIVATIONS[spec.activation]
        self.input_gate, self.input_out = parts.linear(f"{layer}.input_gate"), parts.linear(f"{layer}.input_out")
        self.norm = parts.norm(f"{layer}.input_out_norm")

    def __call__(self, x: Tensor, vector: Tensor) -> Tensor:
        """x [N, width], vector [N, inputs] -> x with the token's part added."""
        return x + self.norm(self.input_out(self.activation(self.input_gate(x)) * vector))


class TokenInputs:
    """The vectors of every token for every layer (``TokenInputsSpec``)."""

    linears = ("project",)

    def __init__(self, spec: TokenInputsSpec, parts: WeightSource, dtype: torch.dtype) -> None:
        self.spec, self.norm = spec, parts.find("input_norm.weight")
        self.table, self.project = parts.find("input_table.weight"), parts.linear("input_project")
        self._table_scale = torch.tensor(spec.table_scale, dtype=dtype).item()  # rounded as transformers does

    def __call__(self, tokens: Tensor, x: Tensor, eps: float) -> Tensor:
        """Tokens [N], their embeddings x [N, width] -> [layers, N, inputs]."""
        assert self.table is not None
        spec = self.spec
        projected = (self.project(x) * spec.project_scale).view(len(x), -1, spec.width)
        normed = functional.rms_norm(projected, (spec.width,), self.norm, eps)
        found = functional.embedding(tokens, self.table) * self._table_scale
        return ((normed + found.view_as(normed)) * spec.sum_scale).transpose(0, 1)


def _attention(
    spec: AttentionSpec, parts: WeightSource, index: int, place: int, rotaries: Mapping[Rotary, int]
) -> _Attention | LatentAttention:
    """Return the attention of layer ``index``; other arguments as for ``DecoderLayer``."""
    if spec.latent is None:
        return _Attention(spec, parts, index, place, rotaries)
    assert spec.rotary is not None
    return parts.latent(spec, f"layers.{index}", place, rotaries[spec.rotary])


class DecoderLayer:
    """One layer: attention, a recurrent layer or both, then an MLP or a mixture of experts, with norms and sums."""

    def __init__(
        self, decoder: DecoderSpec, parts: WeightSource, index: int, place: int, rotaries: Mapping[Rotary, int]
    ) -> None:
        """index: of the layer. place: see ``DecoderSpec.places``. rotaries: the numbers of rotary positions."""
        spec, name = decoder.layers[index], f"layers.{index}"
        self.spec, self.index = spec, index
        self.mixers: list[_Attention | LatentAttention | RecurrentLayer] = []
        if isinstance(spec.mixer, AttentionSpec):
            self.mixers.append(_attention(spec.mixer, parts, index, place, rotaries))
        if spec.recurrent is not None:
            prefix = f"{name}.{BESIDE if spec.beside else ''}"
            self.mixers.append(RecurrentLayer(spec.recurrent, parts, prefix, decoder.state_places[index]))
        self.norms = {norm: parts.norm(f"{name}.{norm}") for norm in NORMS[spec.norms]}
        self.attention_out_norm, self.mlp_out_norm = self.norms.get("attn_out_norm"), self.norms.get("mlp_out_norm")
        self.mlp = _mlp(spec, parts, name)
        self.input = None if decoder.token_inputs is None else _TokenInput(decoder.token_inputs, parts, name)
        self.scale = parts.find(f"{name}.scale.weight")
        shared = self.mlp.shared if isinstance(self.mlp, Experts) else None
        beside = shared if isinstance(shared, GatedMLP | _PlainMLP) else None
        of_layer = (*self.mixers, self.mlp, beside, self.input)
        self.owners = tuple(part for part in of_layer if part is not None)  # of linear layers

    @property
    def attention(self) -> _Attention:
        """The mixer, which the caller knows to be attention."""
        mixer = self.mixers[0]
        assert isinstance(mixer, _Attention), "a recurrent layer has no attention"
        return mixer

    @property
    def entry(self) -> Norm | None:
        """The norm of the layer's input; None if the layer reads the hidden states themselves."""
        return None if self.spec.norms == "after_sum" else self.norms.get("attn_norm")

    def __call__(
        self, x: Tensor, normed: Tensor, forward: ForwardContext, following: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer: hidden states x and its input, both [N, width] -> both for the next layer.

        The input is the norm ``entry`` of x, or x if there is none.
        following: the norm after this layer, which is the next layer's first or the final one; None if there is none.
        """
        steps = forward.steps
        if self.mlp is None:
            return _add(steps, x, self._mixed(normed, forward), following)
        if not self.mixers:
            return _add(steps, x, self.mlp(normed, steps), following)
        if self.spec.norms == "after_sum":
            x = steps.add_norm(x, self._mixed(x, forward), self.norms["attn_norm"])[1]
            x = steps.add_norm(x, self.mlp(x, steps), self.norms["mlp_norm"])[1]
            return x, x
        out = self._mixed(normed, forward)
        if self.spec.norms == "parallel":
            return _add(steps, x + out, self.mlp(self.norms["mlp_norm"](x), steps), following)
        if self.attention_out_norm is not None:
            out = self.attention_out_norm(out)
        x, normed = _add(steps, x, out, self.norms.get("mlp_norm"))
        mlp = self.mlp
        out = mlp.with_own_norms(x, normed, steps) if isinstance(mlp, Experts) and mlp.norms else mlp(normed, steps)
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        if self.input is None and self.scale is None:
            return _add(steps, x, out, following)
        x = self._end(x + out, forward)
        return x, x if following is None else following(x)

    def _mixed(self, x: Tensor, forward: ForwardContext) -> Tensor:
        """Return the sum of the mixers' outputs [N, width] of x [N, width]."""
        first, *others = (mixer(x, forward) for mixer in self.mixers)
        return sum(others, first)

    def _end(self, x: Tensor, forward: ForwardContext) -> Tensor:
        """Add the token's vector to the layer's output x [N, width], and scale it."""
        if self.input is not None:
            assert forward.token_inputs is not None
            x = self.input(x, forward.token_inputs[self.index])
        return x if self.scale is None else x * self.scale


def _add(steps: LayerSteps, x: Tensor, added: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the sum of x and added [N, width], and its norm, or twice the sum if there is no norm."""
    if norm is not None:
        return steps.add_norm(x, added, norm)
    total = x + added
    return total, total
