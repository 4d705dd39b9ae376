"""Drafts and verdicts: the draft tokens of a batch, and the result of a round, as lists on the host.

Shapes: B rows, k draft tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from paceline.errors import ParameterError

Value = TypeVar("Value")

MAX_KINDS = 10  # kinds of draft tokens that a drafter may distinguish
# Offset added to the kind of a lower-ranked sibling: it can only be accepted where a better sibling is rejected.
SIBLING_KIND = MAX_KINDS // 2


class Undrawn(IntEnum):
    """Stands in place of a row's token, always its last of a round, if none could be drawn. No row gains it."""

    NOT_FINITE = -1  # the model's logits are NaN, or the largest is infinite
    ALL_FORBIDDEN = -2  # the model's logits are finite, but -inf or NaN after masks and logits processors


@dataclass(frozen=True, init=False, eq=False)
class Draft:
    """Draft tokens of a batch.

    draft_tokens: those of each row, up to k.
    probabilities: [B, k, V] float32 or wider, the distribution that each draft token was drawn from. None if draft
        tokens are not drawn (n-gram) or are drawn with the target's own noise (coupled rule). Trees have none.
    confidence: the drafter's probability, from 0 to 1, that a draft token is accepted if its ancestors are, for each
        draft token or more; None if the drafter has no such score.
    parents: for trees, index of each draft token's parent, which comes before it; -1 is the row's pending token. None:
        chains.
    kinds: source of each draft token, a number of its drafter from 0 to ``MAX_KINDS`` - 1, which tells acceptance rates
        apart; None if all have the same source.
    """

    draft_tokens: list[list[int]]
    probabilities: Tensor | None = None
    confidence: Sequence[Sequence[float]] | None = None
    parents: list[list[int]] | None = None
    kinds: Sequence[Sequence[int]] | None = None

    def __init__(
        self,
        draft_tokens: Tensor | list[list[int]],
        counts: Tensor | Sequence[int] | None = None,
        probabilities: Tensor | None = None,
        confidence: Sequence[Sequence[float]] | None = None,
        *,
        parents: Tensor | list[list[int]] | None = None,
        kinds: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Make a draft from tensors [B, k], which are read once, or from lists.

        counts: [B], number of real draft tokens of each row, the rest being padding; None: all are real.

        Raises ParameterError if a count is negative or exceeds k.
        """
        tokens, tree = _listed(draft_tokens), None if parents is None else _listed(parents)
        if counts is not None:
            numbers: Sequence[int] = counts.tolist() if isinstance(counts, Tensor) else counts
            k = max(map(len, tokens), default=0)
            if not all(0 <= count <= k for count in numbers):
                raise ParameterError("counts", numbers, f"from 0 to the {k} draft tokens of a row; fix the drafter")
            tokens, tree = first_of(tokens, numbers), None if tree is None else first_of(tree, numbers)
        vars(self).update(draft_tokens=tokens, parents=tree)
        vars(self).update(probabilities=probabilities, confidence=confidence, kinds=kinds)

    @property
    def k(self) -> int:
        """Draft tokens of the row with the most."""
        return max(map(len, self.draft_tokens), default=0)

    @property
    def drafted(self) -> list[int]:
        """Number of draft tokens of each row."""
        return [len(line) for line in self.draft_tokens]

    def with_kinds(self, kinds: Sequence[Sequence[int]]) -> Draft:
        """The same draft tokens, of these kinds."""
        draft = copy.copy(self)
        vars(draft)["kinds"] = kinds
        return draft

    def capped(self, caps: Sequence[int] | None) -> Draft:
        """Truncate row i to caps[i] draft tokens, a tree to that depth. None returns the draft unchanged."""
        if caps is None:
            return self
        if self.parents is not None:
            return self._cut(self.parents, caps)
        lines = first_of(self.draft_tokens, caps)
        return Draft(lines, None, self.probabilities, self.confidence, kinds=self.kinds)

    def first(self, counts: Sequence[int]) -> Draft:
        """Keep the first counts[i] draft tokens of each row; k shrinks to the largest count."""
        lines = first_of(self.draft_tokens, counts)
        if self.parents is not None:
            return branching(lines, first_of(self.parents, counts))
        return Draft(lines, None, self.probabilities if max(counts) > 0 else None)

    def _cut(self, parents: list[list[int]], depths: Sequence[int]) -> Draft:
        """Remove the draft tokens of trees that are deeper than depths[i] in row i."""
        kept = [
            [place for place, depth in enumerate(depths_of(line)) if depth <= limit]
            for line, limit in zip(parents, depths, strict=True)
        ]
        scores = None if self.confidence is None else _taken(self.confidence, kept)
        kinds = None if self.kinds is None else _taken(self.kinds, kept)
        return branching(_taken(self.draft_tokens, kept), _parents_among(parents, kept), scores, kinds)

    def ordered(self, orders: Sequence[Sequence[int]]) -> Draft:
        """Reorder the draft tokens of trees: row i takes the order orders[i], in which parents come first."""
        assert self.parents is not None
        return Draft(_taken(self.draft_tokens, orders), parents=_parents_among(self.parents, orders))

    def spread(self, first: int, rows: int) -> Draft:
        """Embed the draft of a part of a batch into a batch of ``rows`` rows, in which other rows have no draft tokens.

        first: index of the part's first row.
        """

        def longer(lines: Sequence[Sequence[Any]] | None) -> list[list[Any]] | None:
            if lines is None:
                return None
            return [*([] for _ in range(first)), *map(list, lines), *([] for _ in range(rows - first - len(lines)))]

        wide, q = None, self.probabilities
        if q is not None:
            wide = q.new_zeros(rows, *q.shape[1:])
            wide[first : first + q.shape[0]] = q
        confidence, kinds, parents = longer(self.confidence), longer(self.kinds), longer(self.parents)
        return Draft(longer(self.draft_tokens) or [], None, wide, confidence, parents=parents, kinds=kinds)


def _listed(table: Tensor | list[list[int]]) -> list[list[int]]:
    if not isinstance(table, Tensor):
        return table
    lines: list[list[int]] = table.tolist()
    return lines


@cache
def empty_draft(rows: int) -> Draft:
    """Draft without tokens for ``rows`` rows: the round is plain decoding."""
    return Draft([[] for _ in range(rows)])


def branching(
    draft_tokens: list[list[int]],
    parents: list[list[int]],
    confidence: Sequence[Sequence[float]] | None = None,
    kinds: Sequence[Sequence[int]] | None = None,
) -> Draft:
    """Make a draft of trees from each row's draft tokens and their parents; a draft of chains if no row branches."""
    chains = all(line == list(range(-1, len(line) - 1)) for line in parents)
    return Draft(draft_tokens, None, None, confidence, parents=None if chains else parents, kinds=kinds)


def first_of(table: Sequence[list[int]], counts: Sequence[int]) -> list[list[int]]:
    """Return the first counts[i] entries of row i."""
    return [line[:count] for line, count in zip(table, counts, strict=True)]


def _taken(table: Sequence[Sequence[Any]], kept: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Select the entries at positions kept[i] of row i."""
    return [[line[place] for place in places] for line, places in zip(table, kept, strict=True)]


def _parents_among(parents: list[list[int]], kept: Sequence[Sequence[int]]) -> list[list[int]]:
    """Parents of the kept draft tokens, as indices into ``kept``."""
    new = [{old: place for place, old in enumerate([-1, *places], -1)} for places in kept]
    return [[places[old] for old in line] for places, line in zip(new, _taken(parents, kept), strict=True)]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each draft token of a row, from 1 on. parents: index of each parent, -1 for the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


class Logprobs(NamedTuple):
    """Log-probabilities under the target's unmodified distribution, by row and position.

    own: of the gained tokens. top_ids: the m most likely tokens. top_values: of these.
    """

    own: list[list[float]]
    top_ids: list[list[list[int]]]
    top_values: list[list[list[float]]]


class VerifiedTree(NamedTuple):
    """Result of verifying one row's tree.

    depths: depth of each draft token, from 1 on. saved_at: index, among the accepted draft tokens, of the first
    lower-ranked sibling, where a chain would have ended; None if there is none. fully_accepted: whether the last
    accepted draft token has no children.
    """

    depths: list[int]
    saved_at: int | None
    fully_accepted: bool

    @staticmethod
    def of(parents: Sequence[int], path: Sequence[int]) -> VerifiedTree:
        """Make the result. parents: index of each draft token's parent, or -1. path: accepted draft tokens in order."""
        saved_at = next((place for place, node in enumerate(path) if is_later_sibling(parents, node)), None)
        return VerifiedTree(depths_of(parents), saved_at, (path[-1] if path else -1) not in parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest draft token; 0 without draft tokens."""
        return max(self.depths, default=0)

    @property
    def branches(self) -> bool:
        """Whether the tree is not a chain."""
        return len(self.depths) > self.depth

    def verified(self, gained: int) -> int:
        """Number of draft tokens at the depths of the first ``gained`` tokens."""
        return sum(depth <= gained for depth in self.depths)


def is_later_sibling(parents: Sequence[int], node: int) -> bool:
    """Whether an earlier draft token has the same parent as draft token ``node``."""
    return parents[node] in parents[:node]


@dataclass(frozen=True)
class RoundTiming:
    """Milliseconds of a round, for the length policy.

    draft_ms: for choosing, drafting and selecting, and for learning from the round before of the same kind, with or
        without a draft: this round's own learning has yet to come. verify_ms: for verification, acceptance and commit.
    """

    draft_ms: float
    verify_ms: float


@dataclass(frozen=True)
class Verdict:
    """Result of a round, with one entry per row.

    tokens: the accepted[i] + 1 new tokens of row i; the last may be ``Undrawn``.
    accepted, drafted: number of draft tokens.
    gained: number of tokens that each row took, fewer than ``tokens`` has if the row ends among them.
    parents: those of the draft tokens of trees; None if the draft had chains only.
    path: for trees, indices of the accepted draft tokens in order; None for chains, whose first ones are accepted.
    logprobs: log-probabilities of the tokens; None if no row requests them.
    matched: tokens matched by the n-gram draft that replaced a model's, on a device; 0: the model's. None: elsewhere.
    note: ``SpeculationPlan.note`` of the round. timing: None if the round was not measured.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    gained: list[int] = field(default_factory=list)
    parents: list[list[int]] | None = None
    path: list[list[int]] | None = None
    logprobs: Logprobs | None = None
    matched: list[int] | None = None
    note: object = None
    timing: RoundTiming | None = None

    @property
    def host(self) -> Verdict:
        """The verdict itself: its values are on the host."""
        return self

    def of_rows(self, lines: Sequence[int | None]) -> Verdict:
        """Return the result for other rows. lines: each one's row in this result, None if it was not in the round.

        Such rows have drafted, accepted and gained nothing; their log-probabilities are undefined.
        """
        return replace(
            self,
            tokens=[[] if line is None else self.tokens[line] for line in lines],
            accepted=[0 if line is None else self.accepted[line] for line in lines],
            drafted=[0 if line is None else self.drafted[line] for line in lines],
            gained=[0 if line is None else self.gained[line] for line in lines],
            parents=None if self.parents is None else _rows_of(self.parents, lines),
            path=None if self.path is None else _rows_of(self.path, lines),
            matched=None if self.matched is None else [0 if line is None else self.matched[line] for line in lines],
            logprobs=None if self.logprobs is None else Logprobs(*(_rows_of(each, lines) for each in self.logprobs)),
        )

    @cached_property
    def trees(self) -> list[VerifiedTree] | None:
        """Results of the rows' trees; None if the draft had chains only."""
        if self.parents is None or self.path is None:
            return None
        return [VerifiedTree.of(*row) for row in zip(self.parents, self.path, strict=True)]

    @property
    def depths(self) -> list[int]:
        """Depth of each row's draft."""
        return self.drafted if self.trees is None else [tree.depth for tree in self.trees]

    @property
    def rows_saved_by_sibling(self) -> int:
        """Number of rows that accepted a lower-ranked sibling."""
        return sum(tree.saved_at is not None for tree in self.trees or ())

    def verified(self, row: int, gained: int) -> int:
        """Number of draft tokens that a row's first ``gained`` tokens verify: all, unless the row ended before."""
        drafted = self.drafted[row]
        if gained > self.accepted[row]:
            return drafted
        return min(drafted, gained) if self.trees is None else self.trees[row].verified(gained)

    def saved_by_sibling(self, row: int, gained: int) -> bool:
        """Whether a row's first ``gained`` tokens contain a lower-ranked sibling."""
        saved_at = None if self.trees is None else self.trees[row].saved_at
        return saved_at is not None and saved_at < gained

    def fully_accepted(self, row: int) -> bool:
        """Whether no draft token of the row comes after the accepted ones."""
        return self.accepted[row] == self.drafted[row] if self.trees is None else self.trees[row].fully_accepted


def _rows_of(table: list[list[Value]], lines: Sequence[int | None]) -> list[list[Value]]:
    return [[] if line is None else table[line] for line in lines]
