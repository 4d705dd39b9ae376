"""One answer, round by round: what was verified, as a tree, and what of it was taken; and a page that shows it.

The page is one file without scripts that loads nothing: what a model wrote is hostile, so all of it is escaped, and the
page's own policy forbids whatever escaping might have missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from paceline.batch import Batch, Wish
from paceline.bench.recording import Recorder
from paceline.draft import Draft, Verdict, stands_beside
from paceline.outputs import CompletionOutput

Show = Callable[[int], str]  # a token's text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2024; }
pre, li { font-family: ui-monospace, monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.accepted { background: #cdeccf; } .recovered { background: #fbd9b5; } .bonus { background: #cfe0fb; }
.plain { background: #e8e8e8; } pre span { border-right: 1px solid #fff; }
ul { list-style: none; margin: 0; padding-left: 1.4rem; border-left: 1px solid #ccc; }
li.taken > b { background: #cdeccf; }
li > b { font-weight: normal; white-space: pre; } li:not(.taken) > b { color: #888; }
summary { cursor: pointer; } table { border-collapse: collapse; } td { padding-right: 1.5rem; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class TracedRound:
    """guesses: verified; follows: the guess that each follows, -1: the text. path: those kept. tokens: gained."""

    guesses: Sequence[int]
    follows: Sequence[int]
    path: Sequence[int]
    tokens: Sequence[int]

    @property
    def saved(self) -> bool:
        """Whether a guess was kept that stands beside a better one: a chain would have ended there."""
        return any(stands_beside(self.follows, guess) for guess in self.path)


@dataclass
class Tracer(Recorder):
    """A length policy that notes the rounds of an engine's one row and lets ``inner`` choose them."""

    traced: list[TracedRound] = field(default_factory=list)

    def choose(self, batch: Batch) -> Wish:
        self._draft: Draft | None = None
        return super().choose(batch)

    def select(self, batch: Batch, draft: Draft) -> Draft:
        self._draft = super().select(batch, draft)
        return self._draft

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        super().observe(batch, verdict)
        self.traced.append(_traced(self._draft, verdict))


def _traced(draft: Draft | None, verdict: Verdict) -> TracedRound:
    host = verdict.host
    count, accepted = host.drafted[0], host.accepted[0]
    guesses = [] if draft is None else draft.guesses[0][:count]
    chain = list(range(-1, count - 1))
    follows = chain if draft is None or draft.follows is None else draft.follows[0][:count]
    path = list(range(accepted)) if verdict.path is None else verdict.path[0, :accepted].tolist()
    return TracedRound(guesses, follows, path, host.tokens[0])


def page(title: str, answer: CompletionOutput, rounds: Sequence[TracedRound], show: Show) -> str:
    """HTML. title: what ran, in a line. show: a token's text."""
    body = [
        f"<h1>An answer, round by round</h1><p>{escape(title)}</p>",
        _figures(answer, rounds),
        "<p>" + " ".join(f'<span class="{kind}">{kind}</span>' for kind in ("accepted", "recovered", "bonus", "plain")),
        "<pre>" + "".join(_answer(answer)) + "</pre>",
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
