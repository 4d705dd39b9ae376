"""What the trial program translates: a structure, or calls of tools, into grammars of llguidance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import StructureError
from paceline.structured.calls import grammar_of_calls
from paceline.structured.limits import GrammarLimits
from paceline.structured.schemas import grammars_of


@dataclass(frozen=True)
class Translation:
    """A structure as grammars. trial: for a vocabulary of bytes alone. grammar: for the model's. notes: log lines."""

    trial: str
    grammar: str
    notes: Sequence[str]


def translation(
    kind: str, text: str, unspelled: Collection[int], special: Mapping[str, int], limits: Mapping[str, Any]
) -> Translation:
    """Translate a structure. limits: the fields of ``GrammarLimits``. The others: see ``TrialJob``.

    Raises StructureError for a structure that cannot be enforced; its field is "tools" if one of them is the reason.
    """
    known, notes = GrammarLimits(**limits), list[str]()
    if kind == "calls":
        try:
            text, notes = grammar_of_calls(text, unspelled, known)
        except RecursionError as error:
            raise StructureError("a schema is nested too deeply to be followed") from error
        kind = "grammar"
    trial, grammar = grammars_of(kind, text, unspelled, [{}, special], known)
    return Translation(trial, grammar, notes)
