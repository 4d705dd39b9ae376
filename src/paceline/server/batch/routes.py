"""``/v1/files`` and ``/v1/batches``, as OpenAI has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from paceline.server import errors
from paceline.server.batch.documents import (
    BatchList,
    BatchObject,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
    PageQuery,
)
from paceline.server.batch.forms import FormReader, Part
from paceline.server.batch.runner import ANYBODY, Runner
from paceline.server.batch.store import page
from paceline.server.bodies import checked
from paceline.server.context import Context

Q = TypeVar("Q", bound=BaseModel)
_PIECE = 2**16  # bytes
_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "const": "batch"}},
    "required": ["file", "purpose"],
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_CONTENT = {200: {"content": {"application/octet-stream": {}}, "description": "The file, as it is"}}


class Desk:
    """Who asks, and what for. runner: None where no files are kept."""

    def __init__(self, context: Context, runner: Runner | None) -> None:
        self._context, self._runner = context, runner

    @property
    def runner(self) -> Runner:
        """Raises ApiError (404)."""
        if self._runner is None:
            message = "this server keeps no files and plays no batches: start it with --batch-dir DIR"
            raise errors.not_found(message, code="no_batch_dir")
        return self._runner

    def owner_of(self, request: Request) -> str:
        """With keys everybody has his own files; without, all have the same."""
        return self._context.client_of(request) if self._context.config.api_keys else ANYBODY


def add_batches(app: FastAPI, context: Context, runner: Runner | None) -> None:
    """All of these routes; without a runner they say how to have them."""
    desk = Desk(context, runner)
    _add_uploads(app, desk)
    _add_files(app, desk)
    _add_batches(app, desk)


def _add_uploads(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/files", response_model=FileObject, openapi_extra=_UPLOAD)
    async def upload(request: Request) -> Response:
        """Keep a file: a form with the file and its purpose, "batch"."""
        store = desk.runner.store
        _refuse_strangers(request)
        async with store.arriving(desk.owner_of(request)) as arrival:
            reader = FormReader(request.headers.get("content-type", ""), arrival.write)
            try:
                async for piece in _pieces(request):
                    await arrival.take(reader.feed, piece)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            return document(await arrival.keep(_upload_of(reader.end()).filename or ""))


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it comes, in pieces that are worth a turn on the disk."""
    waiting = bytearray()
    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= _PIECE:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _add_files(app: FastAPI, desk: Desk) -> None:
    @app.get("/v1/files", response_model=FileList)
    async def files(request: Request) -> Response:
        """Which files are kept. Query: limit, after, order ("asc" or "desc"), purpose."""
        store, query, owner = desk.runner.store, _query(FilesQuery, request), desk.owner_of(request)
        mine = [kept.document for kept in store.files.values() if kept.owner == owner]
        wanted = [each for each in mine if query.purpose in (None, each.purpose)]
        data, more = page(wanted if query.order == "asc" else wanted[::-1], query.limit, query.after)
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return document(FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=more))

    @app.get("/v1/files/{file_id}", response_model=FileObject)
    async def file(file_id: str, request: Request) -> Response:
        """A file's name and size."""
        return document(desk.runner.store.file(desk.owner_of(request), file_id))

    @app.delete("/v1/files/{file_id}", response_model=FileDeleted)
    async def delete(file_id: str, request: Request) -> Response:
        """Forget a file."""
        await desk.runner.store.delete(desk.owner_of(request), file_id)
        return document(FileDeleted(id=file_id))

    @app.get("/v1/files/{file_id}/content", response_class=FileResponse, responses=_CONTENT)  # type: ignore[arg-type]
    async def content(file_id: str, request: Request) -> Response:
        """A file as it is."""
        store = desk.runner.store
        name = store.file(desk.owner_of(request), file_id).filename
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(store.content(file_id), 200, headers, "application/octet-stream", filename=name)


def _add_batches(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/batches", response_model=BatchObject)
    async def create(body: BatchRequest, request: Request) -> Response:
        """Answer a file of requests, behind all requests that come one by one."""
        return document(await desk.runner.create(desk.owner_of(request), body))

    @app.get("/v1/batches", response_model=BatchList)
    async def batches(request: Request) -> Response:
        """Which batches there are, the newest first. Query: limit, after."""
        store, query, owner = desk.runner.store, _query(PageQuery, request), desk.owner_of(request)
        mine = [kept.document for kept in store.batches.values() if kept.owner == owner]
        data, more = page(mine[::-1], query.limit, query.after)
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return document(BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=more))

    @app.get("/v1/batches/{batch_id}", response_model=BatchObject)
    async def batch(batch_id: str, request: Request) -> Response:
        """How far a batch is."""
        return document(desk.runner.store.batch(desk.owner_of(request), batch_id).document)

    @app.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
    async def cancel(batch_id: str, request: Request) -> Response:
        """End a batch; what was answered is kept."""
        return document(await desk.runner.cancel(desk.owner_of(request), batch_id))


def document(reply: BaseModel) -> Response:
    """Whole: what is not known yet is null."""
    return Response(reply.model_dump_json(), 200, media_type="application/json")


def _query(model: type[Q], request: Request) -> Q:
    """Raises ApiError (400), also for what is not known."""
    return checked(model, dict(request.query_params))


def _refuse_strangers(request: Request) -> None:
    """A page from elsewhere may send forms without asking first; browsers say where it is from. Raises ApiError."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise errors.ApiError(403, errors.INVALID, "pages from elsewhere cannot upload files", code="foreign_origin")


def _upload_of(parts: list[Part]) -> Part:
    """The file. Raises ApiError."""
    fields = {part.name: part for part in parts}
    if len(fields) < len(parts):
        raise errors.invalid("a field was given twice")
    for name in fields.keys() - {"file", "purpose"}:
        shown = errors.shortened(name, 100)
        raise errors.invalid(f"unknown field {shown!r}: this server refuses what it would have to ignore", shown)
    if "purpose" not in fields or fields["purpose"].content != b"batch":
        raise errors.invalid('files are kept for batches: purpose is "batch"', "purpose")
    if "file" not in fields or fields["file"].filename is None:
        raise errors.invalid("the form has no file", "file")
    return fields["file"]
