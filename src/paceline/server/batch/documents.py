"""Files and batches as OpenAI's documents, and as they are kept on disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.config import MAX_COUNT
from paceline.server import limits
from paceline.server.batch.lines import Url
from paceline.server.protocol import Label, Strict

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class FileObject(BaseModel):
    """A file that is kept."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    """It is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchFault(BaseModel):
    """Why a batch failed. line: of the input file; the first is 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(BaseModel):
    """The first of them."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchCounts(BaseModel):
    """Lines: all, answered, answered with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(BaseModel):
    """A batch, and how far it is."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Url
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


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRequest(Strict):
    """``POST /v1/batches``. seed: from it and a line's custom_id comes the seed of a line that has none."""

    input_file_id: Label
    endpoint: Url
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=limits.MAX_LABEL)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None


class PageQuery(BaseModel):
    """Which part of a list is wanted: at most ``limit`` entries after the one called ``after``."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=limits.MAX_FILES)] = 20
    after: Label | None = None


class FilesQuery(PageQuery):
    """Of files. order: by age."""

    limit: Annotated[int, Field(ge=1, le=MAX_COUNT)] = limits.MAX_FILES
    purpose: Purpose | None = None
    order: Literal["asc", "desc"] = "desc"


class KeptFile(BaseModel):
    """A file's document on disk. owner: who may see it."""

    owner: str
    document: FileObject


class KeptBatch(BaseModel):
    """A batch's."""

    owner: str
    seed: int
    document: BatchObject
