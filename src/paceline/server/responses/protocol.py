"""Request bodies of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError, to_json

from paceline.config import MAX_LOGPROBS, StructuredOutputs
from paceline.server import limits
from paceline.server.chat_protocol import JsonObjectFormat, TextFormat
from paceline.server.protocol import (
    LABELS,
    TEXT_ONLY,
    Label,
    Metadata,
    RefusalPart,
    SampledTurnRequest,
    Strict,
    Unsupported,
    Verbatim,
    bounded_list,
    reject_types,
)

_STORES = "this server stores no answers: send the whole conversation as input"
_TEXT_LOGPROBS = "message.output_text.logprobs"  # of ``include``
_HOSTED = "it runs on OpenAI's own service"


class ItemText(Strict):
    """A piece of a message's text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=limits.MAX_CONTENT_PARTS)] | None = None
    logprobs: Annotated[list[JsonValue], Field(max_length=limits.MAX_CONTENT_PARTS)] | None = None


_REFUSED_PARTS = dict.fromkeys(("input_image", "input_file", "input_audio"), TEXT_ONLY)
_Part: TypeAlias = Annotated[
    Annotated[ItemText | RefusalPart, Field(discriminator="type")], reject_types(_REFUSED_PARTS, "parts")
]
Content: TypeAlias = str | Annotated[list[_Part], bounded_list(limits.MAX_CONTENT_PARTS)]


class _Item(Strict):
    """id, status: of an item that an earlier answer had. provider_specific_fields: of LiteLLM, without effect."""

    id: Label | None = None
    provider_specific_fields: JsonValue = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message. phase: a label of the client's."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Label | None = None


class FunctionCallItem(_Item):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: Label
    name: Label
    arguments: str


class CustomCallItem(_Item):
    """A call of a tool that takes a text. Such tools are left out of ``tools``; their calls are shown to the model."""

    type: Literal["custom_tool_call"]
    call_id: Label
    name: Label
    input: str

    @property
    def arguments(self) -> str:
        return to_json({"input": self.input}).decode()


class CallOutputItem(_Item):
    """What a call returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Label
    output: Content


class ReasoningText(Strict):
    """A piece of thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_Item):
    """Thoughts of the assistant. encrypted_content: of the service that made them; it cannot be read here."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], bounded_list(limits.MAX_CONTENT_PARTS)] | None = None
    content: Annotated[list[ReasoningText], bounded_list(limits.MAX_CONTENT_PARTS)] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


Item: TypeAlias = MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


_REFUSED_ITEMS = {"item_reference": _STORES} | dict.fromkeys(
    ("web_search_call", "file_search_call", "computer_call", "code_interpreter_call", "image_generation_call"), _HOSTED
)
_AnyItem: TypeAlias = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[CustomCallItem, Tag("custom_tool_call")]
        | Annotated[CallOutputItem, Tag("function_call_output")]
        | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_kind),
    ],
    reject_types(_REFUSED_ITEMS, "items"),
]


class FunctionTool(Verbatim):
    """A function that the model may call."""

    type: Literal["function"]
    name: Label
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    def as_openai(self) -> dict[str, Any]:
        """The tool in the form of chats, its fields as they were sent."""
        function = {name: value for name, value in self._sent.items() if name != "type"}
        return {"type": "function", "function": function}


def _functions(tools: Any) -> Any:
    """Leave out tools that are no functions: agents offer those of OpenAI's service beside their own."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type", "function") == "function"]


class NamedFunction(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: Label


class AllowedFunctions(Strict):
    """The functions that may be called, and whether one has to be. Other tools are left out, as in ``tools``."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], bounded_list(limits.MAX_TOOLS), BeforeValidator(_functions)]


_NamedFunctions: TypeAlias = Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]


class Reasoning(Strict):
    """effort: how much the model thinks, without effect if its chat template knows no such setting.

    summary, generate_summary: without effect, as summaries are not made.
    """

    effort: Label | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextSchema(Strict):
    """JSON that follows a schema. name, description, strict: labels, as the schema always holds."""

    type: Literal["json_schema"]
    name: Label
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    """The form of the answer's text. verbosity: without effect."""

    format: Annotated[TextFormat | JsonObjectFormat | TextSchema, Field(discriminator="type")] | None = None
    verbosity: Label | None = None


class ResponseStreamOptions(Strict):
    """Only false: events are not padded here."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(SampledTurnRequest):
    """``POST /v1/responses``.

    input: a text, or the items of the whole conversation. instructions: put in front of it. include: extra parts of
    items, of which there are the text's log-probabilities here; the others stay out. top_logprobs: likeliest tokens to
    list for each token of the text. metadata: labels, repeated in the response. seed,
    top_k, priority, timeout, deadline_ms, num_speculative_tokens: as in completions.
    """

    structure_field: ClassVar[str] = "text.format"
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "previous_response_id": Unsupported(_STORES),
        "conversation": Unsupported(_STORES),
        "background": Unsupported("an answer is given at once", (False,)),
        "prompt": Unsupported(_STORES),
        "truncation": Unsupported("prompts are never cut", ("disabled",)),
        "max_tool_calls": Unsupported("this server calls no tools by itself"),
        "context_management": Unsupported("this server sends prompts as they are", ([],)),
    }
    labels: ClassVar[frozenset[str]] = LABELS - {"metadata"} | {"store", "service_tier", "client_metadata"}

    model: Label | None = None
    input: str | Annotated[list[_AnyItem], bounded_list(limits.MAX_MESSAGES)]
    instructions: str | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FunctionTool], bounded_list(limits.MAX_TOOLS), BeforeValidator(_functions)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedFunctions | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Annotated[list[Label], bounded_list(limits.MAX_STOP_STRINGS)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    user: Label | None = None
    metadata: Metadata | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            context = {"field": "stream_options"}
            raise PydanticCustomError("not_a_stream", "stream_options needs stream = true", context)
        return self

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and self.num_logprobs is None:
            message = f"top_logprobs needs include = [{_TEXT_LOGPROBS!r}]"
            raise PydanticCustomError("top_logprobs", "{message}", {"field": "top_logprobs", "message": message})
        return self

    def answer_limit(self, left: int) -> int:
        return left if self.max_output_tokens is None else self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if _TEXT_LOGPROBS in (self.include or ()) else None

    @property
    def items(self) -> list[Item]:
        given = self.input or ""  # no items are an empty text, by which agents ask whether the server is there
        return [MessageItem(role="user", content=given)] if isinstance(given, str) else given

    @property
    def structure(self) -> StructuredOutputs | None:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, TextSchema):
            return StructuredOutputs(json=wanted.schema_)
        return StructuredOutputs(json_object=True) if isinstance(wanted, JsonObjectFormat) else None
