"""Requests on their way into the engine: made, checked, admitted, compared with earlier ones, submitted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from paceline.config import ServerConfig
from paceline.engine.engine import Request
from paceline.engine.scoring import EMBEDDED, PooledStates
from paceline.server import errors
from paceline.server.admission import Admission, AdmissionLimits, AdmissionTicket
from paceline.server.clients import prefix_owner
from paceline.server.generation import Generation, time_limit
from paceline.server.limits import MAX_LOGPROB_ENTRIES
from paceline.server.quotas import Quotas
from paceline.server.service import EngineService
from paceline.server.structures import AnswerForm, structured
from paceline.server.texts import TextWorker
from paceline.server.transcripts import Transcripts, log_difference

log = logging.getLogger("paceline.server")


class Dispatcher:
    """Makes the engine's requests, and runs them within the limits of their client and of the server.

    new_id: makes a unique id from its prefix. quotas: the limits of API keys.
    """

    def __init__(
        self,
        config: ServerConfig,
        service: EngineService,
        texts: TextWorker,
        new_id: Callable[[str], str],
        quotas: Quotas,
    ) -> None:
        self._config, self._service, self._texts, self._new_id = config, service, texts, new_id
        self.quotas = quotas
        self.admission = Admission(config.max_waiting, config.max_waiting_tokens)
        self._transcripts = Transcripts()
        self._embedding_width: int | None = None

    @property
    def limits(self) -> AdmissionLimits:
        """Capacity of the engine's rows."""
        llm = self._service.llm
        rows = llm.config.rows
        return AdmissionLimits(rows, rows * llm.engine.max_model_len)

    def check_answers(self, answers: int) -> None:
        """Raise ApiError (400) if the request has more sequences than the server can ever admit."""
        self.admission.check(answers, self.limits)

    async def requests(
        self,
        prompts: Sequence[list[int]],
        template: Request,
        prepare: Callable[[Request], Request] = lambda request: request,
    ) -> list[Request]:
        """Make and check the engine's requests. Raises ApiError.

        prompts: token ids. template: a request without its prompt: parameters, references, its client and its arrival.
        prepare: changes each request before it is checked.
        """

        def make(prompt: list[int]) -> Request:
            request = prepare(self._request(prompt, template))
            self._service.llm.engine.check(request)
            return request

        return await self._texts.run(lambda: [make(prompt) for prompt in prompts])

    def _request(self, prompt: list[int], template: Request) -> Request:
        made = self._service.llm.request(prompt, template.params)
        return replace(
            template,
            prompt_token_ids=made.prompt_token_ids,
            request_id=self._new_id("prompt"),
            make_stream=made.make_stream,
            make_constraint=made.make_constraint,
            prefix_owner=prefix_owner(self._config, template.client),
        )

    def check_logprobs(self, requests: Sequence[Request], top: int | None, *, of_prompts: bool = False) -> None:
        """Raise ApiError (400) if the reply would hold too many log-probabilities.

        top: log-probabilities per token besides its own (None: none at all). of_prompts: include the prompts' tokens.
        """
        if top is None:
            return
        positions = sum(
            ticket.answers * (ticket.made + of_prompts * len(request.prompt_token_ids))
            for request, ticket in zip(requests, self._tickets(requests), strict=True)
        )
        if positions * (1 + top) > MAX_LOGPROB_ENTRIES:
            message = (
                f"{positions * (1 + top)} log-probabilities were requested; one reply has at most "
                f"{MAX_LOGPROB_ENTRIES}; reduce logprobs, max_tokens, n or the number of prompts"
            )
            raise errors.invalid(message, "logprobs")

    def _tickets(self, requests: Sequence[Request]) -> list[AdmissionTicket]:
        max_model_len = self._service.llm.engine.max_model_len
        return [AdmissionTicket.of(request, max_model_len) for request in requests]

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], form: AnswerForm, *, timeout: float | None, streaming: bool
    ) -> AsyncIterator[Generation]:
        """Admit the requests of one client together, submit them to the engine and yield their ``Generation``.

        Those that only read their prompt, and collect nothing from it, are not submitted.
        form: what the answers must look like, compiled before they are submitted. timeout: seconds (None: the server's
        default). streaming: whether tokens are delivered round by round. Raises ApiError.
        """
        first = requests[0]
        if len(requests) == 1:
            self._compare(first.prompt_token_ids, first.client)
        generation, tickets = Generation(self._service, streaming=streaming), self._tickets(requests)
        async with self._admitted(first.client, tickets, timeout, generation), generation:
            constrained = await structured(self._service.llm, requests, form)
            for request, ticket in zip(constrained, tickets, strict=True):
                if request.reading is not None or not request.only_read:
                    generation.submit(request, ticket)
            yield generation

    def _compare(self, prompt: Sequence[int], client: str) -> None:
        """Record where a prompt differs from an earlier one of its client."""
        divergence = self._transcripts.note(client, prompt)
        if divergence is None:
            return
        self._service.meter.prompt_differed(divergence.first_difference)
        if log.isEnabledFor(logging.DEBUG) and not divergence.extends:
            log_difference(divergence, prompt, self._texts.tokenizer.spell)

    @asynccontextmanager
    async def _admitted(
        self, client: str, tickets: Sequence[AdmissionTicket], timeout: float | None, generation: Generation
    ) -> AsyncIterator[None]:
        """Hold the client's quota and the tickets' admission, within the time limit. Raises ApiError.

        The quota is charged with the prompts' tokens and those that are generated.
        """
        with self.quotas.hold(client, sum(ticket.tokens for ticket in tickets)):
            self.admission.enter(client, tickets, self.limits)
            try:
                async with time_limit(self._config.request_timeout if timeout is None else timeout):
                    yield
            finally:
                self.quotas.charge(client, sum(ticket.read for ticket in tickets) + generation.made)
                for ticket in tickets:
                    ticket.close()

    async def embedding_width(self) -> int:
        """Numbers in an embedding of this model."""
        if self._embedding_width is None:
            text = PooledStates([0])
            request = Request([0], EMBEDDED, request_id=self._new_id("text"), reading=text, only_read=True)
            await self._read([request], Generation(self._service, streaming=False))
            self._embedding_width = len(text.vector)
        return self._embedding_width

    async def embed(self, requests: Sequence[Request], timeout: float | None) -> None:
        """Read the texts of requests to embed; together they count as one answer without tokens. Raises ApiError."""
        ticket = AdmissionTicket(answers=1, made=0, read=sum(len(request.prompt_token_ids) for request in requests))
        generation = Generation(self._service, streaming=False)
        async with self._admitted(requests[0].client, [ticket], timeout, generation):
            await self._read(requests, generation)

    async def _read(self, requests: Sequence[Request], generation: Generation) -> None:
        """Run requests that only read their prompts."""
        async with generation:
            for request in requests:
                generation.submit(request)
            await generation.finish()
