"""Sets of conversations for benchmarks, which differ in how much an answer repeats existing text.

stubs: functions to complete (the answer begins with the stub: drafts are right there, typical of completion and
    flattering for anything else). chat: open questions. edits: programs with a small change, whose original is the
    reference. retrieval: questions whose answers stand in a document, which is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.tools.bench.edits import EDITS
from paceline.tools.bench.prompts import OPEN
from paceline.tools.bench.stubs import STUBS

SetName = Literal["stubs", "chat", "edits", "retrieval"]


@dataclass(frozen=True)
class Asked:
    """A user's message. references: texts that the answer repeats in parts."""

    text: str
    references: tuple[str, ...] = ()

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        return [{"role": "user", "content": self.text}]


_MORE_QUESTIONS = (
    "Why do leaves change their colour in autumn?",
    "Plan a weekend in Vienna for two people who like music.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite message that declines an invitation to a wedding.",
    "How can I fall asleep faster?",
    "Explain what a hash table is and when it is slow.",
    "Give me a recipe for lentil soup for four.",
    "Which questions should I ask in a job interview?",
)

_HANDBOOK = """Watering. Young plants are watered every morning, never at noon. Tomatoes need two litres a day from
June on, and their leaves must stay dry. The tank behind the greenhouse holds four hundred litres of
rain; when it is empty, the tap on the north wall may be used until eight in the evening.

Compost. Kitchen scraps, grass and leaves go on the heap, but no meat, no bread and no diseased
plants. The heap is turned in April and in September. After the second turning the compost rests for
three months under a cover, and is spread in a layer of three centimetres.

Tools. Every tool has its place in the shed. Blades are cleaned and oiled after work. Broken tools
are put into the red box beside the door, with a note that says what is wrong; Marta repairs them on
the first Saturday of a month.

Keys. There are five keys to the gate. Members who take one write their name, the date and the hour
into the book. A key that is lost must be reported to the board within two days, and costs twenty
euros."""

_QUESTIONS = (
    "What does the handbook say about watering tomatoes and about the tank?",
    "What may go on the heap, and what happens after the second turning?",
    "What is done with broken tools, and who repairs them?",
    "What must a member do who takes a key, and what if it is lost?",
    "Which sections of the handbook name a month or a weekday? Quote each of these sentences.",
    "Quote every sentence of the handbook in which a number is written out.",
    "Until when may the tap be used, and under which condition? Quote the whole passage.",
    "Copy the section about compost as a list with one sentence a line.",
)


def _edit(change: str, language: str, code: str) -> Asked:
    text = f"{change} Answer with the whole file and nothing else.\n\n```{language}\n{code}```"
    return Asked(text, (f"```{language}\n{code}```",))


def _lookup(question: str) -> Asked:
    return Asked(f"{_HANDBOOK}\n\n{question} Answer in the handbook's own words.", (_HANDBOOK,))


SETS: Mapping[SetName, tuple[Asked, ...]] = {
    "stubs": tuple(Asked(f"Complete this function.\n\n```python\n{stub}\n```") for stub in STUBS),
    "chat": tuple(map(Asked, (*OPEN, *_MORE_QUESTIONS))),
    "edits": tuple(_edit(*edit) for edit in EDITS),
    "retrieval": tuple(map(_lookup, _QUESTIONS)),
}
