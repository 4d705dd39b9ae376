"""N-gram lookup in rows' own texts as a program of tensors, of which the host reads nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def copied(text: Tensor, length: Tensor, k: int, longest_suffix: int) -> tuple[Tensor, Tensor]:
    """What followed the latest of the longest matches of each row's end: guesses [B, k], and tokens matched [B].

    As ``drafters.lookup`` finds them. text [B, P], length [B]. 0 tokens matched: there is none, and its guesses mean
    nothing. Beyond a row's end the stretch from the match on repeats.
    """
    size = text.shape[1]
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
