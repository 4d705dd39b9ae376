"""What all trained heads share: they read a target's streams and say some of its tokens.

Shapes: B rows, T places, H the head's width, V the target's vocabulary, Vd the tokens that it can say, S streams.
Names of modules and tensors are those of the speculators layout, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.layers import Layer, Step, rms_norm
from paceline.kernels.attention.base import Attend
from paceline.models.transformer import RotaryAngles, Rotation


class Head(nn.Module):
    """A head as ``HeadConfig`` says it, its weights not set. joined: how many of its layers read
    embeddings beside hidden states.

    embed_tokens [V, H] is not trained: it is the target's, or the checkpoint's own.
    d2t [Vd] int64: what is to be added to the head's number of a token to get the target's. t2d [V] bool: which of the
    target's tokens it can say.

    late: how many places behind the text the first draft token of a draft is drawn. at_any_size: whether training may
    bring the streams to another size. unrolls: whether training has it read its own draft tokens.
    """

    late = 0
    at_any_size = unrolls = True
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, *, joined: int) -> None:
        super().__init__()
        shape = config.decoder
        self.config = config
        self.embed_tokens = nn.Embedding(shape.vocab_size, config.width).requires_grad_(False)
        self._add_fusion(config)  # here, because random weights and training's checkpoints know the parts' order
        self.layers = nn.ModuleList(Layer(config, index, joined=index < joined) for index in range(shape.layers))
        self.norm = rms_norm(config.width, config)
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < config.draft_vocab_size)
        self._angles: dict[tuple[torch.dtype, torch.device], RotaryAngles] = {}

    def _add_fusion(self, config: HeadConfig) -> None:
        """The parts of ``fuse``, of heads that have some."""

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def targets(self) -> Tensor:
        """[Vd] int64: the target's number of each of the head's tokens."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def say(self, targets: Tensor) -> None:
        """The head's tokens are these of the target's, [Vd] int64, each one once."""
        self.d2t.copy_(targets - torch.arange(targets.shape[0], device=targets.device))
        self.t2d.zero_()[targets] = True

    def fuse(self, features: Tensor) -> Tensor:
        """The target's streams [..., S, target width] -> [..., H], what ``step`` reads where the target has read."""
        raise NotImplementedError

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """What is read in one pass at so many places behind the text: tokens [B, count] and hidden [B, count, H].

        token [B]: the text's last; hidden [B, H]: the fused streams of the one before it. Of heads that draft token so.
        """
        raise NotImplementedError

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Step:
        """tokens [B, T], each the one after its place; hidden [B, T, H] fused streams or states; positions [B, T]."""
        rotation = self._rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = cast(Layer, layer)(hidden, rotation, attend)
        return self._said(hidden)

    def _said(self, hidden: Tensor) -> Step:
        normed = self.norm(hidden)
        return Step(normed if self.config.norm_output else hidden, normed)

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., Vd], of the head's own numbers of tokens."""
        return cast(Tensor, self.lm_head(normed))

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Whole sequences: what ``logits`` takes, [B, T, H], of each of at most so many draft tokens of a draft.

        tokens [B, T]: token i + 1 at place i; features [B, T, S, target width]: of token i. Step s at place i knows the
        streams up to i, and draft tokens token i + 2 + s. Its last s places mean nothing.
        """
        raise NotImplementedError

    def drafts(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """``states`` of texts as they are, token i and its streams both at place i: [B, T - 1, H], of drafts behind
        token i + 1.
        """
        return self.states(tokens[:, 1:], features[:, :-1], steps)

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """The logits [B, T, Vd] of ``states``."""
        return map(self.logits, self.states(tokens, features, steps))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """One step over whole sequences: ``unroll`` with one step."""
        return next(self.unroll(tokens, features, 1))

    def absorb(self, scale: Tensor) -> None:
        """Take streams from now on as they are, which were multiplied by scale [S] until now."""

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        key = (dtype, positions.device)
        if key not in self._angles:
            assert self.config.decoder.rotary is not None
            self._angles[key] = RotaryAngles(self.config.decoder.rotary, *key)
        return self._angles[key](positions)
