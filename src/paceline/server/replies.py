"""What the server answers, as documents. Fields that were not set are left out; those set to None are null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from paceline.core.outputs import CompletionOutput, TokenKind

FinishWord = Literal["stop", "length"]


class CompletionTokensDetails(BaseModel):
    """With a prediction: its tokens that appeared in the completion, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptTokensDetails(BaseModel):
    """cached_tokens: of the prompts' tokens those that were copied from what had been read before."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens. A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class AnswerMetrics(BaseModel):
    """What one answer cost; ``outputs.Metrics`` says how it is counted. mean_logprob: where answers are ranked."""

    cached_tokens: int
    output_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    saved_by_sibling: int
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
            rounds=measured.rounds,
            drafted=measured.drafted,
            accepted=measured.accepted,
            acceptance_rate=measured.acceptance_rate,
            mean_acceptance_length=measured.mean_acceptance_length,
            saved_by_sibling=measured.saved_by_sibling,
            ttft_ms=None if first is None else 1000 * first,
            ms_per_token=measured.ms_per_token,
            queue_ms=None if started is None else 1000 * (started - measured.arrival_time),
            mean_logprob=answer.mean_logprob,
        )


class SpeculativeDecoding(BaseModel):
    """How drafting went, as vLLM counts it and aiperf reads it: of the rounds that drafted, the others left out.

    acceptance_histogram: in how many of these 0, 1, 2, ... draft tokens were kept. num_spec_steps: how many they are.
    mean_acceptance_length: 1 + accepted / num_spec_steps, so it is never below that of ``AnswerMetrics``, which counts
    all rounds.
    """

    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float

    @staticmethod
    def of(answer: CompletionOutput) -> SpeculativeDecoding | None:
        """None if nothing was drafted."""
        kept, drafted = kept_by_round(answer.token_kinds), answer.metrics.drafted
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


def kept_by_round(kinds: Sequence[TokenKind]) -> list[int]:
    """Of each round that drafted how many draft tokens were kept; the last one may have been cut behind one of them."""
    rounds, kept = [], 0
    for kind in kinds:
        if kind == "accepted":
            kept += 1
        elif kind != "plain":
            rounds.append(kept)
            kept = 0
    return [*rounds, kept] if kept else rounds


class RequestMetrics(BaseModel):
    """With "metrics": true, of a request with one answer; in a stream with its last chunk."""

    speculative_decoding: SpeculativeDecoding | None


class Extras(BaseModel):
    """With "metrics": true. token_ids, kinds and pieces go together: a token, how it came about, the text it let out.

    metrics: in the answer's last chunk.
    """

    token_ids: list[int]
    kinds: list[TokenKind]
    pieces: list[str]
    metrics: AnswerMetrics | None = None


class CompletionLogprobs(BaseModel):
    """Token by token. text_offset: where its text begins in the answer's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An answer or, in a stream, a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class Completion(BaseModel):
    """``/v1/completions``, whole or a chunk of the stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TopLogprob(BaseModel):
    """A token that was likely. bytes: its own, which need not be a whole character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Token by token."""

    content: list[ChatLogprob]


class ChatMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatDelta(BaseModel):
    """What it said since the last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class ChatChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: str | int | None = None
    paceline: Extras | None = None


class Chat(BaseModel):
    """``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class ChatChunk(BaseModel):
    """A chunk of its stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    """``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """``/tokenizer_info``: what a client needs to write the model's prompts itself, as with vLLM."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    model_max_length: int


class Text(BaseModel):
    """``/detokenize``."""

    prompt: str


class Version(BaseModel):
    """``/version``."""

    version: str


class Load(BaseModel):
    """``/load``."""

    server_load: int


class Health(BaseModel):
    """``/health``: status is "ready", or with 503 what is still to be done, or "stalled"."""

    status: str


def finish_word(answer: CompletionOutput) -> FinishWord | None:
    """OpenAI's two words; a deadline is a limit on length, too (``stop_reason`` says which)."""
    if answer.finish_reason is None:
        return None
    return "stop" if answer.finish_reason == "stop" else "length"


def stop_reason(answer: CompletionOutput) -> str | int | None:
    """The stop string or token that ended the answer, or "deadline"."""
    return "deadline" if answer.finish_reason == "deadline" else answer.stop_reason
