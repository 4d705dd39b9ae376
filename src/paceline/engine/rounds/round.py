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
from paceline.core.draft import Draft, Verdict
from paceline.core.draft_tensors import DraftTensors
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.base import Drafter
from paceline.engine.rounds.place import FinishedRound, HostPlace, Obstacle
from paceline.lengths.base import LengthPolicy
from paceline.models.decoding.decoder import Decoder


@dataclass
class Speculation(RowKeepers, HostPlace):
    """The parts of a round, which run it step by step (a ``RoundPlace``): torch operators, one after the other.

    The drafter and the policy keep per-slot state; ``join`` and ``leave`` are passed on to both.
    """

    target: Decoder
    drafter: Drafter
    policy: LengthPolicy
    accept: AcceptanceRule

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return self.drafter, self.policy

    @property
    def decoders(self) -> list[Decoder]:
        """The decoders with per-row caches, the target's first."""
        return [self.target, *self.drafter.decoders]

    def why_not(self, batch: Batch) -> Obstacle | None:
        return None  # it runs every round

    def run(self, batch: Batch, plan: SpeculationPlan) -> FinishedRound:
        """Run one round for all decoding rows: row i gains the tokens ``verdict.tokens[i]``."""
        draft = self.draft(batch, plan)
        drafted_at = time.perf_counter()
        return FinishedRound(self.verify_and_commit(batch, draft), drafted_at)

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
        tensors = DraftTensors.of(draft, batch.device)
        logits = self.target.verify(batch, tensors)  # one forward pass -> [B, k + 1, V], or [N, V] on the CPU kernels
        return self._accept_and_commit(batch, draft, tensors, logits)

    def first_tokens(self, batch: Batch, hidden: Tensor) -> Verdict:
        """Append each row's first token, drawn from hidden [B, width] at the last token of its prompt."""
        draft, logits = batch.empty_draft, self.target.logits(hidden)[:, None]
        verdict = self._accept_and_commit(batch, draft, DraftTensors.of(draft, batch.device), logits)
        self.drafter.observe(batch, verdict)
        return verdict

    def _accept_and_commit(self, batch: Batch, draft: Draft, tensors: DraftTensors, logits: Tensor) -> Verdict:
        accepted = self.accept(tensors, logits, batch)  # accepted draft tokens, then one recovered or bonus token
        self.target.keep(batch, accepted)  # of a tree, moves the accepted path behind the text in the KV cache
        return batch.commit(draft, accepted)  # appends the tokens, cut where a row ends
