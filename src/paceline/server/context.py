"""State shared by all routes: engine service, tokenizer, worker threads, admission, request ids and request logs."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel

from paceline.chat.options import ChatFields, ChatOptions, check_variables
from paceline.config import SamplingParams, ServerConfig
from paceline.config.ranges import names_of
from paceline.core.outputs import Metrics, RequestOutput
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Request
from paceline.engine.scoring import EMBEDDED, PooledStates
from paceline.errors import PacelineError, RequestError
from paceline.models.text.infill import InfillMarkers
from paceline.models.text.tokenizer import Tokenizer
from paceline.server import errors, vllm_names
from paceline.server.admission import Admission, AdmissionLimits, AdmissionTicket, PromptCost
from paceline.server.clients import client_of, prefix_owner
from paceline.server.delta import Delta
from paceline.server.documents import event, typed_events, written, written_in_pieces
from paceline.server.generation import Generation, time_limit
from paceline.server.limits import MAX_LOGPROB_ENTRIES
from paceline.server.logprobs import Spelling
from paceline.server.metrics import Meter
from paceline.server.protocol import GenerationRequest, TurnRequest
from paceline.server.quotas import Quotas, TokenUsage
from paceline.server.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from paceline.server.service import EngineService
from paceline.server.structures import AnswerForm, structured
from paceline.server.transcripts import Transcripts

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")
_LONG_TEXT = 2**14  # characters; tokenizing them takes a few milliseconds
_SHOWN = 32  # tokens shown on each side of a difference
_SHORT_REPLY = 512  # tokens and log-probabilities; serializing them takes a millisecond
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RequestOptions:
    """Options by which a request is served.

    client: identity for fair queueing. arrival: seconds on the clock of ``time.monotonic``. timeout: seconds until the
    request fails (None: the server's default). streaming: whether tokens are delivered round by round.
    of_batch: whether it is a line of a batch, which waits behind other lines: its time budget begins with its row.
    """

    client: str
    priority: int
    arrival: float
    timeout: float | None
    streaming: bool
    of_batch: bool = False

    @staticmethod
    def of(body: GenerationRequest | TurnRequest, client: str, *, of_batch: bool = False) -> RequestOptions:
        return RequestOptions(client, body.priority or 0, time.monotonic(), body.timeout, bool(body.stream), of_batch)


def _loaded(load: Callable[[], LLM], config: ServerConfig) -> LLM:
    """Load the model. Raises ParameterError for ``chat_template_kwargs`` that its chat template has no use for.

    Raises RequestError if it has no chat template, and ModelFormatError for impossible recommended sampling.
    """
    llm = load()
    if config.generation_config == "auto" and (recommended := _unusual(llm.get_default_sampling_params())):
        log.info("sampling of requests that do not say, as the model's files recommend: %s", recommended)
    if config.chat_template_kwargs:
        templates = [llm.requests.tokenizer.chat_template(tools=tools) for tools in (False, True)]
        check_variables(config.chat_template_kwargs, "\n".join(templates))
    return llm


def _unusual(params: SamplingParams) -> str:
    """The fields that differ from the usual ones, as text."""
    usual = SamplingParams()
    names = [name for name in names_of(SamplingParams) if getattr(params, name) != getattr(usual, name)]
    return ", ".join(f"{name} {getattr(params, name)}" for name in names)


class Context:
    """Everything that the routes of one server share.

    Slow work runs in four single threads, to keep the event loop responsive: request bodies, short texts, long texts
    (so that short ones do not wait behind them) and long replies.
    """

    def __init__(self, config: ServerConfig, load: Callable[[], LLM], on_end: Callable[[], None]) -> None:
        self.config = config
        self.meter = Meter(config.log_interval)
        checked = functools.partial(_loaded, load, config)
        self.service = EngineService(checked, self.meter, on_end, config.stall_timeout, config.capture_seconds)
        self.quotas = Quotas(config.api_keys)
        self.admission = Admission(config.max_waiting, config.max_waiting_tokens)
        self.created = int(time.time())
        self._transcripts = Transcripts()
        self._embedding_width: int | None = None
        self._start, self._count = secrets.token_hex(4), itertools.count()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="long texts")
        self._replies = ThreadPoolExecutor(1, thread_name_prefix="replies")
        self.bodies = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    @property
    def llm(self) -> LLM:
        """The loaded model. Raises ApiError (503) until it is ready."""
        return self.service.llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self.llm.requests.tokenizer

    @functools.cached_property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters of requests that name none."""
        return SamplingParams() if self.config.generation_config == "off" else self.llm.get_default_sampling_params()

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

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.llm.engine.models.target.name

    def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format, with vLLM's names too if configured.

        Raises ApiError (503) if vLLM's names are configured and the model's name is not known yet.
        """
        ours = self.meter.exposition()
        if self.config.metrics_names == "paceline":
            return ours
        return ours + vllm_names.exposition(self.meter.registry, self.model_name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, which requests may name as models."""
        found = self.llm.engine.parts.target.adapters
        return () if found is None else found.names

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless ``name`` is the served model or an adapter; None stands for the served model."""
        if name is not None and name not in (self.model_name, *self.adapters):
            served = ", ".join(repr(each) for each in (self.model_name, *self.adapters))
            message = f"the model {name!r} does not exist; this server serves {served}"
            raise errors.not_found(message, "model", "model_not_found")

    def for_model(self, name: str | None, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a request for the model ``name``, which may be an adapter. See ``check_model``."""
        return replace(params, adapter=name) if name in self.adapters else params

    def new_id(self, kind: str) -> str:
        """Return a unique id such as cmpl-1a2b3c4d-17. It is unique across servers, too."""
        return f"{kind}-{self._start}-{next(self._count)}"

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run short work on texts in their thread. Raises ApiError for errors of paceline."""
        return await _run_in(self._texts, functools.partial(work, *args, **kwargs))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids. Raises ApiError (400) if it is longer than any prompt can be."""
        return await self._on_text(len(text), self.tokenizer.encode, text, add_special_tokens)

    async def encode_gap(self, before: str | list[int], after: str) -> list[int]:
        """Return the token ids of a fill-in-the-middle prompt. Raises ApiError (400) as ``encode``."""
        markers = await self.in_thread(lambda: self.infill)
        return await self._on_text(len(before) + len(after), markers.prompt, self.tokenizer, before, after)

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> ChatPrompt:
        """Render a conversation. Raises ApiError (400) if it is longer than any prompt can be.

        messages: in OpenAI's form. fields: of the request; the server's own settings are added.
        """
        options = ChatOptions.of({**fields, "tool_parser": self.config.tool_parser})
        options = replace(options, default_template_kwargs=self.config.chat_template_kwargs)
        given = [*messages, fields.get("tools"), fields.get("chat_template_kwargs")]
        return await self._on_text(_characters(given), self.llm.requests.chat_prompt, messages, options)

    async def _on_text(self, characters: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` on a text of ``characters`` characters in the thread for its length."""
        max_characters = await self.in_thread(lambda: self._max_characters)
        if characters > max_characters:
            message = f"the text has {characters} characters; prompts of this model have at most {max_characters}"
            raise errors.invalid(message, code=errors.TOO_LONG)
        pool = self._texts if characters <= _LONG_TEXT else self._long_texts
        return await _run_in(pool, functools.partial(work, *args, **kwargs))

    @functools.cached_property
    def _max_characters(self) -> int:
        """Upper bound of the characters of a prompt that fits into the model's context."""
        return self.llm.engine.max_model_len * max(len(spelling or "") for spelling in self.tokenizer.tokens())

    async def in_background(self, work: Callable[[], T]) -> T:
        """Run slow work in the replies' thread, so that short texts do not wait for it."""
        return await _run_in(self._replies, work)

    async def written(self, build: Callable[[], BaseModel], entries: int) -> bytes:
        """Serialize a reply. entries: its tokens and log-probabilities; a long reply is serialized in a thread."""
        if entries <= _SHORT_REPLY:
            return written(build())
        return await _run_in(self._replies, lambda: written_in_pieces(build()))

    async def events(self, build: Callable[[], Sequence[BaseModel]], entries: int) -> bytes:
        """Serialize documents as server-sent events. entries: as in ``written``."""
        if entries <= _SHORT_REPLY:
            return b"".join(event(written(document)) for document in build())
        return await _run_in(
            self._replies, lambda: b"".join(event(written_in_pieces(document)) for document in build())
        )

    async def typed_events(self, build: Callable[[], Iterable[Mapping[str, Any]]], entries: int) -> bytes:
        """Serialize documents as server-sent events named by their "type". entries: as in ``written``."""
        if entries <= _SHORT_REPLY:
            return typed_events(build())
        return await self.in_background(lambda: typed_events(build()))

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Capacity of the engine's rows."""
        rows = self.llm.config.max_batch_size
        return AdmissionLimits(rows, rows * self.llm.engine.max_model_len)

    def client_of(self, request: HttpRequest) -> str:
        """Identity of the client for fair queueing and limits."""
        return client_of(request.scope, bool(self.config.api_keys))

    def check_answers(self, answers: int) -> None:
        """Raise ApiError (400) if the request has more sequences than the server can ever admit."""
        self.admission.check(answers, self.admission_limits)

    async def requests(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        options: RequestOptions,
        references: Sequence[list[int]] = (),
        completed: Callable[[Request], Request] = lambda request: request,
    ) -> list[Request]:
        """Build and check the engine's requests. Raises ApiError.

        references: token ids of texts that answers may repeat, shared by all prompts. completed: adds to a request.
        """

        def make(prompt: list[int]) -> Request:
            request = completed(self._request(prompt, params, options, references))
            self.llm.engine.check(request)
            return request

        return await _run_in(self._texts, lambda: [make(prompt) for prompt in prompts])

    async def chat_request(
        self, prompt: ChatPrompt, params: SamplingParams, options: RequestOptions, references: Sequence[list[int]] = ()
    ) -> Request:
        """Build and check the engine's request for a conversation. See ``requests``."""
        (request,) = await self.requests([prompt.token_ids], params, options, references)
        request = self.llm.requests.of_chat(request, prompt)
        return replace(request, read_message=None)  # replies read the message themselves

    def _request(
        self, prompt: list[int], params: SamplingParams, options: RequestOptions, references: Sequence[list[int]]
    ) -> Request:
        name = self.new_id("prompt")
        request = self.llm.request(
            prompt,
            params,
            references=references,
            arrival=options.arrival,
            request_id=name,
            client=options.client,
            priority=options.priority,
        )
        owner = prefix_owner(self.config, options.client)
        return replace(request, budget_from_row=options.of_batch, prefix_owner=owner)

    def check_logprobs(self, requests: Sequence[Request], top: int | None, *, read: bool = False) -> None:
        """Raise ApiError (400) if the reply would hold too many log-probabilities.

        top: log-probabilities per token besides its own (None: none at all). read: include the prompts' tokens.
        """
        if top is None:
            return
        positions = sum(
            cost.answers * (cost.made + read * len(request.prompt_token_ids))
            for request in requests
            for cost in [self._cost(request)]
        )
        if positions * (1 + top) > MAX_LOGPROB_ENTRIES:
            message = (
                f"{positions * (1 + top)} log-probabilities were requested; one reply has at most "
                f"{MAX_LOGPROB_ENTRIES}; reduce logprobs, max_tokens, n or the number of prompts"
            )
            raise errors.invalid(message, "logprobs")

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], options: RequestOptions, *, form: AnswerForm | None = None
    ) -> AsyncIterator[Generation]:
        """Admit the requests together, submit them to the engine and yield their ``Generation``.

        Those that only read their prompt, and collect nothing from it, are not submitted.
        form: what the answers must look like, compiled before they are submitted. Raises ApiError.
        """
        costs = [self._cost(each) for each in requests]
        if len(requests) == 1:
            self._compare(requests[0].prompt_token_ids, options.client)
        generation = None
        async with self._admitted(costs, options) as (tickets, key_usage):
            try:
                constrained = await structured(self.llm, requests, form or AnswerForm(), options.arrival)
                pairs = zip(constrained, tickets, strict=True)
                wanted = [pair for pair in pairs if pair[0].reading is not None or not pair[0].only_read]
                generation = Generation(self.service, wanted, options.streaming)
                async with generation:
                    yield generation
            finally:
                key_usage.used += 0 if generation is None else generation.made

    def _compare(self, prompt: Sequence[int], client: str) -> None:
        """Record where a prompt differs from an earlier one of its client."""
        found = self._transcripts.note(client, prompt)
        if found is None:
            return
        self.meter.prompt_differed(found.first_difference)
        if log.isEnabledFor(logging.DEBUG) and not found.extends:
            at = found.first_difference
            parts = {
                "before": prompt[max(0, at - _SHOWN) : at],
                "was": found.earlier[at:][:_SHOWN],
                "now": prompt[at:][:_SHOWN],
            }
            texts = {name: self.tokenizer.spell(tokens) for name, tokens in parts.items()}
            fields = {"first_difference": at, "earlier_tokens": found.earlier_tokens, "prompt_tokens": len(prompt)}
            log.debug("prompt differs", extra={"fields": fields | texts})

    @asynccontextmanager
    async def _admitted(
        self, costs: Sequence[PromptCost], options: RequestOptions
    ) -> AsyncIterator[tuple[list[AdmissionTicket], TokenUsage]]:
        """Hold the client's quota and an admission ticket per prompt, within the request's time limit.

        Raises ApiError. The prompts' tokens are counted as used; the block adds the tokens that it generates.
        """
        with self.quotas.hold(options.client, sum(cost.tokens for cost in costs)) as key_usage:
            tickets = self.admission.enter(options.client, costs, self.admission_limits)
            key_usage.used = sum(cost.read for cost in costs)
            try:
                async with time_limit(self.config.request_timeout if options.timeout is None else options.timeout):
                    yield tickets, key_usage
            finally:
                for ticket in tickets:
                    ticket.close()

    async def embedding_width(self) -> int:
        """Numbers in an embedding of this model."""
        if self._embedding_width is None:
            text = PooledStates([0])
            await self._read([Request([0], EMBEDDED, request_id=self.new_id("text"), reading=text, only_read=True)])
            self._embedding_width = len(text.vector)
        return self._embedding_width

    async def embed(self, requests: Sequence[Request], options: RequestOptions) -> None:
        """Read the texts of requests to embed; together they count as one answer without tokens. Raises ApiError."""
        cost = PromptCost(answers=1, made=0, read=sum(len(request.prompt_token_ids) for request in requests))
        async with self._admitted([cost], options):
            await self._read(requests)

    async def _read(self, requests: Sequence[Request]) -> None:
        """Run requests that only read their prompts, without admission."""
        async with Generation(self.service, [(request, None) for request in requests], streaming=False) as generation:
            await generation.finish()

    def _cost(self, request: Request) -> PromptCost:
        params, size = request.params, len(request.prompt_token_ids)
        made = 0 if request.only_read else min(params.max_tokens, self.llm.engine.max_model_len - size)
        return PromptCost(params.answers, made, size if made or request.reading else 0)

    def close(self) -> None:
        """Stop the worker threads and forget the tokenizer. Pending work is cancelled.

        FastAPI remembers the routes of ended servers, and thereby this object: it must not keep the model in memory.
        """
        for pool in (self._texts, self._long_texts, self._replies, self.bodies):
            pool.shutdown(wait=False, cancel_futures=True)
        vars(self).pop("spelling", None)


def _characters(value: object) -> int:
    """Least characters of messages, tools or variables as text: those of texts and names, one for any other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(name) + _characters(part) for name, part in value.items())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 1


async def _run_in(pool: Executor, work: Callable[[], T]) -> T:
    """Run ``work`` in ``pool``. Errors that paceline raises become ApiError."""
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    except PacelineError as error:
        raise errors.from_paceline(error) from error


@dataclass
class StreamUsage:
    """Token usage of a stream so far."""

    prompt_tokens: int
    completion_tokens: int = 0

    def add(self, delta: Delta) -> Usage:
        """Add a delta and return the usage including it."""
        self.completion_tokens += len(delta.token_ids)
        total = self.prompt_tokens + self.completion_tokens
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens, total_tokens=total)


def usage_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput], details: CompletionTokensDetails | None = None
) -> Usage:
    """Sum the usage: each prompt once, every sampled sequence. details: token counts of a chat."""
    prompt = sum(map(len, prompts))
    answers = sum(answer.metrics.output_tokens for output in outputs for answer in output.candidates)
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=answers,
        total_tokens=prompt + answers,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(output.cached_tokens for output in outputs)),
    )
    if details is not None:
        usage.completion_tokens_details = details
    return usage


def log_request(request_id: str, outputs: Sequence[RequestOutput], user: str | None) -> None:
    """Log one line about a completed request, summed over its answers."""
    answers = [answer for output in outputs for answer in output.candidates]
    total = Metrics(
        rounds=sum(answer.metrics.rounds for answer in answers),
        drafted=sum(answer.metrics.drafted for answer in answers),
        accepted=sum(answer.metrics.accepted for answer in answers),
        saved_by_sibling=sum(answer.metrics.saved_by_sibling for answer in answers),
    )
    first = [seconds for answer in answers if (seconds := answer.metrics.time_to_first_token) is not None]
    paces = [pace for answer in answers if (pace := answer.metrics.ms_per_token) is not None]
    fields = {
        "request": request_id,
        "user": user,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.cached_tokens for output in outputs),
        "output_tokens": sum(answer.metrics.output_tokens for answer in answers),
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "saved_by_sibling": total.saved_by_sibling,
        "mean_acceptance_length": total.mean_acceptance_length,
        "ttft_ms": 1000 * min(first) if first else None,
        "ms_per_token": sum(paces) / len(paces) if paces else None,
        "finish_reasons": ",".join(sorted({str(answer.finish_reason) for answer in answers})),
    }
    log.info("answered", extra={"fields": fields})
