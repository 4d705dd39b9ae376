"""Trees that a draft model grows, depth by depth. B rows, V vocabulary, W draft tokens of a row at a depth."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH, MIN_TEMPERATURE
from paceline.core.batch import Batch
from paceline.core.draft import SIBLING_KIND, Verdict
from paceline.core.sampling import Choices, Purpose, noise_key, uniform
from paceline.drafters.branches import Branches, draft_of
from paceline.models.decoder import Decoder


class _Candidate(NamedTuple):
    """A draft token that may come after ``parent``; survival: the chance that it and all it follows are right."""

    parent: int
    token: int
    chance: float
    survival: float
    kind: int


def candidates(logits: Tensor, lines: Batch, width: int) -> list[tuple[list[int], list[float]]]:
    """W draws after each of N texts, each draw without the tokens before it, and the chances of each token to be right.

    logits: [N, V]. Greedily the chance is the token's probability. Under noise, which is the target's, too, it is
    the token's part of the noisy leaders' weights: one that the noise has put first is likely to be so there.
    """
    left, logits = logits.new_ones(len(logits)), logits[:, None].clone()
    tokens, chances = [], []
    for _ in range(min(width, logits.shape[2])):
        choices = Choices(logits, lines)
        drawn = choices.draw().clamp(0, logits.shape[2] - 1)  # where nothing is left, anything is drawn
        chance = choices.likelihood(drawn)[:, 0].nan_to_num(0.0) * left
        tokens.append(drawn[:, 0])
        chances.append(chance)
        left = (left - chance).clamp(min=0.0)
        logits.scatter_(2, drawn[..., None], -math.inf)
    drawn, chance = torch.stack(tokens, 1), torch.stack(chances, 1)
    if not lines.sampling.all_greedy:
        chance = torch.where(lines.sampling.temperature[:, None] > 0, _shares(drawn, chance, lines), chance)
    return list(zip(drawn.T.tolist(), chance.T.tolist(), strict=True))


def _shares(tokens: Tensor, chances: Tensor, lines: Batch) -> Tensor:
    """[N, W]: each token's part of the weights of all, noise included; what is not there weighs as much as the last."""
    key = noise_key(lines.sampling.seed[:, None], lines.length[:, None], Purpose.DRAW)
    noise = -torch.log(-torch.log(uniform(key, tokens)))
    values = chances.double().log() / lines.sampling.temperature[:, None].clamp(min=MIN_TEMPERATURE) + noise
    weights = torch.cat([values, values[:, -1:]], 1).softmax(1)[:, :-1]
    return weights.nan_to_num(0.0).to(chances.dtype)


class Growth:
    """One round's trees of a part of a batch, whose texts ``decoder`` has read.

    A draft token's candidates are drawn as the target will draw there, with its noise, each without those before it: so
    they are the leaders of what the target will see if the two models agree (Daliri et al. 2408.07978). Of all
    candidates of a row at one depth the W that most likely survive stay (EAGLE-2, 2406.16858, section 4, keeps the best
    in this way),
    the chain of first candidates always: a tree holds what a chain would have been.

    rows: the trees. new: of each row that has any, (row, draft token) not read yet.
    """

    def __init__(self, decoder: Decoder, batch: Batch, width: int) -> None:
        self.rows = [Branches() for _ in range(batch.rows)]
        self._decoder, self._batch, self._width = decoder, batch, width
        self._text = batch.lengths[: batch.rows]
        self._read = [0] * batch.rows
        self._chain = [-1] * batch.rows  # the last of each row's first candidates
        self._survivals: list[list[float]] = [[] for _ in self.rows]
        self.new = [(row, -1) for row in range(batch.rows)]  # after what the next ones come

    @property
    def scores(self) -> tuple[list[list[float]], list[list[int]]]:
        """Of each row the chances of its draft tokens, and what they follow."""
        return [row.scores for row in self.rows], [row.follows for row in self.rows]

    def read(self) -> Tensor:
        """Feed the draft tokens that are new -> hidden [N, width] after them."""
        hidden = self._decoder.hidden_after_branches(self._batch, draft_of(self.rows, self._batch.device), self._read)
        self._read = [len(row.tokens) for row in self.rows]
        return hidden

    def spread(self, logits: Tensor) -> None:
        """logits [N, V], after what is new: the best candidates become draft tokens, and are what is new."""
        found: list[list[_Candidate]] = [[] for _ in self.rows]
        places = [(row, self.rows[row].way(draft_token)) for row, draft_token in self.new]
        for rank, (tokens, chances) in enumerate(candidates(logits, self._batch.after(places), self._width)):
            for (row, parent), token, chance in zip(self.new, tokens, chances, strict=True):
                before = 1.0 if parent < 0 else self._survivals[row][parent]
                if chance > 0:  # else nothing is left that may be drawn there
                    found[row].append(_Candidate(parent, token, chance, before * chance, SIBLING_KIND if rank else 0))
        self.new = [(row, draft_token) for row, each in enumerate(found) for draft_token in self._grow(row, each)]

    def _grow(self, row: int, found: list[_Candidate]) -> list[int]:
        """The numbers of the draft tokens that the best candidates become. A draft token takes a place in the cache."""
        tree = self.rows[row]
        room = min(MAX_SPECULATION_LENGTH, self._decoder.cache.positions - self._text[row]) - len(tree.tokens)
        found = sorted(found, key=attrgetter("survival"), reverse=True)
        chain = [each for each in found if each.parent == self._chain[row] and each.kind == 0]
        best = [*chain, *(each for each in found if each not in chain)][: max(0, min(self._width, room))]
        self._survivals[row] += [candidate.survival for candidate in best]
        new = [tree.add(each.parent, each.token, each.chance, each.kind) for each in best]
        if chain and new:
            self._chain[row] = new[0]
        return new

    def keep(self, verdict: Verdict) -> None:
        """What a round kept, as far as it was read, stays in the cache; other draft tokens do not."""
        first = self._batch.first
        tokens = verdict.host.tokens[first : first + len(self.rows)]
        rows = zip(self.rows, tokens, self._read, strict=True)
        paths = [
            [draft_token for draft_token in tree.path(gained) if draft_token < read] for tree, gained, read in rows
        ]
        self._decoder.keep_draft_tokens(self._batch, self._text, paths)
