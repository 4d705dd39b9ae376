"""One configurable decoder for all native families.

Inside, all rows' tokens form one matrix [N, width], N = B * L, so that every linear is one plain matrix product.
Shapes: B rows, L new tokens a row, H heads, G key/value heads, D head width.
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
from paceline.models.base import Streams, check_taps
from paceline.models.config import ModelConfig, Rotary
from paceline.models.linear import Dense, Linear, LinearFactory

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each [B, L, 1, D]


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + D/2) of x [B, L, heads, D]; the sign of rotate-half is in the sine."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RotaryAngles:
    """cos and sin of every position, once a forward pass."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32, device=device)
        self._frequencies = torch.cat((-frequencies, frequencies))  # cos is even, sin is odd: the signs come for free
        self._scaling, self._dtype = rotary.scaling, dtype

    def __call__(self, positions: Tensor) -> Rotation:
        angles = positions[:, :, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(self._dtype), sin.to(self._dtype)


class _Parts:
    """The weights by name; makes a layer's pieces from them and remembers which tensors they keep, but the linears'."""

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
        """The weights of the norms of query and key, one line a head: [H + G, D]."""
        q, k = self.find(f"{layer}.q_norm.weight"), self.find(f"{layer}.k_norm.weight")
        if q is None or k is None:
            return None
        return torch.cat((q.expand(self._config.heads, -1), k.expand(self._config.kv_heads, -1)))


@dataclass(frozen=True)
class _Pass:
    """What all layers of a forward pass are told. rows: B of its N = B * L tokens."""

    rows: int
    rotation: Rotation | None
    attend: Attend
    steps: LayerSteps


class _Attention:
    linears = ("qkv", "output")

    def __init__(self, config: ModelConfig, parts: _Parts, index: int) -> None:
        layer = f"layers.{index}"
        self.index, self.dim = index, config.head_dim
        self.split = [config.heads, config.kv_heads, config.kv_heads]
        self.turned = config.heads + config.kv_heads
        self.scale, self.window = config.scales[index], config.windows[index]
        self.qkv, self.output = parts.linear(f"{layer}.qkv"), parts.linear(f"{layer}.o")
        self.qk_norm, self.eps = parts.qk_norm(layer), config.norm_eps

    def __call__(self, x: Tensor, forward: _Pass) -> Tensor:
        """Mix x [N, width] over positions -> [N, width]."""
        qkv, attend = self.qkv(x).view(forward.rows, -1, sum(self.split), self.dim), forward.attend
        if isinstance(attend, AttendPacked):
            heads, kv_heads, _ = self.split
            packed = PackedHeads(qkv, heads, kv_heads, forward.rotation, self.qk_norm, self.eps)
            out = attend.packed(self.index, packed, scale=self.scale, window=self.window)
        else:
            q, k, v = (each.transpose(1, 2) for each in self._heads(qkv, forward.rotation))
            out = attend(self.index, q, k, v, scale=self.scale, window=self.window)
        return self.output(out.transpose(1, 2).reshape(x.shape[0], -1))

    def _heads(self, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """From qkv [B, L, H + 2G, D]: q [B, L, H, D], k and v [B, L, G, D], normed and turned."""
        heads, kv_heads, _ = self.split
        if rotation is None:
            q, k, v = qkv.split_with_sizes(self.split, dim=2)
            return q, k, v
        qk, v = qkv.split_with_sizes([self.turned, kv_heads], dim=2)
        if self.qk_norm is not None:
            qk = functional.rms_norm(qk, (self.dim,), None, self.eps) * self.qk_norm
        q, k = rotate(qk, rotation).split_with_sizes([heads, kv_heads], dim=2)
        return q, k, v


class _GatedMLP:
    linears = ("gate_up", "down")

    def __init__(self, config: ModelConfig, parts: _Parts, layer: str) -> None:
        self.activation = config.activation
        self.gate_up, self.down = parts.linear(f"{layer}.gate_up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(steps.gate(self.gate_up(x), self.activation))


class _PlainMLP:
    linears = ("up", "down")

    def __init__(self, config: ModelConfig, parts: _Parts, layer: str) -> None:
        self.activation = ACTIVATIONS[config.activation]
        self.up, self.down = parts.linear(f"{layer}.up"), parts.linear(f"{layer}.down")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        return self.down(self.activation(self.up(x)))


class _Layer:
    def __init__(self, config: ModelConfig, parts: _Parts, index: int) -> None:
        name = f"layers.{index}"
        self.norm_first = config.norm_first
        self.attention = _Attention(config, parts, index)
        self.attention_norm, self.mlp_norm = parts.norm(f"{name}.attn_norm"), parts.norm(f"{name}.mlp_norm")
        self.mlp = (_GatedMLP if config.gated else _PlainMLP)(config, parts, name)

    @property
    def entry(self) -> Norm | None:
        """The norm of what it reads; None where the layer before it has normalised that."""
        return self.attention_norm if self.norm_first else None

    def __call__(self, x: Tensor, normed: Tensor, forward: _Pass, following: Norm | None) -> tuple[Tensor, Tensor]:
        """x, normed [N, width]: the residual stream, and as the layer reads it -> the same after it.

        following: the norm that comes next, the next layer's or the last of all; None where nothing is normalised.
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


def _cut(linear: Linear, outputs: Mapping[str, int]) -> dict[str, Tensor]:
    """Weight and bias of each of the matrices that lie below one another in one, by its name and number of outputs."""
    assert isinstance(linear, Dense), "nothing has packed it"
    kinds = {"weight": linear.weight, "bias": linear.bias}
    parts = {kind: torch.split(whole, list(outputs.values())) for kind, whole in kinds.items() if whole is not None}
    return {f"{name}.{kind}": part for kind, cut in parts.items() for name, part in zip(outputs, cut, strict=True)}


class Transformer:
    """A decoder of a native family; implements ``Model``.

    weights: the tensors by the names of ``models.weights.slots``, all of one dtype and on one device.
    linear: makes the linear layers of attention, MLP and head from their weights; ``Dense`` unless said otherwise.
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
        parts = _Parts(config, weights, linear)
        self._build(parts)
        self._kept = tuple(parts.kept)

    def _build(self, parts: _Parts) -> None:
        config = self.config
        parts.find("embed.weight")
        self._positions = parts.find("positions.weight")
        self._project_in, self._project_out = parts.find("project_in.weight"), parts.find("project_out.weight")
        self._angles = RotaryAngles(config.rotary, self.dtype, self.device) if config.rotary else None
        self._blocks = [_Layer(config, parts, index) for index in range(config.layers)]
        self._norm = parts.norm("norm") if config.final_norm else None
        self._head = parts.linear("embed" if config.tied else "head")

    def _linears(self) -> Iterator[tuple[object, str]]:
        """Where the linear layers are kept: an object and its attribute's name."""
        yield self, "_head"
        for block in self._blocks:
            for owner in (block.attention, block.mlp):
                yield from ((owner, name) for name in owner.linears)

    def replace_linears(self, make: LinearFactory) -> None:
        """Make the linear layers anew from their weights, one by one: what ``make`` does not keep is freed at once.

        For a model as it was loaded, whose linear layers are all ``Dense``.
        """
        for owner, name in self._linears():
            dense = getattr(owner, name)
            setattr(owner, name, make(dense.weight, dense.bias))

    def linears(self) -> list[Linear]:
        """The linear layers of attention, MLP and head."""
        return [getattr(owner, name) for owner, name in self._linears()]

    def streams(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()) -> Streams:
        """tokens, positions [B, L] int64 -> hidden [B, L, embed_width], features [B, L, taps, width]."""
        rows, length = tokens.shape
        check_taps(taps, self.layers)
        x = self._embed(tokens, positions)
        rotation = self._angles(positions) if self._angles else None
        forward = _Pass(rows, rotation, attend, self.steps)
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
        return Streams(normed.view(rows, length, -1), features)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """-> [N, width]. Padding beyond the last learned position takes the last one: nothing looks at it."""
        x = functional.embedding(tokens.flatten(), self._embedding)
        if self._project_in is not None:
            x = functional.linear(x, self._project_in)
        if self._positions is not None:
            index = positions.flatten().clamp(max=self.max_positions - 1) + self.config.position_offset
            x = x + functional.embedding(index, self._positions)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., embed_width] -> logits [..., vocab_size] in float32."""
        return self._head(hidden).float()

    def ends(self) -> tuple[Tensor, Linear, Norm | None]:
        """The embedding of tokens [vocab_size, width], the head, and the norm before it: what a trained head shares."""
        return self._embedding, self._head, self._norm

    def layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of a gated layer with RMS norms, named and cut as Llama's; of a model as it was loaded."""
        block, config = self._blocks[index], self.config
        attention, mlp, norms = block.attention, block.mlp, (block.attention_norm, block.mlp_norm)
        assert isinstance(mlp, _GatedMLP), "the caller looks"
        found = {
            **_cut(attention.qkv, {"self_attn.q_proj": config.query_width, **dict.fromkeys(_KV, config.kv_width)}),
            **_cut(attention.output, {"self_attn.o_proj": config.width}),
            **_cut(mlp.gate_up, dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.mlp_width)),
            **_cut(mlp.down, {"mlp.down_proj": config.width}),
        }
        for name, norm in zip(("input_layernorm", "post_attention_layernorm"), norms, strict=True):
            assert norm.weight is not None
            found[f"{name}.weight"] = norm.weight
        if attention.qk_norm is not None:
            lines = {"q": attention.qk_norm[0], "k": attention.qk_norm[config.heads]}
            found |= {f"self_attn.{part}_norm.weight": line for part, line in lines.items()}
        return found

    def weight_bytes(self) -> int:
        """Memory of the weights, each counted once (tied ones too), in bytes."""
        tensors = [*self._kept, *(tensor for linear in self.linears() for tensor in linear.tensors())]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def multiply_adds(self) -> int:
        """Of its matrices for one token, the head included, attention over the cache not."""
        others = [matrix for matrix in (self._project_in, self._project_out) if matrix is not None]
        return sum(linear.tensors()[0].numel() for linear in self.linears()) + sum(matrix.numel() for matrix in others)
