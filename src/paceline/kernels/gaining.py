"""Rows gain what a round gave them, natively: the twin of ``rows.RowState.gain``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels import abi, native


def gain(kernels: native.Kernels, rows: abi.CTextRows, tokens: Tensor, accepted: Tensor) -> list[int]:
    """tokens [B, k + 1], accepted [B], both int64 -> how many of its accepted + 1 tokens each row has gained."""
    tokens, accepted, gained = tokens.contiguous(), accepted.contiguous(), torch.empty_like(accepted)
    count, block = tokens.shape
    given = tokens.data_ptr(), block, accepted.data_ptr(), count, gained.data_ptr()
    kernels.library.pl_gain(ctypes.addressof(rows), *given)
    numbers: list[int] = gained.tolist()
    return numbers
