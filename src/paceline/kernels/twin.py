"""Reference implementation of every kernel in plain torch: for tests, and where the extension is missing.

The quantisation arithmetic is the same, so integer sums agree exactly; sums of floats agree up to their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes, Seen, seen_by
from paceline.kernels.gpu.steps import ACTIVATIONS
from paceline.kernels.pack import Bf16Weight, Format, Int4Weight, Int8Weight, Weight, dequantise, quantise
from paceline.kernels.spec import LayerWeights, LinearWeights, NativeSpec, Rotary

ACTIVATION_GROUP = 64  # inputs of a row that share a scale, so that an outlier costs accuracy only within its group
_SILENT = 1e-30  # rows whose largest amplitude is at most this count as zero


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] float32 -> int8 values [N, G, 64] and the scale of each group of 64 inputs [N, G]."""
    groups = functional.pad(x, (0, -x.shape[1] % ACTIVATION_GROUP)).view(x.shape[0], -1, ACTIVATION_GROUP)
    amplitude = groups.abs().amax(dim=2)
    silent = ~(amplitude > _SILENT)
    # A true division, like the kernels': torch computes ``127.0 / tensor`` as 127 times a reciprocal, which rounds
    # twice.
    inverse = torch.where(silent, 0.0, torch.full_like(amplitude, 127.0) / amplitude)
    scales = torch.where(silent, 0.0, amplitude / 127.0)
    return (groups * inverse[:, :, None]).round().to(torch.int8), scales


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [N, K] float32 -> [N, M] float32, with the kernels' arithmetic."""
    if isinstance(weight, Bf16Weight):
        y = (x.bfloat16().double() @ weight.values.double().T).float()
    else:
        y = _int4(x, weight) if isinstance(weight, Int4Weight) else _int8(x, weight)
    return y if bias is None else y + bias.float()


def _int8(x: Tensor, weight: Int8Weight) -> Tensor:
    values, scales = quantise_rows(x)
    groups = functional.pad(weight.values, (0, -x.shape[1] % ACTIVATION_GROUP)).view(-1, *values.shape[1:])
    exact = torch.einsum("ngk,mgk->nmg", values.double(), groups.double())
    return ((exact * scales.double()[:, None]).sum(dim=2) * weight.scales.double()).float()


def _int4(x: Tensor, weight: Int4Weight) -> Tensor:
    values, scales = quantise_rows(x)
    fine = values.view(values.shape[0], -1, weight.group)
    scales = scales.repeat_interleave(ACTIVATION_GROUP // weight.group, dim=1)
    groups = weight.values.view(*weight.scales.shape, weight.group).double()
    there = groups.shape[1]  # the weight and the activations are padded to different multiples
    exact = torch.einsum("ngk,mgk->nmg", fine[:, :there].double(), groups) * weight.scales.double()
    exact += fine[:, :there].double().sum(dim=2)[:, None] * weight.lows.double()
    return (exact * scales[:, None, :there].double()).sum(dim=2).float()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight.float(), epsilon)


def rotary_table(rotary: Rotary, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, half] for every position."""
    frequencies = torch.tensor(rotary.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos() * rotary.scaling, angles.sin() * rotary.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D]; cos, sin [N, half]: rotate the pairs (i, i + half); elements beyond 2 * half stay."""
    half = cos.shape[1]
    a, b, rest = x.split_with_sizes([half, half, x.shape[2] - 2 * half], dim=2)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=2)


def write(layer: int, cache: KVCache, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [N, G, D] of tokens at (rows, slots); slots beyond the capacity go to the trash position."""
    at = slots.clamp(max=cache.positions)
    cache.keys[layer, rows, :, at] = k.to(cache.keys.dtype)
    cache.values[layer, rows, :, at] = v.to(cache.values.dtype)


def attend(
    layer: int, cache: KVCache, q: Tensor, rows: Tensor, seen: Sequence[Seen], scale: float, window: int | None
) -> Tensor:
    """q [N, H, D] over the keys that each token sees in its row, at most the last ``window`` -> [N, H, D]."""
    out = torch.empty_like(q)
    for i, (row, (text, tail)) in enumerate(zip(rows.tolist(), seen, strict=True)):
        slots = [*range(text), *tail][: cache.positions]
        visible = slots if window is None else slots[max(0, len(slots) - window) :]
        k, v = (table[layer, row][:, visible].float() for table in (cache.keys, cache.values))
        grouped = q[i].view(k.shape[0], -1, q.shape[2])
        scores = (grouped * scale) @ k.transpose(1, 2)
        out[i] = (scores.softmax(dim=2) @ v).view(-1, q.shape[2])
    return out


class TwinDecoder:
    """A whole decoder in plain torch. Weights are quantised like the kernels' and kept as float32."""

    def __init__(self, spec: NativeSpec, layer_format: Format, head_format: Format) -> None:
        self._spec = spec
        self._layer_format = layer_format
        self._tables = [rotary_table(layer.rotary or spec.rotary, spec.max_positions) for layer in spec.layers]
        self._layers = [_TwinLayer(layer, self._make(layer_format)) for layer in spec.layers]
        head = spec.head or LinearWeights(spec.embedding)
        self._head = self._make(head_format)(head)
        tied = dequantise(quantise(spec.embedding, head_format), spec.width)
        self._embedding = tied if spec.head is None else spec.embedding.bfloat16().float()

    @staticmethod
    def _make(to: Format) -> Callable[[LinearWeights], _TwinLinear]:
        return lambda weights: _TwinLinear(weights, to)

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """-> hidden [N - read, width] after the final norm, features [N - read, taps, width]; writes the cache."""
        spec, seen = self._spec, seen_by(nodes)[nodes.read :]
        tokens, rows, positions = (given[nodes.read :] for given in nodes[:3])
        slots = positions if nodes.slots is None else nodes.slots[nodes.read :]
        if len(tokens) == 0:
            empty = torch.empty(0, spec.width, dtype=torch.float32)
            return empty, empty.new_empty(0, len(taps), spec.width) if taps else None
        at = positions.clamp(max=spec.max_positions - 1)
        x = self._embedding[tokens] * spec.embed_scale
        entering = []
        for index, layer in enumerate(self._layers):
            entering.append(x * spec.tap_scale)
            weights = layer.weights
            qkv = layer.qkv(self._norm(x, weights.input_norm)).view(x.shape[0], -1, spec.head_dim)
            q, k, v = qkv.split_with_sizes([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
            q, k = self._normed_heads(q, weights.q_norm), self._normed_heads(k, weights.k_norm)
            cos, sin = (table[at] for table in self._tables[index])
            write(index, cache, rows, slots, rotate(k, cos, sin), v)
            scale = spec.scale_of(weights)
            attended = attend(index, cache, rotate(q, cos, sin), rows, seen, scale, weights.window)
            x = x + self._norm(layer.attention_out(attended.flatten(1)), weights.attention_out_norm)
            gate, up = layer.gate_up(self._norm(x, weights.post_norm)).chunk(2, dim=1)
            x = x + self._norm(layer.down(ACTIVATIONS[weights.activation](gate) * up), weights.mlp_out_norm)
        features = torch.stack([entering[tap] for tap in taps], 1) if taps else None
        return rms_norm(x, spec.final_norm, spec.epsilon), features

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self._spec.epsilon)

    def _normed_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Norm queries or keys [N, heads, D], each head or all together."""
        if weight is None or weight.numel() == self._spec.head_dim:
            return self._norm(x, weight)
        return self._norm(x.flatten(1), weight).view_as(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [M, width] -> [M, vocab]."""
        return self._head(hidden)


class _TwinLinear:
    """A product of rounded weights and rounded activations in float32."""

    def __init__(self, weights: LinearWeights, to: Format) -> None:
        self._weight = dequantise(weights.rounded(to), weights.weight.shape[1])
        self._bias = None if weights.bias is None else weights.bias.float()
        self._bf16 = to == "bf16"

    def __call__(self, x: Tensor) -> Tensor:
        if self._bf16:
            rounded = x.bfloat16().float()
        else:
            values, scales = quantise_rows(x)
            rounded = (values.float() * scales[:, :, None]).flatten(1)[:, : x.shape[1]]
        return functional.linear(rounded, self._weight, self._bias)


class _TwinLayer:
    def __init__(self, weights: LayerWeights, make: Callable[[LinearWeights], _TwinLinear]) -> None:
        self.weights = weights
        self.qkv, self.attention_out = make(weights.qkv), make(weights.attention_out)
        self.gate_up, self.down = make(weights.gate_up), make(weights.down)
