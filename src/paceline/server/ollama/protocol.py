"""Request bodies of Ollama's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from paceline.config import MAX_LOGPROBS, StructuredOutputs
from paceline.config.limits import LEAST_SEED, MOST_SEED
from paceline.server import limits
from paceline.server.chat_protocol import Tool
from paceline.server.protocol import (
    TEXT_ONLY,
    ApiRequest,
    Label,
    Strict,
    Strings,
    TurnRequest,
    Unsupported,
    bounded_list,
    optional,
)

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?P<sign>-?)(?P<parts>(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SHIFTS = "this server never drops the beginning of a conversation that outgrows the context"


def _seconds(value: object) -> object:
    """Seconds of a duration as Go writes it, such as 1h30m; numbers are seconds already."""
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"-?\d+(\.\d+)?", value):
        return float(value)
    if (match := _DURATION.fullmatch(value)) is None:
        raise PydanticCustomError("duration", 'seconds, or a duration such as "5m" or "1h30m"; below 0: for ever')
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(match["parts"]))
    return -seconds if match["sign"] else seconds


def _no_images(value: object) -> object:
    if value not in (None, []):
        raise PydanticCustomError("images", "images are not supported: {why}", {"why": TEXT_ONLY})
    return None


Duration = Annotated[float, BeforeValidator(_seconds)]
Images = Annotated[None, BeforeValidator(_no_images)]
Think = bool | Literal["low", "medium", "high"]
Format = Literal["", "json"] | dict[str, JsonValue]


class ModelOptions(ApiRequest):
    """How an answer is sampled. What is not given is as the model's files recommend.

    num_predict: most tokens of the answer; below 0: until the context is full. num_ctx: most tokens of prompt and
    answer. repeat_penalty: counts all tokens of prompt and answer. repeat_last_n: only -1, which says so, and 0, which
    switches the penalty off.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "mirostat": Unsupported("its cut would depend on how surprising the tokens drawn before were", (0,)),
        "mirostat_tau": Unsupported("it belongs to mirostat"),
        "mirostat_eta": Unsupported("it belongs to mirostat"),
        "tfs_z": Unsupported("use min_p or typical_p", (1, 1.0)),
        "penalize_newline": Unsupported("penalties count line breaks as any token", (True,)),
        "num_keep": Unsupported(_SHIFTS, (0, -1, 4)),
        "logits_all": Unsupported("use logprobs", (False,)),
        "vocab_only": Unsupported("the whole model is loaded", (False,)),
        "embedding_only": Unsupported("use /api/embed", (False,)),
    }
    # Where and how Ollama computes: whatever they say, the answer is the same.
    labels: ClassVar[frozenset[str]] = frozenset(
        {"num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"}
    )

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    repeat_last_n: Literal[-1, 0] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=LEAST_SEED, le=MOST_SEED)] | None = None
    stop: Strings | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    num_ctx: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters by the names of ``SamplingParams``."""
        lengths = {"num_predict", "num_ctx", "repeat_last_n"}
        given = self.model_dump(exclude=lengths, exclude_none=True)
        penalty = given.pop("repeat_penalty", None)
        if penalty is not None and self.repeat_last_n != 0:
            given["repetition_penalty"] = penalty
        return given


class AnswerRequest(TurnRequest):
    """Fields that ``/api/chat`` and ``/api/generate`` share.

    think: whether, or how much, the model thinks before it answers. keep_alive: how long a model that was loaded on
    demand stays loaded, in seconds or as "5m"; below 0 for ever; the first model always stays. logprobs, top_logprobs:
    log-probabilities of the tokens. priority, timeout, deadline_ms, num_speculative_tokens: as in /v1/completions.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "truncate": Unsupported(_SHIFTS, (False, True)),
        "shift": Unsupported(_SHIFTS, (False, True)),
    }
    labels: ClassVar[frozenset[str]] = frozenset()
    structure_field: ClassVar[str] = "format"

    model: Label
    stream: bool = True
    format: Format | None = None
    options: ModelOptions = Field(default_factory=ModelOptions)
    think: Think | None = None
    keep_alive: Duration | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Clients send null for options and stream that were not chosen."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _check_logprobs(self) -> AnswerRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs = true", {"field": "top_logprobs"})
        return self

    @property
    def given(self) -> Mapping[str, Any]:
        tokens = {} if self.num_speculative_tokens is None else {"num_speculative_tokens": self.num_speculative_tokens}
        return {**self.options.sampling, **tokens}

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def answer_limit(self, left: int) -> int:
        wanted = self.options.num_predict
        return left if wanted is None or wanted < 0 else max(1, wanted)

    @property
    def structure(self) -> StructuredOutputs | None:
        if not self.format:
            return None
        return StructuredOutputs(json_object=True) if self.format == "json" else StructuredOutputs(json=self.format)

    @property
    def reasoning_effort(self) -> str | None:
        if isinstance(self.think, str):
            return self.think
        return None if self.think is None else "medium" if self.think else "none"


class MadeFunction(Strict):
    """A function that the assistant called, and its arguments. index: of streams, sent back."""

    name: Label
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    description: str | None = None
    index: int | None = None


class MadeCall(Strict):
    """A call that the assistant made in an earlier turn."""

    id: Label | None = None
    type: Literal["function"] = "function"
    function: MadeFunction


class ChatMessage(Strict):
    """One turn of a conversation. thinking: thoughts of the assistant. tool_name: what a message of a tool answers."""

    role: Label
    content: str | None = ""
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[list[MadeCall], bounded_list(limits.MAX_TOOLS)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None


class OllamaChatRequest(AnswerRequest):
    """``POST /api/chat``. Without messages the model is loaded, or with keep_alive = 0 unloaded."""

    messages: Annotated[list[ChatMessage], bounded_list(limits.MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Tool], bounded_list(limits.MAX_TOOLS)] | None = optional("Functions that the model may call.")


class OllamaGenerateRequest(AnswerRequest):
    """``POST /api/generate``. Without a prompt the model is loaded, or with keep_alive = 0 unloaded.

    prompt: a message, which the chat template frames; with ``raw`` the text that is continued; with ``suffix`` the text
    before a gap that the answer fills. system: the system message.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **AnswerRequest.unsupported,
        "template": Unsupported("the model's own chat template is used; raw = true leaves it out", ("",)),
        "context": Unsupported("send the whole conversation to /api/chat", ([],)),
        **dict.fromkeys(("width", "height", "steps"), Unsupported(TEXT_ONLY, (0,))),
    }

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    images: Images = None

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateRequest:
        if (self.raw or self.suffix) and (self.system or self.think):
            message = "a prompt that is raw or has a suffix is no conversation: leave out system and think"
            raise PydanticCustomError("raw", message, {"field": "raw"})
        return self


class OllamaEmbedRequest(ApiRequest):
    """``POST /api/embed``. truncate: whether texts that are too long are cut at their end, or refused."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    labels: ClassVar[frozenset[str]] = frozenset({"options"})  # of sampling, and of how Ollama computes

    model: Label
    input: str | Annotated[list[str], bounded_list(limits.MAX_EMBEDDINGS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    keep_alive: Duration | None = None


class OllamaPromptEmbedRequest(ApiRequest):
    """``POST /api/embeddings``, the older form of /api/embed for one text."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    labels: ClassVar[frozenset[str]] = frozenset({"options"})

    model: Label
    prompt: str
    keep_alive: Duration | None = None


class OllamaModelRequest(ApiRequest):
    """``POST /api/show``, ``POST /api/pull``: a model by its name. verbose, insecure: without effect."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    labels: ClassVar[frozenset[str]] = frozenset({"verbose", "insecure", "system", "template", "options"})

    model: Label = Field(validation_alias=AliasChoices("model", "name"))
    stream: bool | None = None
