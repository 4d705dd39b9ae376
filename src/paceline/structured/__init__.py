"""Structured outputs: answers that follow a JSON schema, a regular expression, choices or a grammar."""

from paceline.structured.grammars import Grammars

__all__ = ["Grammars"]
