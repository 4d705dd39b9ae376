"""What every route needs: the engine's service, the tokenizer, ids, admission, and what is written about requests."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from paceline.engine import Request
from paceline.errors import PacelineError
from paceline.outputs import Metrics, RequestOutput
from paceline.params import ServerConfig
from paceline.server import errors
from paceline.server.admission import Admission
from paceline.server.delta import Delta
from paceline.server.generation import Generation, time_limit
from paceline.server.logprobs import Spelling
from paceline.server.metrics import Meter
from paceline.server.replies import Usage
from paceline.server.service import EngineService
from paceline.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")
P = ParamSpec("P")
T = TypeVar("T")


class Context:
    """One server. Its slow work on texts happens in one thread, so that the event loop stays quick."""

    def __init__(self, config: ServerConfig, load: Callable[[], LLM], on_end: Callable[[], None]) -> None:
        self.config = config
        self.meter = Meter(config.log_interval)
        self.service = EngineService(load, self.meter, on_end, config.stall_timeout)
        self.admission = Admission(config.max_waiting)
        self.created = int(time.time())
        self._start, self._count = secrets.token_hex(4), itertools.count()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self.bodies = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    @property
    def llm(self) -> LLM:
        """Raises ApiError (503) until it is ready."""
        return self.service.llm

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.llm.tokenizer
        if tokenizer is None:
            raise errors.invalid("this model was loaded without a tokenizer and cannot be served")
        return tokenizer

    @functools.cached_property
    def spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.llm.engine.models.target.name

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) unless it is the model that is served; None is whatever is served."""
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist here; this server has {self.model_name!r}"
            raise errors.not_found(message, "model", "model_not_found")

    def new_id(self, kind: str) -> str:
        """For example cmpl-1a2b3c4d-17: no two requests of any two servers share one."""
        return f"{kind}-{self._start}-{next(self._count)}"

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Tokenizing, templates, grammars. Raises ApiError for what paceline raises on purpose."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._texts, functools.partial(work, *args, **kwargs))
        except PacelineError as error:
            raise errors.from_paceline(error) from error

    def check(self, requests: Sequence[Request]) -> None:
        """Raises ApiError for what the engine would refuse."""
        for request in requests:
            try:
                self.llm.engine.check(request)
            except PacelineError as error:
                raise errors.from_paceline(error) from error

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], timeout: float | None, streaming: bool
    ) -> AsyncIterator[Generation]:
        """The requests in the engine, admitted together. Raises ApiError."""
        rows = self.llm.config.max_batch_size
        seconds = self.config.request_timeout if timeout is None else timeout
        generation = Generation(self.service, requests, streaming)
        with self.admission.place(generation.answers, rows):
            async with time_limit(seconds), generation:
                yield generation

    def close(self) -> None:
        """Nothing is begun any more."""
        for pool in (self._texts, self.bodies):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Tally:
    """What a stream has used so far."""

    prompt_tokens: int
    completion_tokens: int = 0

    def add(self, delta: Delta) -> Usage:
        """The usage up to this piece."""
        self.completion_tokens += len(delta.token_ids)
        total = self.prompt_tokens + self.completion_tokens
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens, total_tokens=total)


def usage_of(prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> Usage:
    """Every prompt once, every answer that was made."""
    prompt = sum(map(len, prompts))
    answers = sum(answer.metrics.output_tokens for output in outputs for answer in output.outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=answers, total_tokens=prompt + answers)


def log_request(request_id: str, outputs: Sequence[RequestOutput], user: str | None) -> None:
    """One line about a request that was answered: what it cost, all its answers together."""
    answers = [answer for output in outputs for answer in output.outputs]
    total = Metrics(
        rounds=sum(answer.metrics.rounds for answer in answers),
        drafted=sum(answer.metrics.drafted for answer in answers),
        accepted=sum(answer.metrics.accepted for answer in answers),
    )
    first = [seconds for answer in answers if (seconds := answer.metrics.time_to_first_token) is not None]
    paces = [pace for answer in answers if (pace := answer.metrics.ms_per_token) is not None]
    fields = {
        "request": request_id,
        "user": user,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": sum(answer.metrics.output_tokens for answer in answers),
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "mean_acceptance_length": total.mean_acceptance_length,
        "ttft_ms": 1000 * min(first) if first else None,
        "ms_per_token": sum(paces) / len(paces) if paces else None,
        "finish_reasons": ",".join(sorted({str(answer.finish_reason) for answer in answers})),
    }
    log.info("answered", extra={"fields": fields})
