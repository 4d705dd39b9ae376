"""Which guesses are kept, and what is drawn instead of the first that is not. Two rules, one law: the target's.

Shapes: B rows, k guesses, V vocabulary. Position j of the target's logits [B, k + 1, V] follows guess j. Logits [N, V]
are those of the N real tokens of a ragged draft, row after row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.batch import Batch, Draft, Logprobs, Verdict
from paceline.kernels.drawing import Gained, accept_guesses, kernels_for, logprobs_of
from paceline.params import SYNTHETIC
from paceline.sampling import Choices, Purpose, draw, noise_key, noisy_argmax, uniform

AcceptanceRule = Callable[[Draft, Tensor, Batch], Verdict]


def coupled(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
    """Keep guesses while they equal the target's own draws (Daliri et al. 2408.07978; greedy: the case without noise).

    What a row gains are the target's own draws, whoever guessed: the same seed gives the same text.
    """
    choices = Choices(logits, batch, draft.tokens, counts=draft.counts)
    if choices.kernels is not None:  # one call, and no draws beyond the first guess that is not kept
        return Verdict(*accept_guesses(choices.kernels, choices.places, Purpose.DRAW), draft.counts)
    draws = _draw(draft, logits, batch)
    return Verdict(draws, _leading(draft.tokens == draws[:, :-1], draft.counts), draft.counts)


def _draw(draft: Draft, logits: Tensor, batch: Batch) -> Tensor:
    """[B, k + 1]: the target's own draws; 0 where a row has no guess."""
    if logits.dim() == 3:
        return draw(logits, batch, draft.tokens)
    return _rectangle(draft, draw(logits[:, None], batch.unrolled(draft))[:, 0])


def _rectangle(draft: Draft, flat: Tensor) -> Tensor:
    """[N, ...] of the real tokens -> [B, k + 1, ...], 0 elsewhere."""
    table = flat.new_zeros(*draft.real.shape, *flat.shape[1:])
    table[draft.real] = flat
    return table


def rejection(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
    """Keep guess x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0), normalised.

    Leviathan et al. 2211.17192, Algorithm 1; Chen et al. 2302.01318. Guesses without probabilities are certain ones
    (q = 1), for which the coupled rule is the same law.
    """
    if draft.probabilities is None or batch.sampling.all_greedy:
        return coupled(draft, logits, batch)
    p = Choices(logits, batch, draft.tokens).law()
    q = draft.probabilities
    p_guess, q_guess = (law[:, : draft.k].gather(-1, draft.tokens[..., None]).squeeze(-1) for law in (p, q))
    seed, position = batch.sampling.seed[: batch.rows, None], batch.live_length[:, None]
    coin = uniform(noise_key(seed, position + torch.arange(draft.k, device=batch.device), Purpose.ACCEPT))
    accepted = _leading(coin * q_guess < p_guess, draft.counts)
    last = _last_draw(p, q, accepted, draft.counts, batch)
    padded = torch.cat([draft.tokens, last[:, None]], dim=1)  # room for the last token; its place is accepted[i]
    return Verdict(padded.scatter(1, accepted[:, None], last[:, None]), accepted, draft.counts)


def _last_draw(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, batch: Batch) -> Tensor:
    """[B]: the recovered token (from max(p - q, 0)) or, where every guess was kept, the bonus token (from p)."""
    place = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_here = p.gather(1, place).squeeze(1)
    q_here = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1).gather(1, place).squeeze(1)
    residual = (p_here - q_here * (accepted < counts)[:, None]).clamp(min=0)
    # p = q to the last bit leaves nothing to recover from, and rounding can still have rejected: p is the law then.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    rows = batch.sampling
    key = noise_key(rows.seed[: batch.rows], batch.live_length + accepted, Purpose.RECOVER)
    return noisy_argmax(residual.log(), key, rows.temperature[: batch.rows] > 0)


def _leading(kept: Tensor, counts: Tensor) -> Tensor:
    """[B, k] bool -> [B]: how many guesses, from the first on, are real and kept."""
    real = torch.arange(kept.shape[1], device=kept.device) < counts[:, None]
    return (kept & real).cumprod(1).sum(1)


def synthetic(rate: float) -> AcceptanceRule:
    """Keep each guess with this probability, whatever it is: for benchmarks of models with random weights."""

    def accept(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
        draws = _draw(draft, logits, batch)
        seed, place = batch.sampling.seed[: batch.rows, None], torch.arange(draft.k, device=batch.device)
        coin = uniform(noise_key(seed, batch.live_length[:, None] + place, Purpose.SYNTHETIC))
        accepted = _leading(coin < rate, draft.counts)
        kept = torch.where(place < accepted[:, None], draft.tokens, draws[:, :-1])
        return Verdict(torch.cat([kept, draws[:, -1:]], dim=1), accepted, draft.counts)

    return accept


def with_logprobs(rule: AcceptanceRule) -> AcceptanceRule:
    """The rule, followed by the log-probabilities of the tokens drawn if any live row asked for them."""

    def accept(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
        verdict = rule(draft, logits, batch)
        if batch.sampling.logprobs is not None:
            verdict.logprobs = _logprobs(draft, logits, batch, verdict)
        return verdict

    return accept


def _logprobs(draft: Draft, logits: Tensor, batch: Batch, verdict: Verdict) -> Logprobs:
    """Of the tokens that rows gained; of rows that did not ask they mean nothing."""
    assert batch.sampling.logprobs is not None
    kernels = kernels_for(logits)
    if kernels is not None:
        wanted = [-1 if p.scored is None else p.scored for p in batch.sampling.params[: batch.rows]]
        gained = Gained(verdict.tokens, verdict.accepted, draft.counts)
        return Logprobs(*logprobs_of(kernels, logits, gained, wanted))
    if logits.dim() == 2:
        logits = _rectangle(draft, logits)
    law = logits.float().log_softmax(-1)
    values, ids = law.topk(min(batch.sampling.logprobs, law.shape[-1]), dim=-1)
    return Logprobs(law.gather(-1, verdict.tokens[..., None]).squeeze(-1), ids, values)


RULES: dict[str, AcceptanceRule] = {"coupled": with_logprobs(coupled), "rejection": with_logprobs(rejection)}


def make_rule(acceptance: str) -> AcceptanceRule:
    """The rule of ``EngineConfig.acceptance``, which has checked it."""
    if acceptance.startswith(SYNTHETIC):
        return with_logprobs(synthetic(float(acceptance.removeprefix(SYNTHETIC))))
    return RULES[acceptance]
