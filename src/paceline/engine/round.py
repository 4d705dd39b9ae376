"""One round of batched speculative decoding: draft, verify, accept, commit.

A batch of B rows decodes together. In each round every row gains its accepted draft tokens and one token of the target.
Each row has its own length, so rows may accept different numbers of draft tokens (BASS, 2404.15778).
Both acceptance rules preserve the target's distribution (rejection: 2211.17192, coupled: 2408.07978),
so the drafter and the length policy change the speed, and never the distribution of the output.

Invariant before and after a round: the target's KV cache holds all tokens of a row except its last one.

Shapes: B rows, k draft tokens, V vocabulary; N = B + all draft tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, RoundTiming, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.base import Drafter
from paceline.engine.native_round import NativeRound
from paceline.lengths.base import LengthPolicy
from paceline.models.decoding.decoder import Decoder


@dataclass
class Speculation(RowKeepers):
    """The parts that run a round: target model, drafter, length policy and acceptance rule.

    The drafter and the policy keep per-slot state; ``join`` and ``leave`` are passed on to both.

    native: verifies, accepts and commits in one call of the CPU kernels; None if the target does not run on them.
    draft_learning_seconds, plain_learning_seconds: time that the drafter and the policy took to learn from the last
        round with a draft, and from the last one without.
    """

    target: Decoder
    drafter: Drafter
    policy: LengthPolicy
    accept: AcceptanceRule
    native: NativeRound | None = None
    draft_learning_seconds: float = 0.0
    plain_learning_seconds: float = 0.0

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self.drafter, self.policy

    @property
    def decoders(self) -> list[Decoder]:
        """The decoders with per-row caches, the target's first."""
        return [self.target, *self.drafter.decoders]

    def draft(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        """Return up to k draft tokens per row: the drafter proposes, the policy selects."""
        if plan.k < 1:
            return batch.empty_draft  # plain decoding
        draft = self.drafter.propose(batch, plan).capped(plan.caps)
        if draft.k > 0:
            draft = self.policy.select(batch, draft)
        return batch.fitting(draft)  # a tree's siblings take one cache slot each

    def verify_and_commit(self, batch: Batch, draft: Draft) -> Verdict:
        """Verify the draft, accept a prefix (of a tree: a path) per row, and append it to the rows."""
        if self.native is not None and self.native.can_run(self.accept, draft):
            return self.native.run(draft)  # the same steps, in one call
        logits = self.target.verify(batch, draft)  # one forward pass -> [B, k + 1, V], or [N, V] on the CPU kernels
        return self._accept(batch, draft, logits)

    def first_tokens(self, batch: Batch, hidden: Tensor) -> Verdict:
        """Append each row's first token, drawn from hidden [B, width] at the last token of its prompt."""
        verdict = self._accept(batch, batch.empty_draft, self.target.logits(hidden)[:, None])
        self.drafter.observe(batch, verdict)
        return verdict

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        verdict = self.accept(draft, logits, batch)  # accepted draft tokens, then one recovered or bonus token
        self.target.keep(batch, verdict)  # of a tree, moves the accepted path behind the text in the KV cache
        batch.commit(verdict)  # appends the tokens, cut where a row ends
        verdict.note_trees(draft)
        return verdict

    def learn(self, batch: Batch, verdict: Verdict, drafts: bool) -> None:
        """Let the drafter and the policy learn from a round. drafts: whether draft tokens were asked for."""
        began = time.perf_counter()
        self.drafter.observe(batch, verdict)
        self.policy.observe(batch, verdict)
        seconds = time.perf_counter() - began
        if drafts:
            self.draft_learning_seconds = seconds
        else:
            self.plain_learning_seconds = seconds


def speculative_round(parts: Speculation, batch: Batch) -> Verdict:
    """Run one round for all decoding rows: row i gains ``verdict.tokens[i, : verdict.accepted[i] + 1]``."""
    began = time.perf_counter()
    plan = parts.policy.choose(batch).within(batch)  # never beyond a row's last token, which needs no draft token
    draft = parts.draft(batch, plan)
    ready = time.perf_counter()
    verdict = parts.verify_and_commit(batch, draft)
    verdict.note = plan.note
    late = draft.late_seconds  # a draft that nothing had read is made by the call that verifies it
    drafts = plan.k > 0
    learning = parts.draft_learning_seconds if drafts else parts.plain_learning_seconds
    drafting = ready - began + late + learning
    verdict.timing = RoundTiming(1000 * drafting, 1000 * (time.perf_counter() - ready - late))
    parts.learn(batch, verdict, drafts)
    return verdict
