"""n-gram drafts, copied from text: prompt lookup, references (LLMA, arXiv 2304.04487), answers, documents.

Answers are those of all requests of one scope, finished or running, parallel samples among them. SuffixDecoding (arXiv
2411.04975) drafts from earlier answers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, ParallelSample, RequestGroup, SpeculationPlan
from paceline.core.draft import SIBLING_KIND, Draft
from paceline.core.row_keeper import PerRow
from paceline.drafters.answers import AnswerTexts
from paceline.drafters.base import Drafter, Equipment
from paceline.drafters.branches import DraftTree, draft_of
from paceline.drafters.lookup import (
    LONGEST_SUFFIX,
    WHOLE,
    Continuation,
    CopySources,
    Lookup,
    SearchedRows,
    TextIndex,
    make_lookup,
)

__all__ = ["LONGEST_SUFFIX", "STRONG", "NgramDrafter"]

# Score of each draft token, by the number of matched tokens: n^2 / (n^2 + 8), where n grows by one with each draft
# token that is right. The first one's is multiplied by the share of matches that agree on it.
# ``lengths.scores`` turns scores into probabilities.
CONFIDENCE = [
    [n**2 / (n**2 + 8) for n in range(matched, matched + MAX_SPECULATION_LENGTH)]
    for matched in range(LONGEST_SUFFIX + 1)
]
_KINDS = [[source] * MAX_SPECULATION_LENGTH for source in range(SIBLING_KIND)]
STRONG_MATCH = 5  # tokens
STRONG = CONFIDENCE[STRONG_MATCH][0]  # score of the first draft token after such a match


class NgramDrafter(Drafter):
    """Finds each row's last tokens elsewhere (the longest match of 8 down to 1), and proposes what followed them there.

    It searches the row's own text, its request's references, answers of this and other requests, and ``documents``.
    The longest match wins, then the first of these sources. Among equally long matches in the row's own text the latest
    wins, elsewhere the latest that goes on as most do. A continuation that reaches the end of the row's own text
    repeats from the match on. Rows without a match get no draft tokens.

    documents: token ids, indexed once for all rows. References are indexed once per request, and answers as they grow,
        in rounds that search and at their ends.
    answer_tokens: of answers that are held; 0: none are searched.
    width: continuations per row; several are merged into a tree, the best first.

    Captured rounds on a device search the rows' own texts and their references, for chains.
    """

    name = "ngram"
    sources = ("own text", "references", "answers", "documents")  # in the order of ``lookup``
    copies = True
    uses_torch = False
    auto_width = 1  # with few draft tokens, branches change tokens per round by -4 to 6 % (benchmarks/tree_gain.py)

    def __init__(self, documents: Sequence[Sequence[int]] = (), answer_tokens: int = 0, width: int = 1) -> None:
        lookup: Lookup[Any] = make_lookup(documents)
        self._lookup, self._documents, self.width = lookup, len(documents) > 0, width
        self.on_device = width == 1 and not self._documents
        self.answers = AnswerTexts(lambda: lookup.texts((), answer_tokens), answer_tokens) if answer_tokens else None
        self._references: WeakKeyDictionary[RequestGroup, TextIndex] = WeakKeyDictionary()
        self._of_slots: PerRow[CopySources[Any]] = PerRow()
        self._latest: tuple[list[int], list[CopySources[Any]] | None] | None = None  # slots, and their sources

    @classmethod
    def build(cls, equipment: Equipment, /) -> NgramDrafter:
        return cls(equipment.documents, equipment.lookup_tokens, equipment.width(cls))

    def join(self, slot: int) -> None:
        self._of_slots.join(slot)
        self._latest = None

    def leave(self, slot: int) -> None:
        self._of_slots.leave(slot)
        self._latest = None

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        slots, sources = batch.slots, self._sources(batch)
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
        scores = [_scores(*each) for each in zip(result.matched, result.shares, strict=True)]
        return Draft(result.draft_tokens, confidence=scores, kinds=kinds)

    def end(self, slot: int, sample: ParallelSample, text: Sequence[int]) -> None:
        beside = self._sources_of(slot, sample)
        if self.answers is not None and (answers := beside.answers) is not None:
            answers.append(beside.number, text[answers.size(beside.number) :])
            self.answers.count(sample.group)

    def _sources(self, batch: Batch) -> list[CopySources[Any]] | None:
        """The sources of each row beside its own text and the documents; None if no row has any."""
        if self._latest is None or self._latest[0] != batch.slots:
            rows = zip(batch.slots, batch.samples, strict=True)
            sources = [CopySources() if sample is None else self._sources_of(slot, sample) for slot, sample in rows]
            self._latest = batch.slots, sources if any(each.references or each.answers for each in sources) else None
        return self._latest[1]

    def _sources_of(self, slot: int, sample: ParallelSample) -> CopySources[Any]:
        if slot not in self._of_slots:
            answers, number = (None, 0) if self.answers is None else self.answers.of(sample.group)
            references = self._references_of(sample.group)
            self._of_slots[slot] = CopySources(references, answers, number, sample.prompt_tail)
        return self._of_slots[slot]

    def _references_of(self, group: RequestGroup) -> TextIndex | None:
        if group.references and group not in self._references:
            self._references[group] = self._lookup.texts(group.references)
        return self._references.get(group)


def _scores(matched: int, share: int) -> list[float]:
    scores = CONFIDENCE[matched]
    return scores if share == WHOLE else [scores[0] * share / WHOLE, *scores[1:]]


def merged(continuations: Sequence[Continuation]) -> DraftTree:
    """Merge a row's continuations, the best first, into one tree."""
    tree = DraftTree()
    for continuation in continuations:
        tree.merge(continuation.draft_tokens, CONFIDENCE[continuation.matched], continuation.source)
    return tree
