"""The EAGLE-3 head (arXiv 2503.01840) and its 3.1 switches: a decoder that reads the target's streams.

At place i it gets the target's streams of token i, fused to one hidden state, and the embedding of token i + 1, which
is known by then; it guesses token i + 2. At the next step, where the target has read nothing yet, the guess is read
beside what the head made of place i. A parallel head (P-EAGLE, arXiv 2602.01469) reads the same mask at all of those
places, so that no step waits for the one before: they are places of one pass. Keys and values stand at the position of
the streams.

Shapes: B rows, T places, H the head's width, V the target's vocabulary, Vd the tokens that it can say, S streams.
Names of modules and tensors are those of the speculators layout, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.attention.base import Attend
from paceline.heads.config import HeadConfig
from paceline.models.config import ModelConfig
from paceline.models.transformer import ACTIVATIONS, RotaryAngles, Rotation, rotate


class Step(NamedTuple):
    """What one step gives at every place, [B, T, H] each.

    state: what the next step reads in place of fused streams. normed: what ``logits`` takes.
    """

    state: Tensor
    normed: Tensor


def _norm(width: int, config: HeadConfig) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=config.decoder.norm_eps)


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        shape = config.decoder
        self.index, self.window, self.dim = index, shape.windows[index], shape.head_dim
        read = 2 * shape.width if index == 0 else shape.width
        self.q_proj = nn.Linear(read, shape.query_width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(read, shape.kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(read, shape.kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.query_width, shape.width, bias=shape.output_bias)
        self.q_norm = _norm(shape.head_dim, config) if shape.qk_norm else nn.Identity()
        self.k_norm = _norm(shape.head_dim, config) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation)
        out = attend(self.index, *(part.transpose(1, 2) for part in (q, k, v)), window=self.window)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))


class _MLP(nn.Module):
    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x)))


class _Layer(nn.Module):
    """The first layer reads the token's embedding beside the hidden state; those after it are plain ones."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.normed_residual = config.norm_before_residual
        self.self_attn, self.mlp = _Attention(config, index), _MLP(config.decoder)
        self.input_layernorm = _norm(config.width, config)
        self.post_attention_layernorm = _norm(config.width, config)
        if index == 0:
            self.hidden_norm = _norm(config.width, config)

    def first(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        read = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return self._rest(normed if self.normed_residual else hidden, read, rotation, attend)

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        return self._rest(hidden, self.input_layernorm(hidden), rotation, attend)

    def _rest(self, residual: Tensor, read: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        hidden = residual + self.self_attn(read, rotation, attend)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class FeatureHead(nn.Module):
    """A head as ``HeadConfig`` says it, its weights not set.

    embed_tokens [V, H] is not trained: it is the target's, or the checkpoint's own.
    d2t [Vd] int64: what is to be added to the head's number of a token to get the target's. t2d [V] bool: which of the
    target's tokens it can say.
    mask_hidden [1, 1, S * target width]: what a parallel head reads in place of streams; None: it reads its own state.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape = config.decoder
        self.config = config
        self.embed_tokens = nn.Embedding(shape.vocab_size, config.width).requires_grad_(False)
        self.fc = nn.Linear(config.streams * config.target_width, config.width, bias=False)
        self.fc_norm = self.input_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(_norm(config.target_width, config) for _ in range(config.streams))
        if config.norm_before_fc:
            self.input_norm = _norm(config.streams * config.target_width, config)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(shape.layers))
        self.norm = _norm(config.width, config)
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < config.draft_vocab_size)
        self.mask_hidden: nn.Parameter | None = None
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.streams * config.target_width))
        self._angles: dict[tuple[torch.dtype, torch.device], RotaryAngles] = {}

    @property
    def targets(self) -> Tensor:
        """[Vd] int64: the target's number of each of the head's tokens."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def say(self, targets: Tensor) -> None:
        """The head's tokens are these of the target's, [Vd] int64, each one once."""
        self.d2t.copy_(targets - torch.arange(targets.shape[0], device=targets.device))
        self.t2d.zero_()[targets] = True

    def fuse(self, features: Tensor) -> Tensor:
        """The target's streams [..., S, target width] -> [..., H], what the first step reads."""
        features = features.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features.unbind(-2), strict=True)
            features = torch.stack([norm(stream) for norm, stream in parts], dim=-2)
        flat = features.flatten(-2)
        return cast(Tensor, self.fc(flat if self.input_norm is None else self.input_norm(flat)))

    def following(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What ``step`` reads where the target has read nothing yet.

        The guesses [B, T] before it, each with the state [B, T, H] that it was made of; a parallel head its mask,
        whatever they are.
        """
        mask = self.mask()
        if mask is None:
            return tokens, state
        return torch.full_like(tokens, self.config.mask_token or 0), mask.expand(*tokens.shape, -1)

    def mask(self) -> Tensor | None:
        """[H]: what a parallel head reads in place of fused streams; None: it reads its own state."""
        return None if self.mask_hidden is None else self.fuse(self.mask_hidden.view(self.config.streams, -1))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Step:
        """tokens [B, T], each the one after its place; hidden [B, T, H] fused streams or states; positions [B, T]."""
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        rotation = self._rotation(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            layer = cast(_Layer, layer)
            first = index == 0
            hidden = layer.first(embedded, hidden, rotation, attend) if first else layer(hidden, rotation, attend)
        normed = self.norm(hidden)
        return Step(normed if self.config.norm_output else hidden, normed)

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., Vd], of the head's own numbers of tokens."""
        return cast(Tensor, self.lm_head(normed))

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Whole sequences: what ``logits`` takes, [B, T, H], of each of so many steps of training (section 3.2).

        tokens [B, T]: token i + 1 at place i; features [B, T, S, target width]: of token i. Step s at place i knows the
        tokens up to i + 1 + s (the true ones; of a parallel head, up to i + 1) and the streams up to i, and guesses
        token i + 2 + s. Its last s places are filled up with the last token and mean nothing.
        """
        hidden, attend = self.fuse(features), Unrolled()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        for step in range(steps):
            known = torch.cat((tokens[:, step:], tokens[:, -1:].expand(-1, min(step, tokens.shape[1]))), dim=1)
            if step > 0:
                known, hidden = self.following(known, hidden)
            hidden, normed = self.step(known, hidden, positions + step, attend)
            yield normed

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """The logits [B, T, Vd] of ``states``."""
        return map(self.logits, self.states(tokens, features, steps))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """One step over whole sequences: ``unroll`` with one step."""
        return next(self.unroll(tokens, features, 1))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        key = (dtype, positions.device)
        if key not in self._angles:
            assert self.config.decoder.rotary is not None
            self._angles[key] = RotaryAngles(self.config.decoder.rotary, *key)
        return self._angles[key](positions)


class Unrolled:
    """An ``Attend`` over whole sequences, one call a layer and step.

    The first step is causal. At step s place i sees the first step's keys up to its own place, and at its own place
    those of the steps between: what drafting s guesses behind place i would have in its cache.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        """q [B, heads, T, D], k and v [B, key heads, T, D] -> [B, heads, T, D]."""
        steps = self._steps.setdefault(layer, [])
        steps.append((k, v))
        if len(steps) == 1 and window is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return _attend_steps(q, steps, scale=scale, window=window)


def _attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], *, scale: float | None, window: int | None) -> Tensor:
    shared, length, last = q.shape[1] // steps[0][0].shape[1], q.shape[2], len(steps) - 1
    spread = [(k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)) for k, v in steps]
    place = torch.arange(length, device=q.device)
    seen = place <= place[:, None]
    if window is not None:
        seen = seen & (place[:, None] + last - place < window)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    text = (q @ spread[0][0].mT).masked_fill(~seen, -torch.inf)
    later = spread[1:] if window is None else spread[1:][-window:]
    own = [(q * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat((text, *own), dim=-1).float().softmax(-1).to(q.dtype)
    out = weights[..., :length] @ spread[0][1]
    for number, (_, v) in enumerate(later):
        out = out + weights[..., length + number, None] * v
    return out
