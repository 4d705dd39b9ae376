"""Who runs: waiting sequences become rows, rows that finish leave at once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from paceline.batch import Batch, Member, RowStart
from paceline.chunks import Chunks
from paceline.decoder import Decoder
from paceline.draft import Verdict
from paceline.guard import Guarded
from paceline.hardware import Stopwatch
from paceline.outputs import CompletionOutput, FinishReason, TokenKind, TokenLogprob, is_outranked
from paceline.params import SamplingParams
from paceline.round import Speculation
from paceline.waiting import Waiting

log = logging.getLogger("paceline")


class TextStream(Protocol):
    """Turns a sequence's tokens into text and looks for stop strings (tokenizer.Detokenizer)."""

    text: str
    stopped: str | None

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass
class Sequence:
    """One answer in the making: ``prompt`` and ``output.token_ids`` are its tokens, ``prefilled`` those cached.

    rivals: its request's answers, if only the best of them are given back.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: frozenset[int]
    output: CompletionOutput
    stream: TextStream | None = None
    deadline: float | None = None  # on the clock of time.monotonic
    constraint: Guarded | None = None
    member: Member | None = None
    rivals: list[CompletionOutput] = field(default_factory=list)
    client: str = ""
    priority: int = 0
    prefilled: int = 0
    read_by_draft: bool = True  # whether draft models read the prompt, too; else they catch up when they are asked

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


@dataclass
class Scheduler:
    """Rows 0 .. len(running) - 1 decode, the next len(prefilling) are being prefilled, both in the order of their rows.

    A prefilled row joins the decoding ones by changing places with the first that is not. When a row leaves, the last
    of its kind takes its place; on the CPU kernels rows change places without their caches being copied.

    parts: their decoders keep the rows' caches; the policy is told when rows begin, move and end.
    chunks: decides what is prefilled next.
    in_flight: most tokens that a row may have gained on the device without the host knowing yet.
    """

    batch: Batch
    parts: Speculation
    capacity: int
    chunks: Chunks
    waiting: Waiting[Sequence] = field(default_factory=Waiting)
    prefilling: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    in_flight: int = 0

    @property
    def decoders(self) -> list[Decoder]:
        """The target's first."""
        return [self.parts.target, *self.parts.drafter.decoders]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def admit(self) -> list[Sequence]:
        """Give free rows to those who wait, feed the next chunk of prompts, let finished prefills join the batch.

        Returns those who could not be begun: they have ended with an error.
        """
        failed: list[Sequence] = []
        while self.waiting and (free := self.capacity - len(self.running) - len(self.prefilling)) > 0:
            failed += self._begin(self.waiting.turn(free))
        if self.prefilling:
            self._join()
        if self.prefilling:
            self._prefill()
            self._join()
        return failed

    def _begin(self, turn: list[Sequence]) -> list[Sequence]:
        """Give rows to answers of one request. Where what it asks makes that fail, it ends, alone; its answers then."""
        for number, sequence in enumerate(turn):
            try:
                self._start(sequence)
            except Exception as error:  # noqa: BLE001 (of whatever kind: it ends one request)
                _log_failure(sequence, error)
                self.waiting.extend(turn[number:])
                return self.drop(sequence.request_id, "error", error)
        return []

    def _start(self, sequence: Sequence) -> None:
        row = len(self.running) + len(self.prefilling)
        self._set_row(row, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        sequence.prefilled, sequence.read_by_draft = 0, self.parts.policy.hopeful(self._rows_soon)
        self.parts.policy.join(row)
        for decoder in self.decoders:
            decoder.start_row(row)
        self.prefilling.append(sequence)
        for source, other in enumerate(self.running):
            if other.request_id == sequence.request_id:
                self._share(source, row)
                break

    def _set_row(self, row: int, sequence: Sequence) -> None:
        stop_tokens = tuple(sorted(sequence.stop_tokens))
        begin = sequence.prompt, sequence.params, sequence.seed, stop_tokens, sequence.constraint, sequence.member
        self.batch.set_row(row, RowStart(*begin))

    @property
    def _rows_soon(self) -> int:
        return min(self.capacity, len(self.running) + len(self.prefilling) + 1 + len(self.waiting))

    def _share(self, source: int, row: int) -> None:
        """Give a prefilling row the prompt of another: its cache holds all of it, for nothing is ever erased."""
        sequence, sibling = self.prefilling[row - len(self.running)], [*self.running, *self.prefilling][source]
        sequence.prefilled, sequence.read_by_draft = sequence.prefill_stop, sibling.read_by_draft
        for decoder in self.decoders:
            decoder.copy_row(source, row, sequence.prefill_stop)

    def _prefill(self) -> None:
        """One chunk."""
        parts = self.chunks.choose(self.prefilling, decoding=bool(self.running))
        watch = Stopwatch(self.batch.device)
        for index, decoder in enumerate(self.decoders):
            read = [part for part in parts if index == 0 or self.prefilling[part.place].read_by_draft]
            rows = [len(self.running) + part.place for part in read]
            if read:
                decoder.prefill_rows(self.batch, rows, [part.start for part in read], [part.stop for part in read])
        watch.stop()
        self.chunks.watch(parts, watch)
        for part in parts:
            self.prefilling[part.place].prefilled = part.stop

    def _join(self) -> None:
        """Rows that are prefilled decode from now on, and those that wait for a sibling's prompt with them."""
        self._share_prompts()
        ready = 0
        for place, sequence in enumerate(self.prefilling):
            if sequence.is_prefilled:
                self._swap(ready, place)
                ready += 1
                self._note_lag(sequence)
        self.running += self.prefilling[:ready]
        del self.prefilling[:ready]
        self.batch.set_rows(len(self.running))

    def _note_lag(self, sequence: Sequence) -> None:
        """Draft models have not read its prompt, or have, and then lack nothing."""
        for decoder in self.decoders[1:] if not sequence.read_by_draft else ():
            decoder.lag = max(decoder.lag, len(sequence.prompt))

    def _share_prompts(self) -> None:
        rows = {s.request_id: row for row, s in enumerate(self.prefilling, len(self.running)) if s.is_prefilled}
        for row, sequence in enumerate(self.prefilling, len(self.running)):
            if not sequence.is_prefilled and sequence.request_id in rows:
                self._share(rows[sequence.request_id], row)

    def _swap(self, first: int, place: int) -> None:
        """Two prefilling rows change places, of which the one at ``first`` has nothing yet but its prompt."""
        if first == place:
            return
        start, prefilling = len(self.running), self.prefilling
        length = max(prefilling[first].prefilled, prefilling[place].prefilled)
        for decoder in self.decoders:
            decoder.swap_rows(start + first, start + place, length)
        self.batch.copy_row(start + place, start + first)
        self.parts.policy.move(start + place, start + first)
        self.parts.policy.join(start + place)
        prefilling[first], prefilling[place] = prefilling[place], prefilling[first]
        self._set_row(start + place, prefilling[place])

    def settle(self, verdict: Verdict) -> list[Sequence]:
        """Give each decoding row its new tokens, cut where the answer ends; rows that ended leave. All who gained."""
        gained = list(self.running)
        now = time.monotonic()
        for row, sequence in enumerate(gained):
            gain_tokens(sequence, verdict, row, now, at_limit=self.batch.positions)
        return gained + self.leave(gained)

    def leave(self, played: list[Sequence]) -> list[Sequence]:
        """Free the rows of those who have ended, who are some of these; returns the siblings of those who failed.

        Who cannot become one of the answers given back any more has ended, too.
        """
        for sequence in played:
            if sequence.rivals and not sequence.output.finished:
                _end_if_outranked(sequence, self.batch.positions)
        for row in range(len(self.running) - 1, -1, -1):
            if self.running[row].output.finished and not self._succeed(row):
                self.release(row)
        failed = [sequence for sequence in played if sequence.output.error is not None]
        return [other for one in failed for other in self.drop(one.request_id, "error", one.output.error)]

    def _succeed(self, row: int) -> bool:
        """Where it is the turn of another answer to the same prompt, it takes the row over, and the prompt with it."""
        leaves = self.running[row]
        if leaves.output.error is not None or not self.waiting or self.waiting.first.request_id != leaves.request_id:
            return False
        (sequence,) = self.waiting.turn(1)
        self._set_row(row, sequence)
        sequence.output.metrics.first_scheduled = time.monotonic()
        sequence.prefilled, sequence.read_by_draft = sequence.prefill_stop, leaves.read_by_draft
        self.parts.policy.leave(row)
        self.parts.policy.join(row)
        for decoder in self.decoders:
            decoder.cut_row(row, sequence.prefill_stop)
        self._note_lag(sequence)
        self.running[row] = sequence
        return True

    def release(self, row: int) -> None:
        """Free a row (decoding or prefilling); others move into the hole."""
        self.parts.policy.leave(row)
        if row < len(self.running):
            last = len(self.running) - 1
            self._move(last, row, self.batch.lengths[last] + self.in_flight)
            self.prefilling.insert(0, self.running[row])  # the hole is now at the border to the prefilling rows
            self.running[row] = self.running[last]
            self.running.pop()
            row = last
        place = row - len(self.running)
        self._move(len(self.running) + len(self.prefilling) - 1, row, self.prefilling[-1].prefilled)
        self.prefilling[place] = self.prefilling[-1]
        self.prefilling.pop()
        self.batch.set_rows(len(self.running))

    def _move(self, source: int, destination: int, length: int) -> None:
        """Put a row, ``length`` positions of its caches, in the place of one that is free."""
        if source == destination:
            return
        self.batch.copy_row(source, destination)
        self.parts.policy.move(source, destination)
        for decoder in self.decoders:
            decoder.move_row(source, destination, length)

    def drop(self, request_id: str, reason: FinishReason, error: Exception | None = None) -> list[Sequence]:
        """End every unfinished sequence of a request, wherever it is; returns them."""
        dropped = [s for s in (*self.waiting, *self.prefilling, *self.running) if s.request_id == request_id]
        for sequence in dropped:
            finish(sequence, reason, time.monotonic())
            sequence.output.error = sequence.output.error or error
        self.sweep()
        return dropped

    def clear(self) -> None:
        """Drop everything at once, whatever state an interrupted round left behind."""
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            if not sequence.output.finished:
                finish(sequence, "abort", time.monotonic())
        for row in range(len(self.running) + len(self.prefilling)):
            self.parts.policy.leave(row)
        self.waiting.clear()
        self.prefilling.clear()
        self.running.clear()
        for decoder in self.decoders:
            decoder.clear()
        self.batch.set_rows(0)

    def overdue(self, now: float) -> list[Sequence]:
        """End the sequences whose deadline has passed; what they have so far stays theirs."""
        late = [
            s for s in (*self.waiting, *self.prefilling, *self.running) if s.deadline is not None and s.deadline <= now
        ]
        for sequence in late:
            finish(sequence, "deadline", now)
        if late:
            self.sweep()
        return late

    def sweep(self) -> None:
        """Remove finished sequences from every queue."""
        self.waiting.keep(s for s in self.waiting if not s.output.finished)
        rows = [*self.running, *self.prefilling]
        for row in range(len(rows) - 1, -1, -1):
            if rows[row].output.finished:
                self.release(row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, rows and caches agree; cheap, called by tests and whenever idle."""
        for decoder in self.decoders:
            decoder.check_integrity()
        assert self.batch.rows == len(self.running), "decoding rows and running sequences differ"
        assert len(self.running) + len(self.prefilling) <= self.capacity, "more rows than there are"
        lengths = self.batch.length.tolist()
        for row, sequence in enumerate([*self.running, *self.prefilling]):
            assert not sequence.output.finished, f"row {row} is finished but was not freed"
            size = len(sequence.prompt) + len(sequence.output.token_ids)
            assert self.batch.lengths[row] == size, f"row {row}: lengths disagree"
            assert 0 <= lengths[row] - size <= self.in_flight, f"row {row}: the device's length disagrees"
            text = self.batch.tokens[row, :size].tolist()
            assert text == sequence.prompt + sequence.output.token_ids, f"row {row}: tokens disagree"


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
    accepted, drafted = host.accepted[row], host.drafted[row]
    kept = 0
    for place, token in enumerate(host.tokens[row]):
        output.token_ids.append(token)
        if output.cumulative_logprob is not None:
            _note_logprob(output, verdict, row, place, sequence.params.logprobs)
        output.token_kinds.append(_kind(place, accepted, drafted))
        output.pieces.append("")
        kept += 1
        _end_if_over(sequence, token, now, at_limit)
        if output.finished:
            break
    metrics = output.metrics
    metrics.first_token = now if metrics.first_token is None else metrics.first_token
    metrics.rounds += 1
    metrics.drafted += drafted if kept > accepted else min(drafted, kept)  # guesses beyond a cut were not judged
    metrics.accepted += min(accepted, kept)
    metrics.output_tokens = len(output.token_ids)


def _end_if_outranked(sequence: Sequence, at_limit: int) -> None:
    params = sequence.params
    most = min(params.max_tokens, at_limit - len(sequence.prompt))
    if params.ranking is not None and is_outranked(sequence.output, sequence.rivals, params.n, params.ranking, most):
        finish(sequence, "outranked", time.monotonic())


def _kind(place: int, accepted: int, drafted: int) -> TokenKind:
    if place < accepted:
        return "accepted"
    if accepted < drafted:
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
    _log_failure(sequence, error)
    output = sequence.output
    output.finish_reason, output.error, output.metrics.finished = "error", error, now
    output.metrics.output_tokens = len(output.token_ids)


def _log_failure(sequence: Sequence, error: Exception) -> None:
    log.error("request %s failed and ends; the others go on", sequence.request_id, exc_info=error)
