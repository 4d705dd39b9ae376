"""The questions for the target: written by the target itself, or read from a file.

A model that was trained on conversations can also write the user's turn, given only its opening (Magpie, arXiv
2406.08464). The opening and the end of a turn are derived from the chat template: they are the common prefix and the
common suffix of two conversations with different words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from paceline.config.files import read_text
from paceline.config.inputs import as_conversations, check_message
from paceline.config.ranges import check_text
from paceline.engine.prefixes import common_prefix_length
from paceline.errors import ParameterError, RequestError
from paceline.models.text.tokenizer import Tokenizer

Question: TypeAlias = tuple[tuple[str, str], ...]
"""A conversation up to the answer: (role, content) of each message, the user's last."""

_JSON = (".json", ".jsonl", ".ndjson")
_PROBES = ("A", "7")  # texts that begin with different tokens in every vocabulary
_LINE = 'a text, {"prompt": a text} or {"messages": a conversation}'
_HELD_OUT_EVERY = 20  # one question of this many is held out


@dataclass(frozen=True)
class Opening:
    """The tokens around a user's words.

    tokens: those in front. ends: the special token behind, with which generation stops; empty if there is none.
    """

    tokens: list[int]
    ends: tuple[int, ...]


def opening_of(tokenizer: Tokenizer) -> Opening | None:
    """The opening of a user's turn; None for a model without a chat template."""
    if not tokenizer.huggingface.chat_template:
        return None
    one, other = (tokenizer.chat([{"role": "user", "content": words}]) for words in _PROBES)
    before = one[: common_prefix_length(one, other, len(one))]
    after = one[len(one) - common_prefix_length(one[::-1], other[::-1], len(one)) :]
    return Opening(before, tuple(token for token in after[:1] if tokenizer.is_special(token)))


def beginning_of_text(tokenizer: Tokenizer) -> list[int]:
    """The prompt for a model without a chat template: the tokens that begin every text, or else the end-of-text token.

    Raises RequestError for a tokenizer with neither.
    """
    begins = tokenizer.encode("") or list(tokenizer.eos_token_ids[:1])
    if not begins:
        raise RequestError(f"{tokenizer.name} has no token that begins a text: give prompts with --prompts")
    return begins


def read_questions(path: Path) -> list[Question]:
    """Read questions from a file with one question per line, plain text or JSON depending on the file's suffix.

    Empty lines and repeated questions are dropped. Raises ParameterError, which names the prompt.
    """
    lines = [line for line in read_text("--prompts", path).split("\n") if line.strip()]  # JSON may contain U+2028
    as_json = path.suffix.lower() in _JSON
    questions = [_from_json(path, n, line) if as_json else _from_text(line) for n, line in enumerate(lines, 1)]
    different = list(dict.fromkeys(questions))
    if len(different) < 2:
        raise ParameterError("--prompts", str(path), "at least two different prompts: one of them is held out")
    return different


_OF_PROMPTS = {"tools", "functions", "system", "documents", "chat_template_kwargs"}
_OF_MESSAGES = {"tool_calls", "tool_call_id", "name"}


def _from_text(text: str) -> Question:
    return (("user", text.removesuffix("\r")),)


def _from_json(path: Path, number: int, line: str) -> Question:
    try:
        value: Any = json.loads(line)
        if isinstance(value, dict) and (more := value.keys() & _OF_PROMPTS):
            raise RequestError(f"{sorted(more)[0]} would be ignored: leave it out")
        value = value.get("messages", value.get("prompt")) if isinstance(value, dict) else value
        if isinstance(value, str) and value.strip():
            return _from_text(check_text("prompt", value))
        (conversation,) = as_conversations(value)
        messages = list(map(check_message, conversation))
        if more := {name for message in messages for name in message} & _OF_MESSAGES:
            raise RequestError(f"messages with {sorted(more)[0]} cannot be learned from")
        if messages[-1]["role"] == "assistant":
            raise RequestError("the last message is an answer: leave it out")
        return tuple((message["role"], message["content"]) for message in messages)
    except (ValueError, RequestError, RecursionError) as error:
        raise ParameterError("--prompts", f"{path}, prompt {number}", f"{_LINE} ({error})") from error


def tokens_of(question: Question, tokenizer: Tokenizer) -> list[int]:
    """The question's tokens, with those of the chat template that precede the answer.

    Raises RequestError for a conversation where the tokenizer has no chat template.
    """
    if not tokenizer.huggingface.chat_template and len(question) == 1:
        return tokenizer.encode(question[0][1])
    return tokenizer.chat([{"role": role, "content": content} for role, content in question])


def split(questions: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """Split into training and held-out questions, in a random order.

    One in 20 is held out, and at least one.
    """
    ordered = sorted(questions, key=lambda question: sha256(repr((seed, question)).encode()).digest())
    held_out = max(1, len(ordered) // _HELD_OUT_EVERY)
    return ordered[held_out:], ordered[:held_out]
