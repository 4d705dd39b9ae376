"""A smaller model draft tokens, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.core.batch import Batch, SpeculationPlan, StopDrafting
from paceline.core.draft import Draft, Verdict
from paceline.core.sampling import Choices, Purpose
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.branches import draft_of
from paceline.drafters.growth import Growth
from paceline.drafters.heads.decoder import HeadDecoder
from paceline.errors import ParameterError
from paceline.models.decoder import USUAL_LAG, Decoder

# Draft tokens so far [B, n] -> the draft model's logits [B, 1, V] after them.
Read = Callable[[Tensor], Tensor]

# These logits and draft tokens -> the next draft token of each row, [B, 1], and whether to go on.
Draw = Callable[[Tensor, Tensor], tuple[Tensor, bool]]


def draw_chain(draft_tokens: Tensor, k: int, read: Read, draw: Draw) -> Tensor:
    """Draft tokens [B, 0] grown to k a row, or until ``draw`` stops: host and device draft by this sequence."""
    goes_on = True
    while goes_on and draft_tokens.shape[1] < k:
        draft_token, goes_on = draw(read(draft_tokens), draft_tokens)
        draft_tokens = torch.cat([draft_tokens, draft_token], dim=1)
    return draft_tokens


class ModelDrafter(Drafter):
    """The draft model draws as the target does: same sampling parameters and, under the coupled rule, the same noise.

    Under the rejection rule it draws with noise of its own and reports the distribution it drew from.
    Where the length policy asks (``SpeculationPlan.stop_drafting``), it scores every draft token by its likelihood and
    stops when told.
    width: of each draft token's candidates (leaders under the target's noise) the likeliest so many a row and depth
    make a tree, grown by one batched pass a depth.
    Its cache may lag behind the text; ``propose`` first feeds what it lacks, so "all accepted" and rounds without
    draft tokens are no special cases.
    """

    name = "model"
    needs_draft_model = True
    on_device = True
    auto_width = 1  # two took 1.00 to 1.14 of the time at one row (benchmarks/trees.py; tree_gain.py counts)
    sources = ("draft model",)
    at_once = USUAL_LAG  # tokens a row that are read side by side; of more, those before are read in chunks

    def __init__(self, decoder: Decoder, acceptance: str, width: int = 1) -> None:
        self.decoder, self.width = decoder, width
        self._grown: Growth | None = None  # this round's
        self._independent = acceptance == "rejection"

    @classmethod
    def build(cls, equipment: Equipment, /) -> ModelDrafter:
        decoder = equipment.draft_decoder()
        if isinstance(decoder, HeadDecoder):
            raise ParameterError("drafter", cls.name, "'feature' or 'hybrid' with a trained head, which this draft is")
        return cls(decoder, equipment.acceptance, equipment.width(cls))

    @property
    def decoders(self) -> Sequence[Decoder]:
        return (self.decoder,)

    @property
    def has_probabilities(self) -> bool:
        return self._independent

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        first, stop = wish.stretch(batch.rows)
        if stop - first == batch.rows:
            return self._propose(batch, wish)
        if first == stop:
            return batch.empty_draft
        return self._propose(batch.part(first, stop), wish).spread(first, batch.rows)

    def _propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        return self._chains(batch, wish) if self.width == 1 else self._trees(batch, wish)

    def _trees(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        self._grown = grown = Growth(self.decoder, batch, self.width)
        after = self._branching(batch, wish.k, grown)
        grown.spread(after(0))
        for depth in range(1, wish.k):
            if not grown.new or (wish.stop_drafting is not None and wish.stop_drafting(batch, *grown.scores)):
                break
            grown.spread(after(depth))
        return draft_of(grown.rows, batch.device)

    def _branching(self, batch: Batch, k: int, grown: Growth) -> Callable[[int], Tensor]:
        """What gives the logits [N, V] after what is new, depth by depth, in trees of a depth of k at most."""
        return lambda depth: self.decoder.logits(grown.read() if depth else self._read_up(batch))

    def _chains(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        distributions: list[Tensor] = []
        scores: list[list[float]] = [[] for _ in range(batch.rows)]

        def draw(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, bool]:
            choices = Choices(logits, batch, draft_tokens, draft_tokens.shape[1])
            draft_token = self._draw(choices, batch, distributions)
            goes_on = wish.stop_drafting is None or not self._stops(
                wish.stop_drafting, batch, choices.likelihood(draft_token), scores
            )
            return draft_token, goes_on

        draft_tokens = draw_chain(batch.tokens.new_empty((batch.rows, 0)), wish.k, self._reading(batch, wish.k), draw)
        self.decoder.note_draft_tokens(batch, draft_tokens.shape[1])
        counts = draft_tokens.new_full((batch.rows,), draft_tokens.shape[1])
        return Draft(
            draft_tokens,
            counts,
            torch.cat(distributions, dim=1) if distributions else None,
            scores if scores[0] else None,
        )

    def _reading(self, batch: Batch, k: int) -> Read:
        """What reads a draft of at most k draft tokens."""
        return lambda draft_tokens: self._read(batch, draft_tokens)

    def _read(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """[B, 1, V]: after the text and the draft_tokens [B, n] so far, of which the cache lacks the last."""
        hidden = self.decoder.hidden_after(batch, draft_tokens) if draft_tokens.shape[1] > 0 else self._read_up(batch)
        return self.decoder.logits(hidden)[:, None]

    def _read_up(self, batch: Batch) -> Tensor:
        """Feed what the cache lacks -> hidden [B, width] at each row's last token."""
        return self.decoder.next_hidden(batch, self._lag(batch))

    def _lag(self, batch: Batch) -> int:
        """How many tokens a row lacks at most; of many, those before the last are read first."""
        lag = max(self.decoder.lags(batch))
        if lag > self.at_once:
            self.decoder.catch_up(batch)
            return 1
        return lag

    def _stops(self, enough: StopDrafting, batch: Batch, chances: Tensor, scores: list[list[float]]) -> bool:
        """Whether the draft tokens just drawn, of these chances [B, 1], are the last; the chances join the rows'
        scores.
        """
        for row, (chance,) in zip(scores, chances.tolist(), strict=True):
            row.append(chance)
        return enough(batch, scores)

    def _draw(self, choices: Choices, batch: Batch, distributions: list[Tensor]) -> Tensor:
        """One draft token a row, [B, 1]; its distribution joins ``distributions`` if the rule wants it."""
        if not self._independent or batch.sampling.all_greedy:
            return choices.draw()
        distributions.append(choices.distribution())
        return choices.draw(Purpose.DRAFT)

    def describe(self, draft: str | None) -> str:
        return str(draft)

    def join(self, row: int) -> None:
        """Trees that were drafted for no round (to be timed, or for one that failed) are nobody's."""
        self._grown = None

    def leave(self, row: int) -> None:
        self._grown = None

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        if self._grown is not None:
            self._grown.keep(verdict)
            self._grown = None
        self.decoder.rewind(batch)
