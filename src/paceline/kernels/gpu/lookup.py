"""N-gram lookup in the rows' own texts as a tensor program, without reads by the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def copied(text: Tensor, length: Tensor, k: int, longest_suffix: int) -> tuple[Tensor, Tensor]:
    """Draft tokens [B, k] by prompt lookup, and the number of tokens matched [B].

    text [B, P], length [B]; rows longer than P are idle, and their draft tokens arbitrary. The longest match of a row's
    end wins, of equal ones the latest, as in ``drafters.lookup``. With 0 tokens matched the draft tokens are
    meaningless. If fewer than k tokens follow the match, they repeat.
    """
    size = text.shape[1]
    length = length.clamp(max=size)
    order = torch.arange(size, device=text.device)
    last = length[:, None] - 1 - torch.arange(longest_suffix, device=text.device)
    suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)
    agrees = (text == suffix[:, :1]) & (order < length[:, None] - 1)
    matched = agrees.long()
    for back in range(1, longest_suffix):
        agrees = agrees & (functional.pad(text, (back, 0), value=-1)[:, :size] == suffix[:, back, None])
        matched = matched + agrees
    best = (matched * size + order).amax(1)
    place = best % size
    step = torch.arange(k, device=text.device) % (length - 1 - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + step).clamp(max=size - 1)), best // size
