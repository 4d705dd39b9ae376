"""Tokens from logits, natively: what ``paceline.sampling`` does in torch, in two passes over each row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels import native


def kernels_for(logits: Tensor) -> native.Kernels | None:
    """What can draw from these logits; None: torch does."""
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32
    return native.select() if on_cpu else None


def draw_tokens(
    kernels: native.Kernels,
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    offset: int,
    purpose: int,
) -> Tensor:
    """logits [B, L, V] float32 -> [B, L] int64: argmax(logits / temperature + noise), at temperature 0 the argmax.

    temperature [B] float32; seeds [B] int64; positions [B] int64: place j is drawn for position + offset + j.
    """
    rows, block, vocabulary = logits.shape
    if logits.stride(-1) != 1 or logits.stride(0) != block * logits.stride(1):
        logits = logits.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    tokens = torch.empty(rows, block, dtype=torch.int64)
    call = native.CDraw(
        logits=logits.data_ptr(),
        temperature=temperature.data_ptr(),
        seeds=seeds.data_ptr(),
        first=positions.data_ptr(),
        rows=rows,
        block=block,
        stride=logits.stride(1),
        vocabulary=vocabulary,
        offset=offset,
        purpose=purpose,
    )
    pool = native.widest_pool(kernels).handle
    kernels.library.pl_draw(kernels.handle, pool, ctypes.addressof(call), tokens.data_ptr())
    return tokens
