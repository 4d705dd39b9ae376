"""The layers of a decoder that reads another model's keys and values, on the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.nodes import Nodes
from paceline.errors import ParameterError
from paceline.kernels import abi, native
from paceline.models.description.spec import DecoderSpec
from paceline.models.native.model import HEAD_FORMAT, LAYER_FORMAT, NativeModel, Quantization
from paceline.models.native.packing import PackedDecoder, packed_size
from paceline.models.native.spec import check_reference, check_spec, spec_of


class NativeLayers:
    """Packed layers without keys of their own. A token stands one position behind the last key that it sees.

    places: the layer of the target's cache that each layer reads.
    Raises ModelFormatError if the kernels cannot run the layers.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        places: Sequence[int],
        target: NativeModel,
        quantization: Quantization | None,
    ) -> None:
        kernels = native.required()
        check_reference(spec)
        without_ends = {**weights, "embed.weight": torch.zeros(1, spec.width)}
        shape = spec_of(replace(spec, vocab_size=1, tied=True), without_ends, places=places)
        shape = replace(shape, max_positions=target.max_positions, read_from=tuple(target.kv_layers), ahead=1)
        check_spec(shape)
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        self._packed = PackedDecoder(shape, formats, kernels, target.threads)
        self._bytes = packed_size(shape, *formats)
        self.precision = f"{quantization or 'bfloat16'} on the CPU kernels {kernels.name}"

    def run(self, x: Tensor, rows: Tensor, last_keys: Tensor, cache: abi.CCache) -> Tensor:
        """Run x [N, width] -> hidden [N, width], float32, after the final norm.

        rows, last_keys [N] int64: each token's row of the target's cache, and the position of the last key it sees.
        """
        entering, hidden = x.float().contiguous(), torch.empty(x.shape, dtype=torch.float32)
        nodes = Nodes(torch.zeros_like(rows), rows.contiguous(), last_keys.contiguous())
        problem = self._packed.decoder.forward(nodes, cache, hidden, None, None, entering)
        if problem is not None:
            raise ParameterError("tokens", f"[{len(rows)} tokens]", problem)
        return hidden

    def weight_bytes(self) -> int:
        """Return the bytes of the packed weights."""
        return self._bytes
