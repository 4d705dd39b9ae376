"""A decoder's weights packed into one piece of memory, in the order in which the kernels read them.

One walk over the weights serves three times: to know how much memory they take, to pack them, and to find them again in
memory that was packed before and kept on disk (``packed_file``). Where a weight lies follows from the shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import pointer
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels import abi, native, pack, twin
from paceline.kernels.pack import Format
from paceline.kernels.spec import FusionWeights, LayerWeights, LinearWeights, NativeSpec

Contents: TypeAlias = Callable[[Tensor], None]
"""Writes what was packed before into memory of its size, uint8."""

_LINE = 64  # bytes: every weight begins on a cache line
_WITHOUT_END = 1 << 62  # bytes


def packed_size(spec: NativeSpec, layers: Format, head: Format) -> int:
    """Bytes that all weights take once packed, each counted once (tied ones too). spec: shapes suffice."""
    places = _Places(torch.empty(_WITHOUT_END, dtype=torch.uint8, device="meta"), fill=False)
    places.of_model(spec, layers, head)
    return places.used


class PackedDecoder:
    """The library's decoder on packed weights. memory: all of them, uint8.

    contents: writes the packed weights, and of the spec's tensors only the shapes matter; None: they are packed now.
    """

    def __init__(
        self,
        spec: NativeSpec,
        formats: tuple[Format, Format],
        kernels: native.Kernels,
        threads: int,
        contents: Contents | None = None,
    ) -> None:
        size = packed_size(spec, *formats)
        arena = native.Arena(kernels.library, size)
        self.memory = arena.take(size)
        if contents is not None:
            contents(self.memory)
        model = _Places(self.memory, fill=contents is None).of_model(spec, *formats)
        tables = twin.rotary_table(spec)
        model.cosine, model.sine = (table.data_ptr() for table in tables)
        self.decoder = native.NativeDecoder(kernels, model, (arena, tables), threads)


class _Places:
    """Walks over the weights, gives each its place in ``memory`` and packs it there if ``fill``."""

    def __init__(self, memory: Tensor, *, fill: bool) -> None:
        self._memory, self._fill, self.used = memory, fill, 0

    def of_model(self, spec: NativeSpec, to: Format, head_to: Format) -> abi.CModel:
        """The whole decoder, but for its rotary tables."""
        layers = [self._layer(layer, to) for layer in spec.layers]
        fusion = None if spec.fusion is None else pointer(self._fusion(spec.fusion, to))
        return abi.CModel(
            layers=(abi.CLayer * len(layers))(*layers),
            head=self._linear(spec.head or LinearWeights(spec.embedding), head_to),
            embedding=None if spec.head is None else self._vector(self._padded(spec.embedding), torch.bfloat16),
            final_norm=self._vector(self._padded(spec.final_norm)),
            positions=spec.max_positions,
            layer_count=len(layers),
            width=spec.width,
            ffn=spec.ffn,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            dim=spec.head_dim,
            rotary_half=len(spec.inverse_frequencies),
            epsilon=spec.epsilon,
            attention_scale=spec.scale,
            fusion=fusion,
        )

    def _fusion(self, fusion: FusionWeights, to: Format) -> abi.CFusion:
        norms, joint = fusion.stream_norms, fusion.joint_norm
        return abi.CFusion(
            fuse=self._linear(fusion.fuse, to),
            stream_norms=None if norms is None else self._vector(self._padded(norms)),
            joint_norm=None if joint is None else self._vector(self._padded(joint)),
            hidden_norm=self._vector(self._padded(fusion.hidden_norm)),
            targets=self._vector(fusion.targets, torch.int64),
            mask=None if fusion.mask is None else self._vector(fusion.mask),
            mask_token=fusion.mask_token,
            vocabulary=fusion.vocabulary,
            streams=fusion.streams,
            stream_width=fusion.stream_width,
            normed_residual=fusion.normed_residual,
            normed_state=fusion.normed_state,
        )

    def _layer(self, layer: LayerWeights, to: Format) -> abi.CLayer:
        return abi.CLayer(
            qkv=self._linear(layer.qkv, to),
            attention_out=self._linear(layer.attention_out, to),
            gate_up=self._linear(self._interleaved(layer.gate_up), to),
            down=self._linear(layer.down, to),
            input_norm=self._vector(self._padded(layer.input_norm)),
            post_norm=self._vector(self._padded(layer.post_norm)),
            q_norm=None if layer.q_norm is None else self._vector(layer.q_norm),
            k_norm=None if layer.k_norm is None else self._vector(layer.k_norm),
            window=layer.window or 0,
        )

    def _interleaved(self, gate_up: LinearWeights) -> LinearWeights:
        weight = pack.interleave_gate_up(self._needed(gate_up.weight))
        bias = None if gate_up.bias is None else pack.interleave_gate_up(self._needed(gate_up.bias))
        return LinearWeights(weight, bias)

    def _needed(self, values: Tensor) -> Tensor:
        """The tensor, or its mere shape where no numbers are needed."""
        return values if self._fill else values.to("meta")

    def _linear(self, linear: LinearWeights, to: Format) -> abi.CLinear:
        outputs, inputs = linear.weight.shape
        packed = pack.allocate(outputs, inputs, to, linear.bias is not None, self._take)
        if self._fill:
            pack.fill(packed, pack.quantise(linear.weight, to), linear.bias)
        return abi.CLinear.of(packed)

    def _vector(self, values: Tensor, dtype: torch.dtype = torch.float32) -> int:
        place = self._take(values.numel() * dtype.itemsize).view(dtype)
        if self._fill:
            place.copy_(values.flatten())
        return place.data_ptr()

    def _padded(self, values: Tensor) -> Tensor:
        return pad(self._needed(values), (0, -values.shape[-1] % pack.INPUT_MULTIPLE))

    def _take(self, nbytes: int) -> Tensor:
        start = pack.round_up(self.used, _LINE)
        self.used = start + nbytes
        return self._memory[start : self.used]
