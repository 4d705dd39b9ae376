"""The answers to one conversation, and the events of which an answer consists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json

from paceline.chat.options import ChatOptions
from paceline.chat.parser import OutputParser
from paceline.chat.values import MessageEvent, ReasoningDelta, TextDelta, ToolCallArgumentsDelta
from paceline.core.outputs import TokenLogprob
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.chat_protocol import ChatRequest
from paceline.server.context import Context
from paceline.server.delta import Delta, Update
from paceline.server.documents import ReplyWriter
from paceline.server.generation import Generation
from paceline.server.protocol import TurnRequest
from paceline.server.structures import AnswerForm, checked_params

_TEXTS = ("content", "reasoning_content")
_Growing = TextDelta | ReasoningDelta | ToolCallArgumentsDelta
EventWriter = Callable[[Iterable[MessageEvent]], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Conversation:
    """What is answered. messages: in OpenAI's form. references: token ids of texts that answers may repeat."""

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    references: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Turn:
    """A validated request for answers to a conversation, ready for the engine."""

    context: Context
    body: ChatRequest | TurnRequest
    prompt: ChatPrompt
    request: Request

    @classmethod
    async def prepare(
        cls,
        context: Context,
        body: ChatRequest | TurnRequest,
        conversation: Conversation,
        client: str,
        *,
        of_batch: bool = False,
    ) -> Turn:
        """Validate and tokenize a conversation. Raises ApiError.

        of_batch: whether it is a line of a batch, which waits behind other lines: its time budget begins with its row.
        """
        arrival = time.monotonic()
        context.check_model(body.model)
        context.dispatcher.check_answers(body.answers)
        if isinstance(body, TurnRequest):
            prompt = await prompt_of(context, conversation)
        else:
            prompt = await context.texts.chat_prompt(conversation.messages, conversation.options)
        template = Request(
            [],
            context.chat_sampling(body),
            client=client,
            priority=body.priority or 0,
            arrival=arrival,
            references=conversation.references,
            budget_from_row=of_batch,
        )
        return await cls.of_prompt(context, body, prompt, template)

    @classmethod
    async def of_prompt(
        cls, context: Context, body: ChatRequest | TurnRequest, prompt: ChatPrompt, template: Request
    ) -> Turn:
        """Validate a request for answers to a prompt. Raises ApiError.

        template: what the engine's request has beside the prompt, with the parameters that the body replaces in part.
        """
        left = max(1, context.llm.engine.max_model_len - len(prompt.token_ids))
        params, structure = await context.texts.run(checked_params, body, template.params, left)
        template = replace(template, params=context.for_model(body.model, params))
        (request,) = await context.dispatcher.requests([prompt.token_ids], template)
        request = context.llm.requests.of_chat(request, prompt)
        request = replace(request, read_message=None)  # replies read the message themselves
        context.dispatcher.check_logprobs([request], params.logprobs)
        return cls(context, body, replace(prompt, structure=structure), request)

    @property
    def model(self) -> str:
        """Name of the model that answers: an adapter's, or the served model's."""
        return self.request.params.adapter or self.context.model_name

    @property
    def replies(self) -> ReplyWriter:
        """What reads the answer and serializes the reply."""
        return self.context.replies if self.prompt.format.responses is None else self.context.waiting_replies

    def generate(self) -> AbstractAsyncContextManager[Generation]:
        """Submit the request to the engine. Raises ApiError."""
        form = AnswerForm(self.prompt.structure, self.prompt, self.body.structure_field)
        return self.context.dispatcher.generate(
            [self.request], form, timeout=self.body.timeout, streaming=bool(self.body.stream)
        )

    def reader(self) -> AnswerReader:
        """Return a reader of the answer."""
        return AnswerReader(self.prompt.parser(), scored=self.request.params.logprobs is not None)

    async def events(self, update: Update, reader: AnswerReader, feed: EventWriter) -> bytes:
        """Serialize what an update adds to the answer as server-sent events. feed: makes the API's own events."""
        return await self.replies.typed_events(
            lambda: feed([event for delta in update.deltas for event in reader.feed(delta)]), update.entries
        )


async def prompt_of(context: Context, conversation: Conversation) -> ChatPrompt:
    """Render a conversation. Raises ApiError.

    Effort and budget of thoughts are hints here: agents send them to every model, whether or not it thinks.
    """
    messages, options = conversation.messages, conversation.options
    try:
        prompt = await context.texts.chat_prompt(messages, options)
    except errors.ApiError as error:
        if error.param != "reasoning_effort":
            raise
        prompt = await context.texts.chat_prompt(messages, replace(options, reasoning_effort=None))
    if prompt.format.thinking is None:
        return replace(prompt, options=replace(prompt.options, max_thinking_tokens=None))
    return prompt


def with_joined_turns(messages: Iterable[Mapping[str, Any]], *roles: str) -> list[dict[str, Any]]:
    """Join neighbouring messages of one of these roles: many chat templates demand that roles alternate.

    A message with calls stays apart from the next one, whose text would come before them.
    """
    turns: list[list[Mapping[str, Any]]] = []
    for message in messages:
        before = turns[-1][-1] if turns else {"role": None}
        if message["role"] in roles and message["role"] == before["role"] and "tool_calls" not in before:
            turns[-1].append(message)
        else:
            turns.append([message])
    return [*map(_joined, turns)]


def _joined(turn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = {name: [message[name] for message in turn if message.get(name)] for name in _TEXTS}
    joined = {name: "\n\n".join(pieces) for name, pieces in texts.items() if pieces}
    return {**turn[0], **turn[-1], **joined}


@dataclass(frozen=True)
class ScoredText(TextDelta):
    """More text of the message, with the log-probabilities of its tokens."""

    logprobs: tuple[TokenLogprob, ...] = ()


def merged(events: Sequence[MessageEvent]) -> list[MessageEvent]:
    """Join consecutive pieces of the same text, thoughts or arguments."""
    if len(events) < 2:  # mostly
        return [*events]
    joined: list[MessageEvent] = []
    for kind, group in groupby(events, _without_text):
        if isinstance(kind, TextDelta):
            joined.append(_joined_text([event for event in group if isinstance(event, TextDelta)]))
        elif isinstance(kind, _Growing):
            joined.append(replace(kind, text="".join(event.text for event in group if isinstance(event, _Growing))))
        else:
            joined += group
    return joined


def _joined_text(pieces: Sequence[TextDelta]) -> TextDelta:
    text = "".join(piece.text for piece in pieces)
    scored = [piece.logprobs for piece in pieces if isinstance(piece, ScoredText)]
    return ScoredText(text, tuple(chain.from_iterable(scored))) if scored else TextDelta(text)


def _without_text(event: MessageEvent) -> MessageEvent:
    if isinstance(event, TextDelta):
        return TextDelta("")
    return replace(event, text="") if isinstance(event, _Growing) else event


def arguments_of(text: str) -> dict[str, JsonValue]:
    """Return the object of a call's arguments. Text that is no JSON object becomes {"INVALID_JSON": text}."""
    try:
        value = from_json(text or "{}", allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


class _TextTokens:
    """Finds the tokens of a message's text among those of its answer, which has markers, thoughts and calls, too."""

    def __init__(self) -> None:
        # Text that the tokens since the last text of the message added, and their log-probabilities; None for the rest
        # of a token that was taken.
        self._pending: list[tuple[str, TokenLogprob | None]] = []

    def add(self, piece: str, entry: TokenLogprob) -> None:
        """Take one more token of the answer and the text that it adds."""
        self._pending.append((piece, entry))

    def take(self, text: str) -> tuple[TokenLogprob, ...]:
        """Return the tokens of text that follows the last one of the message. Text is found where it occurs last."""
        whole = "".join(piece for piece, _ in self._pending)
        start = whole.rfind(text)
        start = len(whole) if start < 0 else start  # held back: it belongs to tokens that have added no text yet
        end, at = start + len(text), 0
        taken: list[TokenLogprob] = []
        rest: list[tuple[str, TokenLogprob | None]] = []
        for piece, entry in self._pending:
            first, at = at, at + len(piece)
            if first >= end:
                rest.append((piece, entry))
            elif entry is not None and (at > start or first == at == start):
                taken.append(entry)
            if first < end < at:
                rest.append((piece[end - first :], None))
        self._pending = rest
        return tuple(taken)


class AnswerReader:
    """Splits one answer into events, and counts the tokens of its thoughts.

    scored: whether its text has log-probabilities, which the deltas bring.
    """

    def __init__(self, parser: OutputParser, *, scored: bool = False) -> None:
        self._parser = parser
        self._text_tokens = _TextTokens() if scored else None
        self._tokens = 0
        self._thinks = True  # no event but thoughts so far
        self.reasoning_tokens = 0

    def feed(self, delta: Delta) -> list[MessageEvent]:
        """Take more of the answer; at its end return the remaining events, too."""
        entries = delta.logprobs if self._text_tokens is not None else (None,) * len(delta.pieces)
        events = [event for token in zip(delta.pieces, entries, strict=True) for event in self._feed(*token)]
        if held_back := delta.text[sum(map(len, delta.pieces)) :]:  # of a token that was delivered before
            events += self._counted(self._parser.feed(held_back))
        return merged(events if delta.ended is None else [*events, *self._counted(self._parser.finish())])

    def _feed(self, piece: str, entry: TokenLogprob | None) -> list[MessageEvent]:
        self._tokens += 1
        if self._text_tokens is not None and entry is not None:
            self._text_tokens.add(piece, entry)
        return self._counted(self._parser.feed(piece))

    def _counted(self, events: list[MessageEvent]) -> list[MessageEvent]:
        for event in events:
            self._thinks = self._thinks and isinstance(event, ReasoningDelta)
            if self._thinks:
                self.reasoning_tokens = self._tokens
        return [*map(self._with_tokens, events)]

    def _with_tokens(self, event: MessageEvent) -> MessageEvent:
        if self._text_tokens is None or not isinstance(event, TextDelta):
            return event
        return ScoredText(event.text, self._text_tokens.take(event.text))
