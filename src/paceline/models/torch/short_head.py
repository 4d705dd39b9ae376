"""An output head over a part of a vocabulary, for drafts, in torch. V: the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


class TorchShortHead:
    """Copies of the rows of a head in torch: weight [V, width], bias [V] or None. Reference of ``PackedShortHead``.

    scaled: what the model does to its logits, in float32.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, size: int, scaled: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._whole, self._scaled, self.size = (weight, bias), scaled, size
        self._weight = weight.new_empty(size, weight.shape[1])
        self._bias = None if bias is None else bias.new_empty(size)

    @torch.no_grad()
    def put(self, places: Tensor, tokens: Tensor) -> None:
        weight, bias = self._whole
        self._weight[places] = weight[tokens]
        if self._bias is not None and bias is not None:
            self._bias[places] = bias[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = functional.linear(hidden, self._weight, self._bias).float()
        return logits if self._scaled is None else self._scaled(logits)
