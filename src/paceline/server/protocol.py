"""Request bodies. Every field is honoured or refused; unknown fields are refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.config import SamplingParams, StructuredOutputs
from paceline.config.help import Help, helps_of
from paceline.config.limits import (
    COMPLETION_MAX_TOKENS,
    LEAST_SEED,
    MAX_LOGPROBS,
    MAX_SECONDS,
    MIN_TIME_BUDGET,
    MOST_SEED,
    RankName,
)
from paceline.config.ranges import AnyOf, Number, Rule, Whole, rules_of
from paceline.server import limits


class Unsupported(NamedTuple):
    """A field of OpenAI's that this server lacks. harmless: values that are accepted because they change nothing."""

    why: str
    harmless: tuple[JsonValue, ...] = ()


TEXT_ONLY = "this server reads text only"
_CHAT_ONLY = "only chats have it"
_GUIDED = "use structured_outputs"
_HOSTED = "it means something only on OpenAI's own service"
_TEMPLATE = "the model's chat template decides that"
UNSUPPORTED: dict[str, Unsupported] = {
    "suffix": Unsupported("only completions fill gaps", ("",)),
    "tools": Unsupported(_CHAT_ONLY, ([],)),
    "tool_choice": Unsupported(_CHAT_ONLY, ("none", "auto")),
    "parallel_tool_calls": Unsupported(_CHAT_ONLY, (True, False)),
    "functions": Unsupported("use tools, which replaced it", ([],)),
    "function_call": Unsupported("use tool_choice, which replaced it", ("none", "auto")),
    "guided_json": Unsupported(_GUIDED + ': {"json": SCHEMA}'),
    "guided_regex": Unsupported(_GUIDED + ': {"regex": "..."}'),
    "guided_choice": Unsupported(_GUIDED + ': {"choice": ["...", "..."]}'),
    "guided_grammar": Unsupported(_GUIDED + ': {"grammar": "..."}'),
    "guided_decoding_backend": Unsupported("this server has one way to follow structures"),
    "guided_whitespace_pattern": Unsupported("white space in JSON is fixed here"),
    "audio": Unsupported("this server speaks text only"),
    "modalities": Unsupported("this server speaks text only", (["text"],)),
    "prediction": Unsupported("only chats take one"),
    "reasoning_effort": Unsupported(_CHAT_ONLY, ("none",)),
    "max_thinking_tokens": Unsupported(_CHAT_ONLY),
    "verbosity": Unsupported("the model's chat template knows no such setting", ("medium",)),
    "web_search_options": Unsupported("this server searches nothing"),
    "store": Unsupported("this server stores no answers, whatever it says", (False, True)),
    "service_tier": Unsupported(_HOSTED, ("auto", "default", "flex", "scale", "priority", "fast")),
    "use_beam_search": Unsupported("this server samples", (False,)),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE, (False,)),
    "chat_template_kwargs": Unsupported(_CHAT_ONLY, ({},)),
}
# Labels for OpenAI's own service and for caches: whatever they say, the answer is the same.
LABELS = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)


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


class Verbatim(Strict):
    """A body that keeps the object that it was read from: ``sent``, with its order of fields and without defaults."""

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, dict):
            made._sent = data
        return made


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


def max_entries(limit: int) -> BeforeValidator:
    """Refuse a long dictionary before its entries are checked: all wrong values would be listed."""

    def check(entries: object) -> object:
        if isinstance(entries, dict) and len(entries) > limit:
            raise PydanticCustomError("too_long", "at most {most} entries", {"most": limit})
        return entries

    return BeforeValidator(check)


def bounded_list(max_length: int | None = None, min_length: int | None = None) -> Any:
    """A list of limited length, checked up to its first fault."""
    return Field(min_length=min_length, max_length=max_length, fail_fast=True)


def optional(description: str) -> Any:
    """A field that may be left out."""
    return Field(None, description=description)


Label = Annotated[str, Field(max_length=limits.MAX_LABEL)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], bounded_list()]
Bias = Annotated[dict[str, float], max_entries(limits.MAX_LOGIT_BIAS), Field(max_length=limits.MAX_LOGIT_BIAS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=limits.MAX_METADATA_KEY)], Label],
    max_entries(limits.MAX_METADATA),
    Field(max_length=limits.MAX_METADATA),
]
Positive = Annotated[float, Field(gt=0)]
Milliseconds = Annotated[float, Field(ge=1000 * MIN_TIME_BUDGET, le=1000 * MAX_SECONDS)]
Strings = str | Annotated[list[str], bounded_list(limits.MAX_STOP_STRINGS)]

SPELLED_OTHERWISE: Mapping[str, str] = {
    "time_budget": "deadline_ms",
    "logprobs": "completions and chats have OpenAI's own forms of it",
    "logits_processors": "functions cannot be sent",
    "adapter": "the model's name says it",
    "prompt_logprobs": "completions have echo with logprobs",
    "structured_outputs": "its members are checked one by one",
}
"""Fields of ``SamplingParams`` that requests spell otherwise or cannot have, and how."""

_LIMITED: Mapping[str, Any] = {
    "stop": Strings,
    "bad_words": Strings,
    "stop_token_ids": Annotated[list[TokenId], bounded_list(limits.MAX_STOP_TOKEN_IDS)],
    "allowed_token_ids": Annotated[list[TokenId], bounded_list(limits.MAX_ALLOWED_TOKEN_IDS)],
    "logit_bias": Bias,
    "cache_salt": Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL)],
}
"""Types of fields whose size a request limits more than ``SamplingParams`` does."""


def _sampling_fields() -> dict[str, Any]:
    """Every other field of ``SamplingParams``, with its type as pydantic checks it and its description."""
    hints, rules = get_type_hints(SamplingParams), rules_of(SamplingParams)
    return {
        name: (_LIMITED.get(name, hints[name]) | None, optional(_described(help_text, rules[name])))
        for name, help_text in helps_of(SamplingParams).items()
        if name not in SPELLED_OTHERWISE
    }


def _described(help_text: Help, rule: Rule) -> str:
    """The description of a field, with the range of a number."""
    (only,) = rule.rules if isinstance(rule, AnyOf) else (rule,)
    return f"{help_text.whole} Allowed: {rule.allowed}." if isinstance(only, (Whole, Number)) else help_text.whole


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


def text_of(content: str | list[Any]) -> str:
    """The text of a string or of parts with a text each."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def reject_types(reasons: Mapping[str, str], noun: str) -> BeforeValidator:
    """Refuse objects of known types by name. reasons: by type, why it is not supported. noun: what the objects are."""

    def check(part: Any) -> Any:
        type_name = part.get("type") if isinstance(part, dict) else None
        why = reasons.get(type_name) if isinstance(type_name, str) else None
        if why is not None:
            context = {"noun": noun, "kind": type_name, "why": why}
            raise PydanticCustomError("part", "{noun} of type {kind} are not supported: {why}", context)
        return part

    return BeforeValidator(check)


class RefusalPart(Strict):
    """An answer of the assistant that was a refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ApiRequest(Strict):
    """A body of an API that has more fields than this server supports.

    unsupported: fields that are refused by name, and the values of theirs that change nothing. labels: fields that are
    accepted with any value, because no value changes the answer.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = UNSUPPORTED
    labels: ClassVar[frozenset[str]] = LABELS

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in data.keys() & cls.unsupported.keys() - cls.model_fields.keys():
            why, harmless = cls.unsupported[name]
            if data[name] is not None and not _among(data[name], harmless):
                raise PydanticCustomError("unsupported", "{field} is not supported: {why}", {"field": name, "why": why})
        passed_over = (cls.unsupported.keys() | cls.labels) - cls.model_fields.keys()
        return {name: value for name, value in data.items() if name not in passed_over}


class AnsweredRequest(ApiRequest):
    """A body that asks for answers."""

    if TYPE_CHECKING:

        @property
        def deadline_ms(self) -> float | None: ...

    @property
    def answers(self) -> int:
        """Number of answers sampled for each prompt."""
        return 1

    def answer_limit(self, left: int) -> int:
        """Most tokens of an answer. left: tokens that the context has left."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token; None for no log-probabilities."""
        return None

    @property
    def structure(self) -> StructuredOutputs | None:
        """The required form of the answer's text. Raises ParameterError."""
        raise NotImplementedError

    @property
    def given(self) -> Mapping[str, Any]:
        """The sampling parameters that the body has, by the names of ``SamplingParams``."""
        names = SamplingFields.model_fields
        return {name: value for name in names if (value := getattr(self, name, None)) is not None}

    def sampling(self, base: SamplingParams, left: int) -> SamplingParams:
        """The sampling parameters; those of ``base`` where the body has none. Raises ParameterError.

        left: as in ``answer_limit``. One reply must hold all log-probabilities of an answer without one.
        """
        if self.num_logprobs is not None:
            left = min(left, limits.MAX_LOGPROB_ENTRIES // (self.answers * (1 + self.num_logprobs)))
        budget = None if self.deadline_ms is None else self.deadline_ms / 1000
        own = {"max_tokens": self.answer_limit(left), "logprobs": self.num_logprobs, "time_budget": budget}
        return SamplingParams.from_mapping({**self.given, **own}, base)


class GenerationRequest(AnsweredRequest, SamplingFields):
    """Fields that completions and chats share. None (or absent) leaves a sampling parameter at its default."""

    model: Label | None = optional("Name of the model.")
    stream: bool | None = optional("Send the answer in parts, as server-sent events.")
    stream_options: StreamOptions | None = None
    user: Label | None = optional("A label, repeated in the log.")
    timeout: Positive | None = optional("Seconds after which the request is cancelled with an error.")
    deadline_ms: Milliseconds | None = optional(
        "Milliseconds from the request's arrival after which its answers end as they are."
    )
    metrics: bool = Field(False, description="Report the cost of each answer and the kind of each token.")
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Higher values wait while lower ones do. 0, the default, is the lowest: a request may let others pass, but "
        "not overtake them."
    )

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
        return self.best_of or self.n or 1


def _among(value: Any, harmless: tuple[JsonValue, ...]) -> bool:
    """Whether ``value`` equals one of them, with the same type: 0 is not false."""
    return any(type(value) is type(each) and value == each for each in harmless)


class TurnRequest(AnsweredRequest):
    """Fields of APIs that give one answer to a conversation: how it is served. None is the default.

    structure_field: the API's name for the required form of the answer's text. Others: as in ``GenerationRequest``.
    """

    structure_field: ClassVar[str]

    stream: bool | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    priority: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    timeout: Positive | None = None
    deadline_ms: Milliseconds | None = None

    if TYPE_CHECKING:

        @property
        def model(self) -> str | None: ...


class SampledTurnRequest(TurnRequest):
    """A body of such an API whose sampling parameters are fields of its own."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=LEAST_SEED, le=MOST_SEED)] | None = None


class StructuredFields(Strict):
    """Form of an answer, by vLLM's names: exactly one of these."""

    json_: dict[str, JsonValue] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = optional("Any JSON object.")
    regex: str | None = optional("A regular expression that the whole answer matches.")
    choice: Annotated[list[str], bounded_list()] | None = optional("Texts of which the answer is one.")
    grammar: str | None = optional("A grammar in llguidance's Lark syntax.")

    @property
    def wanted(self) -> StructuredOutputs:
        """Raises ParameterError."""
        return StructuredOutputs(**self.model_dump(by_alias=True, exclude_none=True))


def _none_if_false(logprobs: object) -> object:
    """None instead of false, which some clients send; 0 asks for the drawn tokens' own."""
    return None if logprobs is False else logprobs


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``.

    prompt: a text or token ids, or several. suffix: the text behind the gap that the answer fills; the prompt is the
    text before it. echo: the prompt is part of the answer.
    """

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], bounded_list(limits.MAX_PROMPTS)]
        | Annotated[list[TokenIds], bounded_list(limits.MAX_PROMPTS)]
    )
    suffix: str | None = None
    echo: bool | None = None
    structured_outputs: StructuredFields | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_none_if_false)] = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens = 0 needs echo = true", {"field": "max_tokens"})
        return self

    @model_validator(mode="after")
    def _check_gap(self) -> CompletionRequest:
        if self.suffix and self.echo:
            message = "suffix and echo cannot be combined: the answer is the text between prompt and suffix"
            raise PydanticCustomError("prompt", message, {"field": "suffix"})
        return self

    def answer_limit(self, left: int) -> int:
        if self.max_tokens is None:
            return COMPLETION_MAX_TOKENS
        return left if self.max_tokens == -1 else self.max_tokens or 1  # 0: only the prompt is read

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def structure(self) -> StructuredOutputs | None:
        return None if self.structured_outputs is None else self.structured_outputs.wanted

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts. An empty list is one prompt without tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return self.prompt


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: Label | None = None
    tokens: TokenIds
