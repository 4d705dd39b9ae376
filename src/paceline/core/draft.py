"""What is drafted for the rows of a batch, and what a round decided. B rows, k draft tokens, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.nodes import Tree
from paceline.errors import ParameterError

MAX_KINDS = 8  # most kinds of draft tokens that a drafter may tell apart
SIBLING_KIND = (
    MAX_KINDS // 2
)  # more than its kind would be, of a draft token that stands beside a better one: right where that is wrong


class OnDemand:
    """A dataclass' tensor that is given, or made of what the host knows when it is first asked for.

    default: where it may be left out.
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
            raise AttributeError(self._name)  # for ``dataclass``: there is no default
        return None


def real_places(counts: Tensor, width: int) -> Tensor:
    """[B, width] bool: the first counts[i] places of row i."""
    return torch.arange(width, device=counts.device) < counts[:, None]


@dataclass
class Draft:
    """What a drafter draft tokens, given as tensors or (``of``) as the host's lists; the others are made when asked
    for.

    tokens: [B, k] int64. counts: [B] int64, how many of a row's draft tokens are real (the rest is padding).
    probabilities: [B, k, V] float32, the distribution each draft token was drawn from; None if draft tokens are not
    drawn (n-gram) or are
        drawn with the target's own noise (coupled).
    confidence: [B, k] or wider, on the host, the drafter's own score from 0 to 1 of each draft token, given that those
    before
        it are right; None if it has none.
    logits: [B, k, V], in the place of probabilities where these are theirs at the rows' temperatures (on a device).
    parents: [B, k] int64, the draft token that each draft token follows, one before it, or -1: the row's unseen token.
    None: each
        follows the one before, a chain. Trees have no probabilities.
    kinds: [B, k] or wider, on the host, where each draft token comes from, as far as that says something about it (its
        drafter's numbers, 0 to ``MAX_KINDS`` - 1); None: all from the same.
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
        """draft tokens: of each row. follows: of trees, what each of them follows."""
        draft = Draft.__new__(Draft)
        draft.draft_tokens, draft._device, draft.confidence, draft.kinds = draft_tokens, device, confidence, kinds
        k = draft.k
        draft.host_parents = None if parents is None else [[*line, *[-1] * (k - len(line))] for line in parents]
        draft._listed = True
        return draft

    _listed = False  # whether it was given as lists

    @property
    def k(self) -> int:
        known = self.__dict__.get("tokens")
        return max(map(len, self.draft_tokens), default=0) if known is None else known.shape[1]

    def _host(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _table(self, lines: Sequence[list[int]] | None, padding: int) -> Tensor | None:
        """[B, k]; None of None."""
        if lines is None:
            return None
        k = self.k
        return self._host([line + [padding] * (k - len(line)) for line in lines]).view(len(lines), k)

    @cached_property
    def draft_tokens(self) -> list[list[int]]:
        """The real draft tokens of each row, read once: on the CPU an operator takes longer than many a round's
        decision.

        Raises ParameterError if a count is not one of the row's draft tokens.
        """
        counts = self.counts.tolist()
        if not all(0 <= count <= self.k for count in counts):
            raise ParameterError("counts", counts, f"from 0 to the {self.k} guesses that a row has; mend the drafter")
        return [line[:count] for line, count in zip(self.tokens.tolist(), counts, strict=True)]

    @property
    def drafted(self) -> list[int]:
        """How many draft tokens of each row are real, on the host."""
        return [len(line) for line in self.draft_tokens]

    @cached_property
    def host_parents(self) -> list[list[int]] | None:
        """``parents`` on the host, read once."""
        return None if self.parents is None else self.parents.tolist()

    @cached_property
    def real(self) -> Tensor:
        """[B, k + 1] bool: each row's unseen token and its real draft tokens."""
        return real_places(self.counts + 1, self.k + 1)

    @cached_property
    def token_paths(self) -> list[list[list[int]]]:
        """Of each row and place the draft tokens on the way there: none for place 0, the unseen token's."""
        tokens = self.tokens.tolist()
        chain = list(range(-1, self.k - 1))
        parents = self.host_parents or [chain] * len(tokens)
        ways: list[list[list[int]]] = []
        for line, follows in zip(tokens, parents, strict=True):
            ways.append([[]])
            for token, parent in zip(line, follows, strict=True):
                ways[-1].append([*ways[-1][parent + 1], token])
        return ways

    @cached_property
    def tree(self) -> Tree | None:
        """None for a chain."""
        return None if self.parents is None else Tree.of(self.parents, self.counts)

    @cached_property
    def ragged(self) -> bool:
        """Whether some row has fewer than k draft tokens; reads the device."""
        return not bool(self.real.all())

    @staticmethod
    def empty(rows: int, device: torch.device) -> Draft:
        """No draft token for any row: the round is plain decoding."""
        return _empty_draft(rows, device)

    def capped(self, caps: Sequence[int] | None) -> Draft:
        """At most caps[i] draft tokens for row i, of a tree as deep; None caps nothing."""
        if caps is None:
            return self
        if self.host_parents is not None:
            return self._cut(caps)
        if self._listed:
            return Draft.of(self._lines(caps), self._device, self.confidence, self.kinds)
        most = self.counts.new_tensor(caps)
        return replace(self, counts=torch.minimum(self.counts, most))

    def first(self, counts: Sequence[int]) -> Draft:
        """The first counts[i] draft tokens of each row alone, as narrow as they allow."""
        if self.host_parents is not None:
            follows = [line[:count] for line, count in zip(self.host_parents, counts, strict=True)]
            return branching(self._lines(counts), follows, self._device)
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
        """Of a tree: row i without what stands deeper than depths[i]."""
        assert self.host_parents is not None
        kept = [
            [place for place, depth in enumerate(depths_of(line[:count])) if depth <= most]
            for line, count, most in zip(self.host_parents, self.drafted, depths, strict=True)
        ]
        scores = None if self.confidence is None else _taken(self.confidence, kept)
        kinds = None if self.kinds is None else _taken(self.kinds, kept)
        return branching(_taken(self.draft_tokens, kept), self._parents_among(kept), self._device, scores, kinds)

    def ordered(self, orders: Sequence[Sequence[int]]) -> Draft:
        """Of a tree: row i has its real draft tokens in the order orders[i], in which none comes before what it
        follows.
        """
        return Draft.of(_taken(self.draft_tokens, orders), self._device, parents=self._parents_among(orders))

    def _parents_among(self, kept: Sequence[Sequence[int]]) -> list[list[int]]:
        """What each of these draft tokens follows among them."""
        assert self.host_parents is not None
        new = [{old: place for place, old in enumerate([-1, *places], -1)} for places in kept]
        return [
            [places[old] for old in line] for places, line in zip(new, _taken(self.host_parents, kept), strict=True)
        ]

    @cached_property
    def _device(self) -> torch.device:
        return self.tokens.device

    def spread(self, first: int, rows: int) -> Draft:
        """The draft of a part of a batch as one of the whole batch, whose other rows have no draft tokens."""

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
    follows: list[list[int]],
    device: torch.device,
    confidence: Sequence[Sequence[float]] | None = None,
    kinds: Sequence[Sequence[int]] | None = None,
) -> Draft:
    """Trees: of each row its draft tokens and what each follows. Where no row has a branch they are chains."""
    if all(line == list(range(-1, len(line) - 1)) for line in follows):
        return Draft.of(draft_tokens, device, confidence, kinds)
    return Draft.of(draft_tokens, device, confidence, kinds, follows)


def _taken(table: Sequence[Sequence[Any]], kept: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Of each row the entries at these places."""
    return [[line[place] for place in places] for line, places in zip(table, kept, strict=True)]


def depths_of(follows: Sequence[int]) -> list[int]:
    """How deep each draft token of a row stands, from 1 on. follows: the draft token that each follows, or -1."""
    depths: list[int] = []
    for parent in follows:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@cache
def _empty_draft(rows: int, device: torch.device) -> Draft:
    return Draft.of([[] for _ in range(rows)], device)


@dataclass
class Logprobs:
    """Under the target's own distribution: own [B, k + 1] of the tokens drawn; top_ids, top_values [B, k + 1, m]."""

    own: Tensor
    top_ids: Tensor
    top_values: Tensor

    @staticmethod
    def alone(own: Tensor) -> Logprobs:
        """Of the tokens drawn, and of no others."""
        nothing = own.new_empty(*own.shape, 0)
        return Logprobs(own, nothing.long(), nothing)

    @cached_property
    def host(self) -> tuple[list[list[float]], list[list[list[int]]], list[list[list[float]]]]:
        """own, top_ids and top_values, read once."""
        return self.own.tolist(), self.top_ids.tolist(), self.top_values.tolist()


class VerifiedTree(NamedTuple):
    """What became of a row's tree.

    depths: of each of its draft tokens, from 1 on. saved_at: the place among the draft tokens kept of the first that
    stands
    beside a better one: a chain would have ended there; None: there is none. whole: nothing was drafted after the last
    one kept.
    """

    depths: list[int]
    saved_at: int | None
    fully_accepted: bool

    @staticmethod
    def of(follows: Sequence[int], path: Sequence[int]) -> VerifiedTree:
        """follows: the draft token that each draft token follows, or -1. path: the draft tokens kept."""
        saved_at = next(
            (place for place, draft_token in enumerate(path) if is_later_sibling(follows, draft_token)), None
        )
        return VerifiedTree(depths_of(follows), saved_at, (path[-1] if path else -1) not in follows)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @property
    def branches(self) -> bool:
        """Whether it is no chain."""
        return len(self.depths) > self.depth

    def verified(self, kept: int) -> int:
        """Draft tokens for the places of the first ``kept`` tokens."""
        return sum(depth <= kept for depth in self.depths)


def is_later_sibling(follows: Sequence[int], draft_token: int) -> bool:
    """Whether a draft token is not the first for its place."""
    return follows[draft_token] in follows[:draft_token]


@dataclass
class HostVerdict:
    """A verdict read by the host: tokens (accepted + 1 each), accepted and drafted, a list entry a row.

    gained: how many of its tokens each row took, fewer where it ends among them; empty until the round is committed.
    trees: None where all draft tokens were chains.
    """

    tokens: list[list[int]]
    accepted: list[int]
    drafted: list[int]
    gained: list[int] = field(default_factory=list)
    trees: list[VerifiedTree] | None = None

    @property
    def depths(self) -> list[int]:
        """How far each row's draft tokens reach."""
        return self.drafted if self.trees is None else [tree.depth for tree in self.trees]

    @property
    def rows_saved_by_sibling(self) -> int:
        """Rows that kept a draft token which stood beside a better one."""
        return sum(tree.saved_at is not None for tree in self.trees or ())

    def verified(self, row: int, kept: int) -> int:
        """Draft tokens that a row's first ``kept`` tokens judge; where it ended among those accepted not all are."""
        drafted = self.drafted[row]
        if kept > self.accepted[row]:
            return drafted
        return min(drafted, kept) if self.trees is None else self.trees[row].verified(kept)

    def saved_by_sibling(self, row: int, kept: int) -> bool:
        """Whether among these tokens is a draft token which stood beside a better one."""
        place = None if self.trees is None else self.trees[row].saved_at
        return place is not None and place < kept

    def fully_accepted(self, row: int) -> bool:
        """Whether nothing was drafted after what was accepted."""
        return self.accepted[row] == self.drafted[row] if self.trees is None else self.trees[row].fully_accepted


@dataclass
class Verdict:
    """What a round decided, as tensors or (``of``) as lists: row i gains tokens[i, : accepted[i] + 1].

    tokens: [B, k + 1]. accepted: [B], draft tokens kept. drafted: [B], draft tokens made.
    path: [B, k], of trees: the draft tokens kept, in their order; behind them each place's own number. None: the first.
    """

    tokens: Tensor = OnDemand(lambda verdict: _padded(verdict.host.tokens))  # type: ignore[assignment]
    accepted: Tensor = OnDemand(lambda verdict: torch.tensor(verdict.host.accepted))  # type: ignore[assignment]
    drafted: Tensor = OnDemand(lambda verdict: torch.tensor(verdict.host.drafted))  # type: ignore[assignment]
    logprobs: Logprobs | None = None
    path: Tensor | None = OnDemand(lambda verdict: verdict._whole_path(), None)  # type: ignore[assignment]

    @staticmethod
    def of(host: HostVerdict, kept: list[list[int]] | None = None) -> Verdict:
        """Of lists of the host. kept: of trees, the draft tokens kept."""
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
        """The one read of a round, on a device; on the CPU a cat would take longer than three reads."""
        if self.tokens.device.type == "cpu":
            accepted = self.accepted.tolist()
            lines = zip(self.tokens.tolist(), accepted, strict=True)
            return HostVerdict([line[: kept + 1] for line, kept in lines], accepted, self.drafted.tolist())
        table = torch.cat([self.tokens, self.accepted[:, None], self.drafted[:, None]], dim=1).tolist()
        return HostVerdict(
            tokens=[line[: line[-2] + 1] for line in table],
            accepted=[line[-2] for line in table],
            drafted=[line[-1] for line in table],
        )

    @cached_property
    def kept(self) -> list[list[int]] | None:
        """``path`` on the host, of each row the draft tokens kept alone; None of chains."""
        if self.path is None:
            return None
        return [path[:good] for path, good in zip(self.path.tolist(), self.host.accepted, strict=True)]

    def note_trees(self, draft: Draft) -> None:
        """Of a draft of trees, what became of them, for all who count."""
        if draft.host_parents is None or self.kept is None:
            return
        trees = zip(draft.host_parents, draft.drafted, self.kept, strict=True)
        self.host.trees = [VerifiedTree.of(line[:count], path) for line, count, path in trees]


def _padded(lines: list[list[int]]) -> Tensor:
    width = max(map(len, lines))
    return torch.tensor([line + [0] * (width - len(line)) for line in lines])
