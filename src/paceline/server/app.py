"""The ASGI application: routes, error handlers and the start and stop of the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from paceline.chat.options import ChatOptions
from paceline.config import ServerConfig
from paceline.config.sampling import sampling_values
from paceline.errors import PacelineError
from paceline.server import errors, replies
from paceline.server.batch.routes import add_batches
from paceline.server.batch.runner import BatchRunner
from paceline.server.batch.store import BatchStore
from paceline.server.bodies import route_class
from paceline.server.chat import ChatJob
from paceline.server.chat_protocol import ChatRequest, TokenizeRequest
from paceline.server.completions import CompletionJob
from paceline.server.context import Context
from paceline.server.documents import written
from paceline.server.embeddings import EmbeddingJob, EmbeddingList, EmbeddingRequest
from paceline.server.generation import ClientGoneError, while_connected
from paceline.server.http_heads import Tracing
from paceline.server.messages.job import MessagesJob, count_tokens
from paceline.server.messages.protocol import MessagesRequest, PromptRequest
from paceline.server.messages.replies import MessageReply, TokenCount
from paceline.server.metrics import LiveStats, Stats
from paceline.server.models import Leases, ModelSource, ServedModels
from paceline.server.ollama.routes import add_ollama
from paceline.server.playground import add_playground
from paceline.server.protocol import CompletionRequest, DetokenizeRequest
from paceline.server.reference import add_reference
from paceline.server.responses import replies as responses_replies
from paceline.server.responses.job import ResponsesJob
from paceline.server.responses.protocol import ResponsesRequest
from paceline.server.security import Gate
from paceline.server.streaming import ENDING, EventStream, sampled
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{errors.ErrorResponse.__name__}"}}}
# Only 400 names the model, whose schema is then in the document: FastAPI builds a validator for each route and status
# that does, which took half of the time of ``make_app``.
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _ERROR, **({"model": errors.ErrorResponse} if status == 400 else {})}
    for status, text in {
        400: "The request is invalid; the message says why",
        401: "Missing or wrong API key",
        404: "No such model or path",
        408: "The body took too long to arrive",
        413: "The body is too large",
        415: "The Content-Type is not JSON, or the body has a Content-Encoding",
        421: "The Host header is not in the server's list of allowed hosts",
        422: "Not used: invalid requests get 400",
        429: "The queue is full, or this client is at its limit; Retry-After says when to retry",
        500: "The engine failed; the log says why",
        503: "Not ready yet, too busy, or shutting down",
        504: "Not finished within the request's timeout",
        507: "The disk for files and batches is full",
    }.items()
}


def make_app(
    config: ServerConfig,
    load: Callable[[], LLM],
    on_end: Callable[[], None] = lambda: None,
    others: Mapping[str, ModelSource] | None = None,
    memory_limit: int | None = None,
) -> FastAPI:
    """Build the server as an ASGI application.

    load: builds the model; called in the engine's thread when the application starts.
    on_end: called in the engine's thread if the engine cannot continue; ``app.state.context.service.failure`` holds the
    exception.
    others: models by name that are loaded when a request names them. memory_limit: bytes for all models together.
    """
    context = Context(config, load, on_end, others=[*(others or ())])
    served = ServedModels(context, others or {}, memory_limit)
    runner = None if config.batch_dir is None else BatchRunner(context, BatchStore(Path(config.batch_dir)))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.service.start()
        if runner is not None:
            runner.start()
        yield
        if runner is not None:
            await runner.stop()
        await served.stop()

    app = FastAPI(
        title="paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=_REFUSALS
    )
    app.state.context, app.state.served = context, served
    app.router.route_class = route_class(context.bodies)
    app.add_middleware(Leases)
    app.add_middleware(Gate, config=config, meter=context.meter)
    if config.allowed_origins:
        _add_cors(app, config.allowed_origins)
    app.add_middleware(Tracing)  # the outermost layer: refused requests have an id, too
    _add_error_handlers(app, context)
    _add_generation(app, served)
    _add_models(app, served)
    add_ollama(app, served)
    _add_texts(app, served)
    _add_operations(app, served)
    add_batches(app, context, runner)
    add_playground(app, config.playground)
    add_reference(app, config.playground)
    return app


def _add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Answer preflight requests, which have no key, and let pages of these origins read all replies."""
    methods, headers = ("GET", "POST", "DELETE"), ("X-Request-Id", "Retry-After")
    app.add_middleware(
        CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=("*",), expose_headers=headers
    )


def _add_generation(app: FastAPI, served: ServedModels) -> None:
    @app.post("/v1/completions", response_model=replies.Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete one or several prompts."""
        context = await served.of(request, body.model)
        job = await CompletionJob.prepare(context, body, context.client_of(request))
        return await _respond(context, request, job, bool(body.stream))

    @app.post("/v1/chat/completions", response_model=replies.Chat)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        context = await served.of(request, body.model)
        job = await ChatJob.prepare(context, body, context.client_of(request))
        return await _respond(context, request, job, bool(body.stream))

    @app.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed one or several texts."""
        context = await served.of(request, body.model)
        job = await EmbeddingJob.prepare(context, body, context.client_of(request))
        return await _respond_whole(request, job.answer())

    @app.post("/v1/messages", response_model=MessageReply)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation, in Anthropic's format."""
        context = await served.of(request, body.model)
        job = await MessagesJob.prepare(context, body, context.client_of(request))
        if body.stream:
            return EventStream(job.stream(), context.meter, done=b"")
        return await _respond_whole(request, job.answer())

    @app.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def tokens(body: PromptRequest, request: Request) -> Response:
        """Count the tokens of a conversation, in Anthropic's format."""
        return document(await count_tokens(await served.of(request, body.model), body))

    @app.post("/v1/responses", response_model=responses_replies.Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's Responses API. Nothing is stored."""
        context = await served.of(request, body.model)
        job = await ResponsesJob.prepare(context, body, context.client_of(request))
        if body.stream:
            return EventStream(job.stream(), context.meter, done=b"", on_error=job.on_error)
        return await _respond_whole(request, job.answer())


async def _respond(context: Context, request: Request, job: CompletionJob | ChatJob, streaming: bool) -> Response:
    """Respond with a stream of events or with one document. A client that disconnects frees its rows."""
    if streaming:
        return EventStream(job.stream(), context.meter)
    return await _respond_whole(request, job.answer())


async def _respond_whole(request: Request, answer: Awaitable[bytes]) -> Response:
    """Respond with one JSON document. Raises ClientGoneError."""
    return Response(await while_connected(request.receive, answer), media_type="application/json")


def document(reply: BaseModel, status: int = 200) -> Response:
    """Return a JSON response. Fields that were not set are left out."""
    return Response(written(reply), status, media_type="application/json")


def _add_models(app: FastAPI, served: ServedModels) -> None:
    first = served.first

    @app.get("/v1/models", response_model=replies.ModelList)
    async def models() -> Response:
        """List the models that this server serves, whether or not they are loaded."""
        cards = [_card(served, name) for name in (first.model_name, *first.adapters, *served.others)]
        return document(replies.ModelList(object="list", data=cards, models=cards))

    @app.get("/v1/models/{name:path}", response_model=replies.ModelCard)
    async def model(name: str) -> Response:
        """Describe a model by name."""
        if name not in served.others:
            first.check_model(name)
        return document(_card(served, name))


def _add_texts(app: FastAPI, served: ServedModels) -> None:
    @app.post("/v1/tokenize", response_model=replies.TokenizedText)
    @app.post("/tokenize", response_model=replies.TokenizedText)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Tokenize a text, or a conversation through the chat template."""
        context = await served.of(request, body.model)
        context.check_model(body.model)
        if body.messages is None:
            async with errors.names_long_text("prompt"):
                tokens = await context.texts.encode(body.prompt or "", body.add_special_tokens)
        else:
            async with errors.names_long_text("messages"):
                messages = [message.plain() for message in body.messages]
                prompt = await context.texts.chat_prompt(messages, ChatOptions())
            tokens = prompt.token_ids

        def found() -> replies.TokenizedText:
            result = replies.TokenizedText(
                count=len(tokens), max_model_len=context.llm.engine.max_model_len, tokens=tokens
            )
            if body.return_token_strs:
                result.token_strs = [context.texts.spelling.text_of(token) for token in tokens]
            return result

        return Response(await context.replies.written(found, len(tokens)), media_type="application/json")

    @app.get("/tokenizer_info", response_model=replies.TokenizerInfo)
    async def tokenizer_info() -> Response:
        """The chat template and the special tokens, for clients that write prompts themselves."""
        tokenizer = served.first.texts.tokenizer.huggingface
        template = tokenizer.chat_template
        names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
        return document(
            replies.TokenizerInfo(
                tokenizer_class=type(tokenizer).__name__,
                chat_template=template if isinstance(template, str) else None,
                model_max_length=served.first.llm.engine.max_model_len,
                **names,
            )
        )

    @app.post("/v1/detokenize", response_model=replies.DetokenizedText)
    @app.post("/detokenize", response_model=replies.DetokenizedText)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Turn token ids back into text. Special tokens appear by name, so that /tokenize accepts the result."""
        context = await served.of(request, body.model)
        context.check_model(body.model)
        engine = context.llm.engine
        vocabulary = engine.models.target.vocab_size
        if len(body.tokens) > engine.max_model_len:
            raise errors.invalid(f"at most {engine.max_model_len} tokens, the model's context length", "tokens")
        if any(token >= vocabulary for token in body.tokens):
            raise errors.invalid(f"token ids must be between 0 and {vocabulary - 1}", "tokens")
        prompt = await context.texts.run(context.texts.tokenizer.spell, body.tokens)
        return document(replies.DetokenizedText(prompt=prompt))


def _card(served: ServedModels, name: str) -> replies.ModelCard:
    """The card of a model. What only a loaded model can tell is left out while it is not loaded."""
    card = replies.ModelCard(id=name, object="model", created=served.first.created, owned_by="paceline")
    context = served.first if name not in served.others else served.contexts.get(name)
    if context is not None:
        card.max_model_len = context.llm.engine.max_model_len
        card.default_sampling = {
            "completions": sampling_values(context.default_sampling),
            "chats": sampling_values(context.default_chat_sampling),
        }
    return card


def _add_operations(app: FastAPI, served: ServedModels) -> None:
    first = served.first

    @app.head("/", include_in_schema=False)  # agents ask whether the server is there
    @app.head("/ping", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/ping", response_model=replies.Health, responses={503: {"model": replies.Health}})
    @app.get("/health", response_model=replies.Health, responses={503: {"model": replies.Health}})
    async def health() -> Response:
        """Return 200 once the first model is loaded and warmed up, and as long as its engine makes progress."""
        state = first.service.health
        return document(replies.Health(status=state), 200 if state == "ready" else 503)

    @app.get("/version", response_model=replies.ServerVersion)
    async def version() -> Response:
        """The version of paceline."""
        return document(replies.ServerVersion(version=__version__))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format, labelled with ``model`` where there are several models."""
        return Response(served.metrics(), media_type=PROMETHEUS)

    @app.get("/load", response_model=replies.ServerLoad)
    async def load() -> Response:
        """Number of sequences that run or wait, under the same name as in vLLM."""
        return document(replies.ServerLoad(server_load=served.inside))

    @app.get("/stats", response_model=Stats)
    async def stats() -> Response:
        """Current figures for people and dashboards, of all models that are loaded."""
        return document(served.stats())

    @app.get("/stats/stream", include_in_schema=False)
    async def live_stats(request: Request) -> Response:
        """The same with the state of /health, as server-sent events, four a second."""

        async def look() -> bytes:
            return written(LiveStats(status=first.service.health, stats=served.stats()))

        return EventStream(sampled(look, request.scope.get(ENDING)), first.meter, done=b"")


def _paths(app: FastAPI) -> str:
    """All documented paths, separated by commas."""
    routes = (route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema)
    return ", ".join(sorted({route.path for route in routes}))


def _add_error_handlers(app: FastAPI, context: Context) -> None:
    def answer(error: errors.ApiError, request: Request) -> JSONResponse:
        context.meter.refused(error)
        return error.response(request.url.path)

    @app.exception_handler(PacelineError)
    async def on_purpose(request: Request, error: PacelineError) -> Response:
        return answer(errors.from_paceline(error), request)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            message += f"; this server has {_paths(app)}"
        response = answer(errors.ApiError(error.status_code, errors.INVALID, message), request)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: Exception) -> Response:
        log.info("the client disconnected")
        return Response(status_code=499)  # not sent: the connection is closed

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return answer(errors.ApiError(500, "server_error", "internal error; see the server's log"), request)
