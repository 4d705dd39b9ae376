"""One answer, round by round: what was verified, as a tree, and what of it was taken; and a page that shows it.

The page is one file without scripts that loads nothing: what a model wrote is hostile, so all of it is escaped, and the
page's own policy forbids whatever escaping might have missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from paceline.core.batch import Batch, Wish
from paceline.core.draft import BESIDE, Draft, Verdict, stands_beside
from paceline.core.outputs import CompletionOutput
from paceline.drafters.base import Drafter
from paceline.drafters.branches import Branches
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
    """guesses: verified; follows: the guess that each follows, -1: the text. path: those kept. tokens: gained.

    sources: where each guess comes from, in words.
    """

    guesses: Sequence[int]
    follows: Sequence[int]
    path: Sequence[int]
    tokens: Sequence[int]
    sources: Sequence[str] = ()

    @property
    def saved(self) -> bool:
        """Whether a guess was kept that stands beside a better one: a chain would have ended there."""
        return any(stands_beside(self.follows, guess) for guess in self.path)


@dataclass
class Tracer(Recorder):
    """A length policy that notes the rounds of an engine's one row and lets ``inner`` choose them."""

    drafter: Drafter = field(kw_only=True)
    traced: list[TracedRound] = field(default_factory=list)

    def choose(self, batch: Batch) -> Wish:
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
    """Of each guess that was selected: what was proposed knows."""
    guesses, kinds = proposed.guesses[0], proposed.kinds[0] if proposed.kinds else [0] * proposed.k
    follows = list(range(-1, len(guesses) - 1)) if proposed.follows is None else proposed.follows[0]
    tree = Branches(guesses, list(follows))
    ways = selected.ways[0][1 : 1 + len(selected.guesses[0])]
    return [names[min(kinds[tree.path(way)[-1]] % BESIDE, len(names) - 1)] for way in ways]


def _traced(draft: Draft | None, verdict: Verdict, sources: Sequence[str]) -> TracedRound:
    host = verdict.host
    count, accepted = host.drafted[0], host.accepted[0]
    guesses = [] if draft is None else draft.guesses[0][:count]
    chain = list(range(-1, count - 1))
    follows = chain if draft is None or draft.follows is None else draft.follows[0][:count]
    path = list(range(accepted)) if verdict.path is None else verdict.path[0, :accepted].tolist()
    return TracedRound(guesses, follows, path, host.tokens[0], sources[:count])


def page(
    title: str,
    answer: CompletionOutput,
    rounds: Sequence[TracedRound],
    show: Show,
    nodes: Sequence[str | None] = (),
) -> str:
    """HTML. title: what ran, in a line. show: a token's text. nodes: of each token of the answer (``bench.syntax``)."""
    body = [
        f"<h1>An answer, round by round</h1><p>{escape(title)}</p>",
        _figures(answer, rounds),
        "<p>" + " ".join(f'<span class="{kind}">{kind}</span>' for kind in ("accepted", "recovered", "bonus", "plain")),
        "<pre>" + "".join(_answer(answer)) + "</pre>",
        _table("Guesses by how deep they stand", "depth", by_depth(rounds)),
        _table("Guesses by where they come from", "source", by_source(rounds)),
        _table("Guessed tokens of code by the innermost node of the syntax tree", "node", by_node(answer, nodes)),
        *(_round(number, played, show) for number, played in enumerate(rounds, 1)),
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
        "tokens a round": f"{len(answer.token_ids) / count:.2f}",
        "guesses verified a round": f"{sum(len(each.guesses) for each in rounds) / count:.2f}",
        "guesses kept a round": f"{sum(len(each.path) for each in rounds) / count:.2f}",
        "rounds that a sibling saved": f"{sum(each.saved for each in rounds) / count:.0%}",
    }
    return "<table>" + "".join(f"<tr><td>{name}<td>{value}" for name, value in lines.items()) + "</table>"


Share = tuple[str, int, int]  # of what, how many there were, how many were kept


def by_depth(rounds: Sequence[TracedRound]) -> list[Share]:
    """Rounds that guessed something after all that they kept before it, and those that kept it."""
    tried, kept = Counter[int](), Counter[int]()
    for played in rounds:
        for depth, guess in enumerate([-1, *played.path], 1):
            tried[depth] += guess in played.follows
            kept[depth] += len(played.path) >= depth
    return [(str(depth), tried[depth], kept[depth]) for depth in sorted(tried) if tried[depth]]


def by_source(rounds: Sequence[TracedRound]) -> list[Share]:
    """Guesses verified, and those kept; apart those that stand beside a better one."""
    made, kept = Counter[str](), Counter[str]()
    for played in rounds:
        for guess, source in enumerate(played.sources):
            name = f"{source}, beside a better one" if stands_beside(played.follows, guess) else source
            made[name] += 1
            kept[name] += guess in played.path
    return [(name, count, kept[name]) for name, count in made.most_common()]


def by_node(answer: CompletionOutput, nodes: Sequence[str | None]) -> list[Share]:
    """Tokens for which something was guessed, and those that were guessed right."""
    pairs = list(zip(nodes, answer.token_kinds, strict=False))
    made = Counter(node for node, kind in pairs if node is not None and kind in ("accepted", "recovered"))
    kept = Counter(node for node, kind in pairs if kind == "accepted")
    return [(node, count, kept[node]) for node, count in made.most_common()]


def _table(title: str, of: str, shares: Iterable[Share]) -> str:
    lines = [f"<tr><td>{escape(name)}<td>{made}<td>{kept}<td>{kept / made:.0%}" for name, made, kept in shares]
    if not lines:
        return ""
    head = f"<tr><th>{escape(of)}<th>guessed<th>kept<th>"
    return f"<details open><summary>{escape(title)}</summary><table>{head}{''.join(lines)}</table></details>"


def _answer(answer: CompletionOutput) -> Iterator[str]:
    """Token by token; one whose character is still open has no text of its own."""
    for piece, kind in zip(answer.pieces, answer.token_kinds, strict=True):
        yield f'<span class="{kind}">{escape(piece)}</span>'


def _round(number: int, played: TracedRound, show: Show) -> str:
    gained = _visible("".join(map(show, played.tokens)))
    saved = ", saved by a sibling" if played.saved else ""
    about = f"{len(played.guesses)} verified, {len(played.path)} kept{saved}"
    tree = _branches(played, show, -1)
    return f"<details open><summary>round {number}: {about}: <b>{gained}</b></summary>{tree}</details>"


def _visible(text: str) -> str:
    """On one line."""
    return escape(text.replace("\n", "\u23ce"))


def _branches(played: TracedRound, show: Show, parent: int) -> str:
    """The guesses after one, each with those after it. No deeper than a draft."""
    children = [guess for guess, follows in enumerate(played.follows) if follows == parent]
    if not children:
        return ""
    items = [
        f"<li{' class=taken' if guess in played.path else ''}><b>{_visible(show(played.guesses[guess]))}</b>"
        f"{_branches(played, show, guess)}"
        for guess in children
    ]
    return f"<ul>{''.join(items)}</ul>"
