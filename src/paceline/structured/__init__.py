"""Answers of a given structure."""

from paceline.structured.grammars import GrammarConstraint, Grammars

__all__ = ["GrammarConstraint", "Grammars"]
