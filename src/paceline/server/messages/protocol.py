"""Request bodies of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from paceline.config import StructuredOutputs
from paceline.server import limits
from paceline.server.protocol import (
    TEXT_ONLY,
    ApiRequest,
    Label,
    SampledTurnRequest,
    Strict,
    Unsupported,
    bounded_list,
    reject_types,
    text_of,
)

_SERVICE = "it runs on Anthropic's own service"
_KEEP_ALL: JsonValue = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_REFUSED_BLOCKS: Mapping[str, str] = {
    "image": TEXT_ONLY,
    "container_upload": _SERVICE,
    "server_tool_use": _SERVICE,
    "web_search_tool_result": _SERVICE,
}
_NAMED = reject_types(_REFUSED_BLOCKS, "blocks")


class _Block(Strict):
    """cache_control: a hint for caches, which changes no answer."""

    cache_control: JsonValue = None


class TextBlock(_Block):
    """A text. citations: of an earlier answer, which change no prompt."""

    type: Literal["text"]
    text: str
    citations: JsonValue = None


class ToolUseBlock(_Block):
    """A call that the assistant made. caller: who made it, which changes nothing here."""

    type: Literal["tool_use"]
    id: Label
    name: Label
    input: dict[str, JsonValue]
    caller: JsonValue = None


class ThinkingBlock(Strict):
    """Thoughts of the assistant. signature: of the service that made them; not checked here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted thoughts; they are left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


_Texts: TypeAlias = Annotated[list[Annotated[TextBlock, _NAMED]], bounded_list(limits.MAX_CONTENT_PARTS)]


class TextSource(Strict):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Strict):
    """The text of a document, in pieces."""

    type: Literal["content"]
    content: str | _Texts

    @property
    def text(self) -> str:
        return text_of(self.content)


class Citations(Strict):
    """Only false: answers cite nothing here."""

    enabled: Literal[False] | None = None


class DocumentBlock(_Block):
    """A document: title, context and text, in this order."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource | ContentSource, Field(discriminator="type")],
        reject_types({"base64": TEXT_ONLY, "url": TEXT_ONLY, "file": TEXT_ONLY}, "sources"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(_Block):
    """What a search has found: title, source and text, in this order."""

    type: Literal["search_result"]
    source: str
    title: str
    content: _Texts
    citations: Citations | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.source, text_of(self.content))))


class ToolReferenceBlock(_Block):
    """The name of a tool that a search has found among ``tools``, all of which are in the prompt."""

    type: Literal["tool_reference"]
    tool_name: Label

    @property
    def text(self) -> str:
        return f"[tool {self.tool_name}]"


ReadableBlock: TypeAlias = TextBlock | DocumentBlock | SearchResultBlock
_ResultBlock: TypeAlias = Annotated[Annotated[ReadableBlock | ToolReferenceBlock, Field(discriminator="type")], _NAMED]


class ToolResultBlock(_Block):
    """What a call returned. is_error: the content says what failed; without content the model reads "Error"."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: str | Annotated[list[_ResultBlock], bounded_list(limits.MAX_CONTENT_PARTS)] | None = None
    is_error: bool | None = None


Block: TypeAlias = ReadableBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
_AnyBlock: TypeAlias = Annotated[Annotated[Block, Field(discriminator="type")], _NAMED]


class InputMessage(Strict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_AnyBlock], bounded_list(limits.MAX_CONTENT_PARTS)]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _check_blocks(self) -> InputMessage:
        allowed = _BLOCKS_OF[self.role]
        wrong = next((block.type for block in self.blocks if not isinstance(block, allowed)), None)
        if wrong is not None:
            context = {"kind": wrong, "role": self.role}
            raise PydanticCustomError("block", "a message of the {role} has no blocks of type {kind}", context)
        return self


_BLOCKS_OF: Mapping[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, DocumentBlock, SearchResultBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}


class ClientTool(_Block):
    """A function that the model may call. Tools that run on Anthropic's own service are refused by their type.

    eager_input_streaming, input_examples: without effect.
    """

    type: Literal["custom"] | None = None
    name: Label
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: JsonValue = None
    defer_loading: Literal[False] | None = None

    def as_openai(self) -> dict[str, Any]:
        """The tool in OpenAI's form, with the fields that were sent."""
        sent = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {name: value for name, value in {**sent, "strict": self.strict}.items() if value is not None}
        return {"type": "function", "function": function}


class MessageToolChoice(Strict):
    """The tools that the model has to call. name: of the tool, for type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "a name belongs to type tool, and only to that")
        return self


class MessageThinking(Strict):
    """Whether the model thinks first, without effect if its chat template knows no such setting.

    budget_tokens: tokens after which thoughts are ended. display: without effect, as thoughts are always sent.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputSchema(Strict):
    """The JSON schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(Strict):
    """effort: how much the model thinks, without effect if its chat template knows no such setting.

    format: the form of the answer's text.
    """

    effort: Label | None = None
    format: OutputSchema | None = None


class PromptRequest(ApiRequest):
    """``POST /v1/messages/count_tokens``: what a prompt consists of.

    system: instructions. thinking, output_config.effort: whether and how much the model thinks, if its chat template
    knows such settings. output_config.format: a schema of the answer's text. tools, tool_choice: functions that the
    model may or must call.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "container": Unsupported(_SERVICE),
        "mcp_servers": Unsupported(_SERVICE, ([],)),
        "context_management": Unsupported("this server sends prompts as they are", ({}, {"edits": []}, _KEEP_ALL)),
        "inference_geo": Unsupported(_SERVICE),
        "speed": Unsupported(_SERVICE, ("standard",)),
        "thread": Unsupported("this server stores no conversations: send the whole one"),
    }
    labels: ClassVar[frozenset[str]] = frozenset({"metadata", "service_tier", "cache_control", "diagnostics"})

    model: Label
    messages: Annotated[list[InputMessage], bounded_list(limits.MAX_MESSAGES, min_length=1)]
    system: str | _Texts | None = None
    tools: Annotated[list[ClientTool], bounded_list(limits.MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _check_last(self) -> PromptRequest:
        if self.messages[-1].role == "assistant":
            message = "the last message is the assistant's: this server cannot continue it"
            raise PydanticCustomError("prefill", message, {"field": "messages"})
        return self


class MessagesRequest(PromptRequest, SampledTurnRequest):
    """``POST /v1/messages``. seed, priority, timeout, deadline_ms, num_speculative_tokens: as in completions."""

    structure_field: ClassVar[str] = "output_config.format"
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[str], bounded_list(limits.MAX_STOP_STRINGS)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    def answer_limit(self, left: int) -> int:
        return self.max_tokens

    @property
    def stop(self) -> list[str]:
        """``stop_sequences`` as a sampling parameter; empty texts end nothing."""
        return [text for text in self.stop_sequences or () if text]

    @property
    def structure(self) -> StructuredOutputs | None:
        wanted = None if self.output_config is None else self.output_config.format
        return None if wanted is None else StructuredOutputs(json=wanted.schema_)
