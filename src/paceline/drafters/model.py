"""The draft model as a drafter: chains token by token, or trees depth by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.batch import Batch, SpeculationPlan, StopDrafting
from paceline.core.draft import Draft, Verdict
from paceline.core.sampling import Choices
from paceline.core.values import Purpose
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.branches import draft_of
from paceline.drafters.growth import Growth
from paceline.drafters.heads.decoder import HeadDecoder
from paceline.errors import ParameterError
from paceline.models.decoding.draft_decoder import USUAL_MISSING, ComputeLogits, DraftDecoder

# From these logits and the draft tokens so far to the next draft token of each row, [B, 1], and whether to go on.
SampleNext = Callable[[Tensor, Tensor], tuple[Tensor, bool]]


def draw_chain(draft_tokens: Tensor, k: int, compute_logits: ComputeLogits, draw: SampleNext) -> Tensor:
    """Extend draft tokens [B, 0] to [B, k], or fewer if ``draw`` stops. Rounds of host and device share this loop."""
    goes_on = True
    while goes_on and draft_tokens.shape[1] < k:
        draft_token, goes_on = draw(compute_logits(draft_tokens), draft_tokens)
        draft_tokens = torch.cat([draft_tokens, draft_token], dim=1)
    return draft_tokens


class ModelDrafter(Drafter):
    """Samples draft tokens from the draft model, with the target's sampling parameters.

    Under the coupled rule it uses the target's noise, too. Under the rejection rule it uses noise of its own, and
    reports the distributions that it sampled from. If the plan has ``stop_drafting``, each draft token is scored by its
    likelihood, and drafting ends when ``stop_drafting`` returns True.

    width: 1 for chains. Otherwise each depth of a row's tree has at most that many draft tokens, and one batched pass
        per depth reads them (``Growth``).

    The cache may lack tokens of the text; ``propose`` feeds them first, so rounds that accept everything and rounds
    without draft tokens need no special case.
    """

    name = "model"
    needs_draft_model = True
    on_device = True
    scores_subset = True
    auto_width = 1  # width 2 took 1.00 to 1.14 times as long at one row (benchmarks/trees.py)
    sources = ("draft model",)
    at_once = 16  # tokens per row that the first drafting pass reads; more are read in chunks before

    def __init__(self, decoder: DraftDecoder, acceptance: str, width: int = 1) -> None:
        self.decoder, self.width = decoder, width
        self._grown: Growth | None = None  # the trees of this round
        self._independent = acceptance == "rejection"
        native = decoder.native
        self._native = native if native is not None and (width == 1 or native.branches) else None
        self.uses_torch = self._native is None or self._independent
        if self._native is None and not isinstance(decoder, HeadDecoder):
            self.at_once = USUAL_MISSING  # torch pads all rows of the pass to the longest

    @classmethod
    def build(cls, equipment: Equipment, /) -> ModelDrafter:
        decoder = equipment.draft_decoder()
        if isinstance(decoder, HeadDecoder):
            raise ParameterError("drafter", cls.name, "'feature' or 'hybrid': the draft model is a trained head")
        return cls(decoder, equipment.acceptance, equipment.width(cls))

    @property
    def decoders(self) -> Sequence[DraftDecoder]:
        return (self.decoder,)

    @property
    def has_probabilities(self) -> bool:
        return self._independent

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        first, stop = plan.stretch(batch.rows)
        if stop - first == batch.rows:
            return self._propose(batch, plan)
        if first == stop:
            return batch.empty_draft
        return self._propose(batch.part(first, stop), plan).spread(first, batch.rows)

    def _propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        if (native := self._native) is not None:  # one call, apart from a large backlog
            self._missing(batch)
            distributions = self._independent and not batch.sampling.all_greedy
            counts = plan.counts(batch)
            return native.draft(batch, counts, plan.stop_drafting, distributions=distributions, width=self.width)
        return self._chains(batch, plan) if self.width == 1 else self._trees(batch, plan)

    def _trees(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        self._grown = grown = Growth(self.decoder, batch, self.width)
        after = self._branching(batch, plan.k, grown)
        grown.spread(after(0))
        for depth in range(1, plan.k):
            if not grown.new or (plan.stop_drafting is not None and plan.stop_drafting(batch, *grown.scores)):
                break
            grown.spread(after(depth))
        return draft_of(grown.rows)

    def _branching(self, batch: Batch, k: int, grown: Growth) -> Callable[[int], Tensor]:
        """A function from the depth to the logits after the new nodes, [N, V]. k: greatest depth."""
        return lambda depth: self.decoder.logits(grown.read() if depth else self._read_up(batch))

    def _chains(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        distributions: list[Tensor] = []
        scores: list[list[float]] = [[] for _ in range(batch.rows)]

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            choices = Choices(logits, batch, draft_tokens, draft_tokens.shape[1])
            draft_token = self._draw(choices, batch, distributions)
            if plan.stop_drafting is None:
                return draft_token, True
            chances = self._chance(choices, draft_token, batch, draft_tokens)
            return draft_token, not self._stops(plan.stop_drafting, batch, chances, scores)

        draft_tokens = draw_chain(batch.text.new_empty((batch.rows, 0)), plan.k, self._reading(batch, plan.k), draw)
        k, asked = draft_tokens.shape[1], plan.counts(batch)
        # A row that asks for none may gain the tokens of another draft, which its cache does not hold.
        self.decoder.note_draft_tokens(
            batch, k if all(asked) else draft_tokens.new_tensor([k if count else 1 for count in asked])
        )
        counts = draft_tokens.new_full((batch.rows,), k)
        return Draft(
            draft_tokens,
            counts,
            torch.cat(distributions, dim=1) if distributions else None,
            scores if scores[0] else None,
        )

    def _reading(self, batch: Batch, k: int) -> ComputeLogits:
        """The function that computes logits for ``draw_chain``. k: longest draft."""
        return lambda draft_tokens: self._read(batch, draft_tokens)

    def _read(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """Logits after the text and the draft tokens so far, [B, 1, V]. draft_tokens: [B, n], the last not yet read."""
        hidden = self.decoder.hidden_after(batch, draft_tokens) if draft_tokens.shape[1] > 0 else self._read_up(batch)
        return self.decoder.logits(hidden)[:, None]

    def _read_up(self, batch: Batch) -> Tensor:
        """Feed the missing tokens of the text. Returns the hidden state at each row's last token, [B, width]."""
        return self.decoder.next_hidden(batch, self._missing(batch))

    def _missing(self, batch: Batch) -> int:
        """Largest number of missing tokens of a row, after a large backlog has been read up to the last token."""
        missing = max(self.decoder.missing_tokens(batch))
        if missing > self.at_once:
            self.decoder.catch_up(batch)
            return 1
        return missing

    def _stops(self, stop_drafting: StopDrafting, batch: Batch, chances: Tensor, scores: list[list[float]]) -> bool:
        """Append the likelihoods of the newest draft tokens, [B, 1], to the scores, and ask whether to stop."""
        for row, (chance,) in zip(scores, chances.tolist(), strict=True):
            row.append(chance)
        return stop_drafting(batch, scores)

    def _chance(self, choices: Choices, draft_token: Tensor, _batch: Batch, _draft_tokens: Tensor) -> Tensor:
        """Probability [B, 1] that the target accepts the newest draft token. draft_tokens: [B, n], those before it."""
        return choices.likelihood(draft_token)

    def _draw(self, choices: Choices, batch: Batch, distributions: list[Tensor]) -> Tensor:
        """Sample one draft token per row, [B, 1]; append its distribution if the acceptance rule needs it."""
        if not self._independent or batch.sampling.all_greedy:
            return choices.draw()
        distributions.append(choices.distribution())
        return choices.draw(Purpose.DRAFT)

    def describe(self, draft: str | None) -> str:
        return str(draft)

    def join(self, row: int) -> None:
        """Drop trees whose round never ended: it was a measurement, or it failed."""
        self._grown = None
        if self.decoder.vocabulary is not None:
            self.decoder.vocabulary.join(row)

    def leave(self, row: int) -> None:
        self._grown = None

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self._grown is not None:
            self._grown.keep(verdict)
            self._grown = None
        self.decoder.rewind(batch)
        if self.decoder.vocabulary is not None:
            self.decoder.vocabulary.observe(batch, verdict)
