"""The live rows, and what a length policy wishes for them. B live rows, k draft tokens, P positions, V vocabulary."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH, SamplingParams
from paceline.core.draft import Draft, Verdict
from paceline.core.nodes import Tree
from paceline.core.ops import HostOps, TextRows
from paceline.core.rows import MAX_STOP_TOKENS, Constraint, ConstraintAfterDraft, RowState, SamplingRows


@dataclass(frozen=True, eq=False)
class RequestGroup:
    """The answers of one request, which may be drafted from each other and from references that it brought along.

    What a draft model has read of their prompt for one of them it need not read for the others.
    """

    references: Sequence[Sequence[int]]
    answers: int


class ParallelSample(NamedTuple):
    """One answer of a family, by its number.

    first: where in its row's text that stretch begins which tells its siblings something: the prompt's last tokens.
    """

    group: RequestGroup
    number: int
    prompt_tail: int


@dataclass
class RowStart:
    """What a row begins with. ``seed``: the sequence's own noise key; ``stop_tokens``: what ends its answer.

    constraint: what its answer may be; a sequence's own. None: anything. member: what its draft tokens may be copied
    from, beside its own text. deadline: when its time budget is over, on the clock of time.monotonic.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: tuple[int, ...] = field(default=())
    constraint: Constraint | None = None
    sample: ParallelSample | None = None
    deadline: float = math.inf


class StopDrafting(Protocol):
    """Whether a draft should end."""

    def __call__(
        self, batch: Batch, scores: Sequence[Sequence[float]], follows: Sequence[Sequence[int]] | None = None
    ) -> bool:
        """Given the rows it is for, the confidence in each of their draft tokens so far and, of trees, what each
        follows.
        """
        ...


# How many draft tokens to ask of a draft model in place of these, which were free; 0: these will do.
Fallback = Callable[["Batch", Draft], int]


@dataclass(frozen=True)
class SpeculationPlan:
    """What a length policy wants of one round's draft; the round hands it to the drafter.

    k: most draft tokens of a row; 0: none, the round is plain decoding. caps: most draft tokens of each decoding row,
    where rows are treated differently. enough: asked by a drafter that scores its draft tokens, after each of them,
    whether to stop there; None: never. instead: asked by a drafter that has two kinds of draft tokens; None: it decides
    by itself.
    """

    k: int
    caps: Sequence[int] | None = None
    stop_drafting: StopDrafting | None = None
    fallback: Fallback | None = None

    def within(self, batch: Batch) -> SpeculationPlan:
        """What of it the rows have room for and their requests allow."""
        if self.k == 0:
            return self
        k, allowed = min(self.k, batch.max_gain - 1), batch.max_draft_tokens[: batch.rows]
        if min(allowed) >= k:
            return self if k == self.k else replace(self, k=k)
        caps = [k] * batch.rows if self.caps is None else self.caps
        return replace(self, k=k, caps=[min(cap, most) for cap, most in zip(caps, allowed, strict=True)])

    def counts(self, batch: Batch) -> list[int]:
        """Most draft tokens of each of the batch's rows, which may be a part of those that it was made for."""
        if self.caps is None:
            return [self.k] * batch.rows
        return [min(self.k, cap) for cap in self.caps[batch.first : batch.first + batch.rows]]

    def stretch(self, rows: int) -> tuple[int, int]:
        """First and stop of the stretch of ``rows`` outside which no row may have draft tokens."""
        if self.caps is None:
            return 0, rows
        asked = [row for row, cap in enumerate(self.caps) if cap > 0]
        return (asked[0], asked[-1] + 1) if asked else (0, 0)


_NO_STOPS = (-1,) * MAX_STOP_TOKENS


class _HostView:
    """The tokens [R, P] and length [R] of a batch on the CPU, as Python's own numbers.

    Between two forward passes, which empty the processor's caches, a tensor operator takes 20 to 50 microseconds.
    """

    def __init__(self, tokens: Tensor, length: Tensor) -> None:
        self._tokens, self._length, self._width = _numbers(tokens), _numbers(length), tokens.shape[1]

    def last(self, row: int) -> int:
        return self._tokens[row * self._width + self._length[row] - 1]


def _numbers(tensor: Tensor) -> memoryview:
    """A contiguous int64 tensor, read in place."""
    return tensor.numpy().reshape(-1).data


class Batch:
    """The rows' text and parameters, on the model's device.

    Rows 0 .. rows - 1 decode; the rows after them are still being prefilled.
    tokens [R, P + slack]: each row's text; what lies at or beyond its length is garbage.
    length [R]: tokens of a row. Exactly one of them (the last) is unknown to the target's cache: the invariant.
    lengths: the same, known to the host; as limits are to limit [R], the length at which a row must end.
    stops [R, MAX_STOP_TOKENS]: tokens that end a row, -1 for none. live [1]: ``rows``, where the device can read it.
    members: what draft tokens for each row may be copied from, beside its own text.
    first: the place of row 0 in the caches; not 0 in a part of a batch.
    ops: what replaces torch's operators on the host; None: nothing does.
    """

    def __init__(
        self,
        capacity: int,
        positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        ops: HostOps | None = None,
    ) -> None:
        self.ops = ops
        slack = (
            MAX_SPECULATION_LENGTH + 1
        )  # a round writes its whole block before the length says how much of it counts
        self.tokens = torch.zeros((capacity, positions + slack), dtype=torch.int64, device=device)
        self.length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.lengths = [0] * capacity
        self.limits = [0] * capacity  # the length at which a row must end
        self.limit = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.stops = torch.full((capacity, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)
        self.max_draft_tokens = [MAX_SPECULATION_LENGTH] * capacity  # that a row's request allows in a round
        self.deadlines = [math.inf] * capacity  # whose draft tokens come first, of those that are worth as much
        self.samples: list[ParallelSample | None] = [None] * capacity
        self.rows = 0
        self.first = 0
        self._view = _HostView(self.tokens, self.length) if self.tokens.device.type == "cpu" else None
        self.positions = positions
        self.vocab_size = vocab_size
        self.sampling = SamplingRows(capacity, vocab_size, device)
        self.text_rows = TextRows(self.tokens, self.length, self.sampling.prompt_length, self.limit, self.stops)
        self.draining = False  # these are the last rows: nobody waits, and nobody will come

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def live_length(self) -> Tensor:
        """[B] int64."""
        return self.length[: self.rows]

    @property
    def longest(self) -> int:
        """Tokens of the longest decoding row."""
        return max(self.lengths[: self.rows])

    @property
    def siblings(self) -> list[tuple[list[int], int]]:
        """Decoding rows that answer one prompt, two at least, and how long that is."""
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(self.samples[: self.rows]):
            if sample is not None:
                groups.setdefault(id(sample.group), []).append(row)
        return [(rows, int(self.sampling.prompt_length[rows[0]])) for rows in groups.values() if len(rows) > 1]

    @property
    def empty_draft(self) -> Draft:
        """For any decoding row: the round is plain decoding."""
        return Draft.empty(self.rows, self.device)

    def fitting(self, draft: Draft) -> Draft:
        """Of a tree the draft tokens that have a slot in their row: siblings take one each, however deep they stand."""
        if draft.host_parents is None:
            return draft
        rows = range(self.rows)
        room = [max(0, self.slots_for(self.limits[row]) - self.lengths[row]) for row in rows]
        return draft.first([min(most, count) for most, count in zip(room, draft.drafted, strict=True)])

    def slots_for(self, limit: int) -> int:
        """Of a row whose text ends at ``limit``: draft tokens beyond it are written, too, before they are judged."""
        return min(limit + MAX_SPECULATION_LENGTH, self.positions)

    @property
    def max_gain(self) -> int:
        """Most tokens that any decoding row may gain in a round."""
        rows = range(self.rows)
        return max(min(self.limits[row] - self.lengths[row], self.max_draft_tokens[row] + 1) for row in rows)

    def set_row(self, row: int, start: RowStart) -> None:
        size = len(start.tokens)
        self.tokens[row, :size] = torch.tensor(start.tokens, dtype=torch.int64)
        self.length[row] = self.lengths[row] = size
        self.limit[row] = self.limits[row] = min(size + start.params.max_tokens, self.positions)
        self.stops[row] = torch.tensor((*start.stop_tokens, *_NO_STOPS)[:MAX_STOP_TOKENS])
        self.sampling.set(row, start.params, start.seed, size, start.stop_tokens)
        self.sampling.constraints[row] = start.constraint
        allowed = start.params.num_speculative_tokens
        self.max_draft_tokens[row] = MAX_SPECULATION_LENGTH if allowed is None else allowed
        self.deadlines[row] = start.deadline
        self.samples[row] = start.sample

    def copy_row(self, source: int, destination: int) -> None:
        """Put the row ``source`` in the place of ``destination``."""
        self.tokens[destination] = self.tokens[source]
        self.length[destination] = self.length[source]
        self.lengths[destination] = self.lengths[source]
        self.limits[destination] = self.limits[source]
        self.limit[destination] = self.limit[source]
        self.stops[destination] = self.stops[source]
        self.max_draft_tokens[destination] = self.max_draft_tokens[source]
        self.deadlines[destination] = self.deadlines[source]
        self.samples[destination] = self.samples[source]
        self.sampling.copy_row(source, destination)

    def free_slot(self, row: int, cached_tokens: int) -> None:
        """Nobody has this row, whose caches hold so many tokens: rounds that play it along write behind them."""
        self.length[row] = self.lengths[row] = cached_tokens + 1

    def set_rows(self, rows: int) -> None:
        """From now on rows 0 .. rows - 1 decode."""
        self.rows = rows
        self.live.fill_(rows)
        self.sampling.refresh(rows)

    def part(self, first: int, stop: int) -> Batch:
        """Decoding rows first .. stop - 1 as a batch of their own, for drafting: views of the same tensors."""
        part = copy.copy(self)
        part.first, part.rows, part._view = self.first + first, stop - first, None
        part.tokens, part.length = self.tokens[first:stop], self.length[first:stop]
        part.lengths, part.limits = self.lengths[first:stop], self.limits[first:stop]
        part.limit, part.stops = self.limit[first:stop], self.stops[first:stop]
        part.max_draft_tokens, part.samples = self.max_draft_tokens[first:stop], self.samples[first:stop]
        part.deadlines = self.deadlines[first:stop]
        part.sampling = self.sampling.part(first, stop)
        return part

    def unrolled(self, draft: Draft) -> Batch:
        """Each place of each row's tree as a row of its own, whose text ends there: B * (k + 1) rows, copies.

        What is drawn after them knows the draft tokens on the way there, and no others.
        """
        assert draft.tree is not None
        width = draft.k + 1
        lines = copy.copy(self)
        lines.rows, lines._view = self.rows * width, None
        lines.length = (self.live_length[:, None] + draft.tree.depths).flatten()
        lines.sampling = self.sampling.repeated(self.rows, width)
        lines.tokens = self._texts_after(draft, draft.tree) if lines.sampling.any_penalty else self.tokens
        if lines.sampling.any_constraint:
            lines.sampling.constraints = self._constraints_after(draft)
        return lines

    def after(self, places: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """Of each (row, draft tokens) that row as one of its own, its text followed by these draft tokens: copies."""
        rows = [row for row, _ in places]
        lines = copy.copy(self)
        lines.rows, lines._view = len(rows), None
        lines.length = self.length.new_tensor([self.lengths[row] + len(way) for row, way in places])
        lines.sampling = self.sampling.picked(rows)
        lines.tokens = self.tokens
        if lines.sampling.any_penalty:
            lines.tokens = self.tokens[rows]
            for line, (row, way) in zip(lines.tokens, places, strict=True):
                line[self.lengths[row] : self.lengths[row] + len(way)] = line.new_tensor(way)
        if lines.sampling.any_constraint:
            own = [self.sampling.constraints[row] for row in rows]
            lines.sampling.constraints = [
                None if constraint is None else ConstraintAfterDraft(constraint, way)
                for constraint, (_, way) in zip(own, places, strict=True)
            ]
        return lines

    def _texts_after(self, draft: Draft, tree: Tree) -> Tensor:
        """[B * (k + 1), P]: the rows' texts, followed by the draft tokens on the way to each place, its own
        included.
        """
        text = self.tokens[: self.rows, None].repeat(1, draft.k + 1, 1)
        at = (self.live_length[:, None] + tree.depths[:, 1:] - 1)[:, None]
        beyond = text.shape[2] - 1  # where what is on another way goes; nothing that counts is there
        at = torch.where(tree.ancestors[:, :, 1:], at, beyond)
        return text.scatter_(2, at, draft.tokens[:, None].expand_as(at)).flatten(0, 1)

    def _constraints_after(self, draft: Draft) -> list[Constraint | None]:
        """Each row's constraint after the draft tokens on the way to each place; at places without a draft token there
        is none.
        """
        counts, own = draft.counts.tolist(), self.sampling.constraints[: self.rows]
        return [
            None if constraint is None or place > count else ConstraintAfterDraft(constraint, way)
            for constraint, count, ways in zip(own, counts, draft.token_paths, strict=True)
            for place, way in enumerate(ways)
        ]

    def pending_on_host(self) -> list[int]:
        """Each row's one token that the target has not seen; on the CPU without a tensor operator."""
        view = self._view
        return self.pending()[:, 0].tolist() if view is None else [view.last(row) for row in range(self.rows)]

    def pending(self) -> Tensor:
        """[B, 1]: each row's one token that the target has not seen."""
        return self.tokens[: self.rows].gather(1, self.live_length[:, None] - 1)

    def state(self, rows: int, *, may_sync: bool = True) -> RowState:
        """The first ``rows`` rows; those beyond the decoding ones do not play."""
        sampling = self.sampling
        return RowState(
            text=self.tokens[:rows],
            length=self.length[:rows],
            prompt_length=sampling.prompt_length[:rows],
            temperature=sampling.temperature[:rows],
            top_k=sampling.top_k[:rows],
            top_p=sampling.top_p[:rows],
            floor=sampling.floor[:rows],
            presence_penalty=sampling.presence_penalty[:rows],
            frequency_penalty=sampling.frequency_penalty[:rows],
            repetition_penalty=sampling.repetition_penalty[:rows],
            min_length=sampling.min_length[:rows],
            seed=sampling.seed[:rows],
            limit=self.limit[:rows],
            stops=self.stops[:rows],
            live=self.live,
            may_sync=may_sync,
        )

    def commit(self, verdict: Verdict) -> None:
        """Append each row's accepted + 1 tokens, cut where the row ends."""
        verdict.host.gained = self._gain(verdict)
        self.note_gains(verdict.host.gained)
        for row, tokens in enumerate(verdict.host.tokens):
            if (constraint := self.sampling.constraints[row]) is not None:
                constraint.advance(tokens)

    def note_gains(self, gained: Sequence[int]) -> None:
        """The rows have gained so many tokens: the round is over."""
        for row, count in enumerate(gained):
            self.lengths[row] += count

    def _gain(self, verdict: Verdict) -> list[int]:
        """How many tokens each row has gained."""
        if self.ops is not None:
            return self.ops.gain(self.text_rows, verdict.tokens, verdict.accepted)
        gained: list[int] = self.state(self.rows).gain(verdict.tokens, verdict.accepted)[0].tolist()
        return gained
