"""One answer, round by round: the verified draft as a tree with its accepted path; and an HTML page that shows it.

The page is one file without scripts that loads nothing. Model output is hostile, so all of it is escaped, and the
page's own content policy forbids whatever escaping might have missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import SIBLING_KIND, Draft, Verdict, is_later_sibling
from paceline.core.outputs import CompletionOutput
from paceline.drafters.base import Drafter
from paceline.drafters.branches import DraftTree
from paceline.tools.bench.recording import Recorder

Show = Callable[[int], str]  # a token's text

_TEMPLATE = Path(__file__).with_name("data") / "trace.html"


@dataclass(frozen=True)
class TracedRound:
    """One recorded round.

    draft_tokens: those that were verified. parents: the parent of each, -1 for the text. path: indices of the accepted
    ones. tokens: those that the answer gained. sources: the source of each draft token, as text.
    """

    draft_tokens: Sequence[int]
    parents: Sequence[int]
    path: Sequence[int]
    tokens: Sequence[int]
    sources: Sequence[str] = ()

    @property
    def saved(self) -> bool:
        """Whether an accepted draft token has a higher-ranked sibling: a chain would have ended there."""
        return any(is_later_sibling(self.parents, node) for node in self.path)


@dataclass
class Tracer(Recorder):
    """A length policy that records the rounds of an engine's only row and lets ``inner`` choose them."""

    drafter: Drafter = field(kw_only=True)
    traced: list[TracedRound] = field(default_factory=list)

    def choose(self, batch: Batch) -> SpeculationPlan:
        self._draft: Draft | None = None
        self._sources: list[str] = []
        return super().choose(batch)

    def select(self, batch: Batch, draft: Draft) -> Draft:
        self._draft = super().select(batch, draft)
        self._sources = _sources(draft, self._draft, self.drafter.sources)
        return self._draft

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        self.traced.append(_traced(self._draft, verdict, self._sources))


def _sources(proposed: Draft, selected: Draft, names: Sequence[str]) -> list[str]:
    """The source of each selected draft token, known from the proposed draft."""
    tokens, kinds = proposed.draft_tokens[0], proposed.kinds[0] if proposed.kinds else [0] * proposed.k
    parents = list(range(-1, len(tokens) - 1)) if proposed.parents is None else proposed.parents[0]
    tree = DraftTree(tokens, list(parents))
    chosen = selected.draft_tokens[0]
    kept = DraftTree(chosen, list(range(-1, len(chosen) - 1)) if selected.parents is None else selected.parents[0])
    ways = map(kept.tokens_to, range(len(chosen)))
    return [names[min(kinds[tree.path(way)[-1]] % SIBLING_KIND, len(names) - 1)] for way in ways]


def _traced(draft: Draft | None, verdict: Verdict, sources: Sequence[str]) -> TracedRound:
    count, accepted = verdict.drafted[0], verdict.accepted[0]
    tokens = [] if draft is None else draft.draft_tokens[0][:count]
    chain = list(range(-1, count - 1))
    parents = chain if draft is None or draft.parents is None else draft.parents[0][:count]
    path = list(range(accepted)) if verdict.path is None else verdict.path[0]
    return TracedRound(tokens, parents, path, verdict.tokens[0], sources[:count])


def document(title: str, answer: CompletionOutput, rounds: Sequence[TracedRound], show: Show) -> dict[str, Any]:
    """The trace for JSON. title, show: as in ``page``. path: indices of the accepted draft tokens of a round."""
    return {
        "engine": title,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "metrics": asdict(answer.metrics),
        "rounds": [
            {
                "draft_tokens": list(made.draft_tokens),
                "texts": [*map(show, made.draft_tokens)],
                "parents": list(made.parents),
                "sources": list(made.sources),
                "path": list(made.path),
                "tokens": list(made.tokens),
            }
            for made in rounds
        ],
    }


def page(
    title: str, answer: CompletionOutput, rounds: Sequence[TracedRound], show: Show, nodes: Sequence[str | None] = ()
) -> str:
    """The HTML page of a trace.

    title: the run, in one line. show: returns a token's text. nodes: the syntax node of each token of the answer, see
    ``bench.syntax``.
    """
    count = max(1, len(rounds))
    figures = {
        "tokens": len(answer.token_ids),
        "rounds": len(rounds),
        "tokens per round": f"{len(answer.token_ids) / count:.2f}",
        "draft tokens verified per round": f"{sum(len(each.draft_tokens) for each in rounds) / count:.2f}",
        "draft tokens accepted per round": f"{sum(len(each.path) for each in rounds) / count:.2f}",
        "rounds saved by a lower-ranked sibling": f"{sum(each.saved for each in rounds) / count:.0%}",
    }
    tables = [
        ("Draft tokens by depth", "depth", by_depth(rounds)),
        ("Draft tokens by source", "source", by_source(rounds)),
        ("Drafted tokens of code by the innermost node of the syntax tree", "node", by_node(answer, nodes)),
    ]
    template = Template(_TEMPLATE.read_text(encoding="utf-8"), autoescape=True, undefined=StrictUndefined)
    pieces = zip(answer.pieces, answer.token_kinds, strict=True)
    text: str = template.render(title=title, figures=figures, pieces=pieces, tables=tables, rounds=rounds, show=show)
    return text


Share = tuple[str, int, int]  # name, number of cases, number accepted


def by_depth(rounds: Sequence[TracedRound]) -> list[Share]:
    """Per depth: rounds that drafted at this depth after accepting everything before it, and those that accepted."""
    tried, accepted = Counter[int](), Counter[int]()
    for record in rounds:
        for depth, node in enumerate([-1, *record.path], 1):
            tried[depth] += node in record.parents
            accepted[depth] += len(record.path) >= depth
    return [(str(depth), tried[depth], accepted[depth]) for depth in sorted(tried) if tried[depth]]


def by_source(rounds: Sequence[TracedRound]) -> list[Share]:
    """Per source: draft tokens verified and accepted; lower-ranked siblings are counted separately."""
    drafted, accepted = Counter[str](), Counter[str]()
    for record in rounds:
        for node, source in enumerate(record.sources):
            name = f"{source}, lower-ranked sibling" if is_later_sibling(record.parents, node) else source
            drafted[name] += 1
            accepted[name] += node in record.path
    return [(name, count, accepted[name]) for name, count in drafted.most_common()]


def by_node(answer: CompletionOutput, nodes: Sequence[str | None]) -> list[Share]:
    """Per node: tokens that were drafted for, and those that were accepted."""
    pairs = list(zip(nodes, answer.token_kinds, strict=False))
    drafted = Counter(node for node, kind in pairs if node is not None and kind in ("accepted", "recovered"))
    accepted = Counter(node for node, kind in pairs if kind == "accepted")
    return [(node, count, accepted[node]) for node, count in drafted.most_common()]
