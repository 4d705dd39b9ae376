"""Sets of conversations for benchmarks, which differ in how much an answer repeats existing text.

stubs: functions to complete (the answer begins with the stub: drafts are right there, typical of completion and
    flattering for anything else). chat: open questions. edits: programs with a small change, whose original is the
    reference. retrieval: questions whose answers stand in a document, which is the reference. project: the same edits
    behind all other programs, prompts of about 4,100 tokens, as an agent sends them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.tools.bench.prompts import OPEN, read_lines, texts

SetName = Literal["stubs", "chat", "edits", "retrieval", "project"]


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


def _fenced(edit: Edit) -> str:
    return f"```{edit.language}\n{edit.code}```"


def _edit(edit: Edit, before: str = "") -> BenchPrompt:
    text = f"{before}{edit.change} Answer with the whole file and nothing else.\n\n{_fenced(edit)}"
    return BenchPrompt(text, (_fenced(edit),))


def _in_project(number: int) -> BenchPrompt:
    """An edit behind the programs of all others, beginning with the next: prompts share no prefix."""
    others = EDITS[number + 1 :] + EDITS[:number]
    files = "\n\n".join(map(_fenced, others))
    return _edit(EDITS[number], f"The files of a project:\n\n{files}\n\n")


def _lookup(question: str) -> BenchPrompt:
    return BenchPrompt(f"{_HANDBOOK}\n\n{question} Answer in the handbook's own words.", (_HANDBOOK,))


SETS: Mapping[SetName, tuple[BenchPrompt, ...]] = {
    "stubs": tuple(BenchPrompt(f"Complete this function.\n\n```python\n{stub}\n```") for stub in STUBS),
    "chat": tuple(map(BenchPrompt, (*OPEN, *texts("sets", "chat")))),
    "edits": tuple(map(_edit, EDITS)),
    "retrieval": tuple(map(_lookup, texts("sets", "retrieval"))),
    "project": tuple(map(_in_project, range(len(EDITS)))),
}
