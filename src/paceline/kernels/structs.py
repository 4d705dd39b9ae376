"""Tensors as the structs of ``abi``, which hold addresses: a tensor must live as long as its struct is used."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.cache import KVCache, KVHeads
from paceline.core.recurrent_state import WINDOW, StatefulCache
from paceline.kernels import abi
from paceline.kernels.pack import Format, Packed

FORMATS: dict[Format, abi.Format] = {"int8": abi.Format.INT8, "bf16": abi.Format.BF16, "int4": abi.Format.INT4}


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


def linear(packed: Packed) -> abi.CLinear:
    """A packed linear layer."""
    return abi.CLinear(
        weights=packed.weights.data_ptr(),
        scales=address(packed.scales),
        bias=address(packed.bias),
        inputs=packed.inputs,
        outputs=packed.outputs,
        format=FORMATS[packed.format],
        group=packed.group,
    )


def cache(of: KVCache) -> abi.CCache:
    """A cache of keys and values, with its recurrent states if it has any."""
    count = len(of.shapes)
    tables = (abi.CKVTable * count)(*(_kv_table(*each) for each in zip(of.of_shapes, of.shapes, strict=True)))
    described = abi.CCache(
        tables=tables,
        table_count=count,
        rows=of.rows,
        capacity=of.positions,
        bf16=of.keys.dtype == torch.bfloat16,
        adapter_of=of.adapter_of.data_ptr(),
    )
    if isinstance(of, StatefulCache):
        for name in ("state", "tail", "inputs", "base", "count"):
            setattr(described, name, getattr(of.states, name).data_ptr())
        described.window = WINDOW
    return described


def _kv_table(tables: tuple[Tensor, Tensor], shape: KVHeads) -> abi.CKVTable:
    keys, values = tables
    layers, _, heads, _, dim = keys.shape
    layer_stride, row_stride, head_stride, position_stride, _ = keys.stride()
    return abi.CKVTable(
        keys=keys.data_ptr(),
        values=None if shape.values_in_keys else values.data_ptr(),
        layer_stride=layer_stride,
        row_stride=row_stride,
        head_stride=head_stride,
        position_stride=position_stride,
        layers=layers,
        heads=heads,
        dim=dim,
    )


def text_rows(text: Tensor, length: Tensor, prompt_length: Tensor, limit: Tensor, stops: Tensor) -> abi.CTextRows:
    """The rows' text and limits."""
    return abi.CTextRows(
        text=text.data_ptr(),
        length=length.data_ptr(),
        prompt_length=prompt_length.data_ptr(),
        limit=limit.data_ptr(),
        stops=stops.data_ptr(),
        stop_count=stops.shape[1],
        text_stride=text.stride(0),
    )
