"""Replies of the Responses API: the whole response, its items, and token counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, model_validator

from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.server.replies import PromptTokensDetails

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputTokensDetails(BaseModel):
    """reasoning_tokens: tokens of the thoughts."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @staticmethod
    def of(output: RequestOutput, reasoning_tokens: int) -> ResponseUsage:
        prompt = len(output.prompt_token_ids)
        made = sum(answer.metrics.output_tokens for answer in output.candidates)
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=PromptTokensDetails(cached_tokens=output.cached_tokens),
            output_tokens=made,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=prompt + made,
        )


class Response(BaseModel):
    """Response of ``/v1/responses``. The request's own settings are repeated; store is false whatever it says."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    @model_validator(mode="after")
    def _write_all(self) -> Response:
        """Mark all fields as set: clients expect every one of them, and replies leave out what was not set."""
        self.__pydantic_fields_set__.update(type(self).model_fields)
        return self


def status_of(answer: CompletionOutput) -> Status:
    """Return the status of a response with this answer."""
    return "completed" if answer.finish_reason == "stop" else "incomplete"


def message_item(
    item_id: str, status: Status, text: str | None, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """An output item with the text of the message. text: None before it begins."""
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The content part with the text of a message. logprobs: one entry per token, if they were asked for."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def reasoning_item(item_id: str, status: Status, text: str | None) -> dict[str, Any]:
    """An output item with thoughts. text: None before they begin."""
    content = [] if text is None else [reasoning_part(text)]
    fields: Mapping[str, Any] = {"summary": [], "content": content, "encrypted_content": None, "status": status}
    return {"id": item_id, "type": "reasoning", **fields}


def reasoning_part(text: str) -> dict[str, Any]:
    """The content part with thoughts."""
    return {"type": "reasoning_text", "text": text}


def call_item(item_id: str, status: Status, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """An output item with a call of a function."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}
