"""Encoding of chats in which a message spells out a control token: there it is text, not a control token.

A tokenizer cannot tell `<|im_end|>` typed by a user from the template's own. Messages that spell such a token are
therefore rendered with a placeholder in its place. The template's own control tokens are replaced by random names,
and the result is encoded by a copy of the tokenizer that knows the control tokens by these names only. All other tokens
are encoded as by the original tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tokenizers import Tokenizer

from paceline.errors import RequestError

T = TypeVar("T")


class ControlTokens:
    """The control tokens of one tokenizer.

    backend: the tokenizer; None for tokenizers written in Python, whose tokens cannot be renamed.
    spellings: text of each control token.
    """

    def __init__(self, backend: Tokenizer | None, spellings: Iterable[str]) -> None:
        nonce = secrets.token_hex(8)  # enclosed in private use characters, which no vocabulary uses in words
        numbered = list(enumerate(sorted(spellings, key=len, reverse=True)))  # the longest match comes first
        self._names = {spelling: f"\ue000{nonce}{n}\ue001" for n, spelling in numbered}
        self._placeholders = {spelling: f"\ue002{nonce}{n}\ue003" for n, spelling in numbered}
        self._spelling_pattern = _any_of(self._names)
        self._placeholder_pattern = _any_of(self._placeholders.values())
        self._spelling_of = {placeholder: spelling for spelling, placeholder in self._placeholders.items()}
        self._original = backend
        self._renamed: Tokenizer | None = None

    def are_spelled_in(self, value: Any) -> bool:
        """Whether any text in a value of lists and objects, such as messages or tools, spells a control token."""
        if isinstance(value, str):
            return self._spelling_pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self.are_spelled_in, value)) or any(map(self.are_spelled_in, value.values()))
        return isinstance(value, (list, tuple)) and any(map(self.are_spelled_in, value))

    def encode(self, value: T, render: Callable[[T], str]) -> list[int]:
        """Encode a conversation. Only the control tokens of the template become control tokens.

        value: messages and tools. render: applies the chat template to them. Raises RequestError without a backend.
        """
        text = render(self._hide(value))
        text = self._spelling_pattern.sub(lambda match: self._names[match[0]], text)
        text = self._placeholder_pattern.sub(lambda match: self._spelling_of[match[0]], text)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _hide(self, value: Any) -> Any:
        """The value with placeholders in place of control tokens in its texts."""
        if isinstance(value, str):
            return self._spelling_pattern.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, Mapping):
            return {self._hide(name): self._hide(part) for name, part in value.items()}
        return [self._hide(part) for part in value] if isinstance(value, (list, tuple)) else value

    @property
    def _backend(self) -> Tokenizer:
        """The renamed tokenizer. Made on first use, because that takes as long as loading the tokenizer."""
        if self._original is None:
            raise RequestError("a message spells a control token, and this model's tokenizer cannot encode it as text")
        if self._renamed is None:
            self._renamed = Tokenizer.from_str(json.dumps(_renamed(json.loads(self._original.to_str()), self._names)))
        return self._renamed


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _renamed(description: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's JSON description with some tokens renamed, and without the steps that add tokens."""
    model = description["model"]
    added = [{**token, "content": _new(token["content"], names)} for token in description["added_tokens"]]
    model = {**model, "vocab": _renamed_vocabulary(model["vocab"], names)}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _new(model["unk_token"], names)
    plain = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**description, **plain, "model": model, "added_tokens": added}


def _renamed_vocabulary(vocabulary: Any, names: Mapping[str, str]) -> Any:
    """Rename tokens in a vocabulary: a dictionary of ids, or Unigram's list of (piece, score)."""
    if isinstance(vocabulary, dict):
        return {_new(token, names): index for token, index in vocabulary.items()}
    return [[_new(piece, names), score] for piece, score in vocabulary]


def _new(spelling: str, names: Mapping[str, str]) -> str:
    return names.get(spelling, spelling)
