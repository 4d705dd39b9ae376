"""Error responses: ``{"error": {"message", "type", "param", "code"}}`` with the matching HTTP status."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from paceline.errors import (
    MissingPackageError,
    PacelineError,
    ParameterError,
    PromptTooLongError,
    RequestError,
    StructureError,
)
from paceline.server.limits import MAX_FAULT, MAX_FAULTS, MAX_MESSAGE, MAX_SHOWN

Full = Literal["server", "client"]  # which limit is reached: over all clients, or of one
INVALID = "invalid_request_error"
TOO_LONG = "context_length_exceeded"
TWO_LENGTHS, BODY_TIMEOUT = "two_lengths", "body_timeout"
_LAST = frozenset({TWO_LENGTHS, BODY_TIMEOUT})  # the start of the next request is unknown: close the connection
OLLAMA = "/api/"  # paths of Ollama's API
_ANTHROPIC = "/v1/messages"
# Anthropic's client reads this and sends the whole conversation instead, without a thread.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorBody(BaseModel):
    """Details of an error. param: the invalid field. code: a machine-readable reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorBody


class ApiError(PacelineError):
    """An error response. kind: the OpenAI error type. retry_after: seconds after which the client may retry."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after = status, kind, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        message = shortened(str(self), MAX_MESSAGE).encode("utf-8", "replace").decode()  # replaces lone surrogates
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def body_for(self, path: str) -> dict[str, Any]:
        """The body in the form of the API that a path belongs to: OpenAI's, Anthropic's or Ollama's."""
        if path.startswith(OLLAMA):
            return {"error": self.body["error"]["message"]}
        if not path.startswith(_ANTHROPIC):
            return self.body
        kind = _ANTHROPIC_KINDS.get(self.status, "api_error" if self.status >= 500 else INVALID)
        details = {"details": _NO_THREADS} if self.param == "thread" else {}
        return {"type": "error", "error": {"type": kind, "message": self.body["error"]["message"], **details}}

    def response(self, path: str) -> JSONResponse:
        """Build the response to a request of a path. Call it only if none has been started."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.code in _LAST:
            headers["Connection"] = "close"
        return JSONResponse(self.body_for(path), self.status, headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: invalid request."""
    return ApiError(400, INVALID, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """404: unknown model, path, file or batch."""
    return ApiError(404, INVALID, message, param=param, code=code)


def unauthorized() -> ApiError:
    """401: missing or wrong API key."""
    message = "this server needs an API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    return ApiError(401, "authentication_error", message, code="invalid_api_key")


def too_large(limit: int) -> ApiError:
    """413: request body too large."""
    message = f"the request body exceeds this server's limit of {limit} bytes"
    return ApiError(413, INVALID, message, code="request_too_large")


def misdirected(host: str) -> ApiError:
    """421: the Host header does not name this server."""
    message = (
        f"this server does not accept the host name {host[:100]!r}; to allow it, start it with --allowed-hosts NAME"
        " (or '*' for any name); the check protects a server without API keys against DNS rebinding"
    )
    return ApiError(421, INVALID, message, code="unknown_host")


def encoded() -> ApiError:
    """415: the body is compressed or otherwise encoded."""
    message = "the request body has a Content-Encoding, which this server does not decode: send it uncompressed"
    return ApiError(415, INVALID, message, code="unsupported_encoding")


def busy(what: str, full: Full) -> ApiError:
    """503 if the limit for all clients together is reached, 429 if only this client's is.

    what: the limited resource.
    """
    if full == "server":
        return unavailable(f"this server is at its limit of {what}; try again", "busy")
    message = f"your address is at this server's limit of {what} per client; try again"
    return ApiError(429, "rate_limit_error", message, code="too_many_of_one_client", retry_after=1)


def overloaded(message: str, retry_after: int) -> ApiError:
    """429: the queue is full."""
    return ApiError(429, "rate_limit_error", message, code="queue_full", retry_after=retry_after)


def over_limit(message: str, retry_after: int) -> ApiError:
    """429: an API key is at its own limit."""
    return ApiError(429, "rate_limit_error", message, code="key_limit", retry_after=retry_after)


def round_failed() -> ApiError:
    """500: a round raised an exception, which the log shows."""
    message = "the engine failed while decoding this request; see the server's log"
    return ApiError(500, "server_error", message, code="engine_error")


def failed(error: Exception) -> ApiError:
    """Response to an error that ended one request only.

    An error that paceline raised on purpose keeps its status; any other becomes 500.
    """
    return from_paceline(error) if isinstance(error, PacelineError) else round_failed()


def unavailable(message: str, code: str) -> ApiError:
    """503: not ready, too busy or shutting down."""
    return ApiError(503, "server_error", message, code=code, retry_after=1)


def timed_out(seconds: float) -> ApiError:
    """504: the timeout of the request or of the server has passed."""
    return ApiError(504, "timeout_error", f"the request did not finish within {seconds:g} s", code="timeout")


def from_paceline(error: PacelineError) -> ApiError:
    """Map an error that paceline raises while it checks a request to an error response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (ParameterError, StructureError)):
        return invalid(str(error), error.field)
    if isinstance(error, PromptTooLongError):
        return invalid(str(error), code=TOO_LONG)
    if isinstance(error, (RequestError, MissingPackageError)):
        return invalid(str(error))
    return ApiError(500, "server_error", str(error))


@asynccontextmanager
async def names_long_text(param: str) -> AsyncIterator[None]:
    """Name the field ``param`` in errors about a text that is too long, unless they name one. Raises ApiError."""
    try:
        yield
    except (ApiError, PromptTooLongError) as error:
        named = from_paceline(error)
        if named.code == TOO_LONG:
            named.param = named.param or param
        raise named from error.__cause__


def from_validation(found: Sequence[Mapping[str, Any]], data: object) -> ApiError:
    """400 for a document that pydantic rejects: names the first invalid fields.

    found: pydantic's list of errors. data: the document.
    """
    field = _place(found[0], data) if found else None
    found = [fault for fault in found if not _is_other_form(fault, found)]
    texts = [_fault(fault, data) for fault in found[:MAX_FAULTS]]
    suffix = "" if len(found) <= MAX_FAULTS else f"; and {len(found) - MAX_FAULTS} more"
    return invalid("; ".join(dict.fromkeys(texts)) + suffix, field)


def _is_other_form(fault: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a fault says only that a list with faults of its own is no text, where both are possible."""
    *field, branch = fault["loc"] or (None,)
    size = len(field)
    return branch == "str" and any(len(f["loc"]) > size + 1 and list(f["loc"][:size]) == field for f in found)


def _fault(fault: Mapping[str, Any], data: object) -> str:
    """Return the invalid field and what is wrong with it."""
    place = _place(fault, data)
    if fault["type"] == "extra_forbidden":
        return f"unknown field {place!r}: this server rejects fields that it does not support"
    text = shortened(fault["msg"], MAX_FAULT)
    if fault["type"] == "union_tag_invalid":  # pydantic names what finds the type, perhaps a function of ours
        text = f"type {shortened(fault['ctx']['tag'], MAX_SHOWN)!r} is not one of {fault['ctx']['expected_tags']}"
    if fault["type"] in ("unsupported", "top_logprobs", "not_a_stream", "prompt", "max_tokens"):
        return text
    return f"{place or 'body'}: {text}"


def _place(fault: Mapping[str, Any], data: object) -> str | None:
    """Return the field's path in the client's document.

    pydantic's ``loc`` also names branches of unions, which are left out here.
    """
    parts: list[str | int] = []
    last = len(fault["loc"]) - 1
    for number, part in enumerate(fault["loc"]):
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
        elif fault["type"] != "missing" or number < last:
            continue
        parts.append(part)
    place = ".".join(map(str, parts)) or fault.get("ctx", {}).get("field")
    return None if place is None else shortened(place, MAX_SHOWN)


def shortened(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``, ending in an ellipsis if it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
