"""Tensors as the structs of ``abi``, which hold addresses: a tensor must live as long as its struct is used."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from paceline.core.cache import KVCache, KVHeads
from paceline.core.pages import PagedVectors
from paceline.core.recurrent_state import WINDOW, StatefulCache
from paceline.kernels import abi
from paceline.kernels.pack import Format, Packed

FORMATS: dict[Format, abi.Format] = {"int8": abi.Format.INT8, "bf16": abi.Format.BF16, "int4": abi.Format.INT4}

CACHE_ELEMENTS = {
    torch.float32: abi.CacheElement.CACHE_FLOAT32,
    torch.bfloat16: abi.CacheElement.CACHE_BF16,
    torch.int8: abi.CacheElement.CACHE_INT8,
}


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
        order=address(packed.order),
    )


def cache(of: KVCache) -> abi.CCache:
    """A cache of keys and values, with its recurrent states if it has any."""
    number = count()
    tables = [
        _kv_table(shape, layers, *(of.paged(next(number)) for _ in shape.stored))
        for shape, layers in of.layer_counts.items()
    ]
    described = abi.CCache(
        references=address(of.paged(0).references),
        tables=(abi.CKVTable * len(tables))(*tables),
        table_count=len(tables),
        rows=of.rows,
        capacity=of.positions,
        element=CACHE_ELEMENTS[of.dtype],
        adapter_of=of.adapter_of.data_ptr(),
    )
    if isinstance(of, StatefulCache):
        for name in ("state", "tail", "inputs", "base", "count"):
            setattr(described, name, getattr(of.states, name).data_ptr())
        described.window = WINDOW
    return described


def _kv_table(shape: KVHeads, layers: int, keys: PagedVectors, values: PagedVectors | None = None) -> abi.CKVTable:
    """Keys and values of layers of one shape. values: None if they are parts of the keys."""
    stored = abi.CCacheVectors() if values is None else _vectors(values)
    return abi.CKVTable(keys=_vectors(keys), values=stored, layers=layers, heads=shape.heads)


def _vectors(of: PagedVectors) -> abi.CCacheVectors:
    strides = of.layer_stride, of.page_stride, of.head_stride, of.memory.shape[-1]
    return abi.CCacheVectors(of.memory.data_ptr(), of.pages.data_ptr(), *strides)


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
