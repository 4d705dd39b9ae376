"""Files and batches: OpenAI's documents, and the documents stored on disk."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from paceline.config.limits import LEAST_SEED, MAX_COUNT, MOST_SEED
from paceline.server import limits
from paceline.server.batch.lines import Endpoint
from paceline.server.protocol import Label, Metadata, Strict

D = TypeVar("D")
Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileObject(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    """Response to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(BaseModel, Generic[D]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[D]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page[FileObject]):
    """A page of the list of files."""


class BatchFault(BaseModel):
    """Why a batch failed. line: line number in the input file, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(BaseModel):
    """The first reasons why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchCounts(BaseModel):
    """Lines in total, with a response, and with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(BaseModel):
    """A batch and its progress."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    metadata: dict[str, str] | None = None


class BatchList(Page[BatchObject]):
    """A page of the list of batches."""


class BatchRequest(Strict):
    """Body of ``POST /v1/batches``. seed: base of the seeds of lines without one."""

    input_file_id: Label
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    seed: Annotated[int, Field(ge=LEAST_SEED, le=MOST_SEED)] | None = None


class PageQuery(BaseModel):
    """Query of a list: at most ``limit`` entries after the entry with the id ``after``."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=limits.MAX_FILES)] = 20
    after: Label | None = None


class FilesQuery(PageQuery):
    """Query of the list of files. order: by creation time."""

    limit: Annotated[int, Field(ge=1, le=MAX_COUNT)] = limits.MAX_FILES
    purpose: Purpose | None = None
    order: Literal["asc", "desc"] = "desc"


class StoredFile(BaseModel):
    """A file's document on disk. owner: the only client that may see it. made: as a batch's."""

    owner: str
    made: int = 0
    document: FileObject


class StoredBatch(BaseModel):
    """A batch's document on disk.

    owner: the only client that may see it. made: nanoseconds of the clock, since ``created_at`` has whole seconds; 0 in
    documents of older versions. seed: base of its lines' seeds.
    """

    owner: str
    made: int = 0
    seed: int
    document: BatchObject
