"""A Chimera head (arXiv 2402.15758): trigrams of tokens, attention over the whole text, one residual head per token.

At position i a small MLP mixes the embeddings of tokens i - 1, i and i + 1, the newest one known: the short range. A
decoder layer lets these trigrams attend to all earlier ones: the full context. Its output and the target's last hidden
state of token i are added, and a residual block for each draft token turns the sum into the input of the output head.
No draft token is read, so one position is enough for all of them.

The abstract fixes these three parts. Norms, sizes and the sum are choices of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadLayer, HeadStep, UnrolledAttention, rms_norm
from paceline.kernels.attention.base import Attend


class ChimeraHead(Head):
    """Shapes as in ``Head``; G is the largest number of draft tokens.

    It reads the target's embedding of a token and its last hidden state, and both of the token before. Where there is
    none before, the first token counts twice.
    heads: [G, H, H], the residual blocks. Zeros return their input.
    """

    at_any_size = False  # norms scale what it reads
    reads_ends = looks_back = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=0)
        self.heads = nn.Parameter(torch.zeros(config.residual_heads, config.width, config.width))

    def _add_fusion(self, config: HeadConfig) -> None:
        self.embed_norm, self.hidden_norm = rms_norm(config.width, config), rms_norm(config.width, config)
        self.trigram_in = nn.Linear(3 * config.width, config.width, bias=False)
        self.trigram_out = nn.Linear(config.width, config.width, bias=False)
        self.fc = nn.Linear(config.width, config.width, bias=False)

    @property
    def fused_width(self) -> int:
        return 2 * self.config.width

    def fuse(self, features: Tensor) -> Tensor:
        """Embedding and last hidden state side by side: [..., 2, H] -> [..., 2H]."""
        return features.to(self.dtype).flatten(-2)

    def positions_after(self, count: int) -> int:
        return 0

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadStep:
        """See ``Head.step``. hidden: [B, T, 4H], fused states of two tokens. Returns the sums, before ``spread``."""
        current, last, before, _ = hidden.chunk(4, dim=-1)
        newest = self.embed_tokens(tokens).to(hidden.dtype)
        trigram = self.embed_norm(torch.stack((before, current, newest), dim=-2))
        x = trigram[..., 2, :] + self.trigram_out(silu(self.trigram_in(trigram.flatten(-2))))
        rotation = self._rotation(positions, x.dtype)
        for layer in self.layers:
            x = cast(HeadLayer, layer)(x, rotation, attend)
        x = x + self.fc(self.hidden_norm(last))
        return HeadStep(x, x)

    def spread(self, normed: Tensor, count: int) -> Tensor:
        return torch.cat([self._after_block(normed, step) for step in range(count)], dim=1)

    def _after_block(self, fused: Tensor, step: int) -> Tensor:
        """Normed states [..., H] of one draft token. Steps beyond the last block repeat its result."""
        block = self.heads[min(step, len(self.heads) - 1)]
        return cast(Tensor, self.norm(fused + silu(nn.functional.linear(fused, block))))

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        fused = self.fuse(features)
        before = torch.cat((fused[:, :1], fused[:, :-1]), dim=1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs = torch.cat((fused, before), dim=-1)
        summed = self.step(tokens, inputs, positions, UnrolledAttention()).normed
        for step in range(min(steps, len(self.heads))):
            yield self._after_block(summed, step)
