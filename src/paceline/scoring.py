"""Log-probabilities of a given text: what ``echo`` with ``logprobs`` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.decoder import Decoder
from paceline.outputs import TokenLogprob

CHUNK = 32  # positions whose logits are alive at once


class PromptScorer:
    """Feeds a text to a cache of its own, a chunk at a time; logprobs[i] is that of token i + 1 after those before it.

    decoder: one row of at least len(token_ids) positions. top: how many of the most likely tokens to tell.
    """

    def __init__(self, decoder: Decoder, token_ids: Sequence[int], top: int) -> None:
        self.decoder, self.token_ids, self.top = decoder, list(token_ids), top
        self.logprobs: list[TokenLogprob] = []

    @property
    def finished(self) -> bool:
        return len(self.logprobs) >= len(self.token_ids) - 1

    def step(self) -> None:
        """Score the next chunk."""
        start = len(self.logprobs)
        fed, drawn = self.token_ids[start : start + CHUNK], self.token_ids[start + 1 : start + CHUNK + 1]
        fed = fed[: len(drawn)]
        device = self.decoder.model.device
        tokens, at = torch.tensor([fed], device=device), torch.tensor([start], device=device)
        law = self.decoder.logits(self.decoder.forward(tokens, at, start + len(fed)))[0].float().log_softmax(-1)
        own = law.gather(-1, torch.tensor(drawn, device=device)[:, None])[:, 0].tolist()
        values, ids = (table.tolist() for table in law.topk(min(self.top, law.shape[-1]), dim=-1))
        for token, value, best, likely in zip(drawn, own, values, ids, strict=True):
            self.logprobs.append(TokenLogprob(token, value, tuple(zip(likely, best, strict=True))))
