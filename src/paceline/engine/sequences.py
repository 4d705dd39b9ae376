"""A sequence: one sample in the making, how it gains tokens and what ends it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.config import SamplingParams
from paceline.core.batch import ParallelSample
from paceline.core.draft import Undrawn, Verdict
from paceline.core.outputs import CompletionOutput, FinishReason, TokenKind, TokenLogprob, is_outranked
from paceline.engine.guard import FaultIsolatedConstraint
from paceline.engine.prefix_files import FileInReading
from paceline.engine.prefixes import Scope
from paceline.engine.scoring import PromptReading
from paceline.errors import NotFiniteError, RequestError

ANSWER_FADE = 0.98  # weight of all earlier answers after one more: about the last 50 count

log = logging.getLogger("paceline")


class TextStream(Protocol):
    """Turns a sequence's tokens into text and finds stop strings (``models.text.detokenizer``)."""

    text: str
    stopped: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(eq=False)
class Sequence:
    """One sample in the making: its tokens are ``prompt`` and ``output.token_ids``.

    deadline: seconds on the clock of time.monotonic; infinite without a limit.
    budget_from_row: whether the deadline is set when it gets a slot.
    rivals: all samples of its request, if only the best of them are returned.
    scope: which cached prefixes it may reuse, and who may reuse its own.
    prefill_text: what prefill reads: the prompt, and after a preemption also the answer so far.
    num_computed: during prefill, the tokens of ``prefill_text`` in each decoder's cache, the target's first.
    read_by_draft: whether draft models read the prompt, too; if not, they catch up before their first draft.
    prefix_reader: another sequence, which is reading the first ``prefix_stop`` tokens of the prompt for both.
    prefix_file: a file that is being read, which has the first tokens of the prompt.
    lost_tokens: first tokens of ``prefill_text`` that had been computed before a preemption.
    reading: what is collected from the prompt's hidden states; None for most sequences.
    only_read: whether it ends with its prompt, all of whose tokens are then prefilled.
    state_stops: numbers of first tokens that other prompts have, too: prefill pauses there to save recurrent states.
    slot: its place in caches and in the batch; -1 while it waits.
    reserved_tokens: cache positions reserved for it, once it has a slot. They grow with its answer.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    output: CompletionOutput
    stream: TextStream | None = None
    deadline: float = math.inf
    constraint: FaultIsolatedConstraint | None = None
    member: ParallelSample | None = None
    rivals: list[CompletionOutput] = field(default_factory=list)
    client: str = ""
    priority: int = 0
    scope: Scope = field(default_factory=Scope)
    prefill_text: list[int] = field(init=False, repr=False)
    num_computed: list[int] = field(default_factory=lambda: [0])
    read_by_draft: bool = True
    prefix_reader: Sequence | None = field(default=None, repr=False)
    prefix_stop: int = 0
    prefix_file: FileInReading | None = field(default=None, repr=False)
    reading: PromptReading | None = None
    only_read: bool = False
    state_stops: set[int] = field(default_factory=set)
    slot: int = -1
    reserved_tokens: int = 0
    lost_tokens: int = 0
    budget_from_row: bool = False

    def __post_init__(self) -> None:
        self.prefill_text = self.prompt

    @property
    def prefilled(self) -> int:
        """Tokens of ``prefill_text`` in the caches of all models that read it."""
        return min(self.num_computed) if self.read_by_draft else self.num_computed[0]

    @property
    def stay(self) -> tuple[Sequence, int]:
        """Key of its time in a slot: it differs after a preemption, even if the slot is the same."""
        return self, self.output.metrics.preempted

    def note_cached(self, tokens: int) -> None:
        """Count prompt tokens that need not be read. After a preemption they are no longer the request's saving."""
        if not self.output.metrics.preempted:
            self.output.metrics.cached_tokens += tokens

    def lose_slot(self, computed: int) -> None:
        """Wait for another slot, where prompt and answer so far are read. computed: tokens that the caches had."""
        if self.reading is not None:
            self.reading = None if self.is_prefilled else self.reading.again()
        self.prefill_text, self.num_computed = self.prompt + self.output.token_ids, [0]
        self.prefix_reader, self.prefix_stop, self.prefix_file = None, 0, None
        self.slot, self.reserved_tokens, self.lost_tokens = -1, 0, max(computed, self.lost_tokens)
        self.output.metrics.preempted += 1

    def ends_by(self, now: float) -> bool:
        """Whether the deadline is at or before ``now``."""
        return self.deadline <= now

    @property
    def waits(self) -> bool:
        return self.prefix_reader is not None or self.prefix_file is not None

    @property
    def wait_is_over(self) -> bool:
        """Whether the prefix that it waits for has been read, or the sequence that was to read it has left its slot."""
        if self.prefix_file is not None:
            return self.prefix_file.tensors.done()
        reader = self.prefix_reader
        if reader is None:
            return False
        return reader.output.finished or reader.slot < 0 or reader.prefilled >= self.prefix_stop

    @property
    def feeding_order(self) -> tuple[int, int, float]:
        """Sort key of prefill: lower ones are mostly fed first."""
        return self.priority, self.prefill_stop - self.prefilled, self.deadline

    @property
    def prefill_stop(self) -> int:
        """Tokens to prefill: all but the last one, which the first round reads if there is one."""
        return len(self.prefill_text) - (not self.only_read)

    def collects(self, stop: int) -> bool:
        """Whether hidden states of the prompt's tokens up to ``stop`` are wanted, at least the last one's."""
        return self.reading is not None and stop > self.reading.reusable(stop, None)

    def decodes_from(self, stop: int) -> bool:
        """Whether decoding begins once the prompt's first ``stop`` tokens are prefilled."""
        return stop == self.prefill_stop and not self.only_read

    @property
    def arrival_time(self) -> float:
        return self.output.metrics.arrival_time

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == self.prefill_stop


@dataclass
class AnswerLengths:
    """Tokens of recent answers and how many of these ended by themselves.

    Answers that are cut or still running count with their tokens, too. Otherwise the short ones, which end first, would
    make the estimate too small.
    """

    tokens: float = 0.0
    ends: float = 0.0

    def add(self, sequence: Sequence) -> None:
        """Count a finished answer."""
        ended = sequence.output.finish_reason == "stop"
        fade = ANSWER_FADE if ended else 1.0
        self.tokens = self.tokens * fade + len(sequence.output.token_ids)
        self.ends = self.ends * fade + ended

    def expected(self, running: Iterable[Sequence]) -> float:
        """Tokens until an answer ends by itself; infinity before any has.

        The maximum-likelihood estimate if every token is equally likely to be the last one.
        """
        tokens = self.tokens + sum(len(sequence.output.token_ids) for sequence in running)
        return tokens / self.ends if self.ends else math.inf


def gain_tokens(sequence: Sequence, verdict: Verdict, row: int, now: float, at_limit: int) -> None:
    """Append a row's new tokens up to the sample's end. An error in doing so ends this sample only.

    Tokens that arrive after the deadline are dropped: a sample that ended by itself did so within its time budget.
    """
    if now > sequence.deadline:
        finish(sequence, "deadline", now)
        return
    try:
        if sequence.constraint is not None:
            sequence.constraint.check()
        _gain(sequence, verdict, row, now, at_limit)
    except Exception as error:  # noqa: BLE001 (any kind: it ends one request)
        fail(sequence, error, now)


def _gain(sequence: Sequence, verdict: Verdict, row: int, now: float, at_limit: int) -> None:
    """Append the tokens and count them; tokens behind the sample's end are not counted."""
    output = sequence.output
    accepted, drafted, all_accepted = verdict.accepted[row], verdict.drafted[row], verdict.fully_accepted(row)
    kept = 0
    for position, token in enumerate(verdict.tokens[row]):
        if token < 0:
            raise _why_undrawn(sequence, token)
        output.token_ids.append(token)
        if output.cumulative_logprob is not None:
            _note_logprob(output, verdict, row, position, sequence.params.logprobs)
        output.token_kinds.append(_kind(position, accepted, drafted, all_accepted=all_accepted))
        output.pieces.append("")
        kept += 1
        _finish_if_ended(sequence, token, now, at_limit)
        if output.finished:
            break
    metrics = output.metrics
    metrics.first_token = now if metrics.first_token is None else metrics.first_token
    metrics.rounds += 1
    metrics.drafted += verdict.verified(row, kept)
    metrics.accepted += min(accepted, kept)
    metrics.saved_by_sibling += verdict.saved_by_sibling(row, kept)
    depth = verdict.depths[row]
    _count_positions(metrics.drafted_per_position, depth if kept > accepted else min(depth, kept))
    _count_positions(metrics.accepted_per_position, min(accepted, kept))
    metrics.output_tokens = len(output.token_ids)


def _count_positions(counts: list[int], reached: int) -> None:
    """Count one more round that reached positions 1 to ``reached``."""
    counts += [0] * (reached - len(counts))
    for position in range(reached):
        counts[position] += 1


def _why_undrawn(sequence: Sequence, reason: int) -> Exception:
    """Return the error of a sequence whose next token could not be drawn. reason: one of ``Undrawn``."""
    place = f"token {len(sequence.output.token_ids) + 1} of the answer"
    if reason == Undrawn.NOT_FINITE:
        return NotFiniteError(f"logits for {place}", sequence.params.adapter)
    return RequestError(
        f"no token is left for {place}: what the request allows leaves none, or its logits processors return NaN or inf"
    )


def end_if_outranked(sequence: Sequence, at_limit: int) -> None:
    """Finish a sequence that cannot become one of the best n samples of its request any more."""
    params = sequence.params
    max_tokens = min(params.max_tokens, at_limit - len(sequence.prompt))
    if params.ranking is not None and is_outranked(
        sequence.output, sequence.rivals, params.n, params.ranking, max_tokens
    ):
        finish(sequence, "outranked", time.monotonic())


def _kind(position: int, accepted: int, drafted: int, *, all_accepted: bool) -> TokenKind:
    if position < accepted:
        return "accepted"
    if not all_accepted:
        return "recovered"
    return "bonus" if drafted else "plain"


def _note_logprob(output: CompletionOutput, verdict: Verdict, row: int, position: int, top: int | None) -> None:
    """Append the log-probabilities of the last gained token and of the ``top`` likeliest tokens."""
    assert verdict.logprobs is not None
    assert output.cumulative_logprob is not None
    own, ids, values = verdict.logprobs
    output.cumulative_logprob += own[row][position]
    if output.logprobs is not None:
        likeliest = zip(ids[row][position][:top], values[row][position][:top], strict=True)
        output.logprobs.append(TokenLogprob(output.token_ids[-1], own[row][position], tuple(likeliest)))


def _finish_if_ended(sequence: Sequence, token: int, now: float, at_limit: int) -> None:
    """Finish at a stop token, a stop string, max_tokens or the longest possible sequence, in this order."""
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
    """Finish a sequence: complete its text and note the time."""
    try:
        if sequence.stream is not None:
            _flush_text(sequence, sequence.stream)
    except Exception as error:  # noqa: BLE001 (any kind: it ends one request)
        fail(sequence, error, now)
        return
    if reason in ("length", "deadline") and sequence.stream is not None and sequence.stream.stopped is not None:
        reason, sequence.output.stop_reason = "stop", sequence.stream.stopped  # in the text that was held back
    sequence.output.finish_reason = reason
    sequence.output.metrics.finished = now


def _flush_text(sequence: Sequence, stream: TextStream) -> None:
    """Append the text that the stream has held back."""
    held_back = stream.finish()
    if held_back:
        sequence.output.pieces[-1] += held_back
    sequence.output.text = stream.text


def fail(sequence: Sequence, error: Exception, now: float) -> None:
    """Finish a sequence with an error; it keeps the tokens gained so far."""
    log_failure(sequence, error)
    output = sequence.output
    output.finish_reason, output.error, output.metrics.finished = "error", error, now
    output.metrics.output_tokens = len(output.token_ids)


def log_failure(sequence: Sequence, error: Exception) -> None:
    """Log an error for the server's operator; the request's caller gets it in the result."""
    log.error("request %s failed; other requests continue", sequence.request_id, exc_info=error)
