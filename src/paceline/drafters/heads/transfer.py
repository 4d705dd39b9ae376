"""The hidden transfer (arXiv 2404.12022): what the target's last layers would make of tokens that are not there yet.

A linear map turns the hidden state that enters one of the target's last layers at a token into a pseudo hidden state of
each token behind it; all of them go through the layers above in one pass, where they see the text and the pseudo states
before them, and the target's own head says what follows. Only the maps are trained.

The paper draws the maps' input from the last token. Here the target has not read that one yet, but it is known: its
embedding is read beside the hidden state of the token before it. So the pseudo state of the known token draft tokens
first. The layers above are a copy of the target's, with keys and values of their own, which makes it a head like
others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import Unrolled

_TINY = 1e-6


class TransferHead(Head):
    """Shapes as of ``Head``; G draft tokens at most.

    transfer [G, H, 2H]: of each draft token, what is added to the hidden state, read from it and from the known token's
    embedding, both at unit size, at the hidden state's size. So a transfer of zeros is the hidden state itself.
    """

    late = 1
    at_any_size = False  # its layers are the target's

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=0)
        self.requires_grad_(False)
        self.transfer = nn.Parameter(torch.zeros(config.transfers, config.width, 2 * config.width))

    def fuse(self, features: Tensor) -> Tensor:
        """It reads one stream, the last of those given."""
        return features[..., -1, :].to(self.dtype)

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Behind the last draft token that it can make nothing means anything."""
        steps = [self._pseudo(token, hidden, min(step, self.config.transfers - 1)) for step in range(count)]
        return token[:, None].expand(-1, count), torch.stack(steps, dim=1)

    def _pseudo(self, tokens: Tensor, hidden: Tensor, step: int) -> Tensor:
        """tokens [...], hidden [..., H] of the ones before them -> [..., H]."""
        embedded, size = self.embed_tokens(tokens).to(hidden.dtype), _size(hidden)
        read = torch.cat((hidden / size, embedded / _size(embedded)), dim=-1)
        return hidden + size * nn.functional.linear(read, self.transfer[step])

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        hidden, attend = self.fuse(features), Unrolled()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.step(tokens, hidden, positions, attend)  # the text, whose keys and values all draft tokens see
        for step in range(min(steps, self.config.transfers)):
            yield self.step(tokens, self._pseudo(tokens, hidden, step), positions + 1 + step, attend).normed


def _size(x: Tensor) -> Tensor:
    """[..., H] -> [..., 1]: the root of its mean square."""
    return x.float().square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY).to(x.dtype)
