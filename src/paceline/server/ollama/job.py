"""``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.chat.families import ChatFormat
from paceline.chat.options import ChatOptions
from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.context import Context
from paceline.server.delta import Delta, Update
from paceline.server.logprobs import chat_logprobs
from paceline.server.ollama.prompt import messages_of, options_of
from paceline.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from paceline.server.ollama.replies import DoneReason, OllamaReply, Pieces, ReplyMessage, durations, timestamp
from paceline.server.streaming import Events
from paceline.server.turns import AnswerReader, Turn
from paceline.server.usage import log_request

_PLAIN = ChatFormat(None, None)  # of a text that is continued: no thoughts, no calls


@dataclass
class OllamaJob:
    """One validated request, ready for the engine. load_seconds: how long it waited for its model."""

    turn: Turn
    body: OllamaChatRequest | OllamaGenerateRequest
    load_seconds: float
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.turn.context.new_id("ollama")

    @classmethod
    async def prepare(
        cls, context: Context, body: OllamaChatRequest | OllamaGenerateRequest, client: str, load_seconds: float
    ) -> OllamaJob:
        """Validate and tokenize a request. Raises ApiError."""
        arrival = time.monotonic()
        context.check_model(body.model)
        is_text = isinstance(body, OllamaGenerateRequest) and (body.raw or bool(body.suffix))
        field = "prompt" if isinstance(body, OllamaGenerateRequest) else "messages"
        async with errors.names_long_text(field):
            prompt = await (_text_prompt(context, body) if is_text else _chat_prompt(context, body))
            base = context.default_sampling if is_text else context.chat_sampling(body)
            template = Request([], base, client=client, priority=body.priority or 0, arrival=arrival)
            turn = await Turn.of_prompt(context, body, prompt, template)
        params = _within_context(context, body, turn)
        if isinstance(body, OllamaGenerateRequest) and body.suffix:
            params = context.texts.infill.ended(params)
        return cls(replace(turn, request=replace(turn.request, params=params)), body, load_seconds)

    async def answer(self) -> bytes:
        """Generate the answer and return it as JSON. Raises ApiError."""
        async with self.turn.generate() as generation:
            (output,) = await generation.finish()
        log_request(self.id, [output], None)
        return await self.turn.replies.written(lambda: self._whole(output), self._entries(generation.made))

    def _entries(self, tokens: int) -> int:
        return tokens * (1 + (self.body.num_logprobs or 0))

    def _whole(self, output: RequestOutput) -> OllamaReply:
        answer, pieces = output.outputs[0], Pieces()
        pieces.feed(self.turn.reader().feed(Delta.whole(answer)))
        fields = next(pieces.take(), {"content": ""})
        return self._ended(output, fields, answer.logprobs or [])

    async def stream(self) -> Events:
        """Yield lines of JSON as tokens are generated. Raises ApiError."""
        reader, pieces, replies = self.turn.reader(), Pieces(), self.turn.replies
        async with self.turn.generate() as generation:
            async for update in generation.updates():
                yield await replies.lines(functools.partial(self._lines, update, reader, pieces), update.entries)
            output = generation.outputs[0]
        log_request(self.id, [output], None)
        yield await replies.lines(lambda: [self._ended(output, {"content": ""})], 0)

    def _lines(self, update: Update, reader: AnswerReader, pieces: Pieces) -> list[OllamaReply]:
        scored: list[TokenLogprob] = []
        for delta in update.deltas:
            pieces.feed(reader.feed(delta))
            scored += delta.logprobs
        found = list(pieces.take()) or ([{"content": ""}] if scored else [])
        return [self._reply(fields, scored, done=False) for fields in found]

    def _ended(self, output: RequestOutput, fields: dict[str, Any], scored: Sequence[TokenLogprob] = ()) -> OllamaReply:
        reply = self._reply(fields, scored, done=True)
        reply.done_reason = _done_reason(output.outputs[0])
        for name, value in durations(output, self.load_seconds).items():
            setattr(reply, name, value)
        return reply

    def _reply(self, fields: dict[str, Any], scored: Sequence[TokenLogprob], *, done: bool) -> OllamaReply:
        reply = reply_of(self.body, self.turn.model, fields, done=done)
        if scored:
            reply.logprobs = chat_logprobs(self.turn.context.texts.spelling, scored).content
        return reply


def reply_of(
    body: OllamaChatRequest | OllamaGenerateRequest, model: str, fields: dict[str, Any], *, done: bool
) -> OllamaReply:
    """Build a reply in the form of the request's path. fields: of the message."""
    reply = OllamaReply(model=model, created_at=timestamp(), done=done)
    if isinstance(body, OllamaChatRequest):
        reply.message = ReplyMessage(role="assistant", **fields)
        return reply
    reply.response = fields["content"]
    if "thinking" in fields:
        reply.thinking = fields["thinking"]
    return reply


def _done_reason(answer: CompletionOutput) -> DoneReason:
    return "stop" if answer.finish_reason == "stop" else "length"


async def _chat_prompt(context: Context, body: OllamaChatRequest | OllamaGenerateRequest) -> ChatPrompt:
    """Render a conversation. Raises ApiError, which names ``think`` for a model without thoughts."""
    try:
        return await context.texts.chat_prompt(messages_of(body), options_of(body))
    except errors.ApiError as error:
        if error.param != "reasoning_effort":
            raise
        raise errors.invalid(f"{body.model!r} does not support thinking: leave out think", "think") from error


async def _text_prompt(context: Context, body: OllamaChatRequest | OllamaGenerateRequest) -> ChatPrompt:
    """The prompt of a text that is continued, or of a gap that is filled. Raises ApiError."""
    assert isinstance(body, OllamaGenerateRequest)
    encode = context.texts.encode_gap(body.prompt, body.suffix) if body.suffix else context.texts.encode(body.prompt)
    return ChatPrompt(await encode, ChatOptions(), _PLAIN, frozenset(), "")


def _within_context(context: Context, body: OllamaChatRequest | OllamaGenerateRequest, turn: Turn) -> SamplingParams:
    """The parameters of an answer that ends where ``num_ctx`` does. Raises ApiError for one that is not possible."""
    params, wanted, longest = turn.request.params, body.options.num_ctx, context.llm.engine.max_model_len
    if wanted is None:
        return params
    size = len(turn.request.prompt_token_ids)
    if wanted > longest:
        message = f"num_ctx must be at most {longest}, the longest sequence of this server: see --max-model-len"
        raise errors.invalid(message, "num_ctx")
    if size >= wanted:
        message = f"the prompt has {size} tokens, and num_ctx = {wanted} holds prompt and answer"
        raise errors.invalid(message, "num_ctx", errors.TOO_LONG)
    return replace(params, max_tokens=min(params.max_tokens, wanted - size))
