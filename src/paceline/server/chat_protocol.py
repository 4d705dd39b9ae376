"""Bodies of chats: conversations with tools, and the forms that answers may have to take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError, to_jsonable_python

from paceline.chat.options import ChatOptions
from paceline.config import MAX_LOGPROBS, StructuredOutputs
from paceline.config.limits import MAX_REFERENCE_CHARACTERS
from paceline.server import limits
from paceline.server.protocol import (
    TEXT_ONLY,
    GenerationRequest,
    Label,
    RefusalPart,
    Strict,
    StructuredFields,
    Verbatim,
    bounded_list,
    optional,
    reject_types,
    text_of,
)


class TextPart(Strict):
    """A piece of a message. Pictures and sounds are refused by their type.

    cache_control, prompt_cache_breakpoint: hints for caches, which change no answer.
    """

    type: Literal["text"]
    text: str
    cache_control: JsonValue = None
    prompt_cache_breakpoint: JsonValue = None


_REFUSED_PARTS = dict.fromkeys(("image_url", "input_audio", "file", "audio_url", "video_url"), TEXT_ONLY)
_Part: TypeAlias = Annotated[
    Annotated[TextPart | RefusalPart, Field(discriminator="type")], reject_types(_REFUSED_PARTS, "parts")
]
_Parts: TypeAlias = Annotated[list[_Part], bounded_list(limits.MAX_CONTENT_PARTS)]
_MAY_BE_EMPTY = ("assistant", "tool", "function")  # roles


class CalledFunction(Strict):
    """A function and the JSON text of its arguments. parsed_arguments: the same, read by OpenAI's client.

    provider_specific_fields: added by LiteLLM to what it returns; without effect.
    """

    name: Label
    arguments: str
    parsed_arguments: JsonValue = None
    provider_specific_fields: JsonValue = None


class SentCall(Strict):
    """A call that the assistant made in an earlier turn. index: of streams, sent back.

    provider_specific_fields: as in ``CalledFunction``.
    """

    id: Label | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction
    provider_specific_fields: JsonValue = None

    def plain(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        own = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**own, "type": "function", "function": function}


class Function(Strict):
    """A function that the model may call. parameters: JSON schema of its arguments. strict: it must be enforced."""

    name: Label
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Verbatim):
    """A tool: only functions. cache_control: a hint for caches, which changes no answer."""

    type: Literal["function"]
    function: Function
    cache_control: JsonValue = None

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it: as it was sent, without the hint."""
        return {name: value for name, value in self._sent.items() if name != "cache_control"}


class FunctionName(Strict):
    """The name of a function."""

    name: Label


class NamedTool(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """The functions that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], bounded_list(limits.MAX_TOOLS)]


class AllowedToolsChoice(Strict):
    """A choice among some of the tools. The prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_NamedTools = Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]


class Message(Strict):
    """One turn of a conversation. audio must be empty: it is of OpenAI's own answers, sent back.

    type: what some clients call every message. content: may be null where the assistant said or a tool returned
    nothing. parsed: the content, read by OpenAI's client. refusal: what the assistant said instead of the content.
    annotations, provider_specific_fields: of answers sent back, without effect. name: for chat templates that have a
    use for it.
    tool_calls, tool_call_id: calls of the assistant, and the call that a message of the role "tool" answers.
    function_call: the only call of the assistant, in the form before tool_calls; the role "function" answers it.
    reasoning_content, reasoning: thoughts of the assistant, by both names that clients use.
    cache_control: a hint for caches, which changes no answer.
    """

    type: Literal["text", "message"] | None = None
    role: Label
    content: str | _Parts | None = None
    parsed: JsonValue = None
    name: Label | None = None
    cache_control: JsonValue = None
    refusal: str | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=limits.MAX_CONTENT_PARTS)] | None = None
    provider_specific_fields: JsonValue = None
    audio: None = None
    function_call: CalledFunction | None = None
    tool_calls: Annotated[list[SentCall], bounded_list(limits.MAX_TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role not in _MAY_BE_EMPTY:
            raise PydanticCustomError("content", "only a message of an assistant or a tool may have no content")
        return self

    @property
    def _calls(self) -> list[SentCall]:
        replaced = [] if self.function_call is None else [SentCall(function=self.function_call)]
        return [*(self.tool_calls or ()), *replaced]

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        fields = {
            "role": "tool" if self.role == "function" else self.role,
            "content": text_of(self.content or "") + (self.refusal or ""),
            "name": self.name,
            "tool_calls": [call.plain() for call in self._calls] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thoughts,
        }
        return {name: value for name, value in fields.items() if value is not None}


class Prediction(Strict):
    """Text that the answer will mostly repeat. Draft tokens are copied from it; it changes the speed alone."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], bounded_list(limits.MAX_CONTENT_PARTS)]

    @model_validator(mode="after")
    def _check_size(self) -> Prediction:
        if not self.text.strip():
            message = "some text that the answer may repeat; an empty or blank one does nothing: leave it out"
            raise PydanticCustomError("prediction", message, {"field": "prediction"})
        if len(self.text) > MAX_REFERENCE_CHARACTERS:
            context = {"field": "prediction", "most": MAX_REFERENCE_CHARACTERS}
            raise PydanticCustomError("too_long", "at most {most} characters in all", context)
        return self

    @property
    def text(self) -> str:
        return text_of(self.content)


class JsonSchema(Strict):
    """schema: the JSON schema that answers follow exactly, whether or not ``strict`` says so. name: a label."""

    name: Label
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], bounded_list(limits.MAX_MESSAGES, min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    prediction: Prediction | None = None
    tools: Annotated[list[Tool], bounded_list(limits.MAX_TOOLS)] | None = optional("Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | _NamedTools | None = optional("Which calls the answer may have.")
    parallel_tool_calls: bool | None = optional("Whether an answer may have several calls. Default: true.")
    reasoning_effort: Label | None = optional("For chat templates that know it; none switches thoughts off.")
    max_thinking_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Tokens after which thoughts are ended."
    )
    chat_template_kwargs: dict[str, JsonValue] | None = optional("Further variables of the chat template.")

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.prediction is not None and self.num_speculative_tokens == 0:
            message = "a prediction does nothing beside num_speculative_tokens = 0"
            raise PydanticCustomError("prediction", message, {"field": "prediction"})
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs = true", {"field": "top_logprobs"})
        if self.structured_outputs is not None and self.response_format is not None:
            message = "give structured_outputs or response_format, not both"
            raise PydanticCustomError("structured_outputs", message, {"field": "structured_outputs"})
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "give max_tokens or max_completion_tokens, not both"
            raise PydanticCustomError("max_tokens", message, {"field": "max_tokens"})
        return self

    @property
    def structure(self) -> StructuredOutputs | None:
        if self.structured_outputs is not None:
            return self.structured_outputs.wanted
        wanted = self.response_format
        if isinstance(wanted, JsonSchemaFormat):
            return StructuredOutputs(json=wanted.json_schema.schema_)
        return StructuredOutputs(json_object=True) if isinstance(wanted, JsonObjectFormat) else None

    @property
    def structure_field(self) -> str:
        return "structured_outputs" if self.response_format is None else "response_format"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer_limit(self, left: int) -> int:
        wanted = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return left if wanted is None or wanted == -1 else wanted

    @property
    def conversation(self) -> list[Mapping[str, Any]]:
        return [message.plain() for message in self.messages]

    @property
    def chat_options(self) -> ChatOptions:
        """The options of the conversation. Raises ParameterError."""
        names = ("tool_choice", "parallel_tool_calls", "reasoning_effort", "max_thinking_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        plain = to_jsonable_python(given, exclude_none=True)
        tools = [tool.plain() for tool in self.tools or ()]
        variables = self.chat_template_kwargs or {}
        return ChatOptions.of({**plain, "tools": tools, "chat_template_kwargs": variables})


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], bounded_list(limits.MAX_MESSAGES, min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages", {"field": "prompt"})
        return self
