"""Response documents. Fields that were not set are left out; those set to None are null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from paceline.core.outputs import CompletionOutput, TokenKind

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(BaseModel):
    """Tokens of the model's thoughts, and those of the prediction that did and did not appear in the completion.

    reasoning_tokens: of chats. The others: of requests with a prediction.
    """

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens that were copied from cached prefixes."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class AnswerMetrics(BaseModel):
    """Figures of one answer, counted as in ``outputs.Metrics``. mean_logprob: set if answers are ranked."""

    cached_tokens: int
    output_tokens: int
    preempted: int
    recomputed_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    saved_by_sibling: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    ttft_ms: float | None
    ms_per_token: float | None
    queue_ms: float | None
    mean_logprob: float | None

    @staticmethod
    def of(answer: CompletionOutput) -> AnswerMetrics:
        measured = answer.metrics
        first, started = measured.time_to_first_token, measured.first_scheduled
        return AnswerMetrics(
            cached_tokens=measured.cached_tokens,
            output_tokens=measured.output_tokens,
            preempted=measured.preempted,
            recomputed_tokens=measured.recomputed_tokens,
            rounds=measured.rounds,
            drafted=measured.drafted,
            accepted=measured.accepted,
            acceptance_rate=measured.acceptance_rate,
            mean_acceptance_length=measured.mean_acceptance_length,
            saved_by_sibling=measured.saved_by_sibling,
            drafted_per_position=measured.drafted_per_position,
            accepted_per_position=measured.accepted_per_position,
            ttft_ms=None if first is None else 1000 * first,
            ms_per_token=measured.ms_per_token,
            queue_ms=None if started is None else 1000 * (started - measured.arrival_time),
            mean_logprob=answer.mean_logprob,
        )


class SpeculativeDecoding(BaseModel):
    """Acceptance figures as vLLM and aiperf define them: only over rounds with draft tokens.

    acceptance_histogram: number of rounds with 0, 1, 2, ... accepted draft tokens. num_spec_steps: number of rounds.
    mean_acceptance_length: 1 + accepted / num_spec_steps. It is at least that of ``AnswerMetrics``, which counts all
    rounds.
    """

    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float

    @staticmethod
    def of(answer: CompletionOutput) -> SpeculativeDecoding | None:
        """Return None if nothing was drafted."""
        kept, drafted = accepted_per_round(answer.token_kinds), answer.metrics.drafted
        if not kept:
            return None
        return SpeculativeDecoding(
            acceptance_histogram=[kept.count(draft_tokens) for draft_tokens in range(max(kept) + 1)],
            num_spec_steps=len(kept),
            num_accepted_draft_tokens=sum(kept),
            num_draft_tokens=drafted,
            mean_acceptance_length=1 + sum(kept) / len(kept),
            draft_acceptance_rate=sum(kept) / drafted,
        )


def accepted_per_round(kinds: Sequence[TokenKind]) -> list[int]:
    """Return the accepted draft tokens of each round that drafted.

    The last round may end with an accepted token, if the answer was cut there.
    """
    rounds, kept = [], 0
    for kind in kinds:
        if kind == "accepted":
            kept += 1
        elif kind != "plain":
            rounds.append(kept)
            kept = 0
    return [*rounds, kept] if kept else rounds


class RequestMetrics(BaseModel):
    """The ``metrics`` field of responses with one answer, if "metrics" is true; in a stream in its last chunk."""

    speculative_decoding: SpeculativeDecoding | None


class Extras(BaseModel):
    """The ``paceline`` field of a choice, if "metrics" is true.

    token_ids, kinds, pieces: per token its id, how it was produced and the text it added.
    metrics: in a stream only in the answer's last chunk.
    """

    token_ids: list[int]
    kinds: list[TokenKind]
    pieces: list[str]
    metrics: AnswerMetrics | None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token. A token has the space that it has inside a text.

    top_logprobs: by text, that of the drawn token in ``tokens``; ``token_id:ID`` for another token with the same text.
    text_offset: start of the token's text in the answer's text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A completion, or a part of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class Completion(BaseModel):
    """Response of ``/v1/completions``, or one chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TopLogprob(BaseModel):
    """One of the likeliest tokens, as it reads inside a text. bytes: its UTF-8, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The sampled token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities per token."""

    content: list[ChatLogprob]


class ReplyFunction(BaseModel):
    """A function and the JSON text of its arguments."""

    name: str
    arguments: str


class ChatToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ReplyFunction


class CalledFunctionDelta(BaseModel):
    """The name, in the first part of a call; more of the arguments' JSON text."""

    name: str | None = None
    arguments: str


class ChatToolCallDelta(BaseModel):
    """A part of call number ``index``. The first one has id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatMessage(BaseModel):
    """The generated message. content: null in a message of tool calls alone. reasoning_content: the thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatDelta(BaseModel):
    """The part of the message that was generated since the last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class ChatChunkChoice(BaseModel):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class Chat(BaseModel):
    """Response of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class ChatChunk(BaseModel):
    """One chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class ModelCard(BaseModel):
    """A served model. default_sampling: of completions and of chats that name no sampling.

    max_model_len and default_sampling are left out while the model is not loaded.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = None
    default_sampling: dict[Literal["completions", "chats"], dict[str, float]] | None = None


class ModelList(BaseModel):
    """Response of ``/v1/models``. models: the same list under the name that some clients read."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[ModelCard]


class TokenizedText(BaseModel):
    """Response of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """Response of ``/tokenizer_info``, as in vLLM: what a client needs to write prompts itself."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    model_max_length: int


class DetokenizedText(BaseModel):
    """Response of ``/detokenize``."""

    prompt: str


class ServerVersion(BaseModel):
    """Response of ``/version``."""

    version: str


class ServerLoad(BaseModel):
    """Response of ``/load``."""

    server_load: int


class Health(BaseModel):
    """Response of ``/health``. status: "ready"; with 503 "stalled" or the phase of the start or stop."""

    status: str
