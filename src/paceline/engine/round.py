"""One round of batched speculative decoding: draft, verify, accept, commit.

A batch of B rows decodes together. In each round every row gains its accepted draft tokens and one token of the target.
Each row keeps its own length, so rows accept different numbers of draft tokens (BASS, 2404.15778; Synergy, 2310.18813).
The acceptance rule preserves the target's distribution (2211.17192, 2408.07978): a drafter only changes the speed.

Invariant before and after a round: the target's KV cache holds all tokens of a row except its last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.base import Drafter
from paceline.engine.native_round import NativeRound
from paceline.lengths.base import LengthPolicy
from paceline.models.decoder import Decoder


@dataclass
class Speculation(RowKeepers):
    """The parts that run a round: target model, drafter, length policy and acceptance rule.

    The drafter and the policy keep per-slot state; ``join``, ``move`` and ``leave`` are passed on to both.

    native: verifies, accepts and commits in one call of the CPU kernels; None if the target does not run on them.
    """

    target: Decoder
    drafter: Drafter
    policy: LengthPolicy
    accept: AcceptanceRule
    native: NativeRound | None = None

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self.drafter, self.policy

    def draft(self, batch: Batch) -> Draft:
        """Return the draft tokens to verify: the policy plans, the drafter proposes, the policy selects."""
        plan = self.policy.choose(batch).within(batch)  # capped at each row's remaining tokens, less the target's own
        if plan.k < 1:
            return batch.empty_draft  # plain decoding
        draft = self.drafter.propose(batch, plan).capped(plan.caps)
        if draft.k > 0:
            draft = self.policy.select(batch, draft)
        return batch.fitting(draft)  # a tree's siblings take one cache slot each

    def verify_and_commit(self, batch: Batch, draft: Draft) -> Verdict:
        """Verify the draft, accept a prefix (or path) of each row and append it to the batch."""
        if self.native is not None and self.native.can_run(self.accept, draft):
            return self.native.run(draft)
        logits = self.target.verify(batch, draft)  # one forward pass over each row's last token and its draft tokens
        verdict = self.accept(draft, logits, batch)  # accepted draft tokens, then one recovered or bonus token
        self.target.keep(batch, verdict)  # moves a tree's accepted path together in the KV cache
        batch.commit(verdict)
        verdict.note_trees(draft)
        return verdict


def speculative_round(parts: Speculation, batch: Batch) -> Verdict:
    """Run one round for all decoding rows of the batch. Return the tokens that each row gained."""
    draft = parts.draft(batch)
    verdict = parts.verify_and_commit(batch, draft)
    parts.drafter.observe(batch, verdict)
    parts.policy.observe(batch, verdict)
    return verdict
