"""``/v1/completions``."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from paceline.config import StructuredOutputs
from paceline.core.outputs import CompletionOutput, FinishReason, RequestOutput
from paceline.engine.engine import Request
from paceline.engine.scoring import PromptScores
from paceline.models.text.detokenizer import Detokenizer
from paceline.server import errors
from paceline.server.context import Context
from paceline.server.delta import Delta, Update
from paceline.server.generation import Generation
from paceline.server.logprobs import completion_logprobs, joined
from paceline.server.protocol import CompletionRequest
from paceline.server.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from paceline.server.streaming import Events
from paceline.server.structures import AnswerForm, checked_params
from paceline.server.texts import TextWorker
from paceline.server.usage import (
    StreamUsage,
    extras_of,
    log_request,
    note_draft_tokens,
    openai_finish_reason,
    stop_reason,
    usage_of,
)


@dataclass(frozen=True)
class PromptEcho:
    """A prompt that is repeated in front of each of its completions."""

    text: str
    logprobs: CompletionLogprobs | None


@dataclass
class CompletionJob:
    """One validated request, ready for the engine.

    requests: one per prompt. structure: form of the completions, not yet compiled. echoes: by number of the prompt, if
    the request has ``echo`` and is not streamed.
    """

    context: Context
    body: CompletionRequest
    requests: list[Request]
    structure: StructuredOutputs | None
    id: str = field(init=False)
    created: int = field(init=False)
    echoes: dict[int, PromptEcho] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id, self.created = self.context.new_id("cmpl"), int(time.time())

    @classmethod
    @errors.names_long_text("prompt")
    async def prepare(
        cls, context: Context, body: CompletionRequest, client: str, *, of_batch: bool = False
    ) -> CompletionJob:
        """Validate and tokenize a request. of_batch: as in ``Turn.prepare``. Raises ApiError."""
        arrival = time.monotonic()
        context.check_model(body.model)
        context.dispatcher.check_answers(len(body.prompts) * body.answers)
        longest = context.llm.engine.max_model_len
        params, structure = await context.texts.run(checked_params, body, context.default_sampling, longest)
        params = context.for_model(body.model, params)
        tokens = [await _encode(context, prompt, body.suffix) for prompt in body.prompts]
        template = Request(
            [],
            context.texts.infill.ended(params) if body.suffix else params,
            client=client,
            priority=body.priority or 0,
            arrival=arrival,
            budget_from_row=of_batch,
        )
        requests = await context.dispatcher.requests(tokens, template, functools.partial(_echoed, body))
        context.dispatcher.check_logprobs(requests, body.logprobs, of_prompts=bool(body.echo))
        return cls(context, body, requests, structure)

    # --- one response ------------------------------------------------------------

    async def answer(self) -> bytes:
        """Generate all completions and return the whole response as JSON. Raises ApiError."""
        async with self._generation() as generation:
            outputs = await self._finished(generation)
        if self.body.echo:
            self.echoes = {number: await self._echo_prompt(number) for number in range(len(self.requests))}
        log_request(self.id, outputs, self.body.user)
        entries = generation.made * _entries(self.body) + sum(map(self._echo_entries, range(len(self.requests))))
        return await self.context.replies.written(functools.partial(self._completion, outputs), entries)

    def _completion(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._whole(number, place, answer)
            for number, output in enumerate(outputs)
            for place, answer in enumerate(output.outputs)
        ]
        document = self._document(choices, usage=usage_of(outputs))
        note_draft_tokens(document, self.body, [answer for output in outputs for answer in output.candidates])
        return document

    def _generation(self) -> AbstractAsyncContextManager[Generation]:
        return self.context.dispatcher.generate(
            self.requests, AnswerForm(self.structure), timeout=self.body.timeout, streaming=bool(self.body.stream)
        )

    @property
    def _only_read(self) -> bool:
        return self.body.max_tokens == 0

    def _echo_entries(self, number: int) -> int:
        """Tokens and log-probabilities in the echo of a prompt, which every completion repeats."""
        tokens = len(self.requests[number].prompt_token_ids)
        return tokens * (self.body.n or 1) * _entries(self.body) if self.body.echo else 0

    async def _finished(self, generation: Generation) -> list[RequestOutput]:
        """Return the finished outputs; with max_tokens = 0 those without tokens, once the prompts are read."""
        outputs, n = await generation.finish(), self.body.n or 1
        if not self._only_read:
            return outputs
        late = {output.request_id for output in outputs if output.outputs[0].finish_reason == "deadline"}

        def reason(request: Request) -> FinishReason:
            return "deadline" if request.request_id in late else "length"

        return [
            RequestOutput(
                request.request_id or "",
                None,
                request.prompt_token_ids,
                [CompletionOutput(i, finish_reason=reason(request), logprobs=[]) for i in range(n)],
            )
            for request in self.requests
        ]

    def _whole(self, number: int, place: int, answer: CompletionOutput) -> CompletionChoice:
        delta = replace(Delta.whole(answer), index=place)
        echo = self.echoes.get(number)
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
            if not self._only_read:
                async for events in self._generated_events(generation, offsets):
                    yield events
            outputs = await self._finished(generation)
        log_request(self.id, outputs, self.body.user)
        if self._only_read:  # the engine has already finished, however slowly the client reads
            for number in range(len(self.requests)):
                yield await self._echo_event(number, offsets)
            yield await self.context.replies.events(lambda: self._final_chunks(outputs), 0)
        if self.body.include_usage:
            yield await self.context.replies.events(lambda: [self._document([], usage=usage_of(outputs))], 0)

    async def _generated_events(self, generation: Generation, offsets: dict[int, int]) -> Events:
        stream_usage = StreamUsage(sum(len(request.prompt_token_ids) for request in self.requests))
        updates = _from_first_sample(generation.updates()) if self.body.echo else generation.updates()
        async for update in updates:
            if self.body.echo and self._index(update.number, 0) not in offsets:
                yield await self._echo_event(update.number, offsets)
            chunks = functools.partial(self._chunks, update, offsets, stream_usage)
            yield await self.context.replies.events(chunks, update.entries)

    async def _echo_event(self, number: int, offsets: dict[int, int]) -> bytes:
        """Return the events that echo a prompt, whose log-probabilities are known."""
        echo = await self._echo_prompt(number)
        return await self.context.replies.events(
            functools.partial(self._echo, echo, number, offsets), self._echo_entries(number)
        )

    def _echo(self, echo: PromptEcho, number: int, offsets: dict[int, int]) -> list[Completion]:
        documents = []
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
            stream_usage.completion_tokens += len(delta.token_ids)
            if delta.text or delta.ended or self.body.metrics or self.body.logprobs is not None:
                choice = self._choice(update.number, delta, offset)
                documents.append(
                    self._document([choice], stream_usage.document if self.body.continuous_usage else None)
                )
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
        spelling = self.context.texts.spelling
        return completion_logprobs(spelling, delta.token_ids, delta.logprobs, delta.pieces, offset, top)

    async def _echo_prompt(self, number: int) -> PromptEcho:
        request, prompt = self.requests[number], self.body.prompts[number]
        return await self.context.texts.run(_echo_of, self.context.texts, request, prompt, self.body.logprobs)


async def _from_first_sample(updates: AsyncIterator[Update]) -> AsyncIterator[Update]:
    """Hold back a prompt's updates until its sample 0 has a token, or has ended.

    That sample reads the prompt's log-probabilities; the others may copy the prompt from a cache and be faster.
    """
    begun: set[int] = set()
    held: defaultdict[int, list[Update]] = defaultdict(list)
    async for update in updates:
        held[update.number].append(update)
        if update.number in begun or any(delta.index == 0 for delta in update.deltas):
            begun.add(update.number)
            yield Update.joined(held.pop(update.number))


async def _encode(context: Context, prompt: str | list[int], suffix: str | None) -> list[int]:
    if suffix:
        return await context.texts.encode_gap(prompt, suffix)
    return await context.texts.encode(prompt) if isinstance(prompt, str) else prompt


def _entries(body: CompletionRequest) -> int:
    """Log-probability entries per token: its own, and those of the likeliest tokens."""
    return 1 + (body.logprobs or 0)


def _echoed(body: CompletionRequest, request: Request) -> Request:
    """Return the request with what its echo needs."""
    tokens, top = request.prompt_token_ids, body.logprobs if body.echo else None
    reading = None if top is None or len(tokens) < 2 else PromptScores(tokens, top)
    return replace(request, reading=reading, only_read=body.max_tokens == 0)


def _echo_of(texts: TextWorker, request: Request, prompt: str | list[int], top: int | None) -> PromptEcho:
    """Return the echo of a prompt that was read. top: log-probabilities per token; None: none at all."""
    growing, tokens = Detokenizer(texts.tokenizer), request.prompt_token_ids
    pieces = [growing.push(token) for token in tokens]
    pieces[-1] += growing.finish()
    text = prompt if isinstance(prompt, str) else "".join(pieces)
    if top is None:
        return PromptEcho(text, None)
    scored = request.reading.logprobs if isinstance(request.reading, PromptScores) else [None]
    return PromptEcho(text, completion_logprobs(texts.spelling, tokens, scored, pieces, 0, top))
