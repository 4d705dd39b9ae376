"""The routes of Ollama's API."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from paceline.server import errors
from paceline.server.documents import written
from paceline.server.embeddings import EmbeddingJob, EmbeddingRequest
from paceline.server.generation import while_connected
from paceline.server.models import ServedModels
from paceline.server.ollama.job import OllamaJob, reply_of
from paceline.server.ollama.library import Library
from paceline.server.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    OllamaPromptEmbedRequest,
)
from paceline.server.ollama.replies import (
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaModelFacts,
    OllamaModelList,
    OllamaReply,
    OllamaStatus,
    OllamaVersion,
    nanoseconds,
)
from paceline.server.streaming import LineStream
from paceline.version import __version__

SPOKEN_VERSION = "0.12.0"  # of Ollama, whose requests and replies these are
_REFUSED = {
    "delete": "this server deletes no files: run paceline rm NAME on its machine",
    "create": "this server makes no models: start it with --also NAME=MODEL",
    "copy": "this server copies no models: start it with --also NAME=MODEL",
    "push": "this server uploads no models",
}


def add_ollama(app: FastAPI, served: ServedModels) -> None:
    """Add the routes below /api/."""
    library = Library(served)
    _add_answers(app, served, library)
    _add_embeddings(app, served, library)
    _add_library(app, served, library)


def _add_answers(app: FastAPI, served: ServedModels, library: Library) -> None:
    async def respond(body: OllamaChatRequest | OllamaGenerateRequest, request: Request, *, empty: bool) -> Response:
        body.model = library.name_of(body.model)
        if empty:
            return await _load(served, library, body, request)
        began = time.monotonic()
        context = await served.of(request, body.model)
        _keep(served, library, body.model, body.keep_alive)
        job = await OllamaJob.prepare(context, body, context.client_of(request), time.monotonic() - began)
        if body.stream:
            return LineStream(job.stream(), context.meter)
        return Response(await while_connected(request.receive, job.answer()), media_type="application/json")

    @app.post("/api/chat", response_model=OllamaReply)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Continue a conversation, in Ollama's format."""
        return await respond(body, request, empty=not body.messages)

    @app.post("/api/generate", response_model=OllamaReply)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer or continue a prompt, in Ollama's format."""
        return await respond(body, request, empty=not (body.prompt or body.suffix))


async def _load(
    served: ServedModels, library: Library, body: OllamaChatRequest | OllamaGenerateRequest, request: Request
) -> Response:
    """Load or unload a model. Raises ApiError."""
    unload = body.keep_alive == 0
    if unload:
        if library.place(body.model) is None:
            raise errors.invalid(f"{body.model!r} is the server's first model, which stays loaded", "keep_alive")
    else:
        (await served.of(request, body.model)).check_model(body.model)
    _keep(served, library, body.model, body.keep_alive)
    reply = reply_of(body, body.model, {"content": ""}, done=True)
    reply.done_reason = "unload" if unload else "load"
    return _document(reply)


def _keep(served: ServedModels, library: Library, model: str, keep_alive: float | None) -> None:
    """Set how long a model that is loaded on demand stays loaded."""
    place = library.place(model)
    if place is not None and keep_alive is not None:
        served.keep(place, None if keep_alive < 0 else keep_alive)


def _add_embeddings(app: FastAPI, served: ServedModels, library: Library) -> None:
    async def embed(body: OllamaEmbedRequest, request: Request) -> OllamaEmbeddings:
        body.model = library.name_of(body.model)
        began = time.monotonic()
        context = await served.of(request, body.model)
        loaded = time.monotonic()
        _keep(served, library, body.model, body.keep_alive)
        texts = [body.input] if isinstance(body.input, str) else body.input
        async with errors.names_long_text("input"):
            tokens = [await context.texts.encode(text) for text in texts]
        if body.truncate is not False:
            tokens = [each[: context.llm.engine.max_model_len - 1] for each in tokens]
        wanted = EmbeddingRequest(model=body.model, input=tokens, dimensions=body.dimensions)
        job = await EmbeddingJob.prepare(context, wanted, context.client_of(request))
        vectors = await while_connected(request.receive, job.vectors())
        return OllamaEmbeddings(
            model=body.model,
            embeddings=vectors,
            total_duration=nanoseconds(time.monotonic() - began),
            load_duration=nanoseconds(loaded - began),
            prompt_eval_count=sum(map(len, tokens)),
        )

    @app.post("/api/embed", response_model=OllamaEmbeddings)
    async def embeddings(body: OllamaEmbedRequest, request: Request) -> Response:
        """Embed one or several texts, in Ollama's format."""
        return _document(await embed(body, request))

    @app.post("/api/embeddings", response_model=OllamaEmbedding)
    async def embedding(body: OllamaPromptEmbedRequest, request: Request) -> Response:
        """Embed one text, in Ollama's older format."""
        wanted = OllamaEmbedRequest(model=body.model, input=body.prompt, keep_alive=body.keep_alive)
        (vector,) = (await embed(wanted, request)).embeddings
        return _document(OllamaEmbedding(embedding=vector))


def _add_library(app: FastAPI, served: ServedModels, library: Library) -> None:
    @app.get("/api/tags", response_model=OllamaModelList)
    async def tags() -> Response:
        """List the models that this server serves, in Ollama's format."""
        return _document(await library.tags())

    @app.get("/api/ps", response_model=OllamaModelList)
    async def loaded() -> Response:
        """List the models in memory, in Ollama's format. size: bytes that they may take."""
        return _document(await library.loaded())

    @app.post("/api/show", response_model=OllamaModelFacts)
    async def show(body: OllamaModelRequest) -> Response:
        """Describe a model by its files, in Ollama's format."""
        return _document(await library.show(body.model))

    @app.post("/api/pull", response_model=OllamaStatus)
    async def pull(body: OllamaModelRequest) -> Response:
        """Fetch the files of a model that this server serves, in Ollama's format."""
        lines = library.pull(body.model)
        if body.stream is not False:
            return LineStream(lines, served.first.meter)
        *_, last = [line async for line in lines]
        return Response(last, media_type="application/json")

    @app.get("/api/version", response_model=OllamaVersion)
    async def version() -> Response:
        """The version of Ollama whose API this is, and paceline's own."""
        return _document(OllamaVersion(version=SPOKEN_VERSION, paceline=__version__))

    for name, why in _REFUSED.items():
        app.add_api_route(f"/api/{name}", _refuse(why), methods=["DELETE", "POST"], include_in_schema=False)


def _refuse(why: str):  # type: ignore[no-untyped-def]
    async def refuse() -> Response:
        raise errors.ApiError(403, errors.INVALID, why)

    return refuse


def _document(reply: BaseModel) -> Response:
    """Return a JSON response. Fields that were not set are left out."""
    return Response(written(reply), media_type="application/json")
