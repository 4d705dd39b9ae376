"""``/v1/files`` and ``/v1/batches``, as in OpenAI's API."""

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
from paceline.server.batch.forms import FormPart, FormReader
from paceline.server.batch.runner import SHARED_OWNER, BatchRunner
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
_CONTENT = {200: {"content": {"application/octet-stream": {}}, "description": "The file's content"}}


class BatchAccess:
    """Access to the batch runner, or the error if the server has none."""

    def __init__(self, context: Context, runner: BatchRunner | None) -> None:
        self._context, self._runner = context, runner

    @property
    def runner(self) -> BatchRunner:
        """The runner. Raises ApiError (404) if the server keeps no files."""
        if self._runner is None:
            message = "this server does not support files and batches: start it with --batch-dir DIR"
            raise errors.not_found(message, code="no_batch_dir")
        return self._runner

    def owner_of(self, request: Request) -> str:
        """Return the owner of a request's files: with keys the client, without keys one owner for all."""
        return self._context.client_of(request) if self._context.config.api_keys else SHARED_OWNER

    def refuse_strangers(self, request: Request) -> None:
        """Raise ApiError (403) if a browser sends a form from another site that is not allowed.

        Browsers send cross-site forms without a preflight request, but with an Origin header.
        """
        origin, allowed = request.headers.get("origin"), self._context.config.allowed_origins
        if origin is None or origin in allowed or "*" in allowed:
            return
        if urlsplit(origin).netloc != request.headers.get("host"):
            message = "pages of other sites cannot upload files; to allow one, start the server with --allowed-origins"
            raise errors.ApiError(403, errors.INVALID, message, code="foreign_origin")


def add_batches(app: FastAPI, context: Context, runner: BatchRunner | None) -> None:
    """Add the routes. Without a runner they respond with 404 and how to enable them."""
    access = BatchAccess(context, runner)
    _add_uploads(app, access)
    _add_files(app, access)
    _add_batches(app, access)


def _add_uploads(app: FastAPI, access: BatchAccess) -> None:
    @app.post("/v1/files", response_model=FileObject, openapi_extra=_UPLOAD)
    async def upload(request: Request) -> Response:
        """Upload a file as a form with the fields file and purpose ("batch")."""
        store = access.runner.store
        access.refuse_strangers(request)
        async with store.receive_file(access.owner_of(request)) as incoming_file:
            reader = FormReader(request.headers.get("content-type", ""), incoming_file.write)
            try:
                async for piece in _pieces(request):
                    await incoming_file.take(reader.feed, piece)
            except ClientDisconnect:
                return Response(status_code=499)  # not sent: the connection is closed
            return document(await incoming_file.keep(_upload_of(reader.end()).filename or ""))


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces large enough for one write to disk each."""
    waiting = bytearray()
    async for chunk in request.stream():
        waiting += chunk
        if len(waiting) >= _PIECE:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _add_files(app: FastAPI, access: BatchAccess) -> None:
    @app.get("/v1/files", response_model=FileList)
    async def files(request: Request) -> Response:
        """List the files. Query: limit, after, order ("asc" or "desc"), purpose."""
        store, query, owner = access.runner.store, _query(FilesQuery, request), access.owner_of(request)
        mine = [stored.document for stored in store.files.values() if stored.owner == owner]
        matching = [each for each in mine if query.purpose in (None, each.purpose)]
        return document(FileList(**page(matching if query.order == "asc" else matching[::-1], query)))

    @app.get("/v1/files/{file_id}", response_model=FileObject)
    async def file(file_id: str, request: Request) -> Response:
        """Describe a file."""
        return document(access.runner.store.file(access.owner_of(request), file_id))

    @app.delete("/v1/files/{file_id}", response_model=FileDeleted)
    async def delete(file_id: str, request: Request) -> Response:
        """Delete a file."""
        await access.runner.store.delete(access.owner_of(request), file_id)
        return document(FileDeleted(id=file_id))

    @app.get("/v1/files/{file_id}/content", response_class=FileResponse, responses=_CONTENT)  # type: ignore[arg-type]
    async def content(file_id: str, request: Request) -> Response:
        """Download a file's content."""
        store = access.runner.store
        name = store.file(access.owner_of(request), file_id).filename
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(store.content(file_id), 200, headers, "application/octet-stream", filename=name)


def _add_batches(app: FastAPI, access: BatchAccess) -> None:
    @app.post("/v1/batches", response_model=BatchObject)
    async def create(body: BatchRequest, request: Request) -> Response:
        """Create a batch. Its lines run after all interactive requests."""
        return document(await access.runner.create(access.owner_of(request), body))

    @app.get("/v1/batches", response_model=BatchList)
    async def batches(request: Request) -> Response:
        """List the batches, newest first. Query: limit, after."""
        store, query, owner = access.runner.store, _query(PageQuery, request), access.owner_of(request)
        mine = [stored.document for stored in store.batches.values() if stored.owner == owner]
        return document(BatchList(**page(mine[::-1], query)))

    @app.get("/v1/batches/{batch_id}", response_model=BatchObject)
    async def batch(batch_id: str, request: Request) -> Response:
        """Describe a batch and its progress."""
        return document(access.runner.store.batch(access.owner_of(request), batch_id).document)

    @app.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject)
    async def cancel(batch_id: str, request: Request) -> Response:
        """Cancel a batch. Finished lines keep their responses."""
        return document(await access.runner.cancel(access.owner_of(request), batch_id))


def document(reply: BaseModel) -> Response:
    """Return a JSON response with all fields; unknown values are null."""
    return Response(reply.model_dump_json(), 200, media_type="application/json")


def _query(model: type[Q], request: Request) -> Q:
    """Validate the query. Raises ApiError (400), also for unknown parameters."""
    return checked(model, dict(request.query_params))


def _upload_of(parts: list[FormPart]) -> FormPart:
    """Return the form's file. Raises ApiError."""
    fields = {part.name: part for part in parts}
    if len(fields) < len(parts):
        raise errors.invalid("a form field occurs twice")
    for name in fields.keys() - {"file", "purpose"}:
        shown = errors.shortened(name, 100)
        raise errors.invalid(f"unknown field {shown!r}: this server rejects fields that it does not support", shown)
    if "purpose" not in fields or fields["purpose"].content != b"batch":
        raise errors.invalid('the only supported purpose is "batch"', "purpose")
    if "file" not in fields or fields["file"].filename is None:
        raise errors.invalid("the form has no file", "file")
    return fields["file"]
