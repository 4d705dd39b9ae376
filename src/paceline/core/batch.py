"""The batch of live rows, and the speculation plan of a length policy.

Shapes: R rows (capacity), B live rows, k draft tokens, P positions, V vocabulary.
"""

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
    """Parallel samples of one request. N-gram drafts may copy from each other and from the request's references.

    references: token ids of each reference. answers: number of samples.
    """

    references: Sequence[Sequence[int]]
    answers: int


class ParallelSample(NamedTuple):
    """One sample of a request group.

    number: index in the group. prompt_tail: position in the row's text from which other samples may copy; it includes
    the last tokens of the prompt as context.
    """

    group: RequestGroup
    number: int
    prompt_tail: int


@dataclass
class RowStart:
    """Initial state of a row.

    tokens: the prompt. seed: noise key of the sequence. stop_tokens: tokens that end the answer. constraint: restricts
    the answer and belongs to this sequence only; None allows any token. sample: the request group whose texts n-gram
    drafts may copy from. deadline: end of the time budget in seconds of time.monotonic.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: tuple[int, ...] = field(default=())
    constraint: Constraint | None = None
    sample: ParallelSample | None = None
    deadline: float = math.inf


class StopDrafting(Protocol):
    """Decides whether drafting stops after the draft tokens so far."""

    def __call__(
        self, batch: Batch, scores: Sequence[Sequence[float]], parents: Sequence[Sequence[int]] | None = None, /
    ) -> bool:
        """Return whether to stop.

        batch: the rows that are drafted for. scores: confidence from 0 to 1 in each draft token of each row. parents:
        for trees, the index of each draft token's parent, -1 for the pending token.
        """
        ...


# Maps a draft from n-gram lookup to the number of tokens to draft with the model instead; 0 keeps the lookup's draft.
Fallback = Callable[["Batch", Draft], int]


@dataclass(frozen=True)
class SpeculationPlan:
    """Request of a length policy for the draft of one round, passed to the drafter.

    k: maximum number of draft tokens per row; 0 means plain decoding. caps: maximum per live row, where rows differ.
    stop_drafting: called after each draft token by drafters that score their draft tokens; None never stops early.
    fallback: called by drafters that combine n-gram lookup with a model; None leaves the choice to the drafter.
    note: whatever the policy wants to have back with the verdict of the round (``Verdict.note``).
    """

    k: int
    caps: Sequence[int] | None = None
    stop_drafting: StopDrafting | None = None
    fallback: Fallback | None = None
    note: object = None

    def within(self, batch: Batch) -> SpeculationPlan:
        """Reduce the plan to the positions that rows have left and to the maximum of their requests."""
        if self.k == 0:
            return self
        k, allowed = min(self.k, batch.max_gain - 1), batch.max_draft_tokens[: batch.rows]
        if min(allowed) >= k:
            return self if k == self.k else replace(self, k=k)
        caps = [k] * batch.rows if self.caps is None else self.caps
        return replace(self, k=k, caps=[min(cap, limit) for cap, limit in zip(caps, allowed, strict=True)])

    def counts(self, batch: Batch) -> list[int]:
        """Maximum number of draft tokens of each row of ``batch``, which may be a part of the planned batch."""
        if self.caps is None:
            return [self.k] * batch.rows
        return [min(self.k, cap) for cap in self.caps[batch.first : batch.first + batch.rows]]

    def stretch(self, rows: int) -> tuple[int, int]:
        """Smallest range of rows, first and stop, that contains all rows with a cap above 0."""
        if self.caps is None:
            return 0, rows
        drafting = [row for row, cap in enumerate(self.caps) if cap > 0]
        return (drafting[0], drafting[-1] + 1) if drafting else (0, 0)


_NO_STOPS = (-1,) * MAX_STOP_TOKENS


class _HostView:
    """Reads tokens [R, P] and length [R] of a batch on the CPU without tensor operators.

    Between two forward passes, which evict the CPU caches, one tensor operator takes 20 to 50 microseconds.
    """

    def __init__(self, tokens: Tensor, length: Tensor) -> None:
        self._tokens, self._length, self._width = _numbers(tokens), _numbers(length), tokens.shape[1]

    def last(self, row: int) -> int:
        return self._tokens[row * self._width + self._length[row] - 1]


def _numbers(tensor: Tensor) -> memoryview:
    """View a contiguous int64 tensor as Python integers."""
    return tensor.numpy().reshape(-1).data


class Batch:
    """Texts and sampling parameters of the rows, on the model's device.

    Rows 0 to ``rows`` - 1 decode; later rows are still in prefill or free.
    tokens [R, P + slack] int64: text of each row. Entries at or beyond its length are undefined.
    length [R] int64: tokens of each row. Invariant: the target's cache holds all of them but the last, the pending
        token.
    lengths: ``length`` on the host.
    limit [R] int64, limits: length at which a row must end, on the device and on the host.
    stops [R, MAX_STOP_TOKENS] int64: tokens that end a row, -1 for none.
    live [1] int64: ``rows`` on the device.
    max_draft_tokens: maximum number of draft tokens per round that each row's request allows.
    deadlines: end of each row's time budget in seconds of time.monotonic. An earlier deadline wins between draft tokens
        of equal value.
    samples: the request group of each row, or None.
    first: index of row 0 in the caches; not 0 in a part of a batch.
    ops: operations that replace torch operators on the host; None uses torch.
    draining: whether these are the last rows: no request waits, and none will come.
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
        # A round writes its whole block before the length says how many of its tokens count.
        slack = MAX_SPECULATION_LENGTH + 1
        self.tokens = torch.zeros((capacity, positions + slack), dtype=torch.int64, device=device)
        self.length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.lengths = [0] * capacity
        self.limits = [0] * capacity
        self.limit = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.stops = torch.full((capacity, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)
        self.max_draft_tokens = [MAX_SPECULATION_LENGTH] * capacity
        self.deadlines = [math.inf] * capacity
        self.samples: list[ParallelSample | None] = [None] * capacity
        self.rows = 0
        self.first = 0
        self._view = _HostView(self.tokens, self.length) if self.tokens.device.type == "cpu" else None
        self.positions = positions
        self.vocab_size = vocab_size
        self.sampling = SamplingRows(capacity, vocab_size, device)
        self.text_rows = TextRows(self.tokens, self.length, self.sampling.prompt_length, self.limit, self.stops)
        self.draining = False

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def live_length(self) -> Tensor:
        """Length of each live row in tokens, [B] int64."""
        return self.length[: self.rows]

    @property
    def longest(self) -> int:
        """Length of the longest live row in tokens."""
        return max(self.lengths[: self.rows])

    @property
    def siblings(self) -> list[tuple[list[int], int]]:
        """For each request group with at least two live rows: these rows and their prompt's length in tokens."""
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(self.samples[: self.rows]):
            if sample is not None:
                groups.setdefault(id(sample.group), []).append(row)
        return [(rows, int(self.sampling.prompt_length[rows[0]])) for rows in groups.values() if len(rows) > 1]

    @property
    def empty_draft(self) -> Draft:
        """Draft without tokens: the round is plain decoding."""
        return Draft.empty(self.rows, self.device)

    def fitting(self, draft: Draft) -> Draft:
        """Truncate a tree to the draft tokens that have a slot in the cache; every sibling takes one slot."""
        if draft.host_parents is None:
            return draft
        rows = range(self.rows)
        free_slots = [max(0, self.slots_for(self.limits[row]) - self.lengths[row]) for row in rows]
        return draft.first([min(slots, count) for slots, count in zip(free_slots, draft.drafted, strict=True)])

    def slots_for(self, limit: int) -> int:
        """Cache slots for a row that must end at ``limit`` tokens, with the draft tokens that are written beyond it."""
        return min(limit + MAX_SPECULATION_LENGTH, self.positions)

    @property
    def max_gain(self) -> int:
        """Maximum number of tokens that a live row may gain in one round."""
        rows = range(self.rows)
        return max(min(self.limits[row] - self.lengths[row], self.max_draft_tokens[row] + 1) for row in rows)

    def set_row(self, row: int, start: RowStart) -> None:
        """Initialize slot ``row`` with a new sequence."""
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
        """Copy the sequence of slot ``source`` to slot ``destination``."""
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
        """Mark a slot as free. Its caches keep the first ``cached_tokens`` tokens; rounds write after them."""
        self.length[row] = self.lengths[row] = cached_tokens + 1

    def set_rows(self, rows: int) -> None:
        """Set the number of live rows: rows 0 to ``rows`` - 1 decode."""
        self.rows = rows
        self.live.fill_(rows)
        self.sampling.refresh(rows)

    def part(self, first: int, stop: int) -> Batch:
        """Live rows ``first`` to ``stop`` - 1 as a batch for drafting, with views of the same tensors."""
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
        """Batch of B * (k + 1) rows, one per position of each row's tree; each text ends at its position.

        A draw for such a row takes into account the draft tokens on the path to its position and no others. The rows
        are copies.
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
        """Batch with one row per (row, draft tokens): a copy of that row, its text followed by the draft tokens."""
        rows = [row for row, _ in places]
        lines = copy.copy(self)
        lines.rows, lines._view = len(rows), None
        lines.length = self.length.new_tensor([self.lengths[row] + len(path) for row, path in places])
        lines.sampling = self.sampling.picked(rows)
        lines.tokens = self.tokens
        if lines.sampling.any_penalty:
            lines.tokens = self.tokens[rows]
            for line, (row, path) in zip(lines.tokens, places, strict=True):
                line[self.lengths[row] : self.lengths[row] + len(path)] = line.new_tensor(path)
        if lines.sampling.any_constraint:
            own = [self.sampling.constraints[row] for row in rows]
            lines.sampling.constraints = [
                None if constraint is None else ConstraintAfterDraft(constraint, path)
                for constraint, (_, path) in zip(own, places, strict=True)
            ]
        return lines

    def _texts_after(self, draft: Draft, tree: Tree) -> Tensor:
        """Each row's text followed by the draft tokens on the path to each position: [B * (k + 1), P] int64."""
        text = self.tokens[: self.rows, None].repeat(1, draft.k + 1, 1)
        at = (self.live_length[:, None] + tree.depths[:, 1:] - 1)[:, None]
        beyond = text.shape[2] - 1  # undefined entry that takes the tokens of other paths
        at = torch.where(tree.ancestors[:, :, 1:], at, beyond)
        return text.scatter_(2, at, draft.tokens[:, None].expand_as(at)).flatten(0, 1)

    def _constraints_after(self, draft: Draft) -> list[Constraint | None]:
        """Each row's constraint after the draft tokens on the path to each position; None at padding."""
        counts, own = draft.counts.tolist(), self.sampling.constraints[: self.rows]
        return [
            None if constraint is None or place > count else ConstraintAfterDraft(constraint, path)
            for constraint, count, paths in zip(own, counts, draft.token_paths, strict=True)
            for place, path in enumerate(paths)
        ]

    def pending_on_host(self) -> list[int]:
        """Pending token of each live row, as a list; on the CPU it is read without tensor operators."""
        view = self._view
        return self.pending()[:, 0].tolist() if view is None else [view.last(row) for row in range(self.rows)]

    def pending(self) -> Tensor:
        """Pending token of each live row, which the target has not read yet: [B, 1] int64."""
        return self.tokens[: self.rows].gather(1, self.live_length[:, None] - 1)

    def state(self, rows: int, *, may_sync: bool = True) -> RowState:
        """State of the first ``rows`` rows; rows that are not live never gain tokens. may_sync: see ``RowState``."""
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
        """Append each row's accepted + 1 tokens, truncated where the row ends."""
        verdict.host.gained = self._gain(verdict)
        self.note_gains(verdict.host.gained)
        for row, tokens in enumerate(verdict.host.tokens):
            if (constraint := self.sampling.constraints[row]) is not None:
                constraint.advance(tokens)

    def note_gains(self, gained: Sequence[int]) -> None:
        """Add the number of tokens that each row gained to the lengths on the host."""
        for row, count in enumerate(gained):
            self.lengths[row] += count

    def _gain(self, verdict: Verdict) -> list[int]:
        """Append the tokens on the device and return how many each row gained."""
        if self.ops is not None:
            return self.ops.gain(self.text_rows, verdict.tokens, verdict.accepted)
        gained: list[int] = self.state(self.rows).gain(verdict.tokens, verdict.accepted)[0].tolist()
        return gained
