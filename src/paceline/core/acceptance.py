"""Acceptance rules as host rounds call them: draft and target logits in, accepted tokens out.

Both lossless rules (``rules.py``) produce tokens that follow the target's distribution.

Shapes: B rows, k draft tokens, V vocabulary. Position j of the target's logits [B, k + 1, V] follows the first j draft
tokens of its row. Logits [N, V] hold only the N real tokens of a ragged draft, row after row. Position 0 of a tree is
the row's pending token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.config import SYNTHETIC
from paceline.core.batch import Batch
from paceline.core.draft import Undrawn
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rules import accept_at_rate, accept_by_ratio, accept_matching, places_of
from paceline.core.sampling import Choices, draw
from paceline.core.values import Accepted, Gained, LogprobTensors, Purpose
from paceline.errors import ParameterError

AcceptanceRule = Callable[[DraftTensors, Tensor, Batch], Accepted]


def coupled(draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
    """Apply the coupled rule (``rules.accept_matching``); greedy decoding is the case without noise.

    logits: [B, k + 1, V] or [N, V].
    """
    choices = Choices.after(draft, logits, batch)
    if choices.ops is not None:  # one call, which stops drawing in each row at the first rejected draft token
        return choices.ops.accept(choices.places, Purpose.DRAW, batch.sampling.scored)
    return accept_matching(draft, _draw(draft, logits, batch))


def _draw(draft: DraftTensors, logits: Tensor, batch: Batch) -> Tensor:
    """Target's own draws, [B, k + 1] int64, or ``Undrawn``. Entries at padding are meaningless."""
    rectangle = logits if logits.dim() == 3 else _rectangle(draft, logits)
    if draft.tree is None:
        return draw(rectangle, batch, draft.tokens)
    return draw(rectangle.flatten(0, 1)[:, None], batch.unrolled(draft)).view(batch.rows, -1)


def _rectangle(draft: DraftTensors, flat: Tensor) -> Tensor:
    """Scatter logits [N, V] of the real tokens into [B, k + 1, V], 0 elsewhere."""
    table = flat.new_zeros(*draft.real.shape, flat.shape[1])
    table[draft.real] = flat
    return table


def rejection(draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
    """Apply the rejection rule (``rules.accept_by_ratio``).

    logits: [B, k + 1, V] or [N, V]. Draft tokens without probabilities were certain (q = 1). For them the coupled rule
    has the same acceptance probability. Raises ParameterError if the draft is a tree.
    """
    _refuse_tree(draft, "rejection")
    if draft.probabilities is None or batch.sampling.all_greedy:
        return coupled(draft, logits, batch)
    distribution = Choices(logits, batch, draft.tokens).distribution()
    accepted = accept_by_ratio(draft, distribution, draft.probabilities, batch.state())
    undrawn = accepted.tokens < 0
    if not bool(undrawn.any()):
        return accepted
    forbidden = undrawn & logits.amax(-1).isfinite()
    return accepted._replace(tokens=accepted.tokens.masked_fill(forbidden, Undrawn.ALL_FORBIDDEN))


def _refuse_tree(draft: DraftTensors, rule: str) -> None:
    if draft.parents is not None:
        raise ParameterError(
            "acceptance", rule, "'coupled' where a drafter drafts trees: this rule verifies chains only"
        )


def synthetic(rate: float) -> AcceptanceRule:
    """Return a rule that accepts each draft token with probability ``rate``, whatever it is.

    It serves benchmarks of models with random weights; the text it produces is meaningless.
    """

    def accept(draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
        _refuse_tree(draft, f"{SYNTHETIC}{rate}")
        return accept_at_rate(draft, _draw(draft, logits, batch), batch.state(), rate)

    return accept


def with_logprobs(rule: AcceptanceRule) -> AcceptanceRule:
    """Wrap a rule so that its result has log-probabilities whenever a live row asks for them."""

    def accept(draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
        accepted = rule(draft, logits, batch)
        if batch.sampling.logprobs is None or accepted.logprobs is not None:  # the kernels may have added them
            return accepted
        return accepted._replace(logprobs=_logprobs(draft, logits, batch, accepted))

    return accept


def _logprobs(draft: DraftTensors, logits: Tensor, batch: Batch, accepted: Accepted) -> LogprobTensors:
    """Log-probabilities of the tokens that rows gained. Entries of rows that did not ask are meaningless."""
    assert batch.sampling.logprobs is not None
    if accepted.path is not None:
        logits = _along_path(draft, logits, accepted.path)
    if batch.ops is not None and logits.dtype == torch.float32:
        wanted = [-1 if p.scored is None else p.scored for p in batch.sampling.params]
        return batch.ops.logprobs(logits, Gained(accepted.tokens, accepted.accepted, draft.counts), wanted)
    if logits.dim() == 2:
        logits = _rectangle(draft, logits)
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(min(batch.sampling.logprobs, logits.shape[-1]), dim=-1)
    own = logits.gather(-1, accepted.tokens.clamp(min=0)[..., None]) - total
    return LogprobTensors(own.squeeze(-1), ids, values - total)


def _along_path(draft: DraftTensors, logits: Tensor, path: Tensor) -> Tensor:
    """Reorder a tree's logits to the order in which its rows gained their tokens: [B, k + 1, V].

    logits: [B, k + 1, V] or [N, V]. path: [B, k], see ``Accepted``.
    """
    places = places_of(path)
    if logits.dim() == 3:
        return logits.gather(1, places[..., None].expand_as(logits))
    real = draft.counts + 1
    first = real.cumsum(0) - real
    return logits[(first[:, None] + places).clamp(max=len(logits) - 1)]


RULES: dict[str, AcceptanceRule] = {"coupled": with_logprobs(coupled), "rejection": with_logprobs(rejection)}


def supports_trees(rule: AcceptanceRule) -> bool:
    """Whether ``rule`` can verify trees. The other rules raise ParameterError for them."""
    return rule is RULES["coupled"]


def make_rule(acceptance: str) -> AcceptanceRule:
    """Return the rule for ``EngineConfig.acceptance``, which has validated the name."""
    if acceptance.startswith(SYNTHETIC):
        return with_logprobs(synthetic(float(acceptance.removeprefix(SYNTHETIC))))
    return RULES[acceptance]
