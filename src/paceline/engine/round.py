"""One round of batched speculative decoding: the papers on one screen."""

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
    """Who takes part in a round. native: plays most rounds of its batch, if the target runs on the CPU kernels.

    Who keeps what it knows of rows is told of them here.
    """

    target: Decoder
    drafter: Drafter
    policy: LengthPolicy
    accept: AcceptanceRule
    native: NativeRound | None = None

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self.drafter, self.policy

    def verify_and_commit(self, batch: Batch, draft: Draft) -> Verdict:
        """Verify, accept, commit: in one call of the CPU kernels where nothing in between needs the host."""
        if self.native is not None and self.native.can_run(self.accept, draft):
            return self.native.run(draft)
        logits = self.target.verify(batch, draft)  # of each row's unseen token and its draft tokens, one forward pass
        verdict = self.accept(draft, logits, batch)
        self.target.keep(batch, verdict)  # of a tree what lies elsewhere than behind the text
        batch.commit(verdict)
        verdict.note_trees(draft)
        return verdict


def speculative_round(parts: Speculation, batch: Batch) -> Verdict:
    """Draft, verify, accept, commit. Before and after, each row has exactly one token that the target has not seen."""
    wish = parts.policy.choose(batch).within(batch)  # the last token of a row needs no draft token
    draft = parts.drafter.propose(batch, wish).capped(wish.caps) if wish.k > 0 else batch.empty_draft
    draft = parts.policy.select(batch, draft) if draft.k > 0 else draft  # perhaps the best draft tokens only
    draft = batch.fitting(draft)  # siblings take a place each in the cache
    verdict = parts.verify_and_commit(batch, draft)  # every row gains accepted + 1 tokens
    parts.drafter.observe(batch, verdict)
    parts.policy.observe(batch, verdict)
    return verdict
