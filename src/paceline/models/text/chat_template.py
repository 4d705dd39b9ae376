"""Rendering of a model's chat template, which is untrusted code: it runs in a subprocess with limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import RequestError
from paceline.models.files.boundary import brief
from paceline.models.text.limited_process import LimitedProcess

CHARACTERS = 16 << 20  # length of the text of one conversation
_ROLES = ("system", "developer", "user", "assistant", "tool")  # which templates may leave out, as they choose
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders conversations as prompts.

    variables: variables that are set for every conversation (the special tokens).
    The subprocess starts with the first conversation and ends with this object. Thread-safe.
    """

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        self._template, self._variables = template, dict(variables)
        self.process = LimitedProcess("template_process.py", {"template": template, "characters": CHARACTERS})

    def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as text, with the generation prompt appended.

        fields: further template variables; they override the defaults, such as ``add_generation_prompt``.
        Raises RequestError if the template fails or leaves out a message of a role that it does not know, or if
        ``fields`` cannot be encoded as JSON.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables}
        given = [self._with_known_role(_completed(message)) for message in messages]
        variables = defaults | dict(fields or {}) | {"messages": given}
        try:
            line = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"its fields cannot be encoded as JSON: {brief(error)}") from error
        reply = self.process.exchange(line)
        if "error" in reply:
            raise RequestError(brief(reply["error"]))
        text = str(reply["text"])
        _check_roles(given, text)
        return text

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's role "developer" is its later name of "system", which most templates do not know."""
        later_name = message.get("role") == "developer" and "developer" not in self._template
        return {**message, "role": "system"} if later_name else message


def _completed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the fields that are None, and repeat the reasoning under each name that templates use, as transformers."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _THOUGHTS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _check_roles(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise RequestError if the text lacks a message whose role is not among the usual ones."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES and isinstance(content, str) and content.strip() not in text:
            raise RequestError(f"it leaves out messages of the role {role!r}; use {', '.join(_ROLES)}")
