"""n-gram drafts, copied from text: prompt lookup, references (LLMA, arXiv 2304.04487), parallel samples, documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, ParallelSample, RequestGroup, SpeculationPlan
from paceline.core.draft import SIBLING_KIND, Draft
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.branches import DraftTree, draft_of
from paceline.drafters.lookup import (
    LONGEST_SUFFIX,
    Continuation,
    CopySources,
    Lookup,
    SearchedRows,
    TextIndex,
    make_lookup,
)

__all__ = ["LONGEST_SUFFIX", "STRONG", "NgramDrafter"]

# Score of each draft token, by the number of matched tokens: n^2 / (n^2 + 8), where n grows by one with each draft
# token that is right. ``lengths.scores`` turns scores into probabilities.
CONFIDENCE = [
    [n**2 / (n**2 + 8) for n in range(matched, matched + MAX_SPECULATION_LENGTH)]
    for matched in range(LONGEST_SUFFIX + 1)
]
_KINDS = [[source] * MAX_SPECULATION_LENGTH for source in range(SIBLING_KIND)]
STRONG = CONFIDENCE[LONGEST_SUFFIX][0]  # score of the first draft token after a match of the longest kind


class _RequestTexts(NamedTuple):
    """Indexed texts of one request group."""

    references: TextIndex | None
    siblings: TextIndex | None


class NgramDrafter(Drafter):
    """Finds each row's last tokens elsewhere (the longest match of 5 down to 1), and proposes what followed them there.

    It searches the row's own text, its request's references, parallel samples of the request, and ``documents``. The
    longest match wins, then the first of these sources, then the latest position. A continuation that reaches the end
    of the row's own text repeats from the match on. Rows without a match get no draft tokens.

    documents: token ids, indexed once for all rows. References are indexed once per request, and parallel samples as
        they grow, in rounds that search.
    siblings: whether parallel samples are searched.
    width: continuations per row; several are merged into a tree, the best first.

    Captured rounds on a device search the rows' own texts and their references, for chains.
    """

    name = "ngram"
    sources = ("own text", "references", "siblings", "documents")  # in the order of ``lookup``
    copies = True
    uses_torch = False
    auto_width = 1  # with few draft tokens, branches change tokens per round by -4 to 6 % (benchmarks/tree_gain.py)

    def __init__(self, documents: Sequence[Sequence[int]] = (), siblings: bool = True, width: int = 1) -> None:
        self._lookup: Lookup[Any] = make_lookup(documents)
        self._documents, self._siblings, self.width = len(documents) > 0, siblings, width
        self.on_device = width == 1 and not self._documents
        self._texts: WeakKeyDictionary[RequestGroup, _RequestTexts] = WeakKeyDictionary()

    @classmethod
    def build(cls, equipment: Equipment, /) -> NgramDrafter:
        return cls(equipment.documents, width=equipment.width(cls))

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        samples, slots = batch.samples, batch.slots
        sources = None if not any(samples) else [self._sources_of(sample) for sample in samples]
        text, length = batch.text, batch.length
        if batch.device.type != "cpu":
            text, length = batch.live_slots.of(text[:, : batch.longest]).cpu(), batch.live_length.cpu()
            slots = list(range(batch.rows))
        rows = SearchedRows(text, length, slots, sources)
        if self.width > 1:
            ways = self._lookup.find_all(rows, plan.k, self.width)
            return draft_of([merged(each) for each in ways])
        result = self._lookup.find(rows, plan.k)
        one_source = sources is None and not self._documents
        kinds = None if one_source else [_KINDS[source] for source in result.sources]
        return Draft(result.draft_tokens, confidence=[CONFIDENCE[size] for size in result.matched], kinds=kinds)

    def _sources_of(self, sample: ParallelSample | None) -> CopySources[Any] | None:
        if sample is None:
            return None
        texts = self._texts.get(sample.group)
        if texts is None:
            group = sample.group
            references = self._lookup.texts(group.references) if group.references else None
            siblings = self._lookup.texts() if self._siblings and group.answers > 1 else None
            texts = self._texts[group] = _RequestTexts(references, siblings)
        return CopySources(texts.references, texts.siblings, sample.number, sample.prompt_tail)


def merged(continuations: Sequence[Continuation]) -> DraftTree:
    """Merge a row's continuations, the best first, into one tree."""
    tree = DraftTree()
    for continuation in continuations:
        tree.merge(continuation.draft_tokens, CONFIDENCE[continuation.matched], continuation.source)
    return tree
