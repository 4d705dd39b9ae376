"""Drafts and verdicts: the draft tokens of a batch, and the result of a round.

Shapes: B rows, k draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.nodes import Tree
from paceline.errors import ParameterError

MAX_KINDS = 10  # kinds of draft tokens that a drafter may distinguish
# Offset added to the kind of a lower-ranked sibling: it can only be accepted where a better sibling is rejected.
SIBLING_KIND = MAX_KINDS // 2


class Undrawn(IntEnum):
    """Stands in place of a row's token, always its last of a round, if none could be drawn. No row gains it."""

    NOT_FINITE = -1  # the model's logits are NaN, or the largest is infinite
    ALL_FORBIDDEN = -2  # the model's logits are finite, but -inf or NaN after masks and logits processors


class OnDemand:
    """Descriptor for a dataclass field: a tensor that is set, or made from host data at its first access.

    default: None makes the field optional.
    """

    def __init__(self, make: Callable[[Any], Tensor | None], *default: None) -> None:
        self._make, self._default = make, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is not None:
            made = instance.__dict__[self._name] = self._make(instance)
            return made
        if not self._default:
            raise AttributeError(self._name)  # tells ``dataclass`` that there is no default
        return None


def real_places(counts: Tensor, width: int) -> Tensor:
    """Mask of the first counts[i] positions of row i: [B, width] bool."""
    return torch.arange(width, device=counts.device) < counts[:, None]


@dataclass
class Draft:
    """Draft tokens of a batch, given as tensors or, with ``of``, as lists. The other form is made when it is needed.

    tokens: [B, k] int64.
    counts: [B] int64, number of real draft tokens of each row; the rest is padding.
    probabilities: [B, k, V] float32, the distribution that each draft token was drawn from. None if draft tokens are
        not drawn (n-gram) or are drawn with the target's own noise (coupled rule). Trees have none.
    confidence: [B, k] or wider, on the host. The drafter's probability, from 0 to 1, that a draft token is accepted if
        its ancestors are; None if the drafter has no such score.
    logits: [B, k, V], on a device. They replace ``probabilities``, which are their softmax at the rows' temperatures.
    parents: [B, k] int64, index of each draft token's parent, which comes before it; -1 is the row's pending token.
        None: a chain.
    kinds: [B, k] or wider, on the host. Source of each draft token, a number of its drafter from 0 to
        ``MAX_KINDS`` - 1, which tells acceptance rates apart; None if all have the same source.
    """

    tokens: Tensor = OnDemand(lambda draft: draft._table(draft.draft_tokens, 0))  # type: ignore[assignment]
    counts: Tensor = OnDemand(lambda draft: draft._host(draft.drafted))  # type: ignore[assignment]
    probabilities: Tensor | None = None
    confidence: Sequence[Sequence[float]] | None = None
    logits: Tensor | None = None
    parents: Tensor | None = OnDemand(lambda draft: draft._table(draft.host_parents, -1), None)  # type: ignore[assignment]
    kinds: Sequence[Sequence[int]] | None = None

    @staticmethod
    def of(
        draft_tokens: list[list[int]],
        device: torch.device,
        confidence: Sequence[Sequence[float]] | None = None,
        kinds: Sequence[Sequence[int]] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Draft:
        """Make a draft from lists.

        draft_tokens: real draft tokens of each row. confidence, kinds: as in the class, one entry per draft token.
        parents: for trees, index of each draft token's parent, -1 for the pending token; None for chains.
        """
        draft = Draft.__new__(Draft)
        draft.draft_tokens, draft._device, draft.confidence, draft.kinds = draft_tokens, device, confidence, kinds
        k = draft.k
        draft.host_parents = None if parents is None else [[*line, *[-1] * (k - len(line))] for line in parents]
        draft._listed = True
        return draft

    _listed = False  # whether the draft was made from lists
    late_seconds = 0.0  # time that verification spent on making a draft that was only planned before

    @property
    def k(self) -> int:
        known = self.__dict__.get("tokens")
        return max(map(len, self.draft_tokens), default=0) if known is None else known.shape[1]

    def _host(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _table(self, lines: Sequence[list[int]] | None, padding: int) -> Tensor | None:
        """Pad lists to a tensor [B, k]; None stays None."""
        if lines is None:
            return None
        k = self.k
        return self._host([line + [padding] * (k - len(line)) for line in lines]).view(len(lines), k)

    @cached_property
    def draft_tokens(self) -> list[list[int]]:
        """Real draft tokens of each row, read from the tensors once.

        Raises ParameterError if a count is negative or exceeds k.
        """
        counts = self.counts.tolist()
        if not all(0 <= count <= self.k for count in counts):
            raise ParameterError("counts", counts, f"from 0 to the {self.k} draft tokens of a row; fix the drafter")
        return [line[:count] for line, count in zip(self.tokens.tolist(), counts, strict=True)]

    @property
    def drafted(self) -> list[int]:
        """``counts`` on the host."""
        return [len(line) for line in self.draft_tokens]

    @cached_property
    def host_parents(self) -> list[list[int]] | None:
        """``parents`` on the host, read once."""
        return None if self.parents is None else self.parents.tolist()

    @cached_property
    def real(self) -> Tensor:
        """Mask of each row's pending token and real draft tokens, [B, k + 1] bool."""
        return real_places(self.counts + 1, self.k + 1)

    @cached_property
    def token_paths(self) -> list[list[list[int]]]:
        """For each row and position, the draft tokens on the path from the root: none for position 0, the root."""
        tokens = self.tokens.tolist()
        chain = list(range(-1, self.k - 1))
        parents = self.host_parents or [chain] * len(tokens)
        paths: list[list[list[int]]] = []
        for row_tokens, row_parents in zip(tokens, parents, strict=True):
            paths.append([[]])
            for token, parent in zip(row_tokens, row_parents, strict=True):
                paths[-1].append([*paths[-1][parent + 1], token])
        return paths

    @cached_property
    def tree(self) -> Tree | None:
        """Ancestors and depths of the positions; None for a chain."""
        return None if self.parents is None else Tree.of(self.parents, self.counts)

    @staticmethod
    def empty(rows: int, device: torch.device) -> Draft:
        """Draft without tokens for ``rows`` rows: the round is plain decoding."""
        return _empty_draft(rows, device)

    def capped(self, caps: Sequence[int] | None) -> Draft:
        """Truncate row i to caps[i] draft tokens, a tree to that depth. None returns the draft unchanged."""
        if caps is None:
            return self
        if self.host_parents is not None:
            return self._cut(caps)
        if self._listed:
            return Draft.of(self._lines(caps), self._device, self.confidence, self.kinds)
        return replace(self, counts=torch.minimum(self.counts, self.counts.new_tensor(caps)))

    def first(self, counts: Sequence[int]) -> Draft:
        """Keep the first counts[i] draft tokens of each row; k shrinks to the largest count."""
        if self.host_parents is not None:
            parents = [line[:count] for line, count in zip(self.host_parents, counts, strict=True)]
            return branching(self._lines(counts), parents, self._device)
        k = max(counts)
        if self._listed or k == 0:
            return Draft.of(self._lines(counts), self._device)
        distributions = None if self.probabilities is None else self.probabilities[:, :k]
        chosen = Draft(self.tokens[:, :k], self.counts.new_tensor(counts), distributions)
        chosen.draft_tokens = self._lines(counts)
        return chosen

    def _lines(self, counts: Sequence[int]) -> list[list[int]]:
        return [line[:count] for line, count in zip(self.draft_tokens, counts, strict=True)]

    def _cut(self, depths: Sequence[int]) -> Draft:
        """Remove the draft tokens of trees that are deeper than depths[i] in row i."""
        assert self.host_parents is not None
        kept = [
            [place for place, depth in enumerate(depths_of(line[:count])) if depth <= limit]
            for line, count, limit in zip(self.host_parents, self.drafted, depths, strict=True)
        ]
        scores = None if self.confidence is None else _taken(self.confidence, kept)
        kinds = None if self.kinds is None else _taken(self.kinds, kept)
        return branching(_taken(self.draft_tokens, kept), self._parents_among(kept), self._device, scores, kinds)

    def ordered(self, orders: Sequence[Sequence[int]]) -> Draft:
        """Reorder the real draft tokens of trees: row i takes the order orders[i], in which parents come first."""
        return Draft.of(_taken(self.draft_tokens, orders), self._device, parents=self._parents_among(orders))

    def _parents_among(self, kept: Sequence[Sequence[int]]) -> list[list[int]]:
        """Parents of the kept draft tokens, as indices into ``kept``."""
        assert self.host_parents is not None
        new = [{old: place for place, old in enumerate([-1, *places], -1)} for places in kept]
        return [
            [places[old] for old in line] for places, line in zip(new, _taken(self.host_parents, kept), strict=True)
        ]

    @cached_property
    def _device(self) -> torch.device:
        return self.tokens.device

    def spread(self, first: int, rows: int) -> Draft:
        """Embed the draft of a part of a batch into a batch of ``rows`` rows, in which other rows have no draft tokens.

        first: index of the part's first row.
        """

        def widen(table: Tensor) -> Tensor:
            wide = table.new_zeros(rows, *table.shape[1:])
            wide[first : first + table.shape[0]] = table
            return wide

        def longer(lines: Sequence[Sequence[Any]] | None) -> list[list[Any]] | None:
            if lines is None:
                return None
            return [*([] for _ in range(first)), *map(list, lines), *([] for _ in range(rows - first - len(lines)))]

        confidence, kinds = longer(self.confidence), longer(self.kinds)
        if self._listed:
            return Draft.of(longer(self.draft_tokens) or [], self._device, confidence, kinds, longer(self.host_parents))
        distributions = None if self.probabilities is None else widen(self.probabilities)
        parents = None if self.parents is None else widen(self.parents + 1) - 1
        return Draft(widen(self.tokens), widen(self.counts), distributions, confidence, None, parents, kinds)


def branching(
    draft_tokens: list[list[int]],
    parents: list[list[int]],
    device: torch.device,
    confidence: Sequence[Sequence[float]] | None = None,
    kinds: Sequence[Sequence[int]] | None = None,
) -> Draft:
    """Make a draft of trees from each row's draft tokens and their parents; a draft of chains if no row branches."""
    if all(line == list(range(-1, len(line) - 1)) for line in parents):
        return Draft.of(draft_tokens, device, confidence, kinds)
    return Draft.of(draft_tokens, device, confidence, kinds, parents)


def _taken(table: Sequence[Sequence[Any]], kept: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Select the entries at positions kept[i] of row i."""
    return [[line[place] for place in places] for line, places in zip(table, kept, strict=True)]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each draft token of a row, from 1 on. parents: index of each parent, -1 for the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@cache
def _empty_draft(rows: int, device: torch.device) -> Draft:
    return Draft.of([[] for _ in range(rows)], device)


@dataclass
class Logprobs:
    """Log-probabilities under the target's unmodified distribution.

    own: [B, k + 1] float32, of the drawn tokens. top_ids: [B, k + 1, m] int64, the m most likely tokens. top_values:
    [B, k + 1, m] float32, of these.
    """

    own: Tensor
    top_ids: Tensor
    top_values: Tensor

    @staticmethod
    def alone(own: Tensor) -> Logprobs:
        """Log-probabilities ``own`` [B, k + 1] of the drawn tokens only (m = 0)."""
        nothing = own.new_empty(*own.shape, 0)
        return Logprobs(own, nothing.long(), nothing)

    @cached_property
    def host(self) -> tuple[list[list[float]], list[list[list[int]]], list[list[list[float]]]]:
        """``own``, ``top_ids`` and ``top_values`` as lists, read once."""
        return self.own.tolist(), self.top_ids.tolist(), self.top_values.tolist()


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


@dataclass
class HostVerdict:
    """Verdict on the host, with one list entry per row.

    tokens: the accepted[i] + 1 new tokens of row i; the last may be ``Undrawn``.
    accepted, drafted: number of draft tokens.
    gained: number of tokens that each row took, fewer than ``tokens`` has if the row ends among them. Empty until the
        round is committed.
    trees: results of the rows' trees; None if the draft had chains only.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    gained: list[int] = field(default_factory=list)
    trees: list[VerifiedTree] | None = None

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


@dataclass(frozen=True)
class RoundTiming:
    """Milliseconds of a round, for the length policy.

    draft_ms: for choosing, drafting and selecting, and for learning from the round before of the same kind, with or
        without a draft: this round's own learning has yet to come. verify_ms: for verification, acceptance and commit.
    """

    draft_ms: float
    verify_ms: float


@dataclass
class Verdict:
    """Result of a round, given as tensors or, with ``of``, as lists: row i gains tokens[i, : accepted[i] + 1].

    tokens: [B, k + 1] int64; the last of a row may be ``Undrawn``. accepted: [B] int64, accepted draft tokens.
    drafted: [B] int64, draft tokens.
    logprobs: log-probabilities of the tokens; None if no row requests them.
    path: [B, k] int64, for trees: indices of the accepted draft tokens in order, then each position's own index. None
        for chains, whose first draft tokens are accepted.
    note: ``SpeculationPlan.note`` of the round. timing: None if the round was not measured.
    """

    tokens: Tensor = OnDemand(lambda verdict: _padded(verdict.host.tokens))  # type: ignore[assignment]
    accepted: Tensor = OnDemand(lambda verdict: torch.tensor(verdict.host.accepted))  # type: ignore[assignment]
    drafted: Tensor = OnDemand(lambda verdict: torch.tensor(verdict.host.drafted))  # type: ignore[assignment]
    logprobs: Logprobs | None = None
    path: Tensor | None = OnDemand(lambda verdict: verdict._whole_path(), None)  # type: ignore[assignment]
    note: object = None
    timing: RoundTiming | None = None

    @staticmethod
    def of(host: HostVerdict, kept: list[list[int]] | None = None) -> Verdict:
        """Make a verdict from lists. kept: for trees, the indices of each row's accepted draft tokens."""
        verdict = Verdict.__new__(Verdict)
        verdict.host, verdict.kept = host, kept
        return verdict

    def _whole_path(self) -> Tensor | None:
        if self.kept is None:
            return None
        width = max(self.host.drafted)
        lines = [[*path, *range(len(path), width)] for path in self.kept]
        return torch.tensor(lines, dtype=torch.int64).view(len(lines), width)

    @cached_property
    def host(self) -> HostVerdict:
        """The verdict as lists. On a device this is the only read of a round; on the CPU three reads cost less."""
        if self.tokens.device.type == "cpu":
            accepted = self.accepted.tolist()
            lines = zip(self.tokens.tolist(), accepted, strict=True)
            return HostVerdict([line[: count + 1] for line, count in lines], accepted, self.drafted.tolist())
        table = torch.cat([self.tokens, self.accepted[:, None], self.drafted[:, None]], dim=1).tolist()
        return HostVerdict(
            tokens=[line[: line[-2] + 1] for line in table],
            accepted=[line[-2] for line in table],
            drafted=[line[-1] for line in table],
        )

    @cached_property
    def kept(self) -> list[list[int]] | None:
        """Indices of each row's accepted draft tokens in a tree; None for chains."""
        if self.path is None:
            return None
        return [path[:count] for path, count in zip(self.path.tolist(), self.host.accepted, strict=True)]

    def note_trees(self, draft: Draft) -> None:
        """Set ``host.trees`` if the draft has trees."""
        if draft.host_parents is None or self.kept is None:
            return
        trees = zip(draft.host_parents, draft.drafted, self.kept, strict=True)
        self.host.trees = [VerifiedTree.of(line[:count], path) for line, count, path in trees]


def _padded(lines: list[list[int]]) -> Tensor:
    width = max(map(len, lines))
    return torch.tensor([line + [0] * (width - len(line)) for line in lines])
