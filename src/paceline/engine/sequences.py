"""An answer in the making: what it is, how it gains tokens, what ends it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config import SamplingParams
from paceline.core.batch import ParallelSample
from paceline.core.draft import Verdict
from paceline.core.outputs import CompletionOutput, FinishReason, TokenKind, TokenLogprob, is_outranked
from paceline.engine.guard import FaultIsolatedConstraint
from paceline.engine.prefixes import Scope

log = logging.getLogger("paceline")


class TextStream(Protocol):
    """Turns a sequence's tokens into text and looks for stop strings (tokenizer.Detokenizer)."""

    text: str
    stopped: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass
class Sequence:
    """One answer in the making: ``prompt`` and ``output.token_ids`` are its tokens.

    rivals: its request's answers, if only the best of them are given back. scope: whose texts it may copy, and who may
    copy its own. cached: while it is prefilled, how many of its tokens each decoder's cache holds, the target's first.
    follows: who is reading the first ``until`` tokens of its prompt, for both. reach: tokens that its row may come to
    hold, once it has one.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    output: CompletionOutput
    stream: TextStream | None = None
    deadline: float | None = None  # on the clock of time.monotonic
    constraint: FaultIsolatedConstraint | None = None
    member: ParallelSample | None = None
    rivals: list[CompletionOutput] = field(default_factory=list)
    client: str = ""
    priority: int = 0
    scope: Scope = field(default_factory=Scope)
    cached: list[int] = field(default_factory=lambda: [0])
    read_by_draft: bool = True  # whether draft models read the prompt, too; else they catch up when they are asked
    follows: Sequence | None = field(default=None, repr=False)
    until: int = 0
    reach: int = 0

    @property
    def prefilled(self) -> int:
        """Tokens that all have read who are to read the prompt."""
        return min(self.cached) if self.read_by_draft else self.cached[0]

    def ends_by(self, now: float) -> bool:
        """Whether its deadline has come."""
        return self.deadline is not None and self.deadline <= now

    @property
    def waits(self) -> bool:
        return self.follows is not None

    @property
    def feeding_order(self) -> tuple[int, int, float]:
        """Lower ones are fed first, mostly."""
        return self.priority, self.prefill_stop - self.prefilled, math.inf if self.deadline is None else self.deadline

    @property
    def prefill_stop(self) -> int:
        """Prefill ends one token short of the prompt's end."""
        return len(self.prompt) - 1

    @property
    def arrival_time(self) -> float:
        return self.output.metrics.arrival_time

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == self.prefill_stop


def gain_tokens(sequence: Sequence, verdict: Verdict, row: int, now: float, at_limit: int) -> None:
    """Append a row's new tokens up to the answer's end; what goes wrong with them ends this answer and no other.

    What comes after its deadline comes too late: an answer that ended by itself did so within its budget.
    """
    if sequence.deadline is not None and now > sequence.deadline:
        finish(sequence, "deadline", now)
        return
    try:
        if sequence.constraint is not None:
            sequence.constraint.check()
        _gain(sequence, verdict, row, now, at_limit)
    except Exception as error:  # noqa: BLE001 (of whatever kind: it ends one request)
        fail(sequence, error, now)


def _gain(sequence: Sequence, verdict: Verdict, row: int, now: float, at_limit: int) -> None:
    """Only what is kept is counted."""
    host, output = verdict.host, sequence.output
    accepted, drafted, whole = host.accepted[row], host.drafted[row], host.fully_accepted(row)
    kept = 0
    for place, token in enumerate(host.tokens[row]):
        output.token_ids.append(token)
        if output.cumulative_logprob is not None:
            _note_logprob(output, verdict, row, place, sequence.params.logprobs)
        output.token_kinds.append(_kind(place, accepted, drafted, whole=whole))
        output.pieces.append("")
        kept += 1
        _end_if_over(sequence, token, now, at_limit)
        if output.finished:
            break
    metrics = output.metrics
    metrics.first_token = now if metrics.first_token is None else metrics.first_token
    metrics.rounds += 1
    metrics.drafted += host.verified(row, kept)
    metrics.accepted += min(accepted, kept)
    metrics.saved_by_sibling += host.saved_by_sibling(row, kept)
    metrics.output_tokens = len(output.token_ids)


def end_if_outranked(sequence: Sequence, at_limit: int) -> None:
    """Who cannot become one of the answers given back any more has ended."""
    params = sequence.params
    most = min(params.max_tokens, at_limit - len(sequence.prompt))
    if params.ranking is not None and is_outranked(sequence.output, sequence.rivals, params.n, params.ranking, most):
        finish(sequence, "outranked", time.monotonic())


def _kind(place: int, accepted: int, drafted: int, *, whole: bool) -> TokenKind:
    if place < accepted:
        return "accepted"
    if not whole:
        return "recovered"
    return "bonus" if drafted else "plain"


def _note_logprob(output: CompletionOutput, verdict: Verdict, row: int, place: int, top: int | None) -> None:
    """Of the token that the answer gained last, and of so many likely ones."""
    assert verdict.logprobs is not None
    assert output.cumulative_logprob is not None
    own, ids, values = verdict.logprobs.host
    output.cumulative_logprob += own[row][place]
    if output.logprobs is not None:
        best = zip(ids[row][place][:top], values[row][place][:top], strict=True)
        output.logprobs.append(TokenLogprob(output.token_ids[-1], own[row][place], tuple(best)))


def _end_if_over(sequence: Sequence, token: int, now: float, at_limit: int) -> None:
    """Finish at a stop token, a stop string, max_tokens or the longest sequence there is room for, in this order."""
    output, params = sequence.output, sequence.params
    if token in sequence.stop_tokens:
        output.stop_reason = token if token in params.stop_token_ids else None
        finish(sequence, "stop", now)
        return
    if sequence.stream is not None:
        output.pieces[-1] = sequence.stream.push(token)
        output.text = sequence.stream.text
        if sequence.stream.stopped is not None:
            output.stop_reason = sequence.stream.stopped
            finish(sequence, "stop", now)
            return
    if len(output.token_ids) >= params.max_tokens or len(sequence.prompt) + len(output.token_ids) >= at_limit:
        finish(sequence, "length", now)


def finish(sequence: Sequence, reason: FinishReason, now: float) -> None:
    """Close a sequence: its text is complete, its time is taken."""
    try:
        if sequence.stream is not None:
            _let_out(sequence, sequence.stream)
    except Exception as error:  # noqa: BLE001 (of whatever kind: it ends one request)
        fail(sequence, error, now)
        return
    sequence.output.finish_reason = reason
    sequence.output.metrics.finished = now


def _let_out(sequence: Sequence, stream: TextStream) -> None:
    """What a text stream held back until the end."""
    held_back = stream.finish()
    if held_back:
        sequence.output.pieces[-1] += held_back
    sequence.output.text = stream.text


def fail(sequence: Sequence, error: Exception, now: float) -> None:
    """Close a sequence that cannot go on; what it has so far stays its own."""
    log_failure(sequence, error)
    output = sequence.output
    output.finish_reason, output.error, output.metrics.finished = "error", error, now
    output.metrics.output_tokens = len(output.token_ids)


def log_failure(sequence: Sequence, error: Exception) -> None:
    """Where the server's owner sees it; the request's own caller reads it in the answer."""
    log.error("request %s failed and ends; the others go on", sequence.request_id, exc_info=error)
