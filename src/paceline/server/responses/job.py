"""``/v1/responses``."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.outputs import RequestOutput, TokenLogprob
from paceline.server import errors
from paceline.server.context import Context
from paceline.server.delta import Delta
from paceline.server.documents import typed_events
from paceline.server.logprobs import chat_logprobs
from paceline.server.responses.events import ResponseStream, StreamEvent
from paceline.server.responses.prompt import messages_of, options_of
from paceline.server.responses.protocol import ResponsesRequest
from paceline.server.responses.replies import Response, ResponseUsage, status_of
from paceline.server.streaming import Events
from paceline.server.turns import AnswerReader, Conversation, Turn
from paceline.server.usage import log_request


@dataclass
class ResponsesJob:
    """One validated request, ready for the engine."""

    turn: Turn
    body: ResponsesRequest
    id: str = field(init=False)
    created: int = field(init=False)
    _stream: ResponseStream = field(init=False)

    def __post_init__(self) -> None:
        new_id = self.turn.context.new_id
        self.id, self.created = new_id("resp"), int(time.time())
        self._stream = ResponseStream(new_id, self._spelled)

    @classmethod
    @errors.names_long_text("input")
    async def prepare(cls, context: Context, body: ResponsesRequest, client: str) -> ResponsesJob:
        """Validate and tokenize a request. Raises ApiError."""
        conversation = Conversation(messages_of(body), options_of(body))
        return cls(await Turn.prepare(context, body, conversation, client), body)

    async def answer(self) -> bytes:
        """Generate the answer and return the whole response as JSON. Raises ApiError."""
        async with self.turn.generate() as generation:
            (output,) = await generation.finish()
        log_request(self.id, [output], self.body.user)
        entries = generation.made * (1 + (self.body.num_logprobs or 0))
        return await self.turn.replies.written(lambda: self._whole(output), entries)

    def _spelled(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [entry.model_dump() for entry in chat_logprobs(self.turn.context.texts.spelling, entries).content]

    def _whole(self, output: RequestOutput) -> Response:
        answer, reader = output.outputs[0], self.turn.reader()
        self._stream.feed(reader.feed(Delta.whole(answer)))
        self._stream.close(status_of(answer))
        return self._ended(output, reader)

    async def stream(self) -> Events:
        """Yield server-sent events as tokens are generated. Raises ApiError."""
        stream, reader = self._stream, self.turn.reader()
        async with self.turn.generate() as generation:
            yield typed_events(stream.start(self._response()))
            async for update in generation.updates():
                yield await self.turn.events(update, reader, stream.feed)
            output = generation.outputs[0]
        log_request(self.id, [output], self.body.user)
        last = functools.partial(self._last_events, output, reader)
        yield await self.turn.replies.typed_events(last, generation.made)

    def _last_events(self, output: RequestOutput, reader: AnswerReader) -> list[StreamEvent]:
        closed = self._stream.close(status_of(output.outputs[0]))
        return [*closed, self._stream.end(self._ended(output, reader))]

    def on_error(self, error: errors.ApiError) -> bytes:
        """Return the last event of a stream that an error ends."""
        failed = self._response()
        failed.status = "failed"
        failed.error = {"code": error.code or error.kind, "message": str(error)}
        return typed_events([self._stream.end(failed)])

    def _ended(self, output: RequestOutput, reader: AnswerReader) -> Response:
        response = self._response()
        response.status = status_of(output.outputs[0])
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = self._stream.items
        response.usage = ResponseUsage.of(output, reader.reasoning_tokens)
        return response

    def _response(self) -> Response:
        """The response before its first token, with the settings that hold for it."""
        body, options, params = self.body, self.turn.prompt.options, self.turn.request.params
        choice, wanted = body.tool_choice, None if body.text is None else body.text.format
        text: dict[str, Any] = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)
        return Response(
            id=self.id,
            created_at=self.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.turn.model,
            output=[],
            parallel_tool_calls=options.parallel_tool_calls,
            reasoning={"effort": options.reasoning_effort, "summary": None},
            temperature=params.temperature,
            text={"format": text},
            tool_choice=choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )
