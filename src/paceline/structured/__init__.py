"""Structured outputs: answers that follow a JSON schema, a regular expression, choices or a grammar."""
