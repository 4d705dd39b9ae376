"""The target's hidden states, last state and next-token distribution for every token of finished texts.

This is a forward pass of its own, after the texts have been generated. It costs about as much as generating them did.
With the CPU kernels its results are bit-identical to those of generation, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.hardware import torch_threads
from paceline.core.nodes import Nodes
from paceline.core.slots import Slots
from paceline.errors import ParameterError
from paceline.kernels.attention import make_backend
from paceline.kernels.attention.cached import CachedAttend
from paceline.kernels.native import kernel_threads
from paceline.models.base import AnyModel, FlatModel, HiddenStates, Model, cache_of

PASS_TOKENS = 2048  # tokens of a forward pass
LOGITS_TOKENS = 256  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class TargetOutputs:
    """The target's outputs for N tokens of concatenated texts, on the CPU.

    features [N, taps, width] bfloat16: inputs of the tapped layers. hidden [N, width] bfloat16: the last state.
    best [N] int32: the most likely next token. norm [N] float32: log-sum-exp of the logits.
    """

    features: Tensor
    hidden: Tensor
    best: Tensor
    norm: Tensor


def taps_of(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads: near the beginning, in the middle, near the end.

    Raises ParameterError for a target with too few layers for three different ones.
    """
    taps = 2, layers // 2, layers - 3
    if not taps[0] < taps[1] < taps[2]:
        raise ParameterError(
            "MODEL", f"{layers} layers", "a target of at least 8 layers: a head reads the inputs of three layers"
        )
    return taps


class HiddenStateReader:
    """Runs a model over texts and returns its ``TargetOutputs``.

    taps: layers whose inputs are returned. longest: tokens of the longest text. threads: CPU threads, as in the engine.
    """

    def __init__(self, model: AnyModel, taps: Sequence[int], longest: int, threads: int) -> None:
        self.model, self.taps, self.longest, self.threads = model, tuple(taps), longest, threads
        rows = max(1, PASS_TOKENS // longest)
        self._cache = cache_of(model, rows, longest)
        self._backend = None if isinstance(model, FlatModel) else make_backend("auto", model.device)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> Iterator[TargetOutputs]:
        """Yield the outputs of one group of texts after the other, in the order of ``texts``."""
        for first in range(0, len(texts), self._cache.rows):
            group = [list(text) for text in texts[first : first + self._cache.rows]]
            with self._kernel_threads():
                features, hidden = self._hidden_states(group)
            with torch_threads(self.threads):
                chunks = [self._best_and_norm(chunk) for chunk in torch.split(hidden, LOGITS_TOKENS)]
            best, norm = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            yield TargetOutputs(features.bfloat16().cpu(), hidden.bfloat16().cpu(), best, norm)

    def _hidden_states(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        model = self.model
        states = _flat(model, self._cache, texts, self.taps) if isinstance(model, FlatModel) else self._padded(texts)
        assert states.features is not None
        return states.features, states.hidden

    def _padded(self, texts: list[list[int]]) -> HiddenStates:
        """Run the texts as one padded batch, and drop the padding from the result."""
        model: Model = self.model  # type: ignore[assignment]
        assert self._backend is not None
        width = max(map(len, texts))
        real = torch.tensor([[True] * len(text) + [False] * (width - len(text)) for text in texts])
        tokens = torch.zeros(real.shape, dtype=torch.int64).masked_scatter_(real, _chain(texts)).to(model.device)
        positions = torch.arange(width, device=model.device).expand_as(tokens)
        rows = Slots.listed(range(len(texts)), model.device)
        attend = CachedAttend(self._cache, self._backend, self._backend.plan(positions, width, None), rows)
        states, real = model.hidden_states(tokens, positions, attend, self.taps), real.to(model.device)
        assert states.features is not None
        return HiddenStates(states.hidden[real], states.features[real])

    def _best_and_norm(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden)
        return logits.argmax(-1).int().cpu(), logits.logsumexp(-1).cpu()

    @contextmanager
    def _kernel_threads(self) -> Iterator[None]:
        """Set threads as the engine does: torch gets one thread where native kernels have their own."""
        with torch_threads(1 if self._backend is None else self.threads), kernel_threads(self.threads):
            yield


def _flat(model: FlatModel, cache: KVCache, texts: list[list[int]], taps: Sequence[int]) -> HiddenStates:
    rows = torch.cat([torch.full((len(text),), row) for row, text in enumerate(texts)])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    return model.forward(Nodes(_chain(texts), rows, positions), cache, taps)


def _chain(texts: list[list[int]]) -> Tensor:
    return torch.tensor([token for text in texts for token in text])
