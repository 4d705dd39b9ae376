"""Trees that a draft model grows, depth by depth. B rows, V vocabulary, W guesses of a row at a depth."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.batch import Batch
from paceline.decoder import Decoder
from paceline.draft import Verdict
from paceline.drafters.branches import BESIDE, Branches, draft_of
from paceline.params import MAX_SPECULATION_LENGTH
from paceline.sampling import Choices


class _Candidate(NamedTuple):
    """A guess that may come after ``parent``; survival: the chance that it and all it follows are right."""

    parent: int
    token: int
    chance: float
    survival: float
    kind: int


class Growth:
    """One round's trees of a part of a batch, whose texts ``decoder`` has read.

    A guess's candidates are drawn as the target will draw there, with its noise, each without those before it: so they
    are the leaders of what the target will see if the two models agree (Daliri et al. 2408.07978). Of all candidates of
    a row at one depth the W that most likely survive stay (EAGLE-2, 2406.16858, section 4, keeps the best in this way).

    rows: the trees. new: of each row that has any, (row, guess) not read yet.
    """

    def __init__(self, decoder: Decoder, batch: Batch, width: int) -> None:
        self.rows = [Branches() for _ in range(batch.rows)]
        self._decoder, self._batch, self._width = decoder, batch, width
        self._text = batch.lengths[: batch.rows]
        self._read = [0] * batch.rows
        self._survivals: list[list[float]] = [[] for _ in self.rows]
        self.new = [(row, -1) for row in range(batch.rows)]  # after what the next ones come

    @property
    def scores(self) -> tuple[list[list[float]], list[list[int]]]:
        """Of each row the chances of its guesses, and what they follow."""
        return [row.scores for row in self.rows], [row.follows for row in self.rows]

    def read(self) -> Tensor:
        """Feed the guesses that are new -> hidden [N, width] after them."""
        hidden = self._decoder.hidden_after_branches(self._batch, draft_of(self.rows, self._batch.device), self._read)
        self._read = [len(row.tokens) for row in self.rows]
        return hidden

    def spread(self, logits: Tensor) -> None:
        """logits [N, V], after what is new: the best candidates become guesses, and are what is new."""
        found: list[list[_Candidate]] = [[] for _ in self.rows]
        places = [(row, self.rows[row].way(guess)) for row, guess in self.new]
        for rank, (tokens, chances) in enumerate(self._candidates(logits, self._batch.after(places))):
            for (row, parent), token, chance in zip(self.new, tokens, chances, strict=True):
                before = 1.0 if parent < 0 else self._survivals[row][parent]
                if chance > 0:  # else nothing is left that may be drawn there
                    found[row].append(_Candidate(parent, token, chance, before * chance, BESIDE if rank else 0))
        self.new = [(row, guess) for row, each in enumerate(found) for guess in self._grow(row, each)]

    def _candidates(self, logits: Tensor, lines: Batch) -> list[tuple[list[int], list[float]]]:
        """W draws at every place, each without the tokens before it, and the chances of each token."""
        left, found = torch.ones(len(logits), device=logits.device), []
        logits = logits[:, None].clone()
        for _ in range(min(self._width, logits.shape[2])):
            choices = Choices(logits, lines)
            drawn = choices.draw().clamp(0, logits.shape[2] - 1)  # where nothing is left, anything is drawn
            chance = choices.likelihood(drawn)[:, 0].nan_to_num(0.0) * left
            found.append((drawn[:, 0].tolist(), chance.tolist()))
            left = (left - chance).clamp(min=0.0)
            logits.scatter_(2, drawn[..., None], -math.inf)
        return found

    def _grow(self, row: int, found: list[_Candidate]) -> list[int]:
        """The numbers of the guesses that the best candidates become. A guess takes a place in the cache."""
        tree = self.rows[row]
        room = min(MAX_SPECULATION_LENGTH, self._decoder.cache.positions - self._text[row]) - len(tree.tokens)
        best = sorted(found, key=attrgetter("survival"), reverse=True)[: max(0, min(self._width, room))]
        self._survivals[row] += [candidate.survival for candidate in best]
        return [tree.add(each.parent, each.token, each.chance, each.kind) for each in best]

    def keep(self, verdict: Verdict) -> None:
        """What a round kept, as far as it was read, stays in the cache; other guesses do not."""
        first = self._batch.first
        tokens = verdict.host.tokens[first : first + len(self.rows)]
        rows = zip(self.rows, tokens, self._read, strict=True)
        paths = [[guess for guess in tree.path(gained) if guess < read] for tree, gained, read in rows]
        self._decoder.keep_guesses(self._batch, self._text, paths)
