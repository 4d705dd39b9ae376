"""What the target says about texts that are there: the streams that enter some layers, its last state, its
distribution.

A pass of its own over finished texts. It costs about as much as generating them did; the CPU kernels' bits are those
that generating had, whatever stood beside a text.
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
from paceline.errors import ParameterError
from paceline.kernels.attention import make_backend
from paceline.kernels.attention.cached import CachedAttend
from paceline.kernels.native import kernel_threads
from paceline.models.base import AnyModel, FlatModel, Model, Streams

PASS_TOKENS = 2048  # read together
LOGITS_TOKENS = 256  # whose logits are alive at once


@dataclass(frozen=True)
class TargetOutputs:
    """Of N tokens, one text after the other; on the CPU.

    features [N, taps, width], hidden [N, width]: bfloat16. best [N] int32: the token that the target finds most likely
    to follow. norm [N] float32: the logarithm of the sum of e^logit, which makes logits a distribution.
    """

    features: Tensor
    hidden: Tensor
    best: Tensor
    norm: Tensor


def taps_of(layers: int) -> tuple[int, int, int]:
    """Whose entering streams an EAGLE-3 head reads: near the beginning, in the middle, near the end.

    Raises ParameterError for a target of so few layers that two of them are one.
    """
    taps = 2, layers // 2, layers - 3
    if not taps[0] < taps[1] < taps[2]:
        raise ParameterError("MODEL", f"{layers} layers", "a target of at least 8 layers: a head reads three streams")
    return taps


class HiddenStateReader:
    """Reads texts with a model. longest: tokens of the longest text. threads: as the engine's."""

    def __init__(self, model: AnyModel, taps: Sequence[int], longest: int, threads: int) -> None:
        self.model, self.taps, self.longest, self.threads = model, tuple(taps), longest, threads
        rows = max(1, PASS_TOKENS // longest)
        shape = model.layers, rows, model.kv_heads, longest, model.head_dim
        self._cache = KVCache(*shape, dtype=model.dtype, device=model.device)
        self._backend = None if isinstance(model, FlatModel) else make_backend("auto", model.device)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> Iterator[TargetOutputs]:
        """One reading for each few texts, in their order; together they are what all texts have."""
        for first in range(0, len(texts), self._cache.rows):
            some = [list(text) for text in texts[first : first + self._cache.rows]]
            with self._own_threads():
                features, hidden = self._streams(some)
            with torch_threads(self.threads):
                distributions = [self._distribution(part) for part in torch.split(hidden, LOGITS_TOKENS)]
            best, norm = (torch.cat(parts) for parts in zip(*distributions, strict=True))
            yield TargetOutputs(features.bfloat16().cpu(), hidden.bfloat16().cpu(), best, norm)

    def _streams(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        model = self.model
        found = _flat(model, self._cache, texts, self.taps) if isinstance(model, FlatModel) else self._padded(texts)
        assert found.features is not None
        return found.features, found.hidden

    def _padded(self, texts: list[list[int]]) -> Streams:
        """Side by side, padded to the longest; of what comes back, the real tokens."""
        model: Model = self.model  # type: ignore[assignment]
        assert self._backend is not None
        width = max(map(len, texts))
        real = torch.tensor([[True] * len(text) + [False] * (width - len(text)) for text in texts])
        tokens = torch.zeros(real.shape, dtype=torch.int64).masked_scatter_(real, _chain(texts)).to(model.device)
        positions = torch.arange(width, device=model.device).expand_as(tokens)
        attend = CachedAttend(self._cache, self._backend, self._backend.plan(positions, width, None), 0)
        found, real = model.streams(tokens, positions, attend, self.taps), real.to(model.device)
        assert found.features is not None
        return Streams(found.hidden[real], found.features[real])

    def _distribution(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden)
        return logits.argmax(-1).int().cpu(), logits.logsumexp(-1).cpu()

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """As the engine's: beside the kernels' threads torch gets one."""
        with torch_threads(1 if self._backend is None else self.threads), kernel_threads(self.threads):
            yield


def _flat(model: FlatModel, cache: KVCache, texts: list[list[int]], taps: Sequence[int]) -> Streams:
    rows = torch.cat([torch.full((len(text),), row) for row, text in enumerate(texts)])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    return model.forward(Nodes(_chain(texts), rows, positions), cache, taps)


def _chain(texts: list[list[int]]) -> Tensor:
    return torch.tensor([token for text in texts for token in text])
