"""Draft trees grown by a draft model, one depth at a time.

Shapes: B rows, V vocabulary, W draft tokens per row and depth, N nodes that are new at a depth, all rows together.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH, MIN_TEMPERATURE
from paceline.core.batch import Batch
from paceline.core.draft import SIBLING_KIND, Verdict
from paceline.core.sampling import Choices, noise_key, uniform
from paceline.core.values import Purpose
from paceline.drafters.branches import DraftTree, draft_of
from paceline.models.decoding.draft_decoder import DraftDecoder


class _Candidate(NamedTuple):
    """A possible child of ``parent``. chance: that it is right if its parent is. survival: that all its path is."""

    parent: int
    token: int
    chance: float
    survival: float
    kind: int


def candidates(logits: Tensor, lines: Batch, width: int) -> list[tuple[list[int], list[float]]]:
    """Sample W tokens without replacement after each of N texts, and the probability of each to be right.

    logits: [N, V]. lines: the N texts as a batch, for their sampling parameters and noise.
    Returns W pairs, in the order of sampling: token ids [N] and probabilities [N].

    A greedy row's probability is the draft model's. Otherwise the target samples with the same noise, so it is the
    token's share of the noisy weights: a token that the noise puts first here is likely to be first there.
    """
    left, logits = logits.new_ones(len(logits)), logits[:, None].clone()
    tokens, chances = [], []
    for _ in range(min(width, logits.shape[2])):
        choices = Choices(logits, lines)
        drawn = choices.draw().clamp(0, logits.shape[2] - 1)  # if no token is left, the draw means nothing
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
    """Share of each token in the noisy weights, [N, W]. All other tokens together weigh as much as the last one.

    tokens, chances: [N, W].
    """
    key = noise_key(lines.sampling.seed[:, None], lines.length[:, None], Purpose.DRAW)  # lines are in slots 0, 1, ...
    noise = -torch.log(-torch.log(uniform(key, tokens)))
    values = chances.double().log() / lines.sampling.temperature[:, None].clamp(min=MIN_TEMPERATURE) + noise
    weights = torch.cat([values, values[:, -1:]], 1).softmax(1)[:, :-1]
    return weights.nan_to_num(0.0).to(chances.dtype)


class Growth:
    """The draft trees of one round, for (part of) a batch whose text ``decoder`` has read.

    Candidates are sampled without replacement with the target's noise, so they are the tokens that the target samples
    first if the two models agree (Daliri et al., arXiv 2408.07978). At each depth a row keeps the W candidates with the
    highest survival, as in EAGLE-2 (arXiv 2406.16858, section 4). The chain of first candidates is always kept, so a
    tree contains the draft that width 1 would have made.

    rows: one tree per row, [B]. new: (row, index in its tree) of the nodes not read yet; -1 is the text itself.
    """

    def __init__(self, decoder: DraftDecoder, batch: Batch, width: int) -> None:
        self.rows = [DraftTree() for _ in range(batch.rows)]
        self._decoder, self._batch, self._width = decoder, batch, width
        self._text = batch.lengths[:]
        self._read = [0] * batch.rows
        self._chain = [-1] * batch.rows  # end of each row's chain of first candidates
        self._survivals: list[list[float]] = [[] for _ in self.rows]
        self.new = [(row, -1) for row in range(batch.rows)]

    @property
    def scores(self) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and parents of each row's draft tokens, as ``SpeculationPlan.stop_drafting`` takes them."""
        return [row.scores for row in self.rows], [row.parents for row in self.rows]

    def read(self) -> Tensor:
        """Feed the new draft tokens. Returns the hidden states after them, [N, width]."""
        hidden = self._decoder.hidden_after_branches(self._batch, draft_of(self.rows), self._read)
        self._read = [len(row.tokens) for row in self.rows]
        return hidden

    def spread(self, logits: Tensor) -> None:
        """Add the best candidates to the trees; they are the new nodes. logits: [N, V], after the nodes so far new."""
        by_row: list[list[_Candidate]] = [[] for _ in self.rows]
        paths = [(row, self.rows[row].tokens_to(node)) for row, node in self.new]
        for rank, (tokens, chances) in enumerate(candidates(logits, self._batch.after(paths), self._width)):
            for (row, parent), token, chance in zip(self.new, tokens, chances, strict=True):
                before = 1.0 if parent < 0 else self._survivals[row][parent]
                if chance > 0:  # otherwise no token is left to sample
                    kind = SIBLING_KIND if rank else 0
                    by_row[row].append(_Candidate(parent, token, chance, before * chance, kind))
        self.new = [(row, node) for row, of_row in enumerate(by_row) for node in self._grow(row, of_row)]

    def _grow(self, row: int, of_row: list[_Candidate]) -> list[int]:
        """Add a row's best candidates to its tree, within the room of the cache. Returns their indices."""
        tree = self.rows[row]
        room = min(MAX_SPECULATION_LENGTH, self._decoder.cache.positions - self._text[row]) - len(tree.tokens)
        ranked = sorted(of_row, key=attrgetter("survival"), reverse=True)
        chain = [candidate for candidate in ranked if candidate.parent == self._chain[row] and candidate.kind == 0]
        best = [*chain, *(each for each in ranked if each not in chain)][: max(0, min(self._width, room))]
        self._survivals[row] += [candidate.survival for candidate in best]
        new = [tree.add(candidate.parent, candidate.token, candidate.chance, candidate.kind) for candidate in best]
        if chain and new:
            self._chain[row] = new[0]
        return new

    def keep(self, verdict: Verdict) -> None:
        """Keep the accepted draft tokens that were read in the cache, and drop all others."""
        first = self._batch.first
        tokens = verdict.tokens[first : first + len(self.rows)]
        rows = zip(self.rows, tokens, self._read, strict=True)
        paths = [[node for node in tree.path(gained) if node < read] for tree, gained, read in rows]
        self._decoder.keep_draft_tokens(self._batch, self._text, paths)
