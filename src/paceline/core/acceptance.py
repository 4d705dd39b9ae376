"""The host's round: what becomes of a draft, from the target's logits. Two rules (``rules.py``), one distribution: the
target's.

Shapes: B rows, k draft tokens, V vocabulary. Position j of the target's logits [B, k + 1, V] follows draft token j.
Logits [N, V] are those of the N real tokens of a ragged draft, row after row. Place 0 of a tree is the row's unseen
token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.config import SYNTHETIC
from paceline.core.batch import Batch
from paceline.core.draft import Draft, Logprobs, Verdict
from paceline.core.ops import Gained
from paceline.core.rules import accept_at_rate, accept_by_ratio, accept_matching, places_of
from paceline.core.sampling import Choices, Purpose, draw
from paceline.errors import ParameterError

AcceptanceRule = Callable[[Draft, Tensor, Batch], Verdict]


def coupled(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
    """The coupled rule (``rules.accept_matching``); greedy decoding is the case without noise."""
    choices = Choices.after(draft, logits, batch)
    if choices.ops is not None:  # one call, and no draws beyond the first that no draft token foresaw
        scored = batch.sampling.scored
        tokens, accepted, path, own = choices.ops.accept(choices.places, Purpose.DRAW, scored)
        return Verdict(tokens, accepted, draft.counts, None if own is None else Logprobs.alone(own), path=path)
    return accept_matching(draft, _draw(draft, logits, batch))


def _draw(draft: Draft, logits: Tensor, batch: Batch) -> Tensor:
    """[B, k + 1]: the target's own draws; where a row has no draft token they mean nothing."""
    rectangle = logits if logits.dim() == 3 else _rectangle(draft, logits)
    if draft.tree is None:
        return draw(rectangle, batch, draft.tokens)
    return draw(rectangle.flatten(0, 1)[:, None], batch.unrolled(draft)).view(batch.rows, -1)


def _rectangle(draft: Draft, flat: Tensor) -> Tensor:
    """[N, V] of the real tokens -> [B, k + 1, V], 0 elsewhere."""
    table = flat.new_zeros(*draft.real.shape, flat.shape[1])
    table[draft.real] = flat
    return table


def rejection(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
    """The rejection rule (``rules.accept_by_ratio``).

    Draft tokens without probabilities are certain ones (q = 1), for which the coupled rule is the same distribution.
    """
    _refuse_tree(draft, "rejection")
    if draft.probabilities is None or batch.sampling.all_greedy:
        return coupled(draft, logits, batch)
    distribution = Choices(logits, batch, draft.tokens).distribution()
    return accept_by_ratio(draft, distribution, draft.probabilities, batch.state(batch.rows))


def _refuse_tree(draft: Draft, rule: str) -> None:
    if draft.parents is not None:
        raise ParameterError(
            "acceptance", rule, "'coupled' where a drafter guesses trees: this rule knows chains alone"
        )


def synthetic(rate: float) -> AcceptanceRule:
    """Keep each draft token with this probability, whatever it is: for benchmarks of models with random weights."""

    def accept(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
        _refuse_tree(draft, f"{SYNTHETIC}{rate}")
        return accept_at_rate(draft, _draw(draft, logits, batch), batch.state(batch.rows), rate)

    return accept


def with_logprobs(rule: AcceptanceRule) -> AcceptanceRule:
    """The rule, followed by the log-probabilities of the tokens drawn if any live row asked for them."""

    def accept(draft: Draft, logits: Tensor, batch: Batch) -> Verdict:
        verdict = rule(draft, logits, batch)
        if batch.sampling.logprobs is not None and verdict.logprobs is None:  # the kernels' draw may have found them
            verdict.logprobs = _logprobs(draft, logits, batch, verdict)
        return verdict

    return accept


def _logprobs(draft: Draft, logits: Tensor, batch: Batch, verdict: Verdict) -> Logprobs:
    """Of the tokens that rows gained; of rows that did not ask they mean nothing."""
    assert batch.sampling.logprobs is not None
    if verdict.path is not None:
        logits = _along_path(draft, logits, verdict.path)
    if batch.ops is not None and logits.dtype == torch.float32:
        wanted = [-1 if p.scored is None else p.scored for p in batch.sampling.params[: batch.rows]]
        gained = Gained(verdict.tokens, verdict.accepted, draft.counts)
        return Logprobs(*batch.ops.logprobs(logits, gained, wanted))
    if logits.dim() == 2:
        logits = _rectangle(draft, logits)
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(min(batch.sampling.logprobs, logits.shape[-1]), dim=-1)
    return Logprobs((logits.gather(-1, verdict.tokens[..., None]) - total).squeeze(-1), ids, values - total)


def _along_path(draft: Draft, logits: Tensor, path: Tensor) -> Tensor:
    """A tree's logits [B, k + 1, V] in the order in which its rows gained their tokens."""
    places = places_of(path)
    if logits.dim() == 3:
        return logits.gather(1, places[..., None].expand_as(logits))
    real = draft.counts + 1
    first = real.cumsum(0) - real
    return logits[(first[:, None] + places).clamp(max=len(logits) - 1)]


RULES: dict[str, AcceptanceRule] = {"coupled": with_logprobs(coupled), "rejection": with_logprobs(rejection)}


def supports_trees(rule: AcceptanceRule) -> bool:
    """Of the rules above; the others refuse trees by name."""
    return rule is RULES["coupled"]


def make_rule(acceptance: str) -> AcceptanceRule:
    """The rule of ``EngineConfig.acceptance``, which has checked it."""
    if acceptance.startswith(SYNTHETIC):
        return with_logprobs(synthetic(float(acceptance.removeprefix(SYNTHETIC))))
    return RULES[acceptance]
