"""Acceptance rules as pure functions of tensors: which draft tokens are accepted, and which token comes after them.

Host and device rounds call these functions. The Triton kernels (``kernels/gpu/accept.py``) and the C++ kernels
(``csrc/sampling.cpp``) compute the same, fused with the draw. No function here reads the device if ``may_sync`` is
false.

Shapes: B rows, k draft tokens, V vocabulary. Position j of draws [B, k + 1] and distributions [B, k + 1, V] follows the
first j draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft_tensors import DraftTensors, real_places
from paceline.core.nodes import Tree
from paceline.core.rows import RowState
from paceline.core.sampling import noise_key, noisy_argmax, uniform
from paceline.core.values import Accepted, Purpose


def accept_matching(draft: DraftTensors, draws: Tensor) -> Accepted:
    """Coupled rule: accept draft tokens as long as they equal the target's own draws (Daliri et al. 2408.07978).

    draws: [B, k + 1] int64. The gained tokens are these draws, so a seed gives the same text with any drafter.
    For trees see ``walk``.
    """
    if draft.parents is not None and draft.tree is not None:
        path, accepted = walk(draws, draft.tokens, draft.parents, draft.tree)
        return Accepted(draws.gather(1, places_of(path)), accepted, path)
    return Accepted(draws, _leading(draft.tokens == draws[:, :-1], draft.counts))


def walk(draws: Tensor, tokens: Tensor, parents: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Follow a tree from its root along the draft tokens that equal the target's own draws.

    draws: [B, k + 1] int64, one per position of the tree. tokens, parents: [B, k] int64. A draft token is accepted if
    it and all its ancestors equal the draws at their positions. Of siblings with the same token the first is accepted.

    Returns path [B, k] int64, the accepted draft tokens in order and then each position's own index, and accepted [B]
    int64.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    matches = (tokens == draws.gather(1, parents + 1)) & ~(same & (order < order[:, None])).any(2)
    kept = (matches[:, None] | ~tree.ancestors[:, 1:, 1:]).all(2) & (tree.depths[:, 1:] > 0)
    accepted = kept.sum(1)
    first = torch.where(kept, order, len(order)).sort(1).values  # ancestors come before descendants
    return torch.where(order < accepted[:, None], first, order), accepted


def places_of(path: Tensor) -> Tensor:
    """Positions of a tree at which the tokens along a path [B, k] were drawn: [B, k + 1], the root first."""
    return torch.cat([path.new_zeros(len(path), 1), path + 1], dim=1)


def accept_by_ratio(draft: DraftTensors, p: Tensor, q: Tensor, rows: RowState) -> Accepted:
    """Rejection rule: accept draft token x with probability min(1, p(x) / q(x)).

    After the first rejection a token is drawn from max(p - q, 0), normalized. Leviathan et al. 2211.17192, Algorithm 1;
    Chen et al. 2302.01318.

    p: target distributions [B, k + 1, V]. q: distributions that the draft tokens were drawn from, [B, k, V].
    """
    p_draft, q_draft = (
        distribution[:, : draft.k].gather(-1, draft.tokens[..., None]).squeeze(-1) for distribution in (p, q)
    )
    accepted = _leading(_coins(draft, rows, Purpose.ACCEPT) * q_draft < p_draft, draft.counts)
    last = _last_draw(p, q, accepted, draft.counts, rows)
    padded = torch.cat([draft.tokens, last[:, None]], dim=1)  # the last token goes to position accepted[i]
    return Accepted(padded.scatter(1, accepted[:, None], last[:, None]), accepted)


def accept_at_rate(draft: DraftTensors, draws: Tensor, rows: RowState, rate: float) -> Accepted:
    """Accept each draft token with probability ``rate``, whatever it is: for benchmarks with random weights.

    draws: the target's own draws [B, k + 1] int64, used after the accepted draft tokens.
    """
    accepted = _leading(_coins(draft, rows, Purpose.SYNTHETIC) < rate, draft.counts)
    place = torch.arange(draft.k, device=draws.device)
    kept = torch.where(place < accepted[:, None], draft.tokens, draws[:, :-1])
    return Accepted(torch.cat([kept, draws[:, -1:]], dim=1), accepted)


def _coins(draft: DraftTensors, rows: RowState, purpose: Purpose) -> Tensor:
    """Uniform random number for every draft token, [B, k] float64."""
    length, seed = rows.values.length, rows.values.seed
    position = length[:, None] + torch.arange(draft.k, device=length.device)
    return uniform(noise_key(seed[:, None], position, purpose))


def _last_draw(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, rows: RowState) -> Tensor:
    """Recovered token, drawn from max(p - q, 0), or the bonus token, drawn from p, if all were accepted: [B] int64."""
    place = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_here = p.gather(1, place).squeeze(1)
    q_here = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1).gather(1, place).squeeze(1)
    residual = (p_here - q_here * (accepted < counts)[:, None]).clamp(min=0)
    # If p equals q to the last bit, the residual is 0, but rounding may still have caused a rejection: draw from p.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    values = rows.values
    key = noise_key(values.seed, values.length + accepted, Purpose.RECOVER)
    return noisy_argmax(residual.log(), key, values.temperature > 0, may_sync=rows.may_sync)


def _leading(accepted: Tensor, counts: Tensor) -> Tensor:
    """Number of leading draft tokens that are real and accepted: [B, k] bool -> [B] int64."""
    return (accepted & real_places(counts, accepted.shape[1])).long().cumprod(1).sum(1)
