"""``/v1/chat/completions``."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.chat.values import (
    AssistantMessage,
    MessageEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArgumentsDelta,
    ToolCallStart,
    message_of,
)
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.server import errors
from paceline.server.chat_protocol import ChatRequest
from paceline.server.context import Context
from paceline.server.delta import Delta, Update
from paceline.server.logprobs import chat_logprobs
from paceline.server.predictions import check_prediction, details_of
from paceline.server.replies import (
    CalledFunctionDelta,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    ChatToolCallDelta,
    CompletionTokensDetails,
    ReplyFunction,
    Usage,
)
from paceline.server.streaming import Events
from paceline.server.turns import AnswerReader, Conversation, Turn
from paceline.server.usage import (
    StreamUsage,
    extras_of,
    log_request,
    note_draft_tokens,
    openai_finish_reason,
    stop_reason,
    usage_of,
)


@dataclass
class AnswerStream:
    """One answer in the making. begun: whether a chunk of it was sent. calls: tool calls so far."""

    reader: AnswerReader
    begun: bool = False
    calls: int = 0

    def deltas(self, delta: Delta) -> list[ChatDelta]:
        """Return what the client gets for new text of the answer."""
        events = self.reader.feed(delta)
        self.calls += sum(isinstance(event, ToolCallStart) for event in events)
        return _deltas(events)


def _deltas(events: Iterable[MessageEvent]) -> list[ChatDelta]:
    """One delta for consecutive events of a kind, so that clients that read a delta in any order keep the order."""
    found: list[ChatDelta] = []
    for event in events:
        last = found[-1] if found else ChatDelta()
        if isinstance(event, TextDelta):
            if last.content is None:
                found.append(last := ChatDelta(content=""))
            last.content = (last.content or "") + event.text
        elif isinstance(event, ReasoningDelta):
            if last.reasoning_content is None:
                found.append(last := ChatDelta(reasoning_content=""))
            last.reasoning_content = (last.reasoning_content or "") + event.text
        elif isinstance(event, ToolCallStart):
            function = CalledFunctionDelta(name=event.name, arguments="")
            call = ChatToolCallDelta(index=event.index, id=event.id, type="function", function=function)
            found.append(ChatDelta(tool_calls=[call]))
        elif isinstance(event, ToolCallArgumentsDelta):
            if last.tool_calls is None:
                call = ChatToolCallDelta(index=event.index, function=CalledFunctionDelta(arguments=""))
                found.append(last := ChatDelta(tool_calls=[call]))
            assert last.tool_calls is not None
            last.tool_calls[0].function.arguments += event.text
    return found


def _whole_message(message: AssistantMessage) -> ChatMessage:
    """Return a complete answer as a message. Fields that it does not need are left out."""
    calls = [
        ChatToolCall(id=call.id, type="function", function=ReplyFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    found = ChatMessage(role="assistant", content=message.text or (None if calls else ""), refusal=None)
    if message.reasoning is not None:
        found.reasoning_content = message.reasoning
    if calls:
        found.tool_calls = calls
    return found


@dataclass
class ChatJob:
    """One validated request, ready for the engine."""

    turn: Turn
    body: ChatRequest
    id: str = field(init=False)
    created: int = field(init=False)
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.created, self.model = self.turn.context.new_id("chatcmpl"), int(time.time()), self.turn.model

    @classmethod
    @errors.names_long_text("messages")
    async def prepare(cls, context: Context, body: ChatRequest, client: str, *, of_batch: bool = False) -> ChatJob:
        """Validate and tokenize a request. Raises ApiError."""
        conversation = Conversation(body.conversation, body.chat_options, await _prediction(context, body))
        return cls(await Turn.prepare(context, body, conversation, client, of_batch=of_batch), body)

    async def answer(self) -> bytes:
        """Generate all answers and return the whole response as JSON. Raises ApiError."""
        async with self.turn.generate() as generation:
            (output,) = await generation.finish()
        log_request(self.id, [output], self.body.user)
        entries = generation.made * (1 + (self.body.top_logprobs or 0))
        details = await self._details(output)
        return await self.turn.replies.written(lambda: self._chat(output, details), entries)

    async def _details(self, output: RequestOutput) -> CompletionTokensDetails:
        if self.body.prediction is None:
            return CompletionTokensDetails()
        (prediction,), answers = self.turn.request.references, [answer.token_ids for answer in output.candidates]
        return await self.turn.replies.run(details_of, prediction, answers)

    def _reader(self) -> AnswerReader:
        return AnswerReader(self.turn.prompt.parser())

    def _chat(self, output: RequestOutput, details: CompletionTokensDetails) -> Chat:
        read = {answer.index: self._read(answer) for answer in output.candidates}
        details.reasoning_tokens = sum(tokens for _, tokens in read.values())
        document = Chat(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._whole(place, answer, read[answer.index][0]) for place, answer in enumerate(output.outputs)],
            usage=usage_of([output], details),
        )
        note_draft_tokens(document, self.body, output.candidates)
        return document

    async def stream(self) -> Events:
        """Yield server-sent events as tokens are generated. Raises ApiError."""
        answers: defaultdict[int, AnswerStream] = defaultdict(lambda: AnswerStream(self._reader()))
        stream_usage = StreamUsage(len(self.turn.request.prompt_token_ids))
        replies = self.turn.replies
        async with self.turn.generate() as generation:
            async for update in generation.updates():
                chunks = functools.partial(self._chunks, update, answers, stream_usage)
                yield await replies.events(chunks, update.entries)
            output = generation.outputs[0]
        log_request(self.id, [output], self.body.user)
        if self.body.include_usage:
            details = await self._details(output)
            details.reasoning_tokens = sum(answer.reader.reasoning_tokens for answer in answers.values())
            usage = usage_of([output], details)
            yield await replies.events(lambda: [self._chunk([], usage)], 0)

    def _chunks(
        self, update: Update, answers: Mapping[int, AnswerStream], stream_usage: StreamUsage
    ) -> list[ChatChunk]:
        documents: list[ChatChunk] = []
        for delta in update.deltas:
            stream_usage.completion_tokens += len(delta.token_ids)
            answer = answers[delta.index]
            pieces = answer.deltas(delta)
            if not pieces and (delta.ended or self.body.metrics or self.body.logprobs):
                pieces = [ChatDelta(content="")]
            chunks = [self._chunk([self._piece(delta.index, answer, piece)]) for piece in pieces]
            if chunks:
                self._complete(chunks[-1], delta, answer)
                if self.body.continuous_usage:
                    chunks[-1].usage = stream_usage.document
            documents += chunks
        return documents

    def _piece(self, index: int, answer: AnswerStream, chat_delta: ChatDelta) -> ChatChunkChoice:
        if not answer.begun:
            answer.begun = True
            chat_delta.role = "assistant"
        return ChatChunkChoice(index=index, delta=chat_delta, logprobs=None, finish_reason=None)

    def _complete(self, chunk: ChatChunk, delta: Delta, answer: AnswerStream) -> None:
        """Add to the last chunk of new text what tells of all of it."""
        (choice,) = chunk.choices
        choice.logprobs = self._logprobs(delta.logprobs)
        if self.body.metrics:
            choice.paceline = extras_of(delta)
        if delta.ended is not None:
            choice.finish_reason = openai_finish_reason(delta.ended, calls=answer.calls > 0)
            choice.stop_reason = stop_reason(delta.ended)
            if self.body.answers == 1:
                note_draft_tokens(chunk, self.body, [delta.ended])

    def _read(self, answer: CompletionOutput) -> tuple[AssistantMessage, int]:
        """The message of a complete answer, and the number of tokens of its thoughts."""
        reader = self._reader()
        return message_of(reader.feed(Delta.whole(answer))), reader.reasoning_tokens

    def _whole(self, place: int, answer: CompletionOutput, message: AssistantMessage) -> ChatChoice:
        word = openai_finish_reason(answer, calls=bool(message.tool_calls))
        assert word is not None
        choice = ChatChoice(
            index=place,
            message=_whole_message(message),
            logprobs=self._logprobs(answer.logprobs or []),
            finish_reason=word,
        )
        choice.stop_reason = stop_reason(answer)
        if self.body.metrics:
            choice.paceline = extras_of(Delta.whole(answer))
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self.turn.context.texts.spelling, entries) if self.body.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        document = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
        )
        if usage is not None or self.body.include_usage:  # null in all chunks but the last
            document.usage = usage
        return document


@errors.names_long_text("prediction")
async def _prediction(context: Context, body: ChatRequest) -> list[list[int]]:
    """Token ids of the prediction, without special tokens; an empty list if there is none. Raises ApiError."""
    if body.prediction is None:
        return []
    check_prediction(context.llm.config, ())
    tokens = await context.texts.encode(body.prediction.text, add_special_tokens=False)
    check_prediction(context.llm.config, tokens)
    return [tokens]
