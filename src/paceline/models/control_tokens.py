"""Control tokens that a message spells out are text: only those of the chat template are control.

A tokenizer cannot tell `<|im_end|>` typed by a user from the template's own. So messages that spell such a token are
rendered with marks in its place, the template's own are given names that nobody can draft token, and the whole is split
by a tokenizer that knows the tokens by these names only. Everything else about it, and so every other token, is the
same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import RequestError

Message = dict[str, Any]


class ControlTokens:
    """The control tokens of one tokenizer, by their spellings.

    backend: None for the few tokenizers that are written in Python, whose tokens cannot be renamed.
    """

    def __init__(self, backend: Tokenizer | None, spellings: Iterable[str]) -> None:
        nonce = secrets.token_hex(8)  # letters of the private use area around it: no model knows them as words
        names = list(
            enumerate(sorted(spellings, key=len, reverse=True))
        )  # of two that begin alike the longer one counts
        self._names = {spelling: f"\ue000{nonce}{n}\ue001" for n, spelling in names}
        self._marks = {spelling: f"\ue002{nonce}{n}\ue003" for n, spelling in names}
        self._spelled = _any_of(self._names)
        self._marked = _any_of(self._marks.values())
        self._spelling_of = {mark: spelling for spelling, mark in self._marks.items()}
        self._original = backend
        self._renamed: Tokenizer | None = None

    def are_spelled_in(self, messages: Iterable[Message]) -> bool:
        """Whether any text of the messages spells one."""
        return any(
            self._spelled.search(text) for message in messages for text in message.values() if isinstance(text, str)
        )

    def encode(self, messages: Iterable[Message], render: Callable[[list[Message]], str]) -> list[int]:
        """The messages' tokens as text, the template's own control tokens as control. render: the chat template.

        Raises RequestError without a backend.
        """
        text = render([self._hide(message) for message in messages])
        text = self._spelled.sub(lambda found: self._names[found[0]], text)
        text = self._marked.sub(lambda found: self._spelling_of[found[0]], text)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _hide(self, message: Message) -> Message:
        def hidden(value: Any) -> Any:
            return self._spelled.sub(lambda found: self._marks[found[0]], value) if isinstance(value, str) else value

        return {name: hidden(value) for name, value in message.items()}

    @property
    def _backend(self) -> Tokenizer:
        """Made when it is first needed: it takes as long as reading the tokenizer's file did."""
        if self._original is None:
            raise RequestError("a message spells a control token, which this model's tokenizer would take for one")
        if self._renamed is None:
            self._renamed = Tokenizer.from_str(json.dumps(_renamed(json.loads(self._original.to_str()), self._names)))
        return self._renamed


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _renamed(description: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer's description with other spellings for some tokens, and nothing added around texts."""
    model = description["model"]
    added = [{**token, "content": _new(token["content"], names)} for token in description["added_tokens"]]
    model = {**model, "vocab": _renamed_vocabulary(model["vocab"], names)}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = _new(model["unk_token"], names)
    plain = dict.fromkeys(("post_processor", "truncation", "padding"))
    return {**description, **plain, "model": model, "added_tokens": added}


def _renamed_vocabulary(vocabulary: Any, names: Mapping[str, str]) -> Any:
    """A dictionary of ids, or Unigram's list of pieces with their scores."""
    if isinstance(vocabulary, dict):
        return {_new(token, names): index for token, index in vocabulary.items()}
    return [[_new(piece, names), score] for piece, score in vocabulary]


def _new(spelling: str, names: Mapping[str, str]) -> str:
    return names.get(spelling, spelling)
