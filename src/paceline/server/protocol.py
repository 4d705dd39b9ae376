"""What requests may say. Every field is honoured or refused: unknown ones are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
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
from paceline.server import limits


class Unsupported(NamedTuple):
    """A field that OpenAI knows and we do not. harmless: values that ask for what happens anyway."""

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
    "skip_special_tokens": Unsupported("special tokens are never part of a text", (True,)),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE, (False,)),
    "chat_template_kwargs": Unsupported(_TEMPLATE, ({},)),
}
# Labels for OpenAI's own service and for caches: whatever they say, the answer is the same.
LABELS = frozenset({"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})


class Strict(BaseModel):
    """No conversions (1 is no "1"), no unknown fields, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        """Every unknown field is a fault of its own: let there be few."""
        if isinstance(data, dict) and len(data) > limits.MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", "at most {most} fields", {"most": limits.MAX_FIELDS})
        return data


class StreamOptions(Strict):
    """include_usage: one more chunk, the last, says how many tokens were used. continuous_usage_stats: every chunk says
    how many were used so far. include_obfuscation: nothing is padded here, so only false can be asked for.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("usage", "continuous_usage_stats needs include_usage = true")
        return self


def _few_entries(bias: object) -> object:
    """Before they are looked at one by one: a dictionary's wrong values are all listed."""
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
_SAMPLING = (
    "n", "best_of", "rank_by", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "num_speculative_tokens", "keep_prefix", "cache_salt",
)  # fmt: skip


class GenerationRequest(Strict):
    """What completions and chats have in common. None (or absent) leaves a parameter at its default.

    Ranges are those of ``SamplingParams``. user: a label, repeated in the log. timeout: seconds after which the request
    is given up with an error; deadline_ms: milliseconds from its arrival after which its answers end as they are, as a
    ``SamplingParams.time_budget``. metrics: say what each answer cost and how each token came about. priority: higher
    values wait while lower ones do; nobody can ask for less than 0, the default, so that a request may make way for
    others but not push in.
    """

    model: Label | None = None
    n: int | None = None
    best_of: int | None = None
    rank_by: RankName | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], _some(limits.MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], _some(limits.MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    num_speculative_tokens: int | None = None
    keep_prefix: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    timeout: Positive | None = None
    deadline_ms: Milliseconds | None = None
    metrics: bool = False
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = None

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
    def _check_stop(self) -> GenerationRequest:
        letters = len(self.stop) if isinstance(self.stop, str) else sum(map(len, self.stop or ()))
        if letters > limits.MAX_STOP_CHARACTERS:
            context = {"field": "stop", "most": limits.MAX_STOP_CHARACTERS}
            raise PydanticCustomError("stop", "at most {most} characters in all", context)
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
        """How many are made."""
        return self.best_of or self.n or 1

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """As the engine takes it. Raises ParameterError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        budget = None if self.deadline_ms is None else self.deadline_ms / 1000
        return SamplingParams.from_mapping(
            given | {"max_tokens": max_tokens, "logprobs": logprobs, "time_budget": budget}
        )


def _among(value: Any, harmless: tuple[JsonValue, ...]) -> bool:
    """Whether it is one of them, type for type: 0 is no false."""
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
        """One or several. An empty list is one prompt without tokens."""
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
        """As chat templates take it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class Prediction(Strict):
    """What the answer will be, mostly: draft tokens are copied from it, and it changes the speed alone."""

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
        """What ``response_format`` asks for. Raises ParameterError."""
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
