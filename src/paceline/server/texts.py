"""Work on texts outside of the event loop: prompts from texts and conversations, and the spelling of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from paceline.chat.options import ChatOptions
from paceline.config import ServerConfig
from paceline.engine.chat import ChatPrompt
from paceline.errors import RequestError
from paceline.models.text.infill import InfillMarkers
from paceline.models.text.tokenizer import Tokenizer
from paceline.server import errors
from paceline.server.logprobs import Spelling
from paceline.server.service import EngineService
from paceline.server.threads import WorkerThread

_LONG_TEXT = 2**14  # characters; tokenizing them takes a few milliseconds
P = ParamSpec("P")
T = TypeVar("T")


class TextWorker:
    """The tokenizer of a server's model, in two threads: short texts do not wait behind long ones."""

    def __init__(self, config: ServerConfig, service: EngineService) -> None:
        self._config, self._service = config, service
        self._short, self._long = WorkerThread("texts"), WorkerThread("long texts")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError (503) until the model is ready."""
        return self._service.llm.requests.tokenizer

    @functools.cached_property
    def spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @functools.cached_property
    def infill(self) -> InfillMarkers:
        """The model's fill-in-the-middle tokens. Raises ApiError (400) if it has none."""
        try:
            return InfillMarkers.of(self.tokenizer)
        except RequestError as error:
            raise errors.invalid(f"suffix is not supported: {error}", "suffix") from error

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do short work on texts. Raises ApiError for errors of paceline."""
        return await self._short.run(work, *args, **kwargs)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids. Raises ApiError (400) if it is longer than any prompt can be."""
        return await self._on_text(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def encode_gap(self, before: str | list[int], after: str) -> list[int]:
        """Return the token ids of a fill-in-the-middle prompt. Raises ApiError (400) as ``encode``."""
        markers = await self.run(lambda: self.infill)
        return await self._on_text(len(before) + len(after), markers.prompt, self.tokenizer, before, after)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """Render a conversation. Raises ApiError (400) if it is longer than any prompt can be.

        messages: in OpenAI's form. options: of the request; the server's own settings are added.
        """
        config = self._config
        whole = replace(options, tool_parser=config.tool_parser, default_template_kwargs=config.chat_template_kwargs)
        written = [*messages, [tool.sent for tool in options.tools], options.chat_template_kwargs]
        return await self._on_text(_characters(written), self._service.llm.requests.chat_prompt, messages, whole)

    async def _on_text(self, characters: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` on a text of ``characters`` characters in the thread for its length."""
        max_characters = await self.run(lambda: self._max_characters)
        if characters > max_characters:
            message = f"the text has {characters} characters; prompts of this model have at most {max_characters}"
            raise errors.invalid(message, code=errors.TOO_LONG)
        thread = self._short if characters <= _LONG_TEXT else self._long
        return await thread.run(work, *args, **kwargs)

    @functools.cached_property
    def _max_characters(self) -> int:
        """Upper bound of the characters of a prompt that fits into the model's context."""
        return self._service.llm.engine.max_model_len * max(len(text or "") for text in self.tokenizer.tokens())

    def close(self) -> None:
        """Stop the threads and forget the tokenizer."""
        self._short.close()
        self._long.close()
        vars(self).pop("spelling", None)


def _characters(value: object) -> int:
    """Least characters of messages, tools or variables as text: those of texts and names, one for any other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(name) + _characters(part) for name, part in value.items())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 1
