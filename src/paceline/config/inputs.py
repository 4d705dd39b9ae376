"""Inputs of models in one form: prompts, documents, conversations.

Prompts are strings or token ids; token ids may be in lists, in numpy's arrays or in torch's tensors. Anything else is a
ParameterError that names the argument: bytes are no text, and a string is one prompt and not a list of letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from paceline.config.limits import MAX_REFERENCE_CHARACTERS, MAX_REFERENCES
from paceline.config.ranges import FileName, check, check_text
from paceline.errors import ParameterError, RequestError, shown

MAX_ADAPTER_NAME = 128  # characters

Prompt: TypeAlias = str | Sequence[int]
GivenPrompt: TypeAlias = Prompt | Mapping[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}, as vLLM's
Message: TypeAlias = Mapping[str, Any]  # role and content, which is a text or a list of text parts

_PROMPT = "a string, or token ids: a sequence, an array or a tensor of whole numbers"
_CONVERSATION = "a list of messages, objects with role and content; or a list of such lists"


def as_prompt(name: str, prompt: object) -> str | list[int]:
    """One prompt: its text, or its token ids as Python's own numbers in a list of its own. Raises ParameterError.

    vLLM's objects {"prompt": text} and {"prompt_token_ids": ids} are such a prompt.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_object(name, prompt)
    if isinstance(prompt, str):
        return check_text(name, prompt)
    given = _plain(prompt)
    if not _is_list(given) or not all(_is_whole(token) for token in given):
        raise ParameterError(name, prompt, _PROMPT)
    return [int(token) for token in given]


def _of_object(name: str, prompt: Mapping[object, object]) -> object:
    """The text or the token ids of a prompt in vLLM's form. Raises ParameterError."""
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    if set(prompt) == {"prompt_token_ids"} and not isinstance(prompt["prompt_token_ids"], str | Mapping):
        return prompt["prompt_token_ids"]
    raise ParameterError(name, prompt, 'an object with either "prompt" (a text) or "prompt_token_ids" (token ids)')


def as_prompts(name: str, prompts: object) -> list[object]:
    """One prompt is a list of one; an array of two dimensions is a list of its lines. Raises ParameterError.

    The entries are returned as they were given; ``as_prompt`` checks them.
    """
    given = _plain(prompts)
    if _is_one(given):
        return [given]
    if not _is_list(given):
        raise ParameterError(name, prompts, f"a list, each entry {_PROMPT}")
    return list(given)


def as_pairs(prompts: object, continuations: object) -> list[tuple[object, object]]:
    """Each continuation with its prompt. A prompt that is not in a list belongs to all. Raises ParameterError.

    The entries are returned as they were given; ``as_prompt`` checks them.
    """
    prefixes, suffixes = as_prompts("prompts", prompts), as_prompts("continuations", continuations)
    if _is_one(prompts):
        prefixes *= len(suffixes)
    if len(prefixes) != len(suffixes):
        raise ParameterError("continuations", f"{len(suffixes)} entries", f"one per prompt ({len(prefixes)})")
    return [*zip(prefixes, suffixes, strict=True)]


def as_documents(name: str, documents: object) -> list[str | list[int]]:
    """Several texts or lists of token ids. Raises ParameterError."""
    given = _plain(documents)
    if not _is_list(given):
        raise ParameterError(name, documents, f"a list, each entry {_PROMPT}")
    return [as_prompt(name, document) for document in given]


def as_gaps(gaps: object) -> list[tuple[str | list[int], str | list[int]]]:
    """Pairs of the texts before and after a gap. Raises ParameterError."""
    allowed = "a list of pairs (before, after), each text a string or token ids"
    if not isinstance(gaps, list | tuple) or not all(isinstance(gap, list | tuple) and len(gap) == 2 for gap in gaps):
        raise ParameterError("gaps", gaps, allowed)
    return [(as_prompt("gaps", before), as_prompt("gaps", after)) for before, after in gaps]


def as_sources(name: str, sources: object) -> list[str | list[int]]:
    """Texts or lists of token ids to copy from, none empty or blank. Raises ParameterError."""
    given = as_documents(name, sources)
    for source in given:
        if not (source.strip() if isinstance(source, str) else source):
            raise ParameterError(name, source, "texts to copy from; an empty or blank one does nothing: leave it out")
    return given


def as_references(name: str, references: object) -> list[str | list[int]]:
    """The texts that one request may copy from, limited in number and length. Raises ParameterError."""
    given = as_sources(name, references)
    letters = sum(len(text) for text in given if isinstance(text, str))
    if len(given) > MAX_REFERENCES or letters > MAX_REFERENCE_CHARACTERS:
        allowed = f"at most {MAX_REFERENCES} texts with {MAX_REFERENCE_CHARACTERS} characters together"
        raise ParameterError(name, f"{len(given)} texts with {letters} characters", allowed)
    return given


def as_references_of_each(references: object, prompts: int) -> list[Any]:
    """A list of references for each prompt; None: no references. ``as_references`` checks the entries."""
    if references is None:
        return [()] * prompts
    given = [_plain(each) for each in references] if _is_list(references) else []  # type: ignore[attr-defined]
    if len(given) != prompts or not all(map(_is_list, given)):
        allowed = f"for each of the {prompts} prompts a list of texts, as in references=[[text], ...]"
        raise ParameterError("references", references, allowed)
    return given


def as_conversations(messages: object) -> list[list[Message]]:
    """A list of conversations; one becomes a list of one. Raises ParameterError. Messages are checked later."""
    if not _is_list(messages):
        raise ParameterError("messages", messages, _CONVERSATION)
    several = messages if len(messages) == 0 or not isinstance(messages[0], Mapping) else [messages]  # type: ignore[arg-type,index]
    if not all(_is_list(conversation) for conversation in several):  # type: ignore[attr-defined]
        raise ParameterError("messages", messages, _CONVERSATION)
    return [list(conversation) for conversation in several]  # type: ignore[attr-defined]


def check_message(message: object) -> Message:
    """The message, its content one text. Raise RequestError unless it is an object whose role and content are strings,
    and ParameterError for half characters in them. Content may be a list of text parts, as OpenAI's clients send it,
    and is empty in a message that has tool calls alone.
    """
    said: dict[str, Any] = {}
    if isinstance(message, Mapping):
        said = {**message, "content": _joined(message.get("content"))}
    if said.get("tool_calls"):
        said["tool_calls"], said["content"] = _tool_calls(said["tool_calls"]), said["content"] or ""
    if not all(isinstance(said.get(key), str) for key in ("role", "content")):
        parts = 'content may be a list of parts {"type": "text", "text": ...}, and no other kind of part can be read'
        raise RequestError(
            f"a message is an object with role and content, both strings ({parts}), not {shown(message)}"
        )
    for key, value in said.items():
        if key != "tool_calls" and value is not None:
            check_text(f"messages.{key}" if isinstance(key, str) and key.isidentifier() else "messages", value)
    return said


def _tool_calls(calls: object) -> list[dict[str, Any]]:
    """Tool calls of a message. Raises RequestError; ParameterError for half characters."""
    form = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    found: list[dict[str, Any]] = []
    call: Any
    for call in calls if isinstance(calls, (list, tuple)) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        given = function if isinstance(function, Mapping) else {}
        if not isinstance(given.get("name"), str) or not isinstance(given.get("arguments"), (str, dict)):
            raise RequestError(f"a tool call in a message is an object {form}, not {shown(call)}")
        found.append({**call, "type": "function", "function": dict(given)})
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError("messages.tool_calls", calls, "JSON without half characters") from error
    return found


def _joined(content: object) -> object:
    """The text of text parts; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]


def _plain(given: object) -> Any:
    """Arrays and tensors of whole numbers as lists; everything else as it is."""
    if isinstance(given, np.ndarray) and np.issubdtype(given.dtype, np.integer):
        return given.tolist()
    if isinstance(given, torch.Tensor) and _whole_dtype(given.dtype):
        return given.tolist()
    return given


def _whole_dtype(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_one(prompts: object) -> bool:
    """Whether this is a single prompt: a text, token ids, or an object with either."""
    given = _plain(prompts)
    return isinstance(given, str | Mapping) or (_is_list(given) and len(given) > 0 and _is_whole(given[0]))


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))


def _is_whole(token: object) -> bool:
    if type(token) is int:  # nearly always; the other tests take ten times longer, and a reference has 131,072 tokens
        return True
    if isinstance(token, torch.Tensor):
        return token.dim() == 0 and _whole_dtype(token.dtype)
    return isinstance(token, Integral) and not isinstance(token, bool)


def as_adapters(value: object) -> dict[str, Path]:
    """Return the directories of adapters by name. Raises ParameterError."""
    check(isinstance(value, Mapping), "adapters", value, "a mapping of names to directories")
    assert isinstance(value, Mapping)
    for name in value:
        good = isinstance(name, str) and 0 < len(name) <= MAX_ADAPTER_NAME and name.isprintable()
        check(good, "adapters", name, f"names of 1 to {MAX_ADAPTER_NAME} printable characters")
    paths = FileName("the directory of an adapter")
    return {name: Path(paths.take(f"adapters[{name!r}]", path)).expanduser() for name, path in value.items()}
