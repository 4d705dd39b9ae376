"""``/v1/embeddings``: the served model's hidden states, pooled."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import normalize

from paceline.config import PoolingName
from paceline.engine.engine import Request
from paceline.engine.scoring import EMBEDDED, PooledStates
from paceline.server import errors, limits
from paceline.server.context import Context
from paceline.server.protocol import ApiRequest, Label, Positive, TokenIds, bounded_list


class EmbeddingRequest(ApiRequest):
    """``POST /v1/embeddings``.

    input: a text or token ids, or several. dimensions: numbers of a vector, the first ones, scaled to length 1 again;
    at most the model's, which is the default. pooling: mean of the hidden states of all tokens, or the state of the
    last one; by default the one that the model's files name, or else mean. priority, timeout: as in completions.
    """

    model: Label | None = None
    input: (
        str
        | TokenIds
        | Annotated[list[str], bounded_list(limits.MAX_EMBEDDINGS)]
        | Annotated[list[TokenIds], bounded_list(limits.MAX_EMBEDDINGS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    pooling: PoolingName | None = None
    user: Label | None = None
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    timeout: Positive | None = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The texts. An empty list is one text without tokens."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input or isinstance(self.input[0], int):
            return [cast("list[int]", self.input)]
        return self.input


class Embedding(BaseModel):
    """The embedding of one text: numbers, or the base64 form of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Response of ``/v1/embeddings``."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass
class EmbeddingJob:
    """One validated request, ready for the engine."""

    context: Context
    body: EmbeddingRequest
    requests: list[Request]
    texts: list[PooledStates]

    @classmethod
    @errors.names_long_text("input")
    async def prepare(cls, context: Context, body: EmbeddingRequest, client: str) -> EmbeddingJob:
        """Validate and tokenize a request. Raises ApiError."""
        context.check_model(body.model)
        if body.model in context.adapters:
            raise errors.invalid(
                f"embeddings are those of {context.model_name!r}; adapters only generate text", "model"
            )
        tokens = [await context.texts.encode(text) if isinstance(text, str) else text for text in body.inputs]
        pooling = context.llm.pooling_or_default(body.pooling)
        texts = [PooledStates(each, pooling) for each in tokens]
        requests = [
            Request(
                each.token_ids,
                EMBEDDED,
                request_id=context.new_id("text"),
                client=client,
                priority=body.priority or 0,
                reading=each,
                only_read=True,
            )
            for each in texts
        ]
        for request in requests:
            context.llm.engine.check(request)
        await _check_size(context, body, len(tokens))
        return cls(context, body, requests, texts)

    async def answer(self) -> bytes:
        """Return the whole response as JSON. Raises ApiError."""
        vectors = await self.vectors()
        return await self.context.replies.written(lambda: self._document(vectors), sum(map(len, vectors)))

    async def vectors(self) -> list[list[float]]:
        """Return the embeddings in order. Raises ApiError."""
        await self.context.dispatcher.embed(self.requests, self.body.timeout)
        return [_first(self.body.dimensions, text.vector).tolist() for text in self.texts]

    def _document(self, vectors: Sequence[list[float]]) -> EmbeddingList:
        tokens = sum(len(text.token_ids) for text in self.texts)
        encode = _base64 if self.body.encoding_format == "base64" else list[float]
        return EmbeddingList(
            object="list",
            data=[
                Embedding(object="embedding", index=index, embedding=encode(vector))
                for index, vector in enumerate(vectors)
            ],
            model=self.context.model_name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )


async def _check_size(context: Context, body: EmbeddingRequest, texts: int) -> None:
    width = await context.dispatcher.embedding_width()
    if body.dimensions is not None and body.dimensions > width:
        raise errors.invalid(f"dimensions must be at most {width}, the model's", "dimensions")
    most = limits.MAX_EMBEDDING_NUMBERS // width
    if texts > most:
        raise errors.invalid(f"{texts} texts; one request to this model has at most {most}", "input")


def _first(dimensions: int | None, vector: Tensor) -> Tensor:
    """The first numbers of a vector of length 1, scaled to length 1. None: the whole vector."""
    if dimensions is None or dimensions == len(vector):
        return vector
    return normalize(vector[:dimensions], dim=0)


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
