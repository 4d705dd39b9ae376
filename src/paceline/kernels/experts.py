"""The choice of a mixture's experts in torch; the kernels' is csrc/experts.cpp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """How a token's experts, and the weights of their outputs, follow from the router's scores.

    used: experts of a token.
    sigmoid: whether an expert's probability is the sigmoid of its score; else the probabilities are a softmax.
    normalised: whether the weights are the probabilities divided by their sum over the token's experts.
    groups, used_groups: the experts lie in ``groups`` equal groups, and those of a token are in the ``used_groups``
        groups whose ``group_best`` highest values have the largest sums: 2 in DeepSeek-V3 (arXiv 2412.19437, section
        2.1.2), 1 in DeepSeek-V2 (arXiv 2405.04434, section 2.2.2).
    margin: if above 0, an expert's weight is its share in a softmax over the experts that were not chosen before it and
        whose scores are at most this fraction below its own (SparseMixer-v2, arXiv 2409.12136, as it infers).
    """

    used: int
    normalised: bool
    sigmoid: bool = False
    groups: int = 1
    used_groups: int = 1
    group_best: int = 2
    margin: float = 0.0


def route(scores: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts with the highest scores; of equal ones the first.

    scores: float32 [N, experts] -> weights float32 and numbers int64 of each token's experts, [N, used] each, by rank.
    correction: float32 [experts]; with it the sums of the probabilities and it take the scores' place in the choice.
    """
    chances = scores.sigmoid() if routing.sigmoid else scores.softmax(-1)
    values = scores if correction is None else chances + correction
    order = _in_best_groups(values, routing).sort(stable=True, dim=-1, descending=True)[1][:, : routing.used]
    if routing.margin > 0:
        return _shares(scores, order, routing.margin), order
    weights = chances.gather(-1, order)
    if routing.normalised and not routing.sigmoid:
        weights = scores.gather(-1, order).softmax(-1)
    elif routing.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, order


def _shares(scores: Tensor, order: Tensor, margin: float) -> Tensor:
    """Return the weights [N, used] of the chosen experts, by ``Routing.margin``."""
    left, weights = scores, []
    for rank in range(order.shape[-1]):
        expert = order[..., rank : rank + 1]
        top = scores.gather(-1, expert)
        far = (top - scores) / scores.abs().maximum(top) > margin
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, -1)


def _in_best_groups(values: Tensor, routing: Routing) -> Tensor:
    """Return the values [N, experts], -inf in groups that a token does not use."""
    if routing.groups == 1:
        return values
    grouped = values.view(*values.shape[:-1], routing.groups, -1)
    totals = grouped.topk(min(routing.group_best, grouped.shape[-1]), -1)[0].sum(-1)
    best = totals.sort(stable=True, dim=-1, descending=True)[1][:, : routing.used_groups]
    kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).view_as(values)
