"""Which draft tokens are kept, and what is drawn instead of the first that is not: pure functions of tensors.

Host and device call these. The Triton kernels (``kernels/gpu/accept.py``) and the C++ ones (``csrc/sampling.cpp``) do
the same, each joined with the draw that comes before. Nothing here reads the device where ``may_sync`` is false.

Shapes: B rows, k draft tokens, V vocabulary. Place j of draws [B, k + 1] and distributions [B, k + 1, V] follows draft
token j.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.draft import Draft, Verdict
from paceline.core.nodes import Tree
from paceline.core.rows import RowState
from paceline.core.sampling import Purpose, noise_key, noisy_argmax, uniform


def accept_matching(draft: Draft, draws: Tensor) -> Verdict:
    """Draft tokens are kept while they equal the target's own draws (Daliri et al. 2408.07978); of a tree see ``walk``.

    What a row gains are these draws, whoever drafted: the same seed gives the same text.
    """
    if draft.parents is not None and draft.tree is not None:
        path, accepted = walk(draws, draft.tokens, draft.parents, draft.tree)
        return Verdict(draws.gather(1, places_of(path)), accepted, draft.counts, path=path)
    return Verdict(draws, _leading(draft.tokens == draws[:, :-1], draft.counts), draft.counts)


def walk(draws: Tensor, tokens: Tensor, parents: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """From the root along the draft tokens that equal the target's own draws: path [B, k], accepted [B].

    draws [B, k + 1]: of each place of the tree. tokens, parents [B, k]. A draft token is kept if it and all its
    ancestors equal what was drawn where they stand; of siblings with the same token the first. What follows the path
    stays.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    same = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    right = (tokens == draws.gather(1, parents + 1)) & ~(same & (order < order[:, None])).any(2)
    kept = (right[:, None] | ~tree.ancestors[:, 1:, 1:]).all(2) & (tree.depths[:, 1:] > 0)
    accepted = kept.sum(1)
    first = torch.where(kept, order, len(order)).sort(1).values  # ancestors come before those who follow them
    return torch.where(order < accepted[:, None], first, order), accepted


def places_of(path: Tensor) -> Tensor:
    """[B, k + 1]: where the root's token and those after a path [B, k] were drawn."""
    return torch.cat([path.new_zeros(len(path), 1), path + 1], dim=1)


def accept_by_ratio(draft: Draft, p: Tensor, q: Tensor, rows: RowState) -> Verdict:
    """Draft token x is kept with probability min(1, p(x) / q(x)), else a token drawn from max(p - q, 0), normalised.

    Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318. p: the target's distributions [B, k + 1, V]; q:
    those that the draft tokens were drawn from, [B, k, V].
    """
    p_draft, q_draft = (
        distribution[:, : draft.k].gather(-1, draft.tokens[..., None]).squeeze(-1) for distribution in (p, q)
    )
    accepted = _leading(_coins(draft, rows, Purpose.ACCEPT) * q_draft < p_draft, draft.counts)
    last = _last_draw(p, q, accepted, draft.counts, rows)
    padded = torch.cat([draft.tokens, last[:, None]], dim=1)  # room for the last token; its place is accepted[i]
    return Verdict(padded.scatter(1, accepted[:, None], last[:, None]), accepted, draft.counts)


def accept_at_rate(draft: Draft, draws: Tensor, rows: RowState, rate: float) -> Verdict:
    """Each draft token is kept with this probability, whatever it is: for benchmarks of models with random weights."""
    accepted = _leading(_coins(draft, rows, Purpose.SYNTHETIC) < rate, draft.counts)
    place = torch.arange(draft.k, device=draws.device)
    kept = torch.where(place < accepted[:, None], draft.tokens, draws[:, :-1])
    return Verdict(torch.cat([kept, draws[:, -1:]], dim=1), accepted, draft.counts)


def _coins(draft: Draft, rows: RowState, purpose: Purpose) -> Tensor:
    """[B, k] float64: a uniform number for every draft token."""
    position = rows.length[:, None] + torch.arange(draft.k, device=rows.length.device)
    return uniform(noise_key(rows.seed[:, None], position, purpose))


def _last_draw(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, rows: RowState) -> Tensor:
    """[B]: the recovered token (from max(p - q, 0)) or, where every draft token was kept, the bonus token (from p)."""
    place = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_here = p.gather(1, place).squeeze(1)
    q_here = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1).gather(1, place).squeeze(1)
    residual = (p_here - q_here * (accepted < counts)[:, None]).clamp(min=0)
    # p = q to the last bit leaves nothing to recover from, and rounding can still have rejected: p is the distribution
    # then.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    key = noise_key(rows.seed, rows.length + accepted, Purpose.RECOVER)
    return noisy_argmax(residual.log(), key, rows.temperature > 0, may_sync=rows.may_sync)


def _leading(kept: Tensor, counts: Tensor) -> Tensor:
    """[B, k] bool -> [B]: how many draft tokens, from the first on, are real and kept."""
    real = torch.arange(kept.shape[1], device=kept.device) < counts[:, None]
    return (kept & real).long().cumprod(1).sum(1)
