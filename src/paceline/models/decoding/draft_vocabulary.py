"""The part of a vocabulary that drafts are made of: the tokens most frequent in what the target reads and writes.

A draft pass then scores only these tokens. All others have probability 0, and the acceptance rules read the
distribution over the subset, so they stay exact. FR-Spec (arXiv 2502.14856, section 3) has a fixed list instead.

Shapes: V vocabulary of the target, S size of the subset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.draft import Verdict
from paceline.core.row_keeper import RowKeeper
from paceline.errors import ParameterError
from paceline.models.base import ShortHead

NEVER = -1e30  # logit of probability 0 in float32. With -inf, a mask that forbids all other tokens would give NaN
FIRST_CHOICE = 64  # counted tokens before the subset is chosen anew for the first time; then the number doubles
# Counted tokens between two choices, at most. A choice sorts the counts of all tokens and copies the columns that are
# new; with 256 instead of 1024 subsets of 8,192 tokens cover 94.5 instead of 93.0 % of SmolLM2's answers.
LAST_CHOICE = 1024


class DraftVocabulary(RowKeeper):
    """The S tokens that a draft model or head scores, and the counts that they are chosen by.

    head: scores the tokens. vocabulary: V. known: tokens that the draft model has, if fewer than V.
    always: tokens that stay in the subset, such as those that end a text.
    follows: whether the subset follows what the rows read and write. It does not under the rejection rule: there the
        text of a seed depends on the distributions of its drafts, so the same call would give another text later.

    Tokenizers that merge pairs number the frequent tokens first, so the subset begins with the smallest ids, and among
    tokens that occurred equally often the smaller id is preferred. Choices come at fixed numbers of counted tokens,
    between rounds, so equal requests give equal drafts.

    tokens: [S] int64, the token at each of the head's places. version: rises whenever they change.

    Raises ParameterError if S is not below V, or too small for ``always``.
    """

    def __init__(
        self,
        head: ShortHead,
        vocabulary: int,
        always: Sequence[int] = (),
        *,
        known: int | None = None,
        follows: bool = True,
    ) -> None:
        self._known = vocabulary if known is None else min(known, vocabulary)
        kept = sorted({token for token in always if 0 <= token < self._known})
        if not len(kept) < head.size < self._known:
            allowed = f"from {len(kept) + 1} to {self._known - 1} here; 0 scores the whole vocabulary"
            raise ParameterError("draft_vocab_size", head.size, allowed)
        self.head, self.vocabulary, self.follows, self.version = head, vocabulary, follows, 0
        self._counts, self._always = np.zeros(vocabulary, dtype=np.int64), np.array(kept, dtype=np.int64)
        self._new_slots: set[int] = set()
        self._counted, self._next, self._apart = 0, FIRST_CHOICE, FIRST_CHOICE
        self.tokens = torch.from_numpy(self._most_frequent())
        head.put(torch.arange(head.size), self.tokens)

    @property
    def size(self) -> int:
        return self.head.size

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] float32 of hidden states [..., width]; ``NEVER`` outside of the subset."""
        own = self.head.logits(hidden.reshape(-1, hidden.shape[-1]))
        return self.by_target(own).view(*hidden.shape[:-1], self.vocabulary)

    def by_target(self, own: Tensor) -> Tensor:
        """Return the logits [N, V] of all tokens by those of the subset, own [N, S]; ``NEVER`` outside of it."""
        logits = own.new_full((len(own), self.vocabulary), NEVER)
        return logits.index_copy_(1, self.tokens, own)

    def join(self, slot: int) -> None:
        self._new_slots.add(slot)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Count what each row gained in a round and, once, its prompt. Choose the subset anew when it is time."""
        if not self.follows:
            return
        rows = zip(verdict.tokens, verdict.gained, strict=True)
        self.count([token for tokens, gained in rows for token in tokens[:gained]])
        if self._new_slots:
            for slot, length, gained in zip(batch.slots, batch.lengths, verdict.gained, strict=True):
                if slot in self._new_slots:
                    self._new_slots.discard(slot)
                    self.count(batch.text[slot, : length - gained].numpy())
        self.choose_if_due()

    def choose_if_due(self) -> None:
        """Choose the subset anew if enough tokens were counted since the last time."""
        if self._counted >= self._next:
            self._apart = min(2 * self._apart, LAST_CHOICE)
            self._next = self._counted + self._apart
            self.choose()

    def count(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Count token ids."""
        np.add.at(self._counts, np.asarray(tokens, dtype=np.int64), 1)
        self._counted += len(tokens)

    def choose(self) -> None:
        """Replace the tokens that are no longer among the most frequent ones. The others keep their places."""
        wanted, present = self._most_frequent(), self.tokens.numpy()
        left = np.flatnonzero(~np.isin(present, wanted, assume_unique=True))
        if len(left) == 0:
            return
        free, new = torch.from_numpy(left), torch.from_numpy(np.setdiff1d(wanted, present, assume_unique=True))
        self.head.put(free, new)
        self.tokens[free] = new
        self.version += 1

    def _most_frequent(self) -> NDArray[np.int64]:
        """Return S token ids, ascending: those that always stay, then by count, then by id."""
        ids = np.arange(self._known)
        rank = self._counts[: self._known] * self._known - ids  # all different, so only one choice is possible
        rank[self._always] = np.iinfo(np.int64).max - self._always
        return np.sort(np.argpartition(-rank, self.size - 1)[: self.size])
