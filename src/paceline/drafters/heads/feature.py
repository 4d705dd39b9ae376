"""The EAGLE-3 head (arXiv 2503.01840) and its 3.1 switches: a decoder over the target's hidden states.

At position i it reads the target's hidden states of token i, fused to one vector, and the embedding of token i + 1,
which is known by then. It predicts token i + 2. At the next step the target has not read its token yet, so the draft
token is read with the head's own state of position i. A parallel head (P-EAGLE, arXiv 2602.01469) reads the same mask
at all these positions, so that one pass covers them. Keys and values are stored at the position of the hidden states.

Shapes: B rows, T positions, H the head's width, V the target's vocabulary, Vd the head's vocabulary, S hidden states
per token. Modules and tensors are named as in the speculators layout, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadLayer, HeadStep, UnrolledAttention, rms_norm
from paceline.kernels.attention.base import Attend


class FeatureHead(Head):
    """A head that reads its draft tokens, or a mask instead.

    mask_hidden: [1, 1, S * target width], read by a parallel head in place of hidden states; None for other heads,
        which read their own state.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=1)
        self.mask_hidden: nn.Parameter | None = None
        if config.parallel:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.tap_count * config.target_width))

    def _add_fusion(self, config: HeadConfig) -> None:
        self.fc = nn.Linear(config.tap_count * config.target_width, config.width, bias=False)
        self.fc_norm = self.input_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(rms_norm(config.target_width, config) for _ in range(config.tap_count))
        if config.norm_before_fc:
            self.input_norm = rms_norm(config.tap_count * config.target_width, config)

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse the target's hidden states [..., S, target width] to the input of the first step, [..., H]."""
        features = features.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features.unbind(-2), strict=True)
            features = torch.stack([norm(state) for norm, state in parts], dim=-2)
        flat = features.flatten(-2)
        return cast(Tensor, self.fc(flat if self.input_norm is None else self.input_norm(flat)))

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        mask = self.mask()
        assert mask is not None, "only parallel heads read ahead"
        tokens = token.new_full((len(token), count), self.config.mask_token or 0)
        return tokens, mask.expand(*tokens.shape, -1)

    def mask(self) -> Tensor | None:
        """The fused mask of a parallel head, [H]; None for other heads."""
        return None if self.mask_hidden is None else self.fuse(self.mask_hidden.view(self.config.tap_count, -1))

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadStep:
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        rotation = self._rotation(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            layer = cast(HeadLayer, layer)
            first = index == 0
            hidden = layer.first(embedded, hidden, rotation, attend) if first else layer(hidden, rotation, attend)
        return self._outputs(hidden)

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """See ``Head.states``; section 3.2 of the paper. Step s also reads the true tokens up to i + 1 + s.

        A parallel head reads them up to i + 1 only.
        """
        hidden, attend = self.fuse(features), UnrolledAttention()
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
