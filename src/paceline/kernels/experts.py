"""A mixture of experts in torch: the choice of a token's experts, and their products one expert after the other.

It is the reference of the kernels: csrc/experts.cpp, and gpu/experts.py in Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional


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


class StackedWeights(Protocol):
    """Weights [N, K], or those of several experts, in a format of their own."""

    @property
    def nbytes(self) -> int: ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in memory."""
        ...

    def stacked(self, others: Sequence[Self], /) -> Self:
        """Stack the matrices of experts, one below the other."""
        ...

    def of_expert(self, expert: int, count: int, /) -> Self:
        """Return the matrix of one of ``count`` experts."""
        ...

    def widened(self, dtype: torch.dtype, /) -> Tensor:
        """Return the weights [N, K]."""
        ...


@dataclass(frozen=True)
class ExpertMatrices:
    """A matrix [N, K] of each of ``count`` experts, one below the other.

    weight: [count N, K]. bias: [count N], or None. outputs: N.
    """

    weight: Tensor | StackedWeights
    bias: Tensor | None
    count: int
    outputs: int

    def product(self, x: Tensor, expert: int) -> Tensor:
        """Return x [M, K] by the matrix of one expert [M, N]."""
        own = slice(expert * self.outputs, (expert + 1) * self.outputs)
        if isinstance(self.weight, Tensor):
            weight = self.weight[own]
        else:
            weight = self.weight.of_expert(expert, self.count).widened(x.dtype)
        return functional.linear(x, weight, None if self.bias is None else self.bias[own])


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer. E experts, W width, I inner width of an expert.

    first: matrices to 2 I, gates first, or to I of experts without gates. second: to W.
    activation: a name in ``kernels.gpu.steps``.
    correction: see ``route``. factors: of the experts' outputs, [E], or None.
    scores_scale, output_scale: factors of the router's scores and of the outputs' weights.
    """

    routing: Routing
    first: ExpertMatrices
    second: ExpertMatrices
    activation: str
    gated: bool
    correction: Tensor | None = None
    factors: Tensor | None = None
    scores_scale: float = 1.0
    output_scale: float = 1.0

    def route(self, scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scores [N, E] -> weights, in ``dtype``, and numbers, int64, of each token's experts, [N, used] each."""
        weights, chosen = route(scores.float() * self.scores_scale, self.routing, self.correction)
        weights = weights if self.factors is None else weights * self.factors.float()[chosen]
        return (weights * self.output_scale).to(dtype), chosen


def run_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, mixture: Mixture, activated: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the weighted sum [N, W] of the outputs of each token's experts. Synchronises with the device.

    x: [N, W]. weights, chosen: [N, used] each. activated: what lies between an expert's matrices.
    Experts run in ascending order, each with all of its tokens. So a token's outputs are added in one order, whatever
    other tokens are there.
    """
    out = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        part = mixture.second.product(activated(mixture.first.product(x[token], expert)), expert)
        out.index_add_(0, token, part * weights[token, place, None])
    return out
