"""Output heads over a part of a vocabulary, for drafts. V: the vocabulary, S: the tokens that are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels import abi, native, pack, structs
from paceline.models.base import AnyModel
from paceline.models.packing import PackedDecoder


class ShortHead(Protocol):
    """An output head over S tokens, in places that can be filled anew. size: S."""

    size: int

    def put(self, places: Tensor, tokens: Tensor) -> None:
        """Score tokens [N] int64 of the vocabulary at places [N] int64 from now on."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, S] float32 of hidden states [N, width]."""
        ...


@dataclass(frozen=True)
class PassBytes:
    """Bytes of weights that a forward pass reads: of the layers, and of the output head for each token of V."""

    layers: int
    token: int


@runtime_checkable
class Shortenable(AnyModel, Protocol):
    """A model that can score a part of its vocabulary, unless ``pass_bytes`` is None."""

    @property
    def pass_bytes(self) -> PassBytes | None:
        """What a forward pass reads; None if the model scores its whole vocabulary only."""
        ...

    def short_head(self, size: int) -> ShortHead:
        """Return a head over ``size`` tokens, whose places are not filled yet."""
        ...


class PackedShortHead:
    """Copies of the packed columns of a decoder on the CPU kernels. ``put`` refuses int4 columns (ParameterError)."""

    def __init__(self, packed: PackedDecoder, size: int) -> None:
        self._decoder, self._whole, self.size = packed.decoder, packed.model.head, size
        whole, formats = self._whole, {number: name for name, number in structs.FORMATS.items()}
        columns = pack.round_up(size, abi.PANEL)
        nbytes = columns * column_bytes(whole) + _SLACK
        self._arena = native.Arena(self._decoder.kernels.library, nbytes)
        memory = pack.allocate(size, whole.inputs, formats[whole.format], bool(whole.bias), self._arena.take)
        self.linear = structs.linear(memory)

    def put(self, places: Tensor, tokens: Tensor) -> None:
        self._decoder.copy_columns(self._whole, tokens.contiguous(), self.linear, places.contiguous())

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float().contiguous()
        out = hidden.new_empty(hidden.shape[0], self.size)
        self._decoder.logits(hidden, out, self.linear)
        return out


_SLACK = 3 * 64  # bytes: weights, scales and biases each begin on a cache line


def column_bytes(linear: abi.CLinear) -> int:
    """Return the bytes of one packed column of an int8 or bf16 layer, with its scale and bias."""
    weights = int(linear.inputs) * (1 if linear.format == abi.Format.INT8 else 2)
    return weights + 4 * (bool(linear.scales) + bool(linear.bias))


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
