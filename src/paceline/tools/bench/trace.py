"""One answer, round by round: the verified draft as a tree with its accepted path; and an HTML page that shows it.

The page is one file without scripts that loads nothing. Model output is hostile, so all of it is escaped, and the
page's own content policy forbids whatever escaping might have missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import SIBLING_KIND, Draft, Verdict, is_later_sibling
from paceline.core.outputs import CompletionOutput
from paceline.drafters.base import Drafter
from paceline.drafters.branches import DraftTree
from paceline.tools.bench.recording import Recorder

Show = Callable[[int], str]  # a token's text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2024; }
pre, li { font-family: ui-monospace, monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { background: #cdeccf; } .recovered { background: #fbd9b5; } .bonus { background: #cfe0fb; }
.plain { background: #e8e8e8; } pre span { border-right: 1px solid #fff; }
ul { list-style: none; margin: 0; padding-left: 1.4rem; border-left: 1px solid #ccc; }
li.taken > b { background: #cdeccf; }
li > b { font-weight: normal; white-space: pre; } li:not(.taken) > b { color: #888; }
summary { cursor: pointer; } table { border-collapse: collapse; }
td, th { padding-right: 1.5rem; text-align: left; font-weight: normal; }
th { color: #888; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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


def page(
    title: str, answer: CompletionOutput, rounds: Sequence[TracedRound], show: Show, nodes: Sequence[str | None] = ()
) -> str:
    """The HTML page of a trace.

    title: the run, in one line. show: returns a token's text. nodes: the syntax node of each token of the answer, see
    ``bench.syntax``.
    """
    body = [
        f"<h1>An answer, round by round</h1><p>{escape(title)}</p>",
        _figures(answer, rounds),
        "<p>" + " ".join(f'<span class="{kind}">{kind}</span>' for kind in ("accepted", "recovered", "bonus", "plain")),
        "<pre>" + "".join(_answer(answer)) + "</pre>",
        _table("Draft tokens by depth", "depth", by_depth(rounds)),
        _table("Draft tokens by source", "source", by_source(rounds)),
        _table("Drafted tokens of code by the innermost node of the syntax tree", "node", by_node(answer, nodes)),
        *(_round(number, record, show) for number, record in enumerate(rounds, 1)),
    ]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>paceline trace</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _figures(answer: CompletionOutput, rounds: Sequence[TracedRound]) -> str:
    count = max(1, len(rounds))
    lines = {
        "tokens": len(answer.token_ids),
        "rounds": len(rounds),
        "tokens per round": f"{len(answer.token_ids) / count:.2f}",
        "draft tokens verified per round": f"{sum(len(each.draft_tokens) for each in rounds) / count:.2f}",
        "draft tokens accepted per round": f"{sum(len(each.path) for each in rounds) / count:.2f}",
        "rounds saved by a lower-ranked sibling": f"{sum(each.saved for each in rounds) / count:.0%}",
    }
    return "<table>" + "".join(f"<tr><td>{name}<td>{value}" for name, value in lines.items()) + "</table>"


Share = tuple[str, int, int]  # name, number of cases, number accepted


def by_depth(rounds: Sequence[TracedRound]) -> list[Share]:
    """Per depth: rounds that drafted at this depth after accepting everything before it, and those that accepted."""
    tried, kept = Counter[int](), Counter[int]()
    for record in rounds:
        for depth, node in enumerate([-1, *record.path], 1):
            tried[depth] += node in record.parents
            kept[depth] += len(record.path) >= depth
    return [(str(depth), tried[depth], kept[depth]) for depth in sorted(tried) if tried[depth]]


def by_source(rounds: Sequence[TracedRound]) -> list[Share]:
    """Per source: draft tokens verified and accepted; lower-ranked siblings are counted separately."""
    made, kept = Counter[str](), Counter[str]()
    for record in rounds:
        for node, source in enumerate(record.sources):
            name = f"{source}, lower-ranked sibling" if is_later_sibling(record.parents, node) else source
            made[name] += 1
            kept[name] += node in record.path
    return [(name, count, kept[name]) for name, count in made.most_common()]


def by_node(answer: CompletionOutput, nodes: Sequence[str | None]) -> list[Share]:
    """Per node: tokens that were drafted for, and those that were accepted."""
    pairs = list(zip(nodes, answer.token_kinds, strict=False))
    made = Counter(node for node, kind in pairs if node is not None and kind in ("accepted", "recovered"))
    kept = Counter(node for node, kind in pairs if kind == "accepted")
    return [(node, count, kept[node]) for node, count in made.most_common()]


def _table(title: str, of: str, shares: Iterable[Share]) -> str:
    lines = [f"<tr><td>{escape(name)}<td>{made}<td>{kept}<td>{kept / made:.0%}" for name, made, kept in shares]
    if not lines:
        return ""
    head = f"<tr><th>{escape(of)}<th>drafted<th>accepted<th>"
    return f"<details open><summary>{escape(title)}</summary><table>{head}{''.join(lines)}</table></details>"


def _answer(answer: CompletionOutput) -> Iterator[str]:
    """The answer token by token; a token in the middle of a character has no text of its own."""
    for piece, kind in zip(answer.pieces, answer.token_kinds, strict=True):
        yield f'<span class="{kind}">{escape(piece)}</span>'


def _round(number: int, record: TracedRound, show: Show) -> str:
    gained = _visible("".join(map(show, record.tokens)))
    saved = ", saved by a lower-ranked sibling" if record.saved else ""
    about = f"{len(record.draft_tokens)} verified, {len(record.path)} accepted{saved}"
    tree = _branches(record, show, -1)
    return f"<details open><summary>round {number}: {about}: <b>{gained}</b></summary>{tree}</details>"


def _visible(text: str) -> str:
    """The text on one line."""
    return escape(text.replace("\n", "\u23ce"))


def _branches(record: TracedRound, show: Show, parent: int) -> str:
    """The children of a node, each with its own children. Recursion ends at a draft's depth."""
    children = [node for node, parent_of_node in enumerate(record.parents) if parent_of_node == parent]
    if not children:
        return ""
    items = [
        f"<li{' class=taken' if node in record.path else ''}><b>{_visible(show(record.draft_tokens[node]))}</b>"
        f"{_branches(record, show, node)}"
        for node in children
    ]
    return f"<ul>{''.join(items)}</ul>"
