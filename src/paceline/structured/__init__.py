"""Constraints on answers: JSON schemas, regular expressions, choices and grammars."""

from paceline.structured.grammars import GrammarConstraint, Grammars

__all__ = ["GrammarConstraint", "Grammars"]
