"""Sets of conversations for benchmarks, which differ in how much an answer repeats existing text.

stubs: functions to complete (the answer begins with the stub: drafts are right there, typical of completion and
    flattering for anything else). chat: open questions. edits: programs with a small change, whose original is the
    reference. retrieval: questions whose answers stand in a document, which is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.tools.bench.prompts import OPEN, read_lines, texts

SetName = Literal["stubs", "chat", "edits", "retrieval"]


@dataclass(frozen=True)
class BenchPrompt:
    """A user's message. references: texts that the answer partly repeats."""

    text: str
    references: tuple[str, ...] = ()

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        return [{"role": "user", "content": self.text}]


class Edit(NamedTuple):
    """A program of 100 to 400 tokens and a small change to it: the answer is the program again."""

    change: str
    language: str
    code: str


EDITS = tuple(Edit(**line) for line in read_lines("edits"))
STUBS = texts("sets", "stubs")  # signature and docstring of a function to be completed
(_HANDBOOK,) = texts("sets", "handbook")


def _edit(change: str, language: str, code: str) -> BenchPrompt:
    text = f"{change} Answer with the whole file and nothing else.\n\n```{language}\n{code}```"
    return BenchPrompt(text, (f"```{language}\n{code}```",))


def _lookup(question: str) -> BenchPrompt:
    return BenchPrompt(f"{_HANDBOOK}\n\n{question} Answer in the handbook's own words.", (_HANDBOOK,))


SETS: Mapping[SetName, tuple[BenchPrompt, ...]] = {
    "stubs": tuple(BenchPrompt(f"Complete this function.\n\n```python\n{stub}\n```") for stub in STUBS),
    "chat": tuple(map(BenchPrompt, (*OPEN, *texts("sets", "chat")))),
    "edits": tuple(_edit(*edit) for edit in EDITS),
    "retrieval": tuple(map(_lookup, texts("sets", "retrieval"))),
}
