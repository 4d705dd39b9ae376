"""``/v1/completions``."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from paceline.config import COMPLETION_MAX_TOKENS, SamplingParams, StructuredOutputs
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.engine.engine import Request
from paceline.models.tokenizer import Detokenizer
from paceline.server import errors
from paceline.server.context import Context, RequestOptions, StreamUsage, log_request, usage_of
from paceline.server.delta import Delta, Update
from paceline.server.generation import Generation, together
from paceline.server.logprobs import completion_logprobs, joined, prompt_logprobs
from paceline.server.protocol import CompletionRequest, GenerationRequest
from paceline.server.replies import (
    AnswerMetrics,
    Chat,
    ChatChunk,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Extras,
    RequestMetrics,
    SpeculativeDecoding,
    Usage,
    openai_finish_reason,
    stop_reason,
)
from paceline.server.streaming import Events
from paceline.server.structures import AnswerForm


@dataclass(frozen=True)
class PromptEcho:
    """A prompt that is repeated in front of each of its completions."""

    text: str
    logprobs: CompletionLogprobs | None


@dataclass
class CompletionJob:
    """One validated request, ready for the engine.

    tokens: token ids per prompt. structure: form of the completions, not yet compiled. echoes: one per prompt if the
    request has ``echo``, else empty.
    """

    context: Context
    body: CompletionRequest
    tokens: list[list[int]]
    requests: list[Request]
    options: RequestOptions
    structure: StructuredOutputs | None
    id: str = field(init=False)
    created: int = field(init=False)
    echoes: list[PromptEcho] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id, self.created = self.context.new_id("cmpl"), int(time.time())

    @classmethod
    async def prepare(cls, context: Context, body: CompletionRequest, client: str) -> CompletionJob:
        """Validate and tokenize a request. Raises ApiError."""
        context.check_model(body.model)
        context.check_answers(len(body.prompts) * body.answers)
        options = RequestOptions.of(body, client)
        params = body.sampling(_max_tokens(body) or 1, body.logprobs)
        params = context.for_model(body.model, params)
        tokens = [await _encode(context, prompt, body.suffix) for prompt in body.prompts]
        if body.suffix:
            params = context.infill.ended(params)
        requests = await context.requests(tokens, params, options)
        if body.echo and body.logprobs is not None and params.adapter is not None:
            raise errors.invalid(f"the prompt's log-probabilities are those of {context.model_name!r} only", "echo")
        context.check_logprobs(requests, body.logprobs, read=bool(body.echo), made=_max_tokens(body) > 0)
        structure = await context.in_thread(lambda: _structure(body, params))
        return cls(context, body, tokens, requests, options, structure)

    # --- one response ------------------------------------------------------------

    async def answer(self) -> bytes:
        """Generate all completions and return the whole response as JSON. Raises ApiError."""
        async with self._generation() as generation:
            await self._echo_prompts(generation)
            outputs = await generation.finish() or self._empty_outputs()
        log_request(self.id, outputs, self.body.user)
        entries = generation.made * _entries(self.body) + self._echoed(len(self.echoes))
        return await self.context.written(functools.partial(self._completion, outputs), entries)

    def _completion(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._whole(number, place, answer)
            for number, output in enumerate(outputs)
            for place, answer in enumerate(output.outputs)
        ]
        document = self._document(choices, usage=usage_of(self.tokens, outputs))
        note_draft_tokens(document, self.body, [answer for output in outputs for answer in output.candidates])
        return document

    def _generation(self) -> AbstractAsyncContextManager[Generation]:
        scored = bool(self.body.echo) and self.body.logprobs is not None
        form = AnswerForm(self.structure)
        return self.context.generate(self.requests, self.options, only_read=self._only_read, scored=scored, form=form)

    @property
    def _only_read(self) -> bool:
        return _max_tokens(self.body) == 0

    def _echoed(self, echoes: int) -> int:
        """Tokens and log-probabilities in the first ``echoes`` echoes, which every completion repeats."""
        return sum(map(len, self.tokens[:echoes])) * (self.body.n or 1) * _entries(self.body)

    def _empty_outputs(self) -> list[RequestOutput]:
        """Outputs of a request with max_tokens = 0, which returns only its prompt."""
        n = self.body.n or 1
        return [
            RequestOutput(
                request.request_id or "",
                None,
                request.prompt_token_ids,
                [CompletionOutput(i, finish_reason="length", logprobs=[]) for i in range(n)],
            )
            for request in self.requests
        ]

    def _whole(self, number: int, place: int, answer: CompletionOutput) -> CompletionChoice:
        delta = replace(Delta.whole(answer), index=place)
        echo = self.echoes[number] if self.echoes else None
        choice = self._choice(number, delta, offset=len(echo.text) if echo else 0)
        if echo is not None:
            choice.text = echo.text + choice.text
            if echo.logprobs is not None and choice.logprobs is not None:
                choice.logprobs = joined(echo.logprobs, choice.logprobs)
        return choice

    # --- streaming ---------------------------------------------------------------

    async def stream(self) -> Events:
        """Yield server-sent events as tokens are generated. Raises ApiError."""
        offsets: dict[int, int] = {}
        async with self._generation() as generation:
            await self._echo_prompts(generation)
            if not self._only_read:
                async for events in self._generated_events(generation, offsets):
                    yield events
            outputs = [generation.outputs[number] for number in sorted(generation.outputs)] or self._empty_outputs()
        log_request(self.id, outputs, self.body.user)
        if self._only_read:  # the engine has already finished, however slowly the client reads
            async for events in self._echo_events(offsets):
                yield events
            yield await self.context.events(lambda: self._final_chunks(outputs), 0)
        if self.body.include_usage:
            yield await self.context.events(lambda: [self._document([], usage=usage_of(self.tokens, outputs))], 0)

    async def _generated_events(self, generation: Generation, offsets: dict[int, int]) -> Events:
        async for events in self._echo_events(offsets):
            yield events
        stream_usage = StreamUsage(sum(map(len, self.tokens)))
        async for update in generation.updates():
            chunks = functools.partial(self._chunks, update, offsets, stream_usage)
            yield await self.context.events(chunks, update.entries)

    async def _echo_events(self, offsets: dict[int, int]) -> Events:
        """Events for the echoed prompts, one after the other."""
        for number in range(len(self.echoes)):
            echo = functools.partial(self._echo, number, offsets)
            yield await self.context.events(echo, self._echoed(number + 1) - self._echoed(number))

    def _echo(self, number: int, offsets: dict[int, int]) -> list[Completion]:
        echo, documents = self.echoes[number], []
        for place in range(self.body.n or 1):
            index = self._index(number, place)
            offsets[index] = len(echo.text)
            choice = CompletionChoice(index=index, text=echo.text, logprobs=echo.logprobs, finish_reason=None)
            documents.append(self._document([choice]))
        return documents

    def _final_chunks(self, outputs: Sequence[RequestOutput]) -> list[Completion]:
        return [
            self._document([self._choice(number, Delta.whole(answer), 0)])
            for number, output in enumerate(outputs)
            for answer in output.outputs
        ]

    def _chunks(self, update: Update, offsets: dict[int, int], stream_usage: StreamUsage) -> list[Completion]:
        documents = []
        for delta in update.deltas:
            index = self._index(update.number, delta.index)
            offset = offsets.get(index, 0)
            offsets[index] = offset + len(delta.text)
            usage = stream_usage.add(delta)
            if delta.text or delta.ended or self.body.metrics or self.body.logprobs is not None:
                choice = self._choice(update.number, delta, offset)
                documents.append(self._document([choice], usage if self.body.continuous_usage else None))
                if delta.ended is not None and len(self.requests) == self.body.answers == 1:
                    note_draft_tokens(documents[-1], self.body, [delta.ended])
        return documents

    # --- building blocks ---------------------------------------------------------

    def _index(self, number: int, place: int) -> int:
        return number * (self.body.n or 1) + place

    def _document(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        model = self.body.model or self.context.model_name
        document = Completion(id=self.id, object="text_completion", created=self.created, model=model, choices=choices)
        if usage is not None or self.body.include_usage:  # null in all chunks but the last
            document.usage = usage
        return document

    def _choice(self, number: int, delta: Delta, offset: int) -> CompletionChoice:
        choice = CompletionChoice(
            index=self._index(number, delta.index),
            text=delta.text,
            logprobs=self._logprobs(delta, offset),
            finish_reason=None if delta.ended is None else openai_finish_reason(delta.ended),
        )
        if delta.ended is not None:
            choice.stop_reason = stop_reason(delta.ended)
        if self.body.metrics:
            choice.paceline = extras_of(delta)
        return choice

    def _logprobs(self, delta: Delta, offset: int) -> CompletionLogprobs | None:
        top = self.body.logprobs
        if top is None:
            return None
        return completion_logprobs(self.context.spelling, delta.logprobs, delta.pieces, offset, top)

    async def _echo_prompts(self, generation: Generation) -> None:
        if not self.body.echo:
            return
        pairs = zip(self.requests, self.body.prompts, strict=True)
        self.echoes = await together([self._echo_prompt(request, prompt) for request, prompt in pairs])
        generation.scored()

    async def _echo_prompt(self, request: Request, prompt: str | list[int]) -> PromptEcho:
        text_or_none = prompt if isinstance(prompt, str) else None
        pieces = await self.context.in_thread(_pieces, self.context, request.prompt_token_ids)
        text = "".join(pieces) if text_or_none is None else text_or_none
        return PromptEcho(text, await self._prompt_logprobs(request, pieces))

    async def _prompt_logprobs(self, request: Request, pieces: Sequence[str]) -> CompletionLogprobs | None:
        top = self.body.logprobs
        if top is None:
            return None
        scored: list[TokenLogprob] = await self.context.service.score(request, top)
        tokens, spelling = request.prompt_token_ids, self.context.spelling
        return await self.context.in_thread(prompt_logprobs, spelling, tokens, scored, pieces, top)


def extras_of(delta: Delta) -> Extras:
    """The ``paceline`` field that "metrics": true adds to a choice."""
    extras = Extras(token_ids=list(delta.token_ids), kinds=list(delta.kinds), pieces=list(delta.pieces))
    if delta.ended is not None:
        extras.metrics = AnswerMetrics.of(delta.ended)
    return extras


def note_draft_tokens(
    document: Completion | Chat | ChatChunk, body: GenerationRequest, answers: Sequence[CompletionOutput]
) -> None:
    """Add the ``metrics`` field to a document with one answer, if the request has "metrics": true."""
    if body.metrics and len(answers) == 1:
        document.metrics = RequestMetrics(speculative_decoding=SpeculativeDecoding.of(answers[0]))


def _structure(body: CompletionRequest, params: SamplingParams) -> StructuredOutputs | None:
    """The form of the completions. Raises ParameterError if it does not fit the other parameters."""
    wanted = None if body.structured_outputs is None else body.structured_outputs.wanted
    return replace(params, structured_outputs=wanted).structured_outputs


async def _encode(context: Context, prompt: str | list[int], suffix: str | None) -> list[int]:
    if suffix:
        return await context.encode_gap(prompt, suffix)
    return await context.encode(prompt) if isinstance(prompt, str) else prompt


def _entries(body: CompletionRequest) -> int:
    """Log-probability entries per token: its own, and those of the likeliest tokens."""
    return 1 + (body.logprobs or 0)


def _max_tokens(body: CompletionRequest) -> int:
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise errors.invalid("max_tokens = 0 needs echo = true", "max_tokens")
    return max_tokens


def _pieces(context: Context, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds."""
    growing = Detokenizer(context.tokenizer)
    pieces = [growing.push(token) for token in tokens]
    pieces[-1] += growing.finish()
    return pieces
