"""N-gram lookup as a tensor program, without reads by the host: in the rows' own texts, and in their references."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SEPARATOR = -1  # between the references of a row: no token, and no match goes beyond it


def copied(text: Tensor, length: Tensor, k: int, longest_suffix: int) -> tuple[Tensor, Tensor]:
    """Draft tokens [B, k] by prompt lookup, and the number of tokens matched [B].

    text [B, P], length [B]; rows longer than P are idle, and their draft tokens arbitrary. The longest match of a row's
    end wins, of equal ones the latest, as in ``drafters.lookup``. With 0 tokens matched the draft tokens are
    meaningless. If fewer than k tokens follow the match, they repeat.
    """
    length = length.clamp(max=text.shape[1])
    place, matched = _last_match(text, length, suffix_of(text, length, longest_suffix))
    step = torch.arange(k, device=text.device) % (length - 1 - place).clamp(min=1)[:, None]
    return text.gather(1, (place[:, None] + 1 + step).clamp(max=text.shape[1] - 1)), matched


def copied_from(references: Tensor, size: Tensor, suffix: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens [B, k] from other texts, the number of them that are real [B], and of tokens matched [B].

    references [B, Q]: the texts of each row, with ``SEPARATOR`` between them. size [B]: their tokens. suffix [B, S]:
    the row's last tokens (``suffix_of``). A continuation ends with its text.
    """
    place, matched = _last_match(references, size, suffix)
    at = place[:, None] + 1 + torch.arange(k, device=references.device)
    tokens = references.gather(1, at.clamp(max=references.shape[1] - 1))
    real = ((at < size[:, None]) & (tokens != SEPARATOR)).long().cumprod(1)
    return tokens.clamp(min=0), real.sum(1), matched


def suffix_of(text: Tensor, length: Tensor, size: int) -> Tensor:
    """The last ``size`` tokens [B, size] of rows text [B, P] of ``length`` [B], the last one first; -2: none."""
    last = length.clamp(max=text.shape[1])[:, None] - 1 - torch.arange(size, device=text.device)
    return torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)


def _last_match(text: Tensor, length: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """Place [B] of the last token of the longest match of ``suffix`` [B, S] in text [B, P], and its tokens [B].

    The last token of a text, at ``length`` - 1 or before a separator, is never the end of a match: nothing follows it.
    """
    size = text.shape[1]
    order = torch.arange(size, device=text.device)
    follows = functional.pad(text, (0, 1), value=SEPARATOR)[:, 1:] != SEPARATOR
    agrees = (text == suffix[:, :1]) & (order < length[:, None] - 1) & follows
    matched = agrees.long()
    for back in range(1, suffix.shape[1]):
        agrees = agrees & (functional.pad(text, (back, 0), value=-3)[:, :size] == suffix[:, back, None])
        matched = matched + agrees
    best = (matched * size + order).amax(1)
    return best % size, best // size
