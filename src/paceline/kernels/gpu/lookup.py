"""N-gram lookup as a tensor program, without reads by the host: in the rows' own texts, and in their references.

Shapes: B rows, R slots, P positions, S tokens of a row's end, k draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.slots import Slots

SEPARATOR = -1  # between the references of a row: no token, and no match goes beyond it

FindMatch: TypeAlias = Callable[[Tensor, Slots, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``last_match`` or a kernel that does the same."""


def last_match(table: Tensor, rows: Slots, size: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
    """Find the longest match of each row's last tokens; of equally long ones the latest.

    table: [R, P] int64, texts. size: [B] int64, tokens of the rows' texts, at most P. suffix: [B, S] int64.
    Returns the place of the match's last token, [B] int64, and its number of tokens, [B] int64; with 0 tokens the place
    has no meaning. The last token of a text, at ``size`` - 1 or before a separator, is never the end of a match:
    nothing follows it.
    """
    text = rows.of(table)
    positions = text.shape[1]
    order = torch.arange(positions, device=text.device)
    follows = functional.pad(text, (0, 1), value=SEPARATOR)[:, 1:] != SEPARATOR
    agrees = (text == suffix[:, :1]) & (order < size[:, None] - 1) & follows
    matched = agrees.long()
    for back in range(1, suffix.shape[1]):
        agrees = agrees & (functional.pad(text, (back, 0), value=-3)[:, :positions] == suffix[:, back, None])
        matched = matched + agrees
    best = (matched * positions + order).amax(1)
    return best % positions, best // positions


def copied(
    table: Tensor, rows: Slots, length: Tensor, k: int, longest_suffix: int, find: FindMatch = last_match
) -> tuple[Tensor, Tensor]:
    """Draft tokens [B, k] by prompt lookup, and the number of tokens matched [B].

    table [R, P]: texts. length [B]; rows longer than P are idle, and their draft tokens arbitrary. The longest match of
    a row's end wins, of equal ones the latest, as in ``drafters.lookup``. With 0 tokens matched the draft tokens are
    meaningless. If fewer than k tokens follow the match, they repeat.
    """
    length = length.clamp(max=table.shape[1])
    place, matched = find(table, rows, length, suffix_of(table, rows, length, longest_suffix))
    step = torch.arange(k, device=table.device) % (length - 1 - place).clamp(min=1)[:, None]
    return _tokens_at(table, rows, place[:, None] + 1 + step), matched


def copied_from(
    references: Tensor, rows: Slots, size: Tensor, suffix: Tensor, k: int, find: FindMatch = last_match
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft tokens [B, k] from other texts, the number of them that are real [B], and of tokens matched [B].

    references [R, P]: the texts of each slot's request, with ``SEPARATOR`` between them. size [B]: their tokens.
    suffix [B, S]: the row's last tokens (``suffix_of``). A continuation ends with its text.
    """
    place, matched = find(references, rows, size, suffix)
    at = place[:, None] + 1 + torch.arange(k, device=references.device)
    tokens = _tokens_at(references, rows, at)
    real = ((at < size[:, None]) & (tokens != SEPARATOR)).long().cumprod(1)
    return tokens.clamp(min=0), real.sum(1), matched


def suffix_of(table: Tensor, rows: Slots, length: Tensor, size: int) -> Tensor:
    """The last ``size`` tokens [B, size] of texts table [R, P] of ``length`` [B], the last one first; -2: none."""
    last = length.clamp(max=table.shape[1])[:, None] - 1 - torch.arange(size, device=table.device)
    return torch.where(last >= 0, _tokens_at(table, rows, last), -2)


def _tokens_at(table: Tensor, rows: Slots, place: Tensor) -> Tensor:
    """The rows' tokens [B, L] at ``place`` [B, L], clamped to the table."""
    return table[rows.index[:, None], place.clamp(0, table.shape[1] - 1)]
