"""``/v1/chat/completions``."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.chat.values import AssistantMessage, message_of
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.chat_deltas import AnswerStream, whole_message
from paceline.server.chat_protocol import ChatRequest
from paceline.server.completions import extras_of, note_draft_tokens
from paceline.server.context import Context, RequestOptions, StreamUsage, log_request, usage_of
from paceline.server.delta import Delta, Update
from paceline.server.logprobs import chat_logprobs
from paceline.server.predictions import check_prediction, details_of
from paceline.server.replies import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    Usage,
    openai_finish_reason,
    stop_reason,
)
from paceline.server.streaming import Events
from paceline.server.structures import AnswerForm
from paceline.server.turns import AnswerReader


@dataclass
class ChatJob:
    """One validated request, ready for the engine. form: what its answers must look like, not yet compiled."""

    context: Context
    body: ChatRequest
    prompt: ChatPrompt
    request: Request
    options: RequestOptions
    form: AnswerForm
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.created = self.context.new_id("chatcmpl"), int(time.time())

    @classmethod
    @errors.names_long_text("messages")
    async def prepare(cls, context: Context, body: ChatRequest, client: str, *, of_batch: bool = False) -> ChatJob:
        """Validate and tokenize a request. Raises ApiError."""
        context.check_model(body.model)
        context.check_answers(body.answers)
        options = RequestOptions.of(body, client, of_batch=of_batch)
        prompt = await context.chat_prompt(body.conversation, body.chat_fields)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        left = max(1, context.llm.engine.max_model_len - len(prompt.token_ids))
        params = body.sampling(context.chat_sampling(body), body.answer_limit(left), logprobs)
        params = context.for_model(body.model, params)
        wanted = await context.in_thread(lambda: body.structure)
        # replace() checks that the structure fits the other parameters
        prompt = replace(prompt, structure=replace(params, structured_outputs=wanted).structured_outputs)
        form = AnswerForm(prompt.structure, prompt, body.structure_field)
        references = await _prediction(context, body)
        request = await context.chat_request(prompt, params, options, references)
        context.check_logprobs([request], params.logprobs)
        return cls(context, body, prompt, request, options, form)

    async def answer(self) -> bytes:
        """Generate all answers and return the whole response as JSON. Raises ApiError."""
        async with self.context.generate([self.request], self.options, form=self.form) as generation:
            (output,) = await generation.finish()
        log_request(self.id, [output], self.body.user)
        entries = generation.made * (1 + (self.body.top_logprobs or 0))
        details = await self._details(output)
        return await self.context.written(lambda: self._chat(output, details), entries)

    async def _details(self, output: RequestOutput) -> CompletionTokensDetails:
        if self.body.prediction is None:
            return CompletionTokensDetails()
        (prediction,), answers = self.request.references, [answer.token_ids for answer in output.candidates]
        return await self.context.in_background(lambda: details_of(prediction, answers))

    def _reader(self) -> AnswerReader:
        return AnswerReader(self.prompt.parser())

    def _chat(self, output: RequestOutput, details: CompletionTokensDetails) -> Chat:
        read = {answer.index: self._read(answer) for answer in output.candidates}
        details.reasoning_tokens = sum(tokens for _, tokens in read.values())
        document = Chat(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.body.model or self.context.model_name,
            choices=[self._whole(place, answer, read[answer.index][0]) for place, answer in enumerate(output.outputs)],
            usage=usage_of([output.prompt_token_ids], [output], details),
        )
        note_draft_tokens(document, self.body, output.candidates)
        return document

    async def stream(self) -> Events:
        """Yield server-sent events as tokens are generated. Raises ApiError."""
        answers: defaultdict[int, AnswerStream] = defaultdict(lambda: AnswerStream(self._reader()))
        stream_usage = StreamUsage(len(self.request.prompt_token_ids))
        async with self.context.generate([self.request], self.options, form=self.form) as generation:
            async for update in generation.updates():
                yield await self.context.events(
                    functools.partial(self._chunks, update, answers, stream_usage), update.entries
                )
            output = generation.outputs[0]
        log_request(self.id, [output], self.body.user)
        if self.body.include_usage:
            details = await self._details(output)
            details.reasoning_tokens = sum(answer.reader.reasoning_tokens for answer in answers.values())
            usage = usage_of([output.prompt_token_ids], [output], details)
            yield await self.context.events(lambda: [self._chunk([], usage)], 0)

    def _chunks(
        self, update: Update, answers: Mapping[int, AnswerStream], stream_usage: StreamUsage
    ) -> list[ChatChunk]:
        documents: list[ChatChunk] = []
        for delta in update.deltas:
            usage = stream_usage.add(delta)
            answer = answers[delta.index]
            pieces = answer.deltas(delta)
            if not pieces and self._shows(delta):
                pieces = [ChatDelta(content="")]
            chunks = [self._chunk([self._piece(delta.index, answer, piece)]) for piece in pieces]
            if chunks:
                self._complete(chunks[-1], delta, answer, usage)
            documents += chunks
        return documents

    def _shows(self, delta: Delta) -> bool:
        return bool(delta.ended or self.body.metrics or self.body.logprobs)

    def _piece(self, index: int, answer: AnswerStream, chat_delta: ChatDelta) -> ChatChunkChoice:
        if not answer.begun:
            answer.begun = True
            chat_delta.role = "assistant"
        return ChatChunkChoice(index=index, delta=chat_delta, logprobs=None, finish_reason=None)

    def _complete(self, chunk: ChatChunk, delta: Delta, answer: AnswerStream, usage: Usage) -> None:
        """Add to the last chunk of new text what tells of all of it."""
        (choice,) = chunk.choices
        choice.logprobs = self._logprobs(delta.logprobs)
        if self.body.continuous_usage:
            chunk.usage = usage
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
            message=whole_message(message),
            logprobs=self._logprobs(answer.logprobs or []),
            finish_reason=word,
        )
        choice.stop_reason = stop_reason(answer)
        if self.body.metrics:
            choice.paceline = extras_of(Delta.whole(answer))
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(self.context.spelling, entries) if self.body.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        document = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.body.model or self.context.model_name,
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
    tokens = await context.encode(body.prediction.text, add_special_tokens=False)
    check_prediction(context.llm.config, tokens)
    return [tokens]
