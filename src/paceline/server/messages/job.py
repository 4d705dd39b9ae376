"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.chat.values import message_of
from paceline.core.outputs import RequestOutput
from paceline.server.context import Context
from paceline.server.delta import Delta
from paceline.server.documents import typed_events
from paceline.server.messages.prompt import messages_of, options_of
from paceline.server.messages.protocol import MessagesRequest, PromptRequest
from paceline.server.messages.replies import (
    MessageReply,
    MessageStream,
    MessageTokensDetails,
    MessageUsage,
    TokenCount,
    content_of,
    stop_of,
)
from paceline.server.streaming import Events
from paceline.server.turns import Conversation, Turn, prompt_of
from paceline.server.usage import log_request


@dataclass
class MessagesJob:
    """One validated request, ready for the engine."""

    turn: Turn
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.turn.context.new_id("msg")

    @classmethod
    async def prepare(cls, context: Context, body: MessagesRequest, client: str) -> MessagesJob:
        """Validate and tokenize a request. Raises ApiError."""
        conversation = Conversation(messages_of(body), options_of(body))
        return cls(await Turn.prepare(context, body, conversation, client))

    async def answer(self) -> bytes:
        """Generate the message and return it as JSON. Raises ApiError."""
        async with self.turn.generate() as generation:
            (output,) = await generation.finish()
        log_request(self.id, [output], None)
        return await self.turn.replies.written(lambda: self._whole(output), generation.made)

    def _whole(self, output: RequestOutput) -> MessageReply:
        answer, reader = output.outputs[0], self.turn.reader()
        message = message_of(reader.feed(Delta.whole(answer)))
        stop, sequence = stop_of(answer, len(message.tool_calls))
        return MessageReply(
            id=self.id,
            type="message",
            role="assistant",
            model=self.turn.model,
            content=content_of(message),
            stop_reason=stop,
            stop_sequence=sequence,
            usage=MessageUsage.of(output, reader.reasoning_tokens),
        )

    async def stream(self) -> Events:
        """Yield server-sent events as tokens are generated. Raises ApiError."""
        stream, reader = MessageStream(self._begun()), self.turn.reader()
        async with self.turn.generate() as generation:
            yield typed_events(stream.start())
            async for update in generation.updates():
                yield await self.turn.events(update, reader, stream.feed)
            output = generation.outputs[0]
        log_request(self.id, [output], None)
        stop, sequence = stop_of(output.outputs[0], stream.calls)
        yield typed_events(stream.end(stop, sequence, MessageUsage.of(output, reader.reasoning_tokens)))

    def _begun(self) -> MessageReply:
        """The message before its first token. How many tokens come from the cache is known at its end."""
        tokens = len(self.turn.request.prompt_token_ids)
        return MessageReply(
            id=self.id,
            type="message",
            role="assistant",
            model=self.turn.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage(
                input_tokens=tokens,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
                output_tokens=0,
                output_tokens_details=MessageTokensDetails(thinking_tokens=0),
            ),
        )


async def count_tokens(context: Context, body: PromptRequest) -> TokenCount:
    """Count the tokens of a prompt. Raises ApiError."""
    context.check_model(body.model)
    prompt = await prompt_of(context, Conversation(messages_of(body), options_of(body)))
    return TokenCount(input_tokens=len(prompt.token_ids))
