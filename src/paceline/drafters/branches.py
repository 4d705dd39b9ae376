"""Draft trees of one row, built token by token or by merging continuations with common prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.draft import SIBLING_KIND, Draft, branching


@dataclass
class DraftTree:
    """The draft tokens of one row: their ids, parents (index in this tree, -1: the root), scores and kinds."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def child(self, parent: int, token: int) -> int | None:
        """Index of the child of ``parent`` with this token id; None if there is none."""
        nodes = zip(self.tokens, self.parents, strict=True)
        return next((index for index, node in enumerate(nodes) if node == (token, parent)), None)

    def has_child(self, parent: int) -> bool:
        """Whether a draft token has this parent, so that the next one is its sibling."""
        return parent in self.parents

    def add(self, parent: int, token: int, score: float, kind: int = 0) -> int:
        """Add a draft token after ``parent``, and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.kinds.append(kind)
        return len(self.tokens) - 1

    def tokens_to(self, index: int) -> list[int]:
        """Token ids from the root to the draft token at ``index``, included; none for -1."""
        return [] if index < 0 else [*self.tokens_to(self.parents[index]), self.tokens[index]]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Indices of the draft tokens that spell the longest prefix of ``tokens`` from the root."""
        path: list[int] = []
        for token in tokens:
            child = self.child(path[-1] if path else -1, token)
            if child is None:
                break
            path.append(child)
        return path

    def merge(self, draft_tokens: Sequence[int], scores: Sequence[float], kind: int) -> None:
        """Add a continuation, up to ``MAX_SPECULATION_LENGTH`` draft tokens in the tree."""
        parent = -1
        for token, score in zip(draft_tokens, scores, strict=False):
            child = self.child(parent, token)
            if child is None:
                if len(self.tokens) == MAX_SPECULATION_LENGTH:
                    return
                child = self.add(parent, token, score, kind + SIBLING_KIND * self.has_child(parent))
            parent = child


def draft_of(rows: Sequence[DraftTree]) -> Draft:
    """The trees of all rows as one draft: chains if no row branches."""
    tokens, parents = [row.tokens for row in rows], [row.parents for row in rows]
    return branching(tokens, parents, [row.scores for row in rows], [row.kinds for row in rows])
