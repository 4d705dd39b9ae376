"""The hidden transfer head (arXiv 2404.12022): it runs the target's last layers on predicted hidden states.

A linear map predicts, from the hidden state that enters one of the target's last layers, a pseudo hidden state for each
of the next tokens. One pass runs all of them through the layers above, where they see the text and the pseudo states
before them. The target's output embedding then gives the logits. Only the maps are trained.

The paper maps the hidden state of the last token. Here the target has not read the last token yet, but its id is known,
so its embedding is read beside the hidden state of the token before it, and its own pseudo state predicts the first
draft token. The layers above are a copy of the target's with a cache of their own, so this is a head like the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import UnrolledAttention

_TINY = 1e-6  # lower bound of a root mean square, against division by 0


class TransferHead(Head):
    """Shapes as in ``Head``; G is the largest number of draft tokens.

    transfer: [G, H, 2H], one map per draft token. It reads the hidden state and the last token's embedding, both scaled
        to a root mean square of 1. Its output, at the hidden state's scale, is added to the hidden state, so maps of
        zeros return the hidden state.
    """

    late = 1
    at_any_size = False  # its layers are copies of the target's, which read unscaled hidden states

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=0)
        self.requires_grad_(False)
        self.transfer = nn.Parameter(torch.zeros(config.transfers, config.width, 2 * config.width))

    def fuse(self, features: Tensor) -> Tensor:
        """The last of the hidden states: this head reads one."""
        return features[..., -1, :].to(self.dtype)

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See ``Head.ahead``. Entries beyond the last map repeat its result and have no meaning."""
        steps = [self._pseudo(token, hidden, min(step, self.config.transfers - 1)) for step in range(count)]
        return token[:, None].expand(-1, count), torch.stack(steps, dim=1)

    def _pseudo(self, tokens: Tensor, hidden: Tensor, step: int) -> Tensor:
        """Pseudo hidden states [..., H]. tokens: [...]. hidden: [..., H], of the tokens before them."""
        embedded, scale = self.embed_tokens(tokens).to(hidden.dtype), _rms(hidden)
        inputs = torch.cat((hidden / scale, embedded / _rms(embedded)), dim=-1)
        return hidden + scale * nn.functional.linear(inputs, self.transfer[step])

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        hidden, attend = self.fuse(features), UnrolledAttention()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.step(tokens, hidden, positions, attend)  # stores the text's keys and values
        for step in range(min(steps, self.config.transfers)):
            yield self.step(tokens, self._pseudo(tokens, hidden, step), positions + 1 + step, attend).normed


def _rms(x: Tensor) -> Tensor:
    """Root mean square over the last dimension: [..., H] -> [..., 1]."""
    return x.float().square().mean(-1, keepdim=True).sqrt().clamp(min=_TINY).to(x.dtype)
