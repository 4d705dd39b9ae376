"""One configurable decoder for all native families.

Internally the tokens of all rows form one matrix [N, width], N = B * L, so each linear layer is one matrix product.
Shapes: B rows, L new tokens per row, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.attention.base import Attend, AttendPacked
from paceline.kernels.gpu.state import Norm, PackedHeads
from paceline.kernels.gpu.steps import ACTIVATIONS, LayerSteps, steps_for
from paceline.models.base import HiddenStates, check_taps
from paceline.models.config import ModelConfig, Rotary
from paceline.models.linear import Dense, Linear, LinearFactory

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [B, L, 1, D]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [B, L, heads, D] -> the same shape. The sine includes the sign."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RotaryAngles:
    """Computes cos and sin of the rotary angles: positions [B, L] -> two tensors [B, L, 1, D]."""

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

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], linear: LinearFactory) -> None:
        self._config, self._weights, self._linear = config, weights, linear
        self.kept: list[Tensor] = []

    def find(self, name: str) -> Tensor | None:
        tensor = self._weights.get(name)
        if tensor is not None:
            self.kept.append(tensor)
        return tensor

    def linear(self, name: str) -> Linear:
        return self._linear(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def norm(self, name: str) -> Norm:
        width, eps, weight = self._config.width, self._config.norm_eps, self.find(f"{name}.weight")
        if self._config.norm == "rms":
            return Norm(width, eps, weight)
        return Norm(width, eps, weight, self.find(f"{name}.bias"), centred=True)

    def qk_norm(self, layer: str) -> Tensor | None:
        """Return the weights of the query and key norms, one row per head [H + G, D]; None if there are none."""
        q, k = self.find(f"{layer}.q_norm.weight"), self.find(f"{layer}.k_norm.weight")
        if q is None or k is None:
            return None
        return torch.cat((q.expand(self._config.heads, -1), k.expand(self._config.kv_heads, -1)))


@dataclass(frozen=True)
class _ForwardContext:
    """Arguments common to all layers of a forward pass. rows: B, for N = B * L tokens."""

    rows: int
    rotation: Rotation | None
    attend: Attend
    steps: LayerSteps


class _Attention:
    linears = ("qkv", "output")

    def __init__(self, config: ModelConfig, parts: _WeightSource, index: int) -> None:
        layer = f"layers.{index}"
        self.index, self.dim = index, config.head_dim
        self.split = [config.heads, config.kv_heads, config.kv_heads]
        self.rotated_heads = config.heads + config.kv_heads
        self.scale, self.window = config.scales[index], config.windows[index]
        self.qkv, self.output = parts.linear(f"{layer}.qkv"), parts.linear(f"{layer}.o")
        self.qk_norm, self.eps = parts.qk_norm(layer), config.norm_eps

    def __call__(self, x: Tensor, forward: _ForwardContext) -> Tensor:
        """Attention over the cache: x [N, width] -> [N, width]."""
        qkv, attend = self.qkv(x).view(forward.rows, -1, sum(self.split), self.dim), forward.attend
        if isinstance(attend, AttendPacked):
            heads, kv_heads, _ = self.split
            packed = PackedHeads(qkv, heads, kv_heads, forward.rotation, self.qk_norm, self.eps)
            out = attend.packed(self.index, packed, scale=self.scale, window=self.window)
        else:
            q, k, v = (part.transpose(1, 2) for part in self._heads(qkv, forward.rotation))
            out = attend(self.index, q, k, v, scale=self.scale, window=self.window)
        return self.output(out.transpose(1, 2).reshape(x.shape[0], -1))

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv [B, L, H + 2G, D] -> q [B, L, H, D], k, v [B, L, G, D], with norms and rotation applied."""
        heads, kv_heads, _ = self.split
        if rotation is None:
            q, k, v = qkv.split_with_sizes(self.split, dim=2)
            return q, k, v
        qk, v = qkv.split_with_sizes([self.rotated_heads, kv_heads], dim=2)
        if self.qk_norm is not None:
            qk = functional.rms_norm(qk, (self.dim,), None, self.eps) * self.qk_norm
        q, k = rotate(qk, rotation).split_with_sizes([heads, kv_heads], dim=2)
        return q, k, v


class _GatedMLP:
    linears = ("gate_up", "down")

    def __init__(self, config: ModelConfig, parts: _WeightSource, layer: str) -> None:
        self.activation = config.activation
        self.gate_up, self.down = parts.linear(f"{layer}.gate_up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(steps.gate(self.gate_up(x), self.activation))


class _PlainMLP:
    linears = ("up", "down")

    def __init__(self, config: ModelConfig, parts: _WeightSource, layer: str) -> None:
        self.activation = ACTIVATIONS[config.activation]
        self.up, self.down = parts.linear(f"{layer}.up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(self.activation(self.up(x)))


class _Layer:
    def __init__(self, config: ModelConfig, parts: _WeightSource, index: int) -> None:
        name = f"layers.{index}"
        self.norm_first = config.norm_first
        self.attention = _Attention(config, parts, index)
        self.attention_norm, self.mlp_norm = parts.norm(f"{name}.attn_norm"), parts.norm(f"{name}.mlp_norm")
        self.mlp = (_GatedMLP if config.gated else _PlainMLP)(config, parts, name)

    @property
    def entry(self) -> Norm | None:
        """The norm of the layer's input; None if the layer applies its norms after attention and MLP."""
        return self.attention_norm if self.norm_first else None

    def __call__(
        self, x: Tensor, normed: Tensor, forward: _ForwardContext, following: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer: residual stream x and its normalised input, both [N, width] -> both for the next layer.

        following: the norm after this layer, which is the next layer's first or the final one; None if there is none.
        """
        if not self.norm_first:
            x = forward.steps.add_norm(x, self.attention(x, forward), self.attention_norm)[1]
            x = forward.steps.add_norm(x, self.mlp(x, forward.steps), self.mlp_norm)[1]
            return x, x
        x, normed = forward.steps.add_norm(x, self.attention(normed, forward), self.mlp_norm)
        out = self.mlp(normed, forward.steps)
        if following is None:
            return x + out, x + out
        return forward.steps.add_norm(x, out, following)


_KV = "self_attn.k_proj", "self_attn.v_proj"


def _split(linear: Linear, outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Split a fused linear layer: weight and bias of each matrix. outputs: name -> number of outputs, in order."""
    assert isinstance(linear, Dense), "the weights are not packed"
    kinds = {"weight": linear.weight, "bias": linear.bias}
    parts = {kind: torch.split(whole, list(outputs.values())) for kind, whole in kinds.items() if whole is not None}
    return {f"{name}.{kind}": part for kind, split in parts.items() for name, part in zip(outputs, split, strict=True)}


class Transformer:
    """A decoder of a native family; implements ``Model``.

    weights: tensors by the names of ``models.weights.slots``, all of one dtype and on one device.
    linear: factory of the linear layers of attention, MLP and head.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], name: str, *, linear: LinearFactory = Dense
    ) -> None:
        self.config, self.name = config, name
        self.vocab_size, self.layers = config.vocab_size, config.layers
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.max_positions = config.max_positions
        self._embedding = weights["embed.weight"]
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self.precision = str(self.dtype).removeprefix("torch.")  # for the start line
        self.steps = steps_for(self.device)
        parts = _WeightSource(config, weights, linear)
        self._build(parts)
        self._kept = tuple(parts.kept)

    def _build(self, parts: _WeightSource) -> None:
        config = self.config
        parts.find("embed.weight")
        self._positions = parts.find("positions.weight")
        self._project_in, self._project_out = parts.find("project_in.weight"), parts.find("project_out.weight")
        self._angles = RotaryAngles(config.rotary, self.dtype, self.device) if config.rotary else None
        self._blocks = [_Layer(config, parts, index) for index in range(config.layers)]
        self._norm = parts.norm("norm") if config.final_norm else None
        self._head = parts.linear("embed" if config.tied else "head")

    def _linears(self) -> Iterator[tuple[object, str]]:
        """Yield the owner and attribute name of each linear layer."""
        yield self, "_head"
        for block in self._blocks:
            for owner in (block.attention, block.mlp):
                yield from ((owner, name) for name in owner.linears)

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

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        """Run tokens, positions [B, L] int64 -> hidden [B, L, embed_width], features [B, L, taps, width].

        Raises ParameterError for a tap that is no layer.
        """
        rows, length = tokens.shape
        check_taps(taps, self.layers)
        x = self._embed(tokens, positions)
        rotation = self._angles(positions) if self._angles else None
        forward = _ForwardContext(rows, rotation, attend, self.steps)
        norms = [*(block.entry for block in self._blocks), self._norm]
        normed = x if norms[0] is None else norms[0](x)
        tapped: dict[int, Tensor] = {}
        for index, (block, following) in enumerate(zip(self._blocks, norms[1:], strict=True)):
            if index in taps:
                tapped[index] = x
            x, normed = block(x, normed, forward, following)
        if self._project_out is not None:
            normed = functional.linear(normed, self._project_out)
        features = torch.stack([tapped[tap] for tap in taps], 1).view(rows, length, len(taps), -1) if taps else None
        return HiddenStates(normed.view(rows, length, -1), features)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens, positions [B, L] -> [N, width].

        Padding may lie beyond the last learned position. It uses the last one, since its results are ignored.
        """
        x = functional.embedding(tokens.flatten(), self._embedding)
        if self._project_in is not None:
            x = functional.linear(x, self._project_in)
        if self._positions is not None:
            index = positions.flatten().clamp(max=self.max_positions - 1) + self.config.position_offset
            x = x + functional.embedding(index, self._positions)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., embed_width]."""
        return self._head(hidden).float()

    def ends(self) -> tuple[Tensor, Linear, Norm | None]:
        """Return the parts that a drafting head shares with its target.

        These are the token embedding [vocab_size, embed_width], the output head and the norm before it.
        """
        return self._embedding, self._head, self._norm

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by Llama's names, fused matrices split.

        The layer must have a gated MLP and RMS norms, and its linear layers must be ``Dense``.
        """
        block, config = self._blocks[index], self.config
        attention, mlp, norms = block.attention, block.mlp, (block.attention_norm, block.mlp_norm)
        assert isinstance(mlp, _GatedMLP), "the caller checks this"
        tensors = {
            **_split(attention.qkv, {"self_attn.q_proj": config.query_width, **dict.fromkeys(_KV, config.kv_width)}),
            **_split(attention.output, {"self_attn.o_proj": config.width}),
            **_split(mlp.gate_up, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.mlp_width)),
            **_split(mlp.down, {"mlp.down_proj": config.width}),
        }
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), norms, strict=True):
            assert norm.weight is not None
            tensors[f"{name}.weight"] = norm.weight
        if attention.qk_norm is not None:
            qk_norms = {"q": attention.qk_norm[0], "k": attention.qk_norm[config.heads]}
            tensors |= {f"self_attn.{part}_norm.weight": weight for part, weight in qk_norms.items()}
        return tensors

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        tensors = [*self._kept, *(tensor for linear in self.linears() for tensor in linear.tensors())]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        others = [matrix for matrix in (self._project_in, self._project_out) if matrix is not None]
        return sum(linear.tensors()[0].numel() for linear in self.linears()) + sum(matrix.numel() for matrix in others)
