"""Structured outputs: answers that follow a JSON schema or a regular expression."""

from paceline.structured.grammars import GrammarConstraint, Grammars

__all__ = ["GrammarConstraint", "Grammars"]
