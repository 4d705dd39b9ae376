"""One decoder for all native families, as their description asks for it.

Internally the tokens of all rows form one matrix [N, width], N = B * L, so each linear layer is one matrix product.
Shapes: B rows, L new tokens per row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.attention.base import Attend, AttendAgain, AttendPacked
from paceline.kernels.gpu.state import Norm, PackedHeads
from paceline.kernels.gpu.steps import ACTIVATIONS, LayerSteps, steps_for
from paceline.models.base import HiddenStates, RowAdapters, check_taps
from paceline.models.description import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    Rotary,
    TokenInputsSpec,
)
from paceline.models.experts import Experts
from paceline.models.linear import Dense, Linear, LinearFactory
from paceline.models.short_head import PassBytes, TorchShortHead
from paceline.models.weights import NORMS

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [B, L, 1, R]: the first R of a head's D elements turn


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + R/2) of x [B, L, heads, D] -> the same shape. The sine includes the sign."""
    cos, sin = rotation
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rotation), x[..., rotated:]), -1)
    return torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin)


class RotaryAngles:
    """Computes cos and sin of the rotary angles: positions [B, L] -> two tensors [B, L, 1, R]."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=device)
        self._frequencies = torch.cat((-frequencies, frequencies))  # sin is odd: this gives the signs of rotate-half
        self._scaling, self._dtype = rotary.scaling, dtype

    def __call__(self, positions: Tensor) -> Rotation:
        angles = positions[:, :, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(self._dtype), sin.to(self._dtype)


class _WeightSource:
    """Makes the parts of a layer from the named weights, and records the tensors in use, except those of linears."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], linear: LinearFactory) -> None:
        self._spec, self._weights, self._linear = spec, weights, linear
        self.kept: list[Tensor] = []

    def find(self, name: str) -> Tensor | None:
        tensor = self._weights.get(name)
        if tensor is not None:
            self.kept.append(tensor)
        return tensor

    def linear(self, name: str) -> Linear:
        return self._linear(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

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
        if q is None:
            return None
        if k is None:
            return q.view(-1, spec.head_dim).expand(spec.heads, -1)
        if spec.qk_norm == "all":
            return torch.cat((q, k)).view(-1, spec.head_dim)
        return torch.cat((q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)))


@dataclass(frozen=True)
class _ForwardContext:
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

    def __init__(self, spec: AttentionSpec, parts: _WeightSource, index: int, place: int, rotary: int | None) -> None:
        """index: of the layer. place: its layer of the cache. rotary: number of its rotary positions; None: none."""
        layer = f"layers.{index}"
        self.spec, self.place, self.rotary = spec, place, rotary
        self.split = [spec.heads, spec.kv_heads, spec.kv_heads] if spec.reads_layer is None else [spec.heads, 0, 0]
        self.packs = spec.qk_norm != "all" and not spec.v_norm and spec.reads_layer is None
        self.qkv, self.output = parts.linear(f"{layer}.qkv"), parts.linear(f"{layer}.o")
        self.qk_norm = parts.qk_norm(spec, layer)

    def __call__(self, x: Tensor, forward: _ForwardContext) -> Tensor:
        """Attention over the cache: x [N, width] -> [N, width]."""
        spec, attend = self.spec, forward.attend
        qkv = self.qkv(x).view(forward.rows, -1, sum(self.split), spec.head_dim)
        rotation = None if self.rotary is None else forward.rotations[self.rotary]
        if isinstance(attend, AttendPacked) and self.packs:
            packed = PackedHeads(qkv, spec.heads, spec.kv_heads, rotation, self.qk_norm, spec.qk_norm_eps)
            out = attend.packed(self.place, packed, scale=spec.scale, window=spec.window)
        else:
            q, k, v = (part.transpose(1, 2) for part in self._heads(qkv, rotation))
            if spec.reads_layer is None:
                out = attend(self.place, q, k, v, scale=spec.scale, window=spec.window)
            else:
                assert isinstance(attend, AttendAgain), "a cache keeps what layers share"
                out = attend.again(self.place, q, scale=spec.scale, window=spec.window)
        return self.output(out.transpose(1, 2).reshape(x.shape[0], -1))

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [B, L, H + 2G, D] -> q [B, L, H, D], k, v [B, L, G, D], with norms and rotation applied."""
        heads, kv_heads, _ = self.split
        qk, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=2)
        if self.qk_norm is not None:
            qk = self._normed(qk, self.qk_norm)
        if rotation is not None:
            qk = rotate(qk, rotation)
        if self.spec.v_norm:
            v = functional.rms_norm(v, v.shape[-1:], None, self.spec.qk_norm_eps)
        q, k = qk.split_with_sizes([heads, kv_heads], dim=2)
        return q, k, v

    def _normed(self, qk: Tensor, weight: Tensor) -> Tensor:
        """Norm queries and keys [B, L, H + G, D]."""
        eps = self.spec.qk_norm_eps
        if self.spec.qk_norm == "head":
            return functional.rms_norm(qk, qk.shape[-1:], None, eps) * weight
        parts = qk.split_with_sizes(self.split[:2], dim=2)
        return torch.cat([functional.rms_norm(part, part.shape[-2:], None, eps) for part in parts], 2) * weight


class _GatedMLP:
    linears = ("gate_up", "down")

    def __init__(self, spec: MLPSpec, parts: _WeightSource, layer: str) -> None:
        self.activation = spec.activation
        self.gate_up, self.down = parts.linear(f"{layer}.gate_up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(steps.gate(self.gate_up(x), self.activation))


class _PlainMLP:
    linears = ("up", "down")

    def __init__(self, spec: MLPSpec, parts: _WeightSource, layer: str) -> None:
        self.activation = ACTIVATIONS[spec.activation]
        self.up, self.down = parts.linear(f"{layer}.up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(self.activation(self.up(x)))


def _mlp(spec: LayerSpec, parts: _WeightSource, layer: str) -> _GatedMLP | _PlainMLP | Experts:
    if isinstance(spec.mlp, ExpertsSpec):
        names = [f"experts_{part}.{kind}" for part in ("gate_up", "down") for kind in ("weight", "bias")]
        stacked = {name: tensor for name in names if (tensor := parts.find(f"{layer}.{name}")) is not None}
        shared = None if spec.mlp.shared is None else _GatedMLP(spec.mlp.shared, parts, layer)
        gate = parts.linear(f"{layer}.shared_gate") if spec.mlp.shared_gate else None
        return Experts(spec.mlp, parts.linear(f"{layer}.router"), stacked, shared, gate)
    return (_GatedMLP if spec.mlp.gated else _PlainMLP)(spec.mlp, parts, layer)


class _TokenInput:
    """What a layer adds of its token's vector (``TokenInputsSpec``)."""

    linears = ("input_gate", "input_out")

    def __init__(self, spec: TokenInputsSpec, parts: _WeightSource, layer: str) -> None:
        self.activation = ACTIVATIONS[spec.activation]
        self.input_gate, self.input_out = parts.linear(f"{layer}.input_gate"), parts.linear(f"{layer}.input_out")
        self.norm = parts.norm(f"{layer}.input_out_norm")

    def __call__(self, x: Tensor, vector: Tensor) -> Tensor:
        """x [N, width], vector [N, inputs] -> x with the token's part added."""
        return x + self.norm(self.input_out(self.activation(self.input_gate(x)) * vector))


class _TokenInputs:
    """The vectors of every token for every layer (``TokenInputsSpec``)."""

    linears = ("project",)

    def __init__(self, spec: TokenInputsSpec, parts: _WeightSource, dtype: torch.dtype) -> None:
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


class _Layer:
    def __init__(self, decoder: DecoderSpec, parts: _WeightSource, index: int, place: int, rotary: int | None) -> None:
        spec, name = decoder.layers[index], f"layers.{index}"
        self.spec, self.index = spec, index
        self.attention = _Attention(spec.attention, parts, index, place, rotary)
        self.norms = {norm: parts.norm(f"{name}.{norm}") for norm in NORMS[spec.norms]}
        self.attention_out_norm, self.mlp_out_norm = self.norms.get("attn_out_norm"), self.norms.get("mlp_out_norm")
        self.mlp = _mlp(spec, parts, name)
        self.input = None if decoder.token_inputs is None else _TokenInput(decoder.token_inputs, parts, name)
        self.scale = parts.find(f"{name}.scale.weight")
        shared = [self.mlp.shared] if isinstance(self.mlp, Experts) and isinstance(self.mlp.shared, _GatedMLP) else []
        inputs = [] if self.input is None else [self.input]
        self.owners = (self.attention, self.mlp, *shared, *inputs)  # of linear layers

    @property
    def entry(self) -> Norm | None:
        """The norm of the layer's input; None if the layer reads the hidden states themselves."""
        return None if self.spec.norms == "after_sum" else self.norms.get("attn_norm")

    def __call__(
        self, x: Tensor, normed: Tensor, forward: _ForwardContext, following: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer: hidden states x and its input, both [N, width] -> both for the next layer.

        The input is the norm ``entry`` of x, or x if there is none.
        following: the norm after this layer, which is the next layer's first or the final one; None if there is none.
        """
        steps = forward.steps
        if self.spec.norms == "after_sum":
            x = steps.add_norm(x, self.attention(x, forward), self.norms["attn_norm"])[1]
            x = steps.add_norm(x, self.mlp(x, steps), self.norms["mlp_norm"])[1]
            return x, x
        out = self.attention(normed, forward)
        if self.attention_out_norm is not None:
            out = self.attention_out_norm(out)
        x, normed = _add(steps, x, out, self.norms.get("mlp_norm"))
        out = self.mlp(normed, steps)
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        if self.input is None and self.scale is None:
            return _add(steps, x, out, following)
        x = self._end(x + out, forward)
        return x, x if following is None else following(x)

    def _end(self, x: Tensor, forward: _ForwardContext) -> Tensor:
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


_KV = "self_attn.k_proj", "self_attn.v_proj"


def _split(linear: Linear, outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Split a fused linear layer: weight and bias of each matrix. outputs: name -> number of outputs, in order."""
    assert isinstance(linear, Dense), "the weights are not packed"
    kinds = {"weight": linear.weight, "bias": linear.bias}
    parts = {kind: torch.split(whole, list(outputs.values())) for kind, whole in kinds.items() if whole is not None}
    return {f"{name}.{kind}": part for kind, split in parts.items() for name, part in zip(outputs, split, strict=True)}


def rotaries_of(spec: DecoderSpec) -> list[Rotary]:
    """Return the different rotary positions of a model's layers."""
    return list(dict.fromkeys(attention.rotary for attention in spec.attentions if attention.rotary is not None))


def cap(logits: Tensor, limit: float) -> Tensor:
    """Return limit * tanh(logits / limit): logits between -limit and limit."""
    return (logits / limit).tanh() * limit


_OURS = {"output": "o"}  # attributes of layers whose names in ``weights.slots`` are others


class Transformer:
    """A decoder of a native family; implements ``Model``. spec: its description.

    weights: tensors by the names of ``models.weights.slots``, all of one dtype and on one device.
    linear: factory of the linear layers of attention, MLP and head.
    places: the cache's layer that each layer reads; None: as its description says.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        name: str,
        *,
        linear: LinearFactory = Dense,
        places: Sequence[int] | None = None,
    ) -> None:
        self.spec, self.name = spec, name
        self.vocab_size, self.layers = spec.vocab_size, len(spec.layers)
        first = spec.attentions[0]
        self.kv_heads, self.head_dim = first.kv_heads, first.head_dim
        self.kv_layers = spec.kv_layers
        self.max_positions = spec.max_positions
        self._embedding = weights["embed.weight"]
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self.precision = str(self.dtype).removeprefix("torch.")  # for the start line
        self.steps = steps_for(self.device)
        self.adapters: RowAdapters | None = None  # see ``models.adapters``
        parts = _WeightSource(spec, weights, linear)
        self._build(parts, spec.kv_places if places is None else places)
        self._kept = tuple(parts.kept)

    def _build(self, parts: _WeightSource, places: Sequence[int]) -> None:
        spec = self.spec
        parts.find("embed.weight")
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=self.dtype).item()  # rounded as transformers does
        self._positions = parts.find("positions.weight")
        self._project_in, self._project_out = parts.find("project_in.weight"), parts.find("project_out.weight")
        rotaries = rotaries_of(spec)
        self._angles = [RotaryAngles(rotary, self.dtype, self.device) for rotary in rotaries]
        numbers = {rotary: number for number, rotary in enumerate(rotaries)}
        self._blocks = [
            _Layer(spec, parts, index, place, numbers.get(layer.attention.rotary))  # type: ignore[arg-type]
            for index, (layer, place) in enumerate(zip(spec.layers, places, strict=True))
        ]
        inputs = spec.token_inputs
        self._token_inputs = None if inputs is None else _TokenInputs(inputs, parts, self.dtype)
        self._norm = parts.norm("norm") if spec.final_norm else None
        self._head = parts.linear("embed" if spec.tied else "head")

    def _linears(self) -> Iterator[tuple[object, str]]:
        """Yield the owner and attribute name of each linear layer."""
        yield self, "_head"
        if self._token_inputs is not None:
            yield from ((self._token_inputs, name) for name in self._token_inputs.linears)
        for block in self._blocks:
            for owner in block.owners:
                yield from ((owner, name) for name in owner.linears)

    def layer_linears(self) -> Iterator[tuple[object, str, str]]:
        """Yield owner, attribute and name (of ``weights.slots``, without the suffix) of the layers' linear layers."""
        for index, block in enumerate(self._blocks):
            for owner in block.owners:
                yield from ((owner, name, f"layers.{index}.{_OURS.get(name, name)}") for name in owner.linears)

    def replace_linears(self, make: LinearFactory) -> None:
        """Replace each ``Dense`` layer by ``make`` of its weight and bias, one by one to save memory.

        The model must be as it was loaded: all its linear layers are ``Dense``.
        """
        for owner, name in self._linears():
            dense = getattr(owner, name)
            setattr(owner, name, make(dense.weight, dense.bias))

    def linears(self) -> list[Linear]:
        """Return the linear layers of attention, MLP and head."""
        return [getattr(owner, name) for owner, name in self._linears()]

    @property
    def reads_device(self) -> bool:
        """Whether a forward pass waits for the device, so that it cannot be captured in a graph."""
        return any(isinstance(layer.mlp, ExpertsSpec) for layer in self.spec.layers)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, embed_width], features [B, L, taps, width].

        The tap ``layers`` is the last layer's output after the final norm. Raises ParameterError for any other tap that
        is no layer.
        """
        check_taps(taps, self.layers + 1)
        x = self._embed(tokens, positions)
        vectors = self._token_inputs
        inputs = None if vectors is None else vectors(tokens.flatten(), x, self.spec.norm.eps)
        tapped: dict[int, Tensor] = {}
        hidden = self.run(x, positions, attend, inputs, taps, tapped)
        return HiddenStates(hidden, self._features(tapped, taps, len(tokens)))

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        token_inputs: Tensor | None = None,
        taps: Sequence[int] = (),
        tapped: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the layers on embeddings x [N, width] at positions [B, L] -> hidden [B, L, embed_width].

        token_inputs: [layers, N, inputs], or None. tapped: gets the hidden states of the layers in ``taps``.
        """
        rows, length = positions.shape
        rotations = [angles(positions) for angles in self._angles]
        forward = _ForwardContext(rows, rotations, attend, self.steps, token_inputs)
        tapped = {} if tapped is None else tapped
        norms = [*(block.entry for block in self._blocks), self._norm]
        normed = x if norms[0] is None else norms[0](x)
        for index, (block, following) in enumerate(zip(self._blocks, norms[1:], strict=True)):
            if index in taps:
                tapped[index] = x
            x, normed = block(x, normed, forward, following)
        if self.layers in taps:
            tapped[self.layers] = normed / self.spec.residual_scale  # which ``_features`` takes back
        if self._project_out is not None:
            normed = functional.linear(normed, self._project_out)
        return normed.view(rows, length, -1)

    def _features(self, tapped: Mapping[int, Tensor], taps: Sequence[int], rows: int) -> Tensor | None:
        """Return the published model's hidden states [B, L, taps, width] of the tapped layers [N, width]."""
        if not taps:
            return None
        features = torch.stack([tapped[tap] for tap in taps], 1).view(rows, -1, len(taps), self.spec.width)
        return features if self.spec.residual_scale == 1.0 else features * self.spec.residual_scale

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, positions [B, L] -> [N, width].

        Padding may lie beyond the last learned position. It uses the last one, since its results are ignored.
        """
        x = functional.embedding(tokens.flatten(), self._embedding)
        if self.spec.embed_scale != 1.0:
            x = x * self._embed_scale
        if self._project_in is not None:
            x = functional.linear(x, self._project_in)
        if self._positions is not None:
            index = positions.flatten().clamp(max=self.max_positions - 1) + self.spec.position_offset
            x = x + functional.embedding(index, self._positions)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., embed_width]."""
        return self.scaled(self._head(hidden).float())

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the head's outputs, float32, with the model's factor and cap."""
        if self.spec.logits_scale != 1.0:
            logits *= self.spec.logits_scale
        return logits if self.spec.logits_cap is None else cap(logits, self.spec.logits_cap)

    @property
    def pass_bytes(self) -> PassBytes | None:
        """Return what a forward pass reads, see ``Shortenable``; None for a head that is not ``Dense``."""
        if not isinstance(self._head, Dense):
            return None
        output = self._head.weight.nbytes
        embedding = 0 if self.spec.tied else self._embedding.nbytes  # one row of it is read for each token
        return PassBytes(self.weight_bytes() - output - embedding, output // self.vocab_size)

    def short_head(self, size: int) -> TorchShortHead:
        """Return an output head over ``size`` tokens; see ``Shortenable``."""
        assert isinstance(self._head, Dense), "pass_bytes tells"
        return TorchShortHead(self._head.weight, self._head.bias, size, self.scaled)

    def ends(self) -> tuple[Tensor, Linear, Norm | None]:
        """Return the parts that a drafting head shares with its target.

        These are the token embedding [vocab_size, embed_width], the output head and the norm before it.
        """
        return self._embedding, self._head, self._norm

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by Llama's names, fused matrices split.

        The layer must have a gated MLP and RMS norms, and its linear layers must be ``Dense``.
        """
        block, width = self._blocks[index], self.spec.width
        attention, mlp, norms = block.attention, block.mlp, block.norms.values()
        assert isinstance(mlp, _GatedMLP), "the caller checks this"
        heads = attention.spec
        tensors = {
            **_split(attention.qkv, {"self_attn.q_proj": heads.query_width, **dict.fromkeys(_KV, heads.kv_width)}),
            **_split(attention.output, {"self_attn.o_proj": width}),
            **_split(mlp.gate_up, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), block.spec.dense.width)),
            **_split(mlp.down, {"mlp.down_proj": width}),
        }
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), norms, strict=True):
            assert norm.weight is not None
            tensors[f"{name}.weight"] = norm.weight
        if attention.qk_norm is not None:
            qk_norms = {"q": attention.qk_norm[0], "k": attention.qk_norm[heads.heads]}
            tensors |= {f"self_attn.{part}_norm.weight": weight for part, weight in qk_norms.items()}
        return tensors

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        tensors = [*self._kept, *(tensor for linear in self.linears() for tensor in linear.tensors())]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        others = [matrix for matrix in (self._project_in, self._project_out) if matrix is not None]
        experts = (block.mlp.used_multiply_adds() for block in self._blocks if isinstance(block.mlp, Experts))
        matrices = (linear.tensors()[0].numel() for linear in self.linears())
        return sum(matrices) + sum(matrix.numel() for matrix in others) + sum(experts)
