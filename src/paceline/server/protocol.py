"""Request bodies. Every field is honoured or refused; unknown fields are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, create_model, model_validator
from pydantic_core import PydanticCustomError

from paceline.config import (
    MAX_LOGPROBS,
    MAX_REFERENCE_CHARACTERS,
    MAX_SECONDS,
    MIN_TIME_BUDGET,
    RankName,
    SamplingParams,
    StructuredOutputs,
)
from paceline.config.help import Help, helps_of
from paceline.config.ranges import AnyOf, Number, Rule, Whole, rules_of
from paceline.server import limits


class Unsupported(NamedTuple):
    """A field of OpenAI's that this server lacks. harmless: values that are accepted because they change nothing."""

    why: str
    harmless: tuple[JsonValue, ...] = ()


_TOOLS = "this server calls no tools; to get JSON of a given form, use response_format"
_HOSTED = "it means something only on OpenAI's own service"
_TEMPLATE = "the model's chat template decides that"
UNSUPPORTED: dict[str, Unsupported] = {
    "suffix": Unsupported("this server continues texts and does not fill gaps", ("",)),
    "tools": Unsupported(_TOOLS, ([],)),
    "tool_choice": Unsupported(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Unsupported(_TOOLS, (True, False)),
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "audio": Unsupported("this server speaks text only"),
    "modalities": Unsupported("this server speaks text only", (["text"],)),
    "prediction": Unsupported("only chats take one"),
    "reasoning_effort": Unsupported("the model's chat template knows no such setting", ("none",)),
    "verbosity": Unsupported("the model's chat template knows no such setting", ("medium",)),
    "web_search_options": Unsupported("this server searches nothing"),
    "store": Unsupported("this server keeps nothing", (False,)),
    "service_tier": Unsupported(_HOSTED, ("auto", "default")),
    "use_beam_search": Unsupported("this server samples", (False,)),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE, (False,)),
    "chat_template_kwargs": Unsupported(_TEMPLATE, ({},)),
}
# Labels for OpenAI's own service and for caches: whatever they say, the answer is the same.
LABELS = frozenset({"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})


class Strict(BaseModel):
    """A body without conversions (1 is not "1"), unknown fields or infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        """Refuse objects with many fields first: every unknown field is reported on its own."""
        if isinstance(data, dict) and len(data) > limits.MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "at most {most} fields", {"most": limits.MAX_FIELDS})
        return data


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send one more chunk, the last, with the number of tokens used.")
    continuous_usage_stats: bool = Field(False, description="Put the number of tokens used so far into every chunk.")
    include_obfuscation: Literal[False] | None = Field(None, description="Only false: chunks are not padded here.")

    @model_validator(mode="after")
    def _check_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats needs include_usage = true")
        return self


def _few_entries(bias: object) -> object:
    """Refuse a long dictionary before its entries are checked: all wrong values would be listed."""
    if isinstance(bias, dict) and len(bias) > limits.MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_long", "at most {most} entries", {"most": limits.MAX_LOGIT_BIAS})
    return bias


def _some(most: int | None = None, least: int | None = None) -> Any:
    """A list of limited length, checked up to its first fault."""
    return Field(min_length=least, max_length=most, fail_fast=True)


Label = Annotated[str, Field(max_length=limits.MAX_LABEL)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], _some()]
Bias = Annotated[dict[str, float], BeforeValidator(_few_entries), Field(max_length=limits.MAX_LOGIT_BIAS)]
Positive = Annotated[float, Field(gt=0)]
Milliseconds = Annotated[float, Field(ge=1000 * MIN_TIME_BUDGET, le=1000 * MAX_SECONDS)]
Strings = str | Annotated[list[str], _some(limits.MAX_STOP_STRINGS)]

SPELLED_OTHERWISE: Mapping[str, str] = {
    "time_budget": "deadline_ms",
    "logprobs": "completions and chats have OpenAI's own forms of it",
    "logits_processors": "functions cannot be sent",
    "adapter": "the model's name says it",
    "prompt_logprobs": "completions have echo with logprobs",
    "structured_outputs": "chats have response_format",
}
"""Fields of ``SamplingParams`` that requests spell otherwise or cannot have, and how."""

_LIMITED: Mapping[str, Any] = {
    "stop": Strings,
    "bad_words": Strings,
    "stop_token_ids": Annotated[list[TokenId], _some(limits.MAX_STOP_TOKEN_IDS)],
    "allowed_token_ids": Annotated[list[TokenId], _some(limits.MAX_ALLOWED_TOKEN_IDS)],
    "logit_bias": Bias,
    "cache_salt": Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL)],
}
"""Types of fields whose size a request limits more than ``SamplingParams`` does."""


def _sampling_fields() -> dict[str, Any]:
    """Every other field of ``SamplingParams``, with its type as pydantic checks it and its description."""
    hints, rules = get_type_hints(SamplingParams), rules_of(SamplingParams)
    return {
        name: (_LIMITED.get(name, hints[name]) | None, Field(None, description=_described(said, rules[name])))
        for name, said in helps_of(SamplingParams).items()
        if name not in SPELLED_OTHERWISE
    }


def _described(said: Help, rule: Rule) -> str:
    """The description of a field, with the range of a number."""
    (only,) = rule.rules if isinstance(rule, AnyOf) else (rule,)
    return f"{said.whole} Allowed: {rule.allowed}." if isinstance(only, (Whole, Number)) else said.whole


if TYPE_CHECKING:

    class SamplingFields(Strict):
        """The fields that this server reads by name."""

        n: int | None
        best_of: int | None
        rank_by: RankName | None
        max_tokens: int | None
        seed: int | None
        stop: str | list[str] | None
        bad_words: str | list[str] | None
        num_speculative_tokens: int | None
else:
    SamplingFields = create_model("SamplingFields", __base__=Strict, **_sampling_fields())


def _said(description: str, **limits: Any) -> Any:
    return Field(None, description=description, **limits)


class GenerationRequest(SamplingFields):
    """Fields that completions and chats share. None (or absent) leaves a sampling parameter at its default."""

    model: Label | None = _said("Name of the model.")
    stream: bool | None = _said("Send the answer in parts, as server-sent events.")
    stream_options: StreamOptions | None = None
    user: Label | None = _said("A label, repeated in the log.")
    timeout: Positive | None = _said("Seconds after which the request is cancelled with an error.")
    deadline_ms: Milliseconds | None = _said(
        "Milliseconds from the request's arrival after which its answers end as they are."
    )
    metrics: bool = Field(False, description="Report the cost of each answer and the kind of each token.")
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = _said(
        "Higher values wait while lower ones do. 0, the default, is the lowest: a request may let others pass, but "
        "not overtake them."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data.keys() & UNSUPPORTED.keys() - cls.model_fields.keys():
            why, harmless = UNSUPPORTED[name]
            if data[name] is not None and not _among(data[name], harmless):
                raise PydanticCustomError("unsupported", "{field} is not supported: {why}", {"field": name, "why": why})
        passed_over = (UNSUPPORTED.keys() | LABELS) - cls.model_fields.keys()
        return {name: value for name, value in data.items() if name not in passed_over}

    @model_validator(mode="after")
    def _check_strings(self) -> GenerationRequest:
        for name, given in (("stop", self.stop), ("bad_words", self.bad_words)):
            letters = len(given) if isinstance(given, str) else sum(map(len, given or ()))
            if letters > limits.MAX_STOP_CHARACTERS:
                context = {"field": name, "most": limits.MAX_STOP_CHARACTERS}
                raise PydanticCustomError(name, "at most {most} characters in all", context)
        return self

    @model_validator(mode="after")
    def _check_ranking(self) -> GenerationRequest:
        ranked = "rank_by" if self.rank_by is not None else "best_of" if self.answers > (self.n or 1) else None
        if self.stream and ranked is not None:
            message = "{field} cannot be streamed: which answers are best is known only at the end"
            raise PydanticCustomError("not_a_stream", message, {"field": ranked})
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            context = {"field": "stream_options"}
            raise PydanticCustomError("not_a_stream", "stream_options needs stream = true", context)
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def answers(self) -> int:
        """Number of answers sampled for each prompt."""
        return self.best_of or self.n or 1

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """The request's sampling parameters. Raises ParameterError."""
        names = SamplingFields.model_fields
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        budget = None if self.deadline_ms is None else self.deadline_ms / 1000
        return SamplingParams.from_mapping(
            given | {"max_tokens": max_tokens, "logprobs": logprobs, "time_budget": budget}
        )


def _among(value: Any, harmless: tuple[JsonValue, ...]) -> bool:
    """Whether ``value`` equals one of them, with the same type: 0 is not false."""
    return any(type(value) is type(each) and value == each for each in harmless)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. prompt: a text or token ids, or several. echo: the prompt is part of the answer."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], _some(limits.MAX_PROMPTS)]
        | Annotated[list[TokenIds], _some(limits.MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts. An empty list is one prompt without tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return self.prompt


class TextPart(Strict):
    """A piece of a message. Pictures and sounds are refused by their type. cache_control: a hint for caches."""

    type: Literal["text"]
    text: str
    cache_control: JsonValue = None


class Message(Strict):
    """One turn of a conversation. The fields that must be empty are those of OpenAI's own answers, sent back.

    content: may be null where the assistant said nothing. name: for chat templates that have a use for it.
    cache_control: a hint for caches, which changes no answer.
    """

    role: Label
    content: str | Annotated[list[TextPart], _some(limits.MAX_CONTENT_PARTS)] | None = None
    name: Label | None = None
    cache_control: JsonValue = None
    refusal: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[JsonValue], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "only an assistant's message may have no content")
        return self

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class Prediction(Strict):
    """Text that the answer will mostly repeat. Draft tokens are copied from it; it changes the speed alone."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], _some(limits.MAX_CONTENT_PARTS)]

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
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


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

    messages: Annotated[list[Message], _some(limits.MAX_MESSAGES, least=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.prediction is not None and self.num_speculative_tokens == 0:
            message = "a prediction does nothing beside num_speculative_tokens = 0"
            raise PydanticCustomError("prediction", message, {"field": "prediction"})
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs = true", {"field": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens):
            message = "give max_tokens or max_completion_tokens, not both"
            raise PydanticCustomError("max_tokens", message, {"field": "max_tokens"})
        return self

    @property
    def structure(self) -> StructuredOutputs | None:
        """The form that ``response_format`` requires. Raises ParameterError."""
        wanted = self.response_format
        if isinstance(wanted, JsonSchemaFormat):
            return StructuredOutputs(json=wanted.json_schema.schema_)
        return StructuredOutputs(json_object=True) if isinstance(wanted, JsonObjectFormat) else None

    @property
    def conversation(self) -> list[Mapping[str, str]]:
        return [message.plain() for message in self.messages]


class TokenizeRequest(Strict):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: Label | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _some(limits.MAX_MESSAGES, least=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages", {"field": "prompt"})
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: Label | None = None
    tokens: TokenIds
