"""Tokens from logits, natively: what ``paceline.sampling`` and ``acceptance`` do in torch, a pass or two a row."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import abi, native


def kernels_for(logits: Tensor) -> native.Kernels | None:
    """What can draw from these logits; None: torch does."""
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32
    return chosen() if on_cpu else None


@cache
def chosen() -> native.Kernels | None:
    """What PACELINE_KERNELS said when it was first asked: to look each round takes a small model 20 microseconds."""
    return native.select()


def _evenly_spaced(logits: Tensor) -> Tensor:
    """[B, L, V] with one stride from place to place, from row to row as well; a head may be wider than V."""
    even = logits.stride(-1) == 1 and logits.stride(0) == logits.shape[1] * logits.stride(1)
    return logits if even else logits.contiguous()


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
    logits = _evenly_spaced(logits)
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    tokens = torch.empty(rows, block, dtype=torch.int64)
    call = abi.CDraw(
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


def likelihood_of(kernels: native.Kernels, logits: Tensor, tokens: Tensor) -> Tensor:
    """The softmax of logits [B, L, V] float32 at tokens [B, L] int64 -> [B, L] float32."""
    rows, block, vocabulary = logits.shape
    logits = _evenly_spaced(logits)
    tokens, chances = tokens.contiguous(), torch.empty(rows, block)
    sizes = rows * block, logits.stride(1), vocabulary
    place = tokens.data_ptr(), chances.data_ptr()
    kernels.library.pl_likelihood(kernels.handle, native.widest_pool(kernels).handle, logits.data_ptr(), *sizes, *place)
    return chances


class Noise(NamedTuple):
    """Of R >= B rows: temperature [R] float32 (0: none), seeds [R], positions [R] of the rows' next tokens, int64."""

    temperature: Tensor
    seeds: Tensor
    positions: Tensor


def accept_guesses(
    kernels: native.Kernels, logits: Tensor, guesses: Tensor, counts: Tensor, noise: Noise, purpose: int
) -> tuple[Tensor, Tensor]:
    """Draw each row's tokens up to the first that is not its guess -> tokens [B, k + 1], accepted [B], both int64.

    guesses [B, k] int64, of which the first counts [B] of each row are real. logits float32: [B, k + 1, V], or [N, V]
    of the unseen tokens and the real guesses alone, row after row. Tokens beyond those drawn are 0.
    """
    rows, most = guesses.shape
    logits = logits.contiguous()
    tokens, accepted = torch.zeros(rows, most + 1, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    inputs = [tensor.contiguous() for tensor in (guesses, counts, *noise)]
    call = abi.CAccept(
        logits.data_ptr(),
        *(tensor.data_ptr() for tensor in inputs),
        rows=rows,
        most=most,
        vocabulary=logits.shape[-1],
        packed=logits.dim() == 2,
        purpose=purpose,
    )
    pool = native.widest_pool(kernels).handle
    place = ctypes.addressof(call), tokens.data_ptr(), accepted.data_ptr()
    kernels.library.pl_accept(kernels.handle, pool, *place)
    return tokens, accepted
