"""Continuations merged into a tree: what they begin with in common is one path of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.draft import SIBLING_KIND, Draft, branching


@dataclass
class Branches:
    """A row's draft tokens: tokens, the draft token that each follows (-1: the row's unseen token), scores and
    kinds.
    """

    tokens: list[int] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def child(self, parent: int, token: int) -> int | None:
        """The draft token of this token after ``parent``; None if there is none."""
        places = zip(self.tokens, self.follows, strict=True)
        return next((place for place, draft_token in enumerate(places) if draft_token == (token, parent)), None)

    def has_child(self, parent: int) -> bool:
        """Whether anything follows this draft token: the next that does is a sibling."""
        return parent in self.follows

    def add(self, parent: int, token: int, score: float, kind: int = 0) -> int:
        """A draft token after ``parent``; returns its number."""
        self.tokens.append(token)
        self.follows.append(parent)
        self.scores.append(score)
        self.kinds.append(kind)
        return len(self.tokens) - 1

    def way(self, draft_token: int) -> list[int]:
        """The tokens on the way to a draft token, its own included; none to -1."""
        return [] if draft_token < 0 else [*self.way(self.follows[draft_token]), self.tokens[draft_token]]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The draft tokens that these tokens go by, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            draft_token = self.child(path[-1] if path else -1, token)
            if draft_token is None:
                break
            path.append(draft_token)
        return path

    def merge(self, draft_tokens: Sequence[int], scores: Sequence[float], kind: int) -> None:
        """Another continuation, as far as there is room."""
        at = -1
        for token, score in zip(draft_tokens, scores, strict=False):
            known = self.child(at, token)
            if known is None:
                if len(self.tokens) == MAX_SPECULATION_LENGTH:
                    return
                known = self.add(at, token, score, kind + SIBLING_KIND * self.has_child(at))
            at = known


def draft_of(rows: Sequence[Branches], device: torch.device) -> Draft:
    """Of all rows; of chains where no row branches."""
    tokens, follows = [row.tokens for row in rows], [row.follows for row in rows]
    return branching(tokens, follows, device, [row.scores for row in rows], [row.kinds for row in rows])
