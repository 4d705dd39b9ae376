"""What the target is asked: questions that it writes itself, or those of a file.

A model that was trained on conversations also knows what users say. Given only the opening of a user's turn, it writes
the turn (Magpie, arXiv 2406.08464). Where a turn opens, and what closes it, is read off the chat template: it is what
two conversations of different words have in common.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from paceline.config.files import read_text
from paceline.config.inputs import as_conversations, check_message
from paceline.config.ranges import check_text
from paceline.errors import ParameterError, RequestError
from paceline.models.tokenizer import Tokenizer

Question: TypeAlias = tuple[tuple[str, str], ...]
"""A conversation: roles and what they say, the user last."""

_JSON = (".json", ".jsonl", ".ndjson")
_PROBES = ("A", "7")  # begin with different tokens in every vocabulary
_LINE = 'a text, {"prompt": a text} or {"messages": a conversation}'
_EACH_HELD_OUT = 20  # one question of so many


@dataclass(frozen=True)
class Opening:
    """tokens: what stands before a user's words. ends: what may stand behind them; none: nothing closes a turn."""

    tokens: list[int]
    ends: tuple[int, ...]


def opening_of(tokenizer: Tokenizer) -> Opening | None:
    """Of a user's turn; None for a model that knows no turns."""
    if not tokenizer.huggingface.chat_template:
        return None
    one, other = (tokenizer.chat([{"role": "user", "content": words}]) for words in _PROBES)
    before, after = _common(one, other), _common(one[::-1], other[::-1])[::-1]
    return Opening(before, tuple(token for token in after[:1] if tokenizer.is_special(token)))


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The longest common beginning."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def beginning_of_text(tokenizer: Tokenizer) -> list[int]:
    """For a model that knows no turns: what every text begins with, else what ends one. Raises RequestError."""
    begins = tokenizer.encode("") or list(tokenizer.eos_token_ids[:1])
    if not begins:
        raise RequestError(f"{tokenizer.name} has no token that begins a text: give it something with --prompts")
    return begins


def read_questions(path: Path) -> list[Question]:
    """Of a file: a line each, plain or JSON (by the file's name); empty lines and repetitions are left out.

    Raises ParameterError, which names the prompt.
    """
    lines = [line for line in read_text("--prompts", path).splitlines() if line.strip()]
    as_json = path.suffix.lower() in _JSON
    found = [_from_json(path, n, line) if as_json else _asked(line) for n, line in enumerate(lines, 1)]
    different = list(dict.fromkeys(found))
    if len(different) < 2:
        raise ParameterError("--prompts", str(path), "at least two different prompts: one is not learnt from")
    return different


def _asked(text: str) -> Question:
    return (("user", text),)


def _from_json(path: Path, number: int, line: str) -> Question:
    try:
        given: Any = json.loads(line)
        given = given.get("messages", given.get("prompt")) if isinstance(given, dict) else given
        if isinstance(given, str) and given.strip():
            return _asked(check_text("prompt", given))
        (conversation,) = as_conversations(given)
        return tuple((message["role"], message["content"]) for message in map(check_message, conversation))
    except (ValueError, RequestError, RecursionError) as error:
        raise ParameterError("--prompts", f"{path}, prompt {number}", f"{_LINE} ({error})") from error


def tokens_of(question: Question, tokenizer: Tokenizer) -> list[int]:
    """As the model reads it, ready for the answer. Raises RequestError for a conversation without a template."""
    if not tokenizer.huggingface.chat_template and len(question) == 1:
        return tokenizer.encode(question[0][1])
    return tokenizer.chat([{"role": role, "content": content} for role, content in question])


def split(questions: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """Those to learn from, in a random order, and those held out: one of 20, and one at least."""
    ordered = sorted(questions, key=lambda question: sha256(repr((seed, question)).encode()).digest())
    held = max(1, len(ordered) // _EACH_HELD_OUT)
    return ordered[held:], ordered[:held]
