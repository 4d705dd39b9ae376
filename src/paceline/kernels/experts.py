"""The choice of a mixture's experts in torch; the kernels' is csrc/experts.cpp."""

from __future__ import annotations

from torch import Tensor


def route(scores: Tensor, used: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Choose the ``used`` experts with the highest scores; of equal ones the first.

    scores: float32 [N, experts] -> weights float32 and numbers int64 of each token's experts, [N, used] each, by rank.
    normalised: whether the weights are a softmax over the scores of the token's experts; else over all.
    """
    ranked, order = scores.sort(stable=True, dim=-1, descending=True)
    best = ranked[:, :used]
    weights = best.softmax(-1) if normalised else ranked.softmax(-1)[:, :used]
    return weights, order[:, :used]
