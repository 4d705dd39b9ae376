"""Layers of trained heads, and their attention over whole sequences in training.

Shapes: B rows, T positions, D the width of an attention head, H the head's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.drafters.heads.config import HeadConfig
from paceline.kernels.attention.base import PLAIN, Attend, AttentionTerms
from paceline.kernels.gpu.steps import ACTIVATIONS
from paceline.models.description.spec import MLPSpec
from paceline.models.torch.rotary import Rotation, rotate


class HeadStep(NamedTuple):
    """Output of one step, [B, T, H] each.

    state: read by the next step in place of fused hidden states. normed: input of ``logits``.
    """

    state: Tensor
    normed: Tensor


def rms_norm(width: int, config: HeadConfig) -> nn.RMSNorm:
    """RMSNorm over ``width`` values, with the head's epsilon."""
    return nn.RMSNorm(width, eps=config.decoder.norm.eps)


class HeadAttention(nn.Module):
    """Attention of a layer. read: width of what it reads."""

    def __init__(self, config: HeadConfig, index: int, read: int) -> None:
        super().__init__()
        shape = config.decoder.layers[index].attention
        self.index, self.terms, self.dim = index, AttentionTerms(window=shape.window), shape.head_dim
        self.q_proj = nn.Linear(read, shape.query_width, bias=shape.bias)
        self.k_proj = nn.Linear(read, shape.kv_width, bias=shape.bias)
        self.v_proj = nn.Linear(read, shape.kv_width, bias=shape.bias)
        self.o_proj = nn.Linear(shape.query_width, config.width, bias=shape.output_bias)
        self.q_norm = rms_norm(shape.head_dim, config) if shape.qk_norm else nn.Identity()
        self.k_norm = rms_norm(shape.head_dim, config) if shape.qk_norm else nn.Identity()

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, key heads, D] of inputs x [B, T, H]."""
        k, v = (part(x).unflatten(-1, (-1, self.dim)) for part in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), rotation), v

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, (k, v) = self.q_proj(x).unflatten(-1, (-1, self.dim)), self.keys_and_values(x, rotation)
        q = rotate(self.q_norm(q), rotation)
        out = attend(self.index, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.terms)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))


class _MLP(nn.Module):
    def __init__(self, shape: MLPSpec, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.gate_proj = nn.Linear(width, shape.width, bias=shape.bias)
        self.up_proj = nn.Linear(width, shape.width, bias=shape.bias)
        self.down_proj = nn.Linear(shape.width, width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)))


class HeadLayer(nn.Module):
    """A decoder layer. joined: whether it reads the token's embedding beside the hidden state (``first``)."""

    def __init__(self, config: HeadConfig, index: int, *, joined: bool) -> None:
        super().__init__()
        self.normed_residual = config.norm_before_residual
        self.self_attn = HeadAttention(config, index, config.width * (1 + joined))
        self.mlp = _MLP(config.decoder.layers[index].dense, config.width)
        self.input_layernorm = rms_norm(config.width, config)
        self.post_attention_layernorm = rms_norm(config.width, config)
        if joined:
            self.hidden_norm = rms_norm(config.width, config)

    def first(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        inputs = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return self._finish(normed if self.normed_residual else hidden, inputs, rotation, attend)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self._finish(hidden, self.input_layernorm(hidden), rotation, attend)

    def _finish(self, residual: Tensor, inputs: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden = residual + self.self_attn(inputs, rotation, attend)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class UnrolledAttention:
    """An ``Attend`` over whole sequences, called once per layer and step.

    The first step is causal. At step s, position i sees the first step's keys up to its own position, and at its own
    position those of the steps between. This is what the cache holds after drafting s tokens at position i.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attention output [B, heads, T, D]. q: [B, heads, T, D]. k, v: [B, key heads, T, D]."""
        assert terms.cap is None and terms.sinks is None, "trained heads have neither"  # noqa: PT018
        steps = self._steps.setdefault(layer, [])
        steps.append((k, v))
        if len(steps) == 1 and terms.window is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=terms.scale, enable_gqa=True)
        return _attend_steps(q, steps, terms)


class PackedBlocks:
    """An ``Attend`` over the blocks of whole texts in training, N blocks of L rows in each of B texts.

    A row sees the keys of its text before the block's anchor, and all rows of its own block. (DSpark, section 3.3.)
    anchors: [B, N] int64, the position of each block's first row.
    texts: each layer's keys and values of the texts, [B, T, key heads, D].
    """

    def __init__(self, anchors: Tensor, texts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._anchors, self._texts = anchors, texts

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attention output [B * N, heads, L, D]. q: [B * N, heads, L, D]. k, v: [B * N, key heads, L, D]."""
        assert terms.window is None and terms.cap is None and terms.sinks is None, "trained blocks have none"  # noqa: PT018
        keys, values = self._texts[layer]
        grouped = (q * terms.scale_of(q.shape[-1])).view(len(q), k.shape[1], -1, *q.shape[2:])
        by_text = grouped.view(*self._anchors.shape, *grouped.shape[1:])  # [B, N, key heads, shared, L, D]
        hidden = torch.arange(keys.shape[1], device=q.device) >= self._anchors[..., None]
        scores = torch.einsum("bngsld,btgd->bngslt", by_text, keys)
        scores = scores.masked_fill(hidden[:, :, None, None, None], -torch.inf).flatten(0, 1)
        own = torch.einsum("bgsld,bgtd->bgslt", grouped, k)
        weights = torch.cat((scores, own), dim=-1).float().softmax(-1).to(q.dtype)
        of_text, of_block = torch.split(weights, [keys.shape[1], k.shape[2]], dim=-1)
        of_text = of_text.view(*self._anchors.shape, *of_text.shape[1:])
        out = torch.einsum("bngslt,btgd->bngsld", of_text, values).flatten(0, 1)
        return (out + torch.einsum("bgslt,bgtd->bgsld", of_block, v)).flatten(1, 2)


def _attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], terms: AttentionTerms) -> Tensor:
    window = terms.window
    shared, length, last = q.shape[1] // steps[0][0].shape[1], q.shape[2], len(steps) - 1
    expanded = [(k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)) for k, v in steps]
    place = torch.arange(length, device=q.device)
    seen = place <= place[:, None]
    if window is not None:
        seen = seen & (place[:, None] + last - place < window)
    q = q * terms.scale_of(q.shape[-1])
    text = (q @ expanded[0][0].mT).masked_fill(~seen, -torch.inf)
    later = expanded[1:] if window is None else expanded[1:][-window:]
    own = [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat((text, *own), dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ expanded[0][1]
    for number, (_, v) in enumerate(later):
        out = out + weights[..., length + number, None] * v
    return out
