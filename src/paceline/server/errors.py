"""Errors as clients see them: ``{"error": {"message", "type", "param", "code"}}`` with the right status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from paceline.server.shares import Full

INVALID = "invalid_request_error"
TWO_LENGTHS, BODY_TIMEOUT = "two_lengths", "body_timeout"
_LAST = frozenset({TWO_LENGTHS, BODY_TIMEOUT})  # after these nobody knows where the next request would begin


class ErrorBody(BaseModel):
    """What went wrong. param: the field at fault. code: a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no success."""

    error: ErrorBody


class ApiError(PacelineError):
    """An answer that is no success. retry_after: seconds after which trying again may help."""

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
        message = shortened(str(self), MAX_MESSAGE).encode("utf-8", "replace").decode()  # broken letters, too
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """For a request that has not been answered yet."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.code in _LAST:
            headers["Connection"] = "close"
        return JSONResponse(self.body, self.status, headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, INVALID, message, param=param, code=code)


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """404."""
    return ApiError(404, INVALID, message, param=param, code=code)


def unauthorized() -> ApiError:
    """401."""
    message = "this server needs an API key: send the header 'Authorization: Bearer KEY'"
    return ApiError(401, "authentication_error", message, code="invalid_api_key")


def too_large(limit: int) -> ApiError:
    """413."""
    message = f"the request's body is longer than {limit} bytes, the most this server reads"
    return ApiError(413, INVALID, message, code="request_too_large")


def misdirected(host: str) -> ApiError:
    """421: somebody else's name points here."""
    message = (
        f"this server is not known as {host[:100]!r}; if it should be, start it with --allowed-hosts NAME"
        " (or '*' for any name), which without API keys is checked against pages from elsewhere"
    )
    return ApiError(421, INVALID, message, code="unknown_host")


def encoded() -> ApiError:
    """415."""
    message = "the request's body has a Content-Encoding; this server reads bodies as they are: send it uncompressed"
    return ApiError(415, INVALID, message, code="unsupported_encoding")


def busy(what: str, full: Full) -> ApiError:
    """503 where all clients together have as much as this server takes, 429 where this one alone has its share."""
    if full == "server":
        return unavailable(f"there are as many {what} as this server takes at a time; try again", "busy")
    message = f"there are as many {what} from your address as this server takes at a time; try again"
    return ApiError(429, "rate_limit_error", message, code="too_many_of_one_client", retry_after=1)


def overloaded(message: str, retry_after: int) -> ApiError:
    """429: the queue is full."""
    return ApiError(429, "rate_limit_error", message, code="queue_full", retry_after=retry_after)


def over_limit(message: str, retry_after: int) -> ApiError:
    """429: of one key alone."""
    return ApiError(429, "rate_limit_error", message, code="key_limit", retry_after=retry_after)


def round_failed() -> ApiError:
    """500: an exception in the engine; the log has it."""
    message = "the engine failed while it decoded this request; the server's log says why"
    return ApiError(500, "server_error", message, code="engine_error")


def failed(error: Exception) -> ApiError:
    """What ended one request alone: its own fault where paceline says so, else 500; the log has it."""
    return from_paceline(error) if isinstance(error, PacelineError) else round_failed()


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """503: not yet, or no longer."""
    return ApiError(503, "server_error", message, code=code, retry_after=retry_after)


def timed_out(seconds: float) -> ApiError:
    """504: the request's own time limit, or the server's, has passed."""
    return ApiError(504, "timeout_error", f"not finished within {seconds:g} s, and given up", code="timeout")


def from_paceline(error: PacelineError) -> ApiError:
    """What paceline raises on purpose while it looks at a request is the request's fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ParameterError):
        return invalid(str(error), error.field)
    if isinstance(error, PromptTooLongError):
        return invalid(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, StructureError):
        return invalid(str(error), "response_format")
    if isinstance(error, (RequestError, MissingPackageError)):
        return invalid(str(error))
    return ApiError(500, "server_error", str(error))


def from_validation(found: Sequence[Mapping[str, Any]], data: object) -> ApiError:
    """400 for a document that pydantic refuses: the first fields at fault, and why. data: the document."""
    faults = [_fault(fault, data) for fault in found[:MAX_FAULTS]]
    message = "; ".join(dict.fromkeys(text for _, text in faults))
    more = "" if len(found) <= MAX_FAULTS else f"; and {len(found) - MAX_FAULTS} more"
    return invalid(message + more, faults[0][0] if faults else None)


def _fault(fault: Mapping[str, Any], data: object) -> tuple[str | None, str]:
    """The field, and what is wrong with it."""
    place = _place(fault, data)
    if fault["type"] == "extra_forbidden":
        return place, f"unknown field {place!r}: this server refuses what it would have to ignore"
    text = shortened(fault["msg"], MAX_FAULT)
    if fault["type"] in ("unsupported", "top_logprobs", "not_a_stream", "prompt", "max_tokens"):
        return place, text
    return place, f"{place or 'body'}: {text}"


def _place(fault: Mapping[str, Any], data: object) -> str | None:
    """The field as the client spells it: pydantic's own names for the ways to read it are no part of the document."""
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
    """At most so many characters of a text, with a mark where it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
