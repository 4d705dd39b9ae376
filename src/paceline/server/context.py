"""The parts of a server that serve one model, and the names by which requests call it."""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest

from paceline.chat.options import check_variables
from paceline.config import RECOMMENDED_FIELDS, SamplingParams, ServerConfig
from paceline.config.sampling import sampling_words
from paceline.server import errors, vllm_names
from paceline.server.clients import client_of
from paceline.server.dispatch import Dispatcher
from paceline.server.documents import ReplyWriter
from paceline.server.metrics import Meter
from paceline.server.protocol import AnsweredRequest
from paceline.server.quotas import Quotas
from paceline.server.service import EngineService
from paceline.server.texts import TextWorker
from paceline.server.threads import WorkerThread

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")


def _loaded(load: Callable[[], LLM], config: ServerConfig) -> LLM:
    """Load the model. Raises ParameterError for ``chat_template_kwargs`` that its chat template has no use for.

    Raises RequestError if it has no chat template, and ModelFormatError for impossible recommended sampling.
    """
    llm = load()
    if config.generation_config == "auto":
        chats = sampling_words(llm.get_default_sampling_params(chat=True))
        if llm.recommends_sampling:
            log.info("sampling of requests that do not say, as the model's files recommend: %s", chats)
        else:
            log.info("sampling of chats that do not say, as the model's files recommend nothing: %s", chats)
    if config.chat_template_kwargs:
        templates = [llm.requests.tokenizer.chat_template(tools=tools) for tools in (False, True)]
        check_variables(config.chat_template_kwargs, "\n".join(templates))
    return llm


def exposition(meter: Meter, config: ServerConfig, name: Callable[[], str]) -> bytes:
    """Return a model's metrics in Prometheus' text format, with vLLM's names too if configured. name: the model's."""
    ours = meter.exposition()
    return ours if config.metrics_names == "paceline" else ours + vllm_names.exposition(meter.registry, name())


class RequestIds:
    """Makes ids such as cmpl-1a2b3c4d-17, which are unique across servers, too."""

    def __init__(self) -> None:
        self._start, self._count = secrets.token_hex(4), itertools.count()

    def __call__(self, prefix: str) -> str:
        return f"{prefix}-{self._start}-{next(self._count)}"


class Context:
    """Everything that requests to one model share.

    Slow work runs in five single threads, which keep the event loop responsive: request bodies, short and long texts
    (``texts``), long replies (``replies``), and replies that a subprocess reads by the model's response template
    (``waiting_replies``).

    first: the context of the server's first model, whose ids, limits of keys and threads for bodies and replies its
    other models use. meter: of an earlier load of the model. others: names of the server's other models.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], LLM],
        on_end: Callable[[], None],
        *,
        first: Context | None = None,
        meter: Meter | None = None,
        others: Sequence[str] = (),
    ) -> None:
        self.config, self._others = config, others
        self.meter = meter or Meter(config.log_interval)
        checked = functools.partial(_loaded, load, config)
        self.service = EngineService(checked, self.meter, on_end, config.stall_timeout, config.capture_seconds)
        self.new_id: RequestIds = RequestIds() if first is None else first.new_id
        self.quotas: Quotas = Quotas(config.api_keys) if first is None else first.quotas
        self.bodies: WorkerThread = WorkerThread("bodies") if first is None else first.bodies
        self.replies: ReplyWriter = ReplyWriter() if first is None else first.replies
        self.waiting_replies = ReplyWriter(waits=True)
        self.texts = TextWorker(config, self.service)
        self.dispatcher = Dispatcher(config, self.service, self.texts, self.new_id, self.quotas)
        shared = (self.bodies, self.replies) if first is None else ()
        self._own = (self.texts, self.waiting_replies, *shared)
        self.created = int(time.time())

    @property
    def llm(self) -> LLM:
        """The loaded model. Raises ApiError (503) until it is ready."""
        return self.service.llm

    @functools.cached_property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters of completions that name none, and what those of a chat complete."""
        return SamplingParams() if self.config.generation_config == "off" else self.llm.get_default_sampling_params()

    @functools.cached_property
    def default_chat_sampling(self) -> SamplingParams:
        """The sampling parameters of chats that name none."""
        off = self.config.generation_config == "off"
        return SamplingParams() if off else self.llm.get_default_sampling_params(chat=True)

    def chat_sampling(self, body: AnsweredRequest) -> SamplingParams:
        """The sampling parameters that a chat's own replace in part.

        A chat that names one of ``RECOMMENDED_FIELDS`` gets nothing of the default that is made for chats.
        """
        named = body.given.keys() & set(RECOMMENDED_FIELDS)
        return self.default_sampling if named else self.default_chat_sampling

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.llm.engine.models.target.name

    def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format, with vLLM's names too if configured.

        Raises ApiError (503) if vLLM's names are configured and the model's name is not known yet.
        """
        return exposition(self.meter, self.config, lambda: self.model_name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, which requests may name as models."""
        found = self.llm.engine.parts.target.adapters
        return () if found is None else found.names

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless ``name`` is the served model or an adapter; None stands for the served model."""
        if name is not None and name not in (self.model_name, *self.adapters):
            served = ", ".join(repr(each) for each in (self.model_name, *self.adapters, *self._others))
            message = f"the model {name!r} does not exist; this server serves {served}"
            raise errors.not_found(message, "model", "model_not_found")

    def for_model(self, name: str | None, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a request for the model ``name``, which may be an adapter. See ``check_model``."""
        return replace(params, adapter=name) if name in self.adapters else params

    def client_of(self, request: HttpRequest) -> str:
        """Identity of the client for fair queueing and limits."""
        return client_of(request.scope, bool(self.config.api_keys))

    def close(self) -> None:
        """Stop the worker threads and forget the tokenizer. Pending work is cancelled.

        FastAPI remembers the routes of ended servers, and thereby this object: it must not keep the model in memory.
        """
        for worker in self._own:
            worker.close()
