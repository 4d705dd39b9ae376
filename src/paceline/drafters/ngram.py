"""Draft tokens copied from text: a row's own (prompt lookup), references (LLMA, 2304.04487), its siblings' answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, ParallelSample, RequestGroup, SpeculationPlan
from paceline.core.draft import SIBLING_KIND, Draft
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.branches import Branches, draft_of
from paceline.drafters.lookup import LONGEST_SUFFIX, Beside, Lookup, Texts, Way, make_lookup

__all__ = ["LONGEST_SUFFIX", "STRONG", "NgramDrafter"]

# Tokens of context that agree, n, growing by one with each right draft token -> n^2 / (n^2 + 8): a score between 0 and
# 1. What it is worth, the rounds tell (``lengths.belief``).
_CONFIDENCE = [
    [n**2 / (n**2 + 8) for n in range(matched, matched + MAX_SPECULATION_LENGTH)]
    for matched in range(LONGEST_SUFFIX + 1)
]
_KINDS = [[source] * MAX_SPECULATION_LENGTH for source in range(SIBLING_KIND)]
STRONG = _CONFIDENCE[LONGEST_SUFFIX][0]  # of the first draft token after the longest match


class _Known(NamedTuple):
    """What the search knows of a request."""

    references: Texts | None
    siblings: Texts | None


class NgramDrafter(Drafter):
    """Finds the longest suffix (5 down to 1 tokens) of each row elsewhere and draft tokens what followed it there.

    Looks in the row's own tokens, in its request's references, in its siblings' answers and in ``documents``; the
    longer match wins, then the first of these, then the later one. A match whose continuation ends at the row's end is
    continued cyclically (the text repeats itself). Rows without a match have an empty draft.

    documents: for all rows; noted once. A request's references are noted once for all of its answers, and its answers
    as they grow: in rounds that look for draft tokens. siblings: whether answers of one request are drafted from each
    other. On a device a round looks in the rows' own texts alone: references, siblings, documents and trees are the
    host's.
    width: most continuations of a row. More than one are merged into a tree, the best first.
    """

    name = "ngram"
    sources = ("own text", "references", "siblings", "documents")  # in the order of ``lookup``
    copies = True
    uses_torch = False
    auto_width = 1  # of few draft tokens verified, branches bring -4 to 6 % of tokens a round (benchmarks/tree_gain.py)

    def __init__(self, documents: Sequence[Sequence[int]] = (), siblings: bool = True, width: int = 1) -> None:
        self._lookup: Lookup[Any] = make_lookup(documents)
        self._documents, self._siblings, self.width = len(documents) > 0, siblings, width
        self.on_device = width == 1 and not self._documents
        self._known: WeakKeyDictionary[RequestGroup, _Known] = WeakKeyDictionary()

    @classmethod
    def build(cls, equipment: Equipment, /) -> NgramDrafter:
        return cls(equipment.documents, width=equipment.width(cls))

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        members = batch.samples[: batch.rows]
        beside = None if not any(members) else [self._beside(member) for member in members]
        rows, longest, device = batch.rows, batch.longest, batch.device
        text, length = batch.tokens, batch.length
        if device.type != "cpu":
            text, length = text[:rows, :longest].cpu(), length[:rows].cpu()
        if self.width > 1:
            ways = self._lookup.find_all(text, length, rows, longest, wish.k, self.width, beside)
            return draft_of([merged(each) for each in ways], device)
        found = self._lookup.find(text, length, rows, longest, wish.k, beside)
        one_source = beside is None and not self._documents
        kinds = None if one_source else [_KINDS[source] for source in found.sources]
        return Draft.of(found.draft_tokens, device, [_CONFIDENCE[size] for size in found.matched], kinds)

    def _beside(self, member: ParallelSample | None) -> Beside[Any] | None:
        if member is None:
            return None
        known = self._known.get(member.group)
        if known is None:
            known = self._known[member.group] = self._note(member.group)
        return Beside(known.references, known.siblings, member.number, member.prompt_tail)

    def _note(self, family: RequestGroup) -> _Known:
        references = self._lookup.texts(family.references) if family.references else None
        return _Known(references, self._lookup.texts() if self._siblings and family.answers > 1 else None)


def merged(ways: Sequence[Way]) -> Branches:
    """A row's continuations, the best first, as one tree."""
    tree = Branches()
    for way in ways:
        tree.merge(way.draft_tokens, _CONFIDENCE[way.matched], way.source)
    return tree
