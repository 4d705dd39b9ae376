"""What replies and the log tell of an answer: why it ended, token counts, figures of speculation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.outputs import CompletionOutput, Metrics, RequestOutput
from paceline.server.delta import Delta
from paceline.server.protocol import GenerationRequest
from paceline.server.replies import (
    AnswerMetrics,
    Chat,
    ChatChunk,
    Completion,
    CompletionTokensDetails,
    Extras,
    OpenAIFinishReason,
    PromptTokensDetails,
    RequestMetrics,
    SpeculativeDecoding,
    Usage,
)

log = logging.getLogger("paceline.server")


@dataclass
class StreamUsage:
    """Tokens of a stream so far."""

    prompt_tokens: int
    completion_tokens: int = 0

    @property
    def document(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens, total_tokens=total)


def usage_of(outputs: Sequence[RequestOutput], details: CompletionTokensDetails | None = None) -> Usage:
    """Sum the usage: each prompt once, every sampled sequence. details: token counts of a chat."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answers = sum(answer.metrics.output_tokens for output in outputs for answer in output.candidates)
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=answers,
        total_tokens=prompt + answers,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(output.cached_tokens for output in outputs)),
    )
    if details is not None:
        usage.completion_tokens_details = details
    return usage


def openai_finish_reason(answer: CompletionOutput, calls: bool = False) -> OpenAIFinishReason | None:
    """Map to OpenAI's finish reasons. A deadline counts as "length"; ``stop_reason`` tells them apart.

    calls: whether the answer has tool calls.
    """
    if answer.finish_reason is None:
        return None
    if calls and answer.finish_reason == "stop":
        return "tool_calls"
    return "stop" if answer.finish_reason == "stop" else "length"


def stop_reason(answer: CompletionOutput) -> str | int | None:
    """Return the stop string or token id that ended the answer, or "deadline"."""
    return "deadline" if answer.finish_reason == "deadline" else answer.stop_reason


def extras_of(delta: Delta) -> Extras:
    """The ``paceline`` field that "metrics": true adds to a choice."""
    extras = Extras(token_ids=list(delta.token_ids), kinds=list(delta.kinds), pieces=list(delta.pieces))
    if delta.ended is not None:
        extras.metrics = AnswerMetrics.of(delta.ended)
    return extras


def note_draft_tokens(
    document: Completion | Chat | ChatChunk, body: GenerationRequest, answers: Sequence[CompletionOutput]
) -> None:
    """Add the ``metrics`` field to a document with one answer, if the request has "metrics": true."""
    if body.metrics and len(answers) == 1:
        document.metrics = RequestMetrics(speculative_decoding=SpeculativeDecoding.of(answers[0]))


def log_request(request_id: str, outputs: Sequence[RequestOutput], user: str | None) -> None:
    """Log one line about a completed request, summed over its answers."""
    answers = [answer for output in outputs for answer in output.candidates]
    total = Metrics(
        rounds=sum(answer.metrics.rounds for answer in answers),
        drafted=sum(answer.metrics.drafted for answer in answers),
        accepted=sum(answer.metrics.accepted for answer in answers),
        saved_by_sibling=sum(answer.metrics.saved_by_sibling for answer in answers),
    )
    first = [seconds for answer in answers if (seconds := answer.metrics.time_to_first_token) is not None]
    paces = [pace for answer in answers if (pace := answer.metrics.ms_per_token) is not None]
    fields = {
        "request": request_id,
        "user": user,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "cached_tokens": sum(output.cached_tokens for output in outputs),
        "output_tokens": sum(answer.metrics.output_tokens for answer in answers),
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "saved_by_sibling": total.saved_by_sibling,
        "mean_acceptance_length": total.mean_acceptance_length,
        "ttft_ms": 1000 * min(first) if first else None,
        "ms_per_token": sum(paces) / len(paces) if paces else None,
        "finish_reasons": ",".join(sorted({str(answer.finish_reason) for answer in answers})),
    }
    log.info("answered", extra={"fields": fields})
