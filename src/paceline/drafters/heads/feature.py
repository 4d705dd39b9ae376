"""The EAGLE-3 head (arXiv 2503.01840) and its 3.1 switches: a decoder that reads the target's streams.

At place i it gets the target's streams of token i, fused to one hidden state, and the embedding of token i + 1, which
is known by then; it draft tokens token i + 2. At the next step, where the target has read nothing yet, the draft token
is read beside what the head made of place i. A parallel head (P-EAGLE, arXiv 2602.01469) reads the same mask at all of
those
places, so that no step waits for the one before: they are places of one pass. Keys and values stand at the position of
the streams.

Shapes: B rows, T places, H the head's width, V the target's vocabulary, Vd the tokens that it can say, S streams.
Names of modules and tensors are those of the speculators layout, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import Layer, Step, Unrolled, rms_norm
from paceline.kernels.attention.base import Attend


class FeatureHead(Head):
    """A head that reads its draft tokens, or a mask in their place.

    mask_hidden [1, 1, S * target width]: what a parallel head reads in place of streams; None: it reads its own state.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=1)
        self.mask_hidden: nn.Parameter | None = None
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.streams * config.target_width))

    def _add_fusion(self, config: HeadConfig) -> None:
        self.fc = nn.Linear(config.streams * config.target_width, config.width, bias=False)
        self.fc_norm = self.input_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(rms_norm(config.target_width, config) for _ in range(config.streams))
        if config.norm_before_fc:
            self.input_norm = rms_norm(config.streams * config.target_width, config)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's streams [..., S, target width] -> [..., H], what the first step reads."""
        features = features.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features.unbind(-2), strict=True)
            features = torch.stack([norm(stream) for norm, stream in parts], dim=-2)
        flat = features.flatten(-2)
        return cast(Tensor, self.fc(flat if self.input_norm is None else self.input_norm(flat)))

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        mask = self.mask()
        assert mask is not None, "other heads read their guesses"
        tokens = token.new_full((len(token), count), self.config.mask_token or 0)
        return tokens, mask.expand(*tokens.shape, -1)

    def mask(self) -> Tensor | None:
        """[H]: what a parallel head reads in place of fused streams; None: it reads its own state."""
        return None if self.mask_hidden is None else self.fuse(self.mask_hidden.view(self.config.streams, -1))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Step:
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        rotation = self._rotation(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            layer = cast(Layer, layer)
            first = index == 0
            hidden = layer.first(embedded, hidden, rotation, attend) if first else layer(hidden, rotation, attend)
        return self._said(hidden)

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Section 3.2: step s knows the true tokens up to i + 1 + s, too; of a parallel head, up to i + 1."""
        hidden, attend = self.fuse(features), Unrolled()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = self.mask()
        for step in range(steps):
            known = torch.cat((tokens[:, step:], tokens[:, -1:].expand(-1, min(step, tokens.shape[1]))), dim=1)
            if step > 0 and mask is not None:
                known, hidden = torch.full_like(tokens, self.config.mask_token or 0), mask.expand_as(hidden)
            hidden, normed = self.step(known, hidden, positions + step, attend)
            yield normed

    @torch.no_grad()
    def absorb(self, scale: Tensor) -> None:
        every = scale.repeat_interleave(self.config.target_width)
        self.fc.weight.mul_(every)
        if self.mask_hidden is not None:
            self.mask_hidden.div_(every)
