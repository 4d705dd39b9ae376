"""A smaller model guesses, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.batch import Batch, Enough, Wish
from paceline.decoder import Decoder
from paceline.draft import Draft, Verdict
from paceline.drafters.base import Drafter, Equipment
from paceline.errors import ParameterError
from paceline.heads import HeadDecoder
from paceline.sampling import Choices, Purpose

USUAL_LAG = 2  # after all guesses were kept: the last of them and the bonus token


class ModelDrafter(Drafter):
    """The draft model draws as the target does: same sampling parameters and, under the coupled rule, the same noise.

    Under the rejection rule it draws with noise of its own and reports the law it drew from.
    Where the length policy asks (``Wish.enough``), it scores every guess by its likelihood and stops when told.
    Its cache may lag behind the text; ``propose`` first feeds what it lacks, so "all accepted" and rounds without
    guesses are no special cases.
    """

    name = "model"
    needs_draft_model = True
    on_device = True
    at_once = USUAL_LAG  # tokens a row that are read side by side; of more, those before are read in chunks

    def __init__(self, decoder: Decoder, acceptance: str) -> None:
        self.decoder = decoder
        self._independent = acceptance == "rejection"

    @classmethod
    def build(cls, equipment: Equipment, /) -> ModelDrafter:
        decoder = equipment.draft_decoder()
        if isinstance(decoder, HeadDecoder):
            raise ParameterError("drafter", cls.name, "'feature' or 'hybrid' with a trained head, which this draft is")
        return cls(decoder, equipment.acceptance)

    @property
    def decoders(self) -> Sequence[Decoder]:
        return (self.decoder,)

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        first, stop = wish.stretch(batch.rows)
        if stop - first == batch.rows:
            return self._propose(batch, wish)
        if first == stop:
            return batch.no_guesses
        return self._propose(batch.part(first, stop), wish).spread(first, batch.rows)

    def _propose(self, batch: Batch, wish: Wish) -> Draft:
        decoder, hidden = self.decoder, self._read_up(batch)
        guesses = batch.tokens.new_empty((batch.rows, 0))
        laws: list[Tensor] = []
        scores: list[list[float]] = [[] for _ in range(batch.rows)]
        for step in range(wish.k):
            if step:
                hidden = decoder.hidden_after(batch, guesses)
            choices = Choices(decoder.logits(hidden)[:, None], batch, guesses, step)
            guess = self._draw(choices, batch, laws)
            guesses = torch.cat([guesses, guess], dim=1)
            if wish.enough is not None and self._stops(wish.enough, batch, choices.likelihood(guess), scores):
                break
        drafted = guesses.shape[1]
        decoder.note_guesses(batch, drafted)
        counts = guesses.new_full((batch.rows,), drafted)
        return Draft(guesses, counts, torch.cat(laws, dim=1) if laws else None, scores if scores[0] else None)

    def _read_up(self, batch: Batch) -> Tensor:
        """Feed what the cache lacks -> hidden [B, width] at each row's last token."""
        lag = max(self.decoder.lags(batch))
        if lag > self.at_once:
            self.decoder.catch_up(batch)
            lag = 1
        return self.decoder.next_hidden(batch, lag)

    def _stops(self, enough: Enough, batch: Batch, chances: Tensor, scores: list[list[float]]) -> bool:
        """Whether the guesses just drawn, of these chances [B, 1], are the last; the chances join the rows' scores."""
        for row, (chance,) in zip(scores, chances.tolist(), strict=True):
            row.append(chance)
        return enough(batch, scores)

    def _draw(self, choices: Choices, batch: Batch, laws: list[Tensor]) -> Tensor:
        """One guess a row, [B, 1]; its law joins ``laws`` if the rule wants it."""
        if not self._independent or batch.sampling.all_greedy:
            return choices.draw()
        laws.append(choices.law())
        return choices.draw(Purpose.GUESS)

    def describe(self, draft: str | None) -> str:
        return str(draft)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.decoder.rewind(batch)
