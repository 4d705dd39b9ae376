"""The base class of trained heads, which predict tokens of (a part of) a target's vocabulary from its hidden states.

Shapes: B rows, T positions, H the head's width, V the target's vocabulary, Vd the head's vocabulary, S hidden states
per token. Modules and tensors are named as in the speculators layout, so a state dict is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.layers import HeadLayer, HeadStep, rms_norm
from paceline.kernels.attention.base import Attend
from paceline.models.torch.rotary import RotaryAngles, Rotation


class Head(nn.Module):
    """A head with the given configuration; its weights are not set.

    joined: number of its layers, from the first, that read embeddings beside hidden states.

    embed_tokens: [V, H], not trained: the target's, or the checkpoint's own.
    d2t: [Vd] int64, to add to a token id of the head to get the target's. t2d: [V] bool, whether the head can predict a
        token of the target.

    late: positions after the text's last one at which the first draft token is predicted.
    at_any_size: whether training may scale the hidden states.
    stride: in a pass of training, drafts begin at one position in ``stride``.
    reads_ends: whether it reads the target's embedding and last hidden state, not the usual ones in between.
    looks_back: whether a position also reads the fused hidden states of the position before.
    """

    late = 0
    at_any_size = True
    stride = 1
    reads_ends = looks_back = False
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, *, joined: int) -> None:
        super().__init__()
        shape = config.decoder
        self.config = config
        self.embed_tokens = nn.Embedding(shape.vocab_size, config.width).requires_grad_(False)
        self._add_fusion(config)  # first: random weights and training checkpoints depend on the order
        self._add_layers(config, joined)
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < config.draft_vocab_size)
        self._angles: dict[tuple[torch.dtype, torch.device], RotaryAngles] = {}

    def _add_fusion(self, config: HeadConfig) -> None:
        """Create the modules that ``fuse`` needs."""

    def _add_layers(self, config: HeadConfig, joined: int) -> None:
        """Create the layers and the norm behind them."""
        layers = range(len(config.decoder.layers))
        self.layers = nn.ModuleList(self._layer(config, index, index < joined) for index in layers)
        self.norm = rms_norm(config.width, config)

    def _layer(self, config: HeadConfig, index: int, joined: bool) -> HeadLayer:
        """Create a layer."""
        return HeadLayer(config, index, joined=joined)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def fused_width(self) -> int:
        """Width of what ``fuse`` returns."""
        return self.config.width

    @property
    def targets(self) -> Tensor:
        """Token id of the target for each token of the head, [Vd] int64."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def set_vocabulary(self, targets: Tensor) -> None:
        """Set the head's vocabulary. targets: distinct token ids of the target, [Vd] int64."""
        self.d2t.copy_(targets - torch.arange(targets.shape[0], device=targets.device))
        self.t2d.zero_()[targets] = True

    def fuse(self, features: Tensor) -> Tensor:
        """Fuse the target's hidden states [..., S, target width] to what ``step`` reads, [..., fused width]."""
        raise NotImplementedError

    def positions_after(self, count: int) -> int:
        """Number of positions after the text's last one at which a pass for ``count`` draft tokens runs."""
        return self.late + count - 1

    def ahead(self, token: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Inputs at ``count`` positions after the text, for heads that draft in one pass.

        token: last token of the text, [B]. hidden: fused hidden states of the token before it, [B, H].
        Returns tokens [B, count] and hidden states [B, count, H].
        """
        raise NotImplementedError

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadStep:
        """Run the layers.

        tokens: [B, T], each the token after its position. hidden: [B, T, H], fused hidden states or the head's own.
        positions: [B, T].
        """
        rotation = self._rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = cast(HeadLayer, layer)(hidden, rotation, attend)
        return self._outputs(hidden)

    def _outputs(self, hidden: Tensor) -> HeadStep:
        normed = self.norm(hidden)
        return HeadStep(normed if self.config.norm_output else hidden, normed)

    def spread(self, normed: Tensor, count: int) -> Tensor:
        """Normed states [B, count, H] of draft tokens, from the output of ``step`` at the positions that draft."""
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., Vd] over the head's vocabulary, from normed states [..., H]."""
        return cast(Tensor, self.lm_head(normed))

    def states(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Normed states of whole sequences, [B, T, H], for each of at most ``steps`` draft tokens.

        tokens: [B, T], token i + 1 at position i. features: [B, T, S, target width], of token i at position i.
        Step s at position i has read the hidden states up to i, and predicts token i + 2 + s. Its last s positions have
        no meaning.
        """
        raise NotImplementedError

    def drafts(self, tokens: Tensor, features: Tensor, begins: Tensor, steps: int) -> Iterator[Tensor]:
        """Normed states [M, H] of each of at most ``steps`` draft tokens, for the drafts that begin at M positions.

        tokens: [B, T]. features: [B, T, S, target width]. Both are of token i at position i.
        begins: [M] int64, ascending positions i of the flattened [B, T - 1], whose drafts follow token i + 1. Step s
            has read the hidden states up to i, and predicts token i + 2 + s. Steps beyond the text have no meaning.
        """
        for states in self.states(tokens[:, 1:], features[:, :-1], steps):
            yield states.flatten(0, 1)[begins]

    def continued(self, states: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [M, Vd] of the draft tokens of a step, and of their acceptance [M] where the head predicts it.

        states: [M, s + 1, H], normed, of the steps up to this one. path: [M, s + 1], the token before each step's.
        """
        return self.logits(states[:, -1]), None

    def trained_steps(self, unroll: int, alone: bool) -> int:
        """Number of draft tokens that training considers, of the ``unroll`` of a whole draft.

        alone: whether it is so early that the first one is trained alone.
        """
        return 1 if alone else unroll

    def unroll(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits [B, T, Vd] of ``states``."""
        return map(self.logits, self.states(tokens, features, steps))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Logits [B, T, Vd] of the first draft token: ``unroll`` with one step."""
        return next(self.unroll(tokens, features, 1))

    def absorb(self, scale: Tensor) -> None:
        """Fold a factor on the hidden states, [S], into the weights, so that they are read unscaled."""

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        key = (dtype, positions.device)
        if key not in self._angles:
            rotary = self.config.decoder.layers[0].attention.rotary
            assert rotary is not None, "families of heads have rotary positions"
            self._angles[key] = RotaryAngles(rotary, *key)
        return self._angles[key](positions)
