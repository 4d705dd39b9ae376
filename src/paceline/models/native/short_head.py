"""An output head over a part of a vocabulary, for drafts, made of a packed decoder's columns."""

from __future__ import annotations

from torch import Tensor

from paceline.kernels import abi, native, pack, structs
from paceline.models.native.packing import PackedDecoder


class PackedShortHead:
    """Copies of the packed columns of a layer on the CPU kernels. ``put`` refuses int4 columns (ParameterError).

    whole: the layer, by default the decoder's output head.
    """

    def __init__(self, packed: PackedDecoder, size: int, whole: abi.CLinear | None = None) -> None:
        self._decoder, self.size = packed.decoder, size
        self._whole = whole = packed.model.head if whole is None else whole
        formats = {number: name for name, number in structs.FORMATS.items()}
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
