"""The batch of live rows, and the speculation plan of a length policy.

Shapes: R slots, B live rows, k draft tokens, P positions, V vocabulary.
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
from paceline.core.draft import Draft, Logprobs, Verdict, empty_draft, first_of
from paceline.core.draft_tensors import DraftTensors
from paceline.core.nodes import Tree
from paceline.core.ops import HostOps
from paceline.core.row_tables import zeros_by_page
from paceline.core.rows import MAX_STOP_TOKENS, Constraint, ConstraintAfterDraft, RowState, RowValues, SamplingRows
from paceline.core.slots import Slots
from paceline.core.uploads import store
from paceline.core.values import Accepted, TextRows


@dataclass(frozen=True, eq=False)
class RequestGroup:
    """Parallel samples of one request. Their n-gram drafts may copy from the request's references and from answers.

    references: token ids of each reference. scope: whose answers they copy from, those of requests with an equal one.
    shared: whether other requests may have an equal scope, now or after a restart.
    """

    references: Sequence[Sequence[int]] = ()
    scope: tuple[str, ...] = ()
    shared: bool = False


class ParallelSample(NamedTuple):
    """One sample of a request group.

    prompt_tail: position in the row's text from which other samples may copy; it includes the last tokens of the prompt
    as context.
    """

    group: RequestGroup
    prompt_tail: int


@dataclass
class RowStart:
    """Initial state of a sequence.

    tokens: the prompt, and the answer so far. seed: noise key of the sequence. stop_tokens: tokens that end the answer.
    constraint: restricts the answer and belongs to this sequence only; None allows any token. sample: the request group
    whose texts n-gram drafts may copy from. deadline: end of the time budget in seconds of time.monotonic.
    answer_tokens: number of last tokens that are the answer's.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_tokens: tuple[int, ...] = field(default=())
    constraint: Constraint | None = None
    sample: ParallelSample | None = None
    deadline: float = math.inf
    answer_tokens: int = 0


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


# Maps a draft from n-gram lookup to the number of tokens to draft with the model instead in each row, [B]; 0 keeps the
# row's n-gram draft.
Fallback = Callable[["Batch", Draft], Sequence[int]]


@dataclass(frozen=True)
class SpeculationPlan:
    """Request of a length policy for the draft of one round, passed to the drafter.

    k: maximum number of draft tokens per row; 0 means plain decoding. caps: maximum per live row, where rows differ.
    stop_drafting: called after each draft token by drafters that score their draft tokens; None never stops early.
    fallback: called by drafters that combine n-gram lookup with a model; None leaves the choice to the drafter.
    note: whatever the policy wants to have back with the verdict of the round (``Verdict.note``).
    least_matches: ``fallback`` of rounds on a device, whose drafts are not seen: tokens that a match must have in each
        live row, so that its n-gram draft replaces the model's. None: the drafter's own number.
    """

    k: int
    caps: Sequence[int] | None = None
    stop_drafting: StopDrafting | None = None
    fallback: Fallback | None = None
    note: object = None
    least_matches: Sequence[int] | None = None

    def within(self, batch: Batch) -> SpeculationPlan:
        """Reduce the plan to the positions that rows have left and to the maximum of their requests."""
        if self.k == 0:
            return self
        k, allowed = min(self.k, batch.max_gain - 1), batch.max_draft_tokens
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
    """Reads text [R, P] and length [R] of a batch on the CPU without tensor operators.

    Between two forward passes, which evict the CPU caches, one tensor operator takes 20 to 50 microseconds.
    """

    def __init__(self, text: Tensor, length: Tensor) -> None:
        self._text, self._length, self._width = _numbers(text), _numbers(length), text.shape[1]

    def last(self, slot: int) -> int:
        return self._text[slot * self._width + self._length[slot] - 1]


def _numbers(tensor: Tensor) -> memoryview:
    """View a contiguous int64 tensor as Python integers."""
    return tensor.numpy().reshape(-1).data


@dataclass
class _HostRow:
    """Host-side state of a slot's sequence; see ``Batch``."""

    length: int = 0
    limit: int = 0
    max_draft_tokens: int = MAX_SPECULATION_LENGTH
    deadline: float = math.inf
    sample: ParallelSample | None = None


class Batch:
    """Texts and sampling parameters of the sequences, on the model's device.

    A sequence has a slot from its first token to its last: its place in the tables here, in caches, and in the
    per-slot state of drafters and length policies. The live rows are those that decode; row i is the sequence in slot
    ``slots[i]``. The other slots are in prefill or free.

    max_rows: most rows that decode at once, at most R; the other slots keep prefixes.

    Tables, by slot (R slots):

    text: [R, P + slack] int64. Entries at or beyond a length are undefined.
    length: [R] int64, tokens of each sequence. Invariant: the target's cache holds all of them but the last, the
        pending token.
    limit: [R] int64, length at which a sequence must end.
    stops: [R, MAX_STOP_TOKENS] int64, tokens that end it, -1 for none.
    slot_order: [R] int64, all slots, those of the live rows first.
    live: [1] int64, number of live rows.

    The live rows (B of them), on the host:

    slots: slot of each row, ascending. live_slots: the same with their tensor.
    lengths, limits: ``length`` and ``limit``.
    max_draft_tokens: maximum number of draft tokens per round that each row's request allows.
    deadlines: end of each row's time budget in seconds of time.monotonic. An earlier deadline wins between draft tokens
        of equal value.
    samples: the request group of each row, or None.

    rows: their number, B.
    first: number of row 0 among all live rows; not 0 in a part of a batch.
    ops: operations that replace torch operators on the host; None uses torch.
    draining: whether these are the last rows: no request waits, and none will come.
    expected_tokens: tokens that a row is expected to gain until its answer ends by itself, however many it has gained;
        infinity before any answer has ended so.
    """

    def __init__(
        self,
        capacity: int,
        positions: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        ops: HostOps | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.ops = ops
        self.max_rows = capacity if max_rows is None else max_rows
        # A round writes its whole block before the length says how many of its tokens count.
        slack = MAX_SPECULATION_LENGTH + 1
        self.text = zeros_by_page(capacity, positions + slack, dtype=torch.int64, device=device)
        self.length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.limit = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.stops = torch.full((capacity, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self.slot_order = torch.arange(capacity, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)
        self._host_rows = [_HostRow() for _ in range(capacity)]
        self.first = 0
        self._view = _HostView(self.text, self.length) if self.text.device.type == "cpu" else None
        self.positions = positions
        self.vocab_size = vocab_size
        self.sampling = SamplingRows(capacity, vocab_size, device)
        self.text_rows = TextRows(self.text, self.length, self.sampling.prompt_length, self.limit, self.stops)
        self.draining = False
        self.expected_tokens = math.inf
        self._list_rows(())

    @property
    def capacity(self) -> int:
        """Number of slots, R."""
        return len(self._host_rows)

    @property
    def device(self) -> torch.device:
        return self.length.device

    @property
    def live_length(self) -> Tensor:
        """Length of each live row in tokens, [B] int64."""
        return self.length[self.live_slots.where]

    @property
    def tokens(self) -> Tensor:
        """Text of each live row, [B, P + slack] int64. Entries at or beyond a row's length are undefined."""
        return self.live_slots.of(self.text)

    @property
    def longest(self) -> int:
        """Length of the longest live row in tokens."""
        return max(self.lengths)

    @property
    def siblings(self) -> list[tuple[list[int], int]]:
        """For each request group with at least two live rows: these rows and their prompt's length in tokens."""
        groups: dict[int, list[int]] = {}
        for row, sample in enumerate(self.samples):
            if sample is not None:
                groups.setdefault(id(sample.group), []).append(row)
        prompt_length = self.sampling.prompt_length
        return [(rows, int(prompt_length[self.slots[rows[0]]])) for rows in groups.values() if len(rows) > 1]

    @property
    def empty_draft(self) -> Draft:
        """Draft without tokens: the round is plain decoding."""
        return empty_draft(self.rows)

    def fitting(self, draft: Draft) -> Draft:
        """Truncate a tree to the draft tokens that have a place in the cache; every sibling takes one."""
        if draft.parents is None:
            return draft
        ends = zip(self.limits, self.lengths, strict=True)
        free = [max(0, self.positions_for(limit) - length) for limit, length in ends]
        return draft.first([min(positions, count) for positions, count in zip(free, draft.drafted, strict=True)])

    def positions_for(self, limit: int) -> int:
        """Cache positions of a row that must end at ``limit`` tokens, with those of draft tokens beyond it."""
        return min(limit + MAX_SPECULATION_LENGTH, self.positions)

    def ends_after(self, tokens: int) -> list[int]:
        """Cache positions that each live row has once it is ``tokens`` longer, at most those that it may need."""
        ends = zip(self.lengths, self.limits, strict=True)
        return [min(length + tokens, self.positions_for(limit)) for length, limit in ends]

    @property
    def max_gain(self) -> int:
        """Maximum number of tokens that a live row may gain in one round."""
        rows = zip(self.limits, self.lengths, self.max_draft_tokens, strict=True)
        return max(min(limit - length, most + 1) for limit, length, most in rows)

    def set_row(self, slot: int, start: RowStart) -> None:
        """Begin a new sequence in ``slot``, which no live row may have. It decodes once ``set_live`` has named it."""
        assert slot not in self.slots, f"slot {slot} belongs to a live row"
        size, allowed = len(start.tokens), start.params.num_speculative_tokens
        prompt = size - start.answer_tokens
        limit = min(prompt + start.params.max_tokens, self.positions)
        most = MAX_SPECULATION_LENGTH if allowed is None else allowed
        self._host_rows[slot] = _HostRow(size, limit, most, start.deadline, start.sample)
        store(self.text[slot, :size], start.tokens)
        self.length[slot].fill_(size)
        self.limit[slot].fill_(limit)
        store(self.stops[slot], (*start.stop_tokens, *_NO_STOPS)[:MAX_STOP_TOKENS])
        self.sampling.set(slot, start.params, start.seed, prompt, start.stop_tokens, start.constraint)

    def length_of(self, slot: int) -> int:
        """Tokens of the sequence in ``slot``."""
        return self._host_rows[slot].length

    def free_slot(self, slot: int, cached_tokens: int) -> None:
        """Mark a slot as free. Its caches keep the first ``cached_tokens`` tokens; rounds write after them."""
        self._host_rows[slot].length = cached_tokens + 1
        self.length[slot].fill_(cached_tokens + 1)

    def set_live(self, slots: Sequence[int]) -> None:
        """Set the slots whose sequences decode, in ascending order."""
        idle = sorted(set(range(self.capacity)).difference(slots))
        store(self.slot_order, [*slots, *idle])
        self.live.fill_(len(slots))
        self._list_rows(slots)

    def _list_rows(self, slots: Sequence[int]) -> None:
        """List what the host knows of the live rows."""
        rows = [self._host_rows[slot] for slot in slots]
        self.slots, self.rows = list(slots), len(slots)
        self.live_slots = Slots(self.slot_order[: len(rows)], self.slots)
        self.lengths, self.limits = [row.length for row in rows], [row.limit for row in rows]
        self.max_draft_tokens = [row.max_draft_tokens for row in rows]
        self.deadlines, self.samples = [row.deadline for row in rows], [row.sample for row in rows]
        self.sampling.refresh(self.live_slots)

    def part(self, first: int, stop: int) -> Batch:
        """Live rows ``first`` to ``stop`` - 1 as a batch for drafting, with the same tables."""
        part = copy.copy(self)
        part.first, part.slots, part.rows = self.first + first, self.slots[first:stop], stop - first
        part.live_slots = self.live_slots.part(first, stop)
        part.lengths, part.limits = self.lengths[first:stop], self.limits[first:stop]
        part.max_draft_tokens, part.samples = self.max_draft_tokens[first:stop], self.samples[first:stop]
        part.deadlines = self.deadlines[first:stop]
        part.sampling = self.sampling.part(part.live_slots)
        return part

    def _copies(self, rows: Sequence[int], length: Tensor) -> Batch:
        """Copies of live rows, which may repeat, in slots 0, 1, ..., without texts. length: [N] int64."""
        copies = copy.copy(self)
        copies._view, copies.length, copies.sampling = None, length, self.sampling.picked(rows)
        copies.slots, copies.rows = list(range(len(rows))), len(rows)
        copies.live_slots = Slots.listed(copies.slots, length.device)
        return copies

    def unrolled(self, draft: DraftTensors) -> Batch:
        """Batch of B * (k + 1) rows, one per position of each row's tree; each text ends at its position.

        A draw for such a row takes into account the draft tokens on the path to its position and no others. The rows
        are copies.
        """
        assert draft.tree is not None
        rows = [row for row in range(self.rows) for _ in range(draft.k + 1)]
        lines = self._copies(rows, (self.live_length[:, None] + draft.tree.depths).flatten())
        if lines.sampling.any_penalty:
            lines.text = self._texts_after(draft, draft.tree)
        if lines.sampling.any_constraint:
            lines.sampling.constraints = self._constraints_after(draft)
        return lines

    def after(self, places: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """Batch with one row per (row, draft tokens): a copy of that row, its text followed by the draft tokens."""
        rows = [row for row, _ in places]
        lengths = [self.lengths[row] + len(path) for row, path in places]
        lines = self._copies(rows, self.length.new_tensor(lengths))
        if lines.sampling.any_penalty:
            lines.text = self.tokens[rows]
            for line, (row, path) in zip(lines.text, places, strict=True):
                line[self.lengths[row] : self.lengths[row] + len(path)] = line.new_tensor(path)
        if lines.sampling.any_constraint:
            lines.sampling.constraints = [
                None if constraint is None else ConstraintAfterDraft(constraint, path)
                for constraint, (_, path) in zip(lines.sampling.constraints, places, strict=True)
            ]
        return lines

    def _texts_after(self, draft: DraftTensors, tree: Tree) -> Tensor:
        """Each row's text followed by the draft tokens on the path to each position: [B * (k + 1), P] int64."""
        text = self.tokens[:, None].repeat(1, draft.k + 1, 1)
        at = (self.live_length[:, None] + tree.depths[:, 1:] - 1)[:, None]
        beyond = text.shape[2] - 1  # undefined entry that takes the tokens of other paths
        at = torch.where(tree.ancestors[:, :, 1:], at, beyond)
        return text.scatter_(2, at, draft.tokens[:, None].expand_as(at)).flatten(0, 1)

    def _constraints_after(self, draft: DraftTensors) -> list[Constraint | None]:
        """Each row's constraint after the draft tokens on the path to each position; None at padding."""
        constraints: list[Constraint | None] = []
        for constraint, paths in zip(self.sampling.constraints, draft.paths, strict=True):
            own = [None if constraint is None else ConstraintAfterDraft(constraint, path) for path in paths]
            constraints += [*own, *[None] * (draft.k + 1 - len(own))]
        return constraints

    def pending_on_host(self) -> list[int]:
        """Pending token of each live row, as a list; on the CPU it is read without tensor operators."""
        view = self._view
        return self.pending()[:, 0].tolist() if view is None else [view.last(slot) for slot in self.slots]

    def pending(self) -> Tensor:
        """Pending token of each live row, which the target has not read yet: [B, 1] int64."""
        return self.text_at(self.live_length[:, None] - 1)

    def text_at(self, place: Tensor) -> Tensor:
        """Tokens [B, L] of the live rows at ``place`` [B, L]; positions beyond the memory give its last token."""
        return self.text[self.live_slots.index[:, None], place.clamp(max=self.text.shape[1] - 1)]

    def state(self, rows: int | None = None) -> RowState:
        """State of the live rows.

        rows: size of a captured program. Its rows are the live ones and then idle ones, which never gain tokens; the
        host does not wait for the device. None: exactly the live rows.
        """
        if rows is None:
            return RowState(self.text, self._tables, self.live_slots, self.live)
        return RowState(
            self.text, self._tables, Slots(self.slot_order[:rows], live=self.live), self.live, may_sync=False
        )

    @property
    def _tables(self) -> RowValues:
        own = {"length": self.length, "limit": self.limit, "stops": self.stops}
        of_sampling = (name for name in RowValues._fields if name not in own)
        return RowValues(**own, **{name: getattr(self.sampling, name) for name in of_sampling})

    def commit(self, draft: Draft, accepted: Accepted) -> Verdict:
        """Append each row's accepted + 1 tokens, truncated where the row ends. Return the round's verdict."""
        tokens, counts, gained = self._gain(accepted)
        self.note_gains(gained)
        self.sampling.advance(tokens)
        path = None if accepted.path is None else first_of(accepted.path.tolist(), counts)
        logprobs = None if accepted.logprobs is None else Logprobs(*(table.tolist() for table in accepted.logprobs))
        return Verdict(tokens, counts, draft.drafted, gained, draft.parents, path, logprobs)

    def note_gains(self, gained: Sequence[int]) -> None:
        """Add the number of tokens that each row gained to the lengths on the host."""
        for row, (slot, count) in enumerate(zip(self.slots, gained, strict=True)):
            self.lengths[row] += count
            self._host_rows[slot].length += count

    def _gain(self, accepted: Accepted) -> tuple[list[list[int]], list[int], list[int]]:
        """Append the tokens on the device.

        Returns each row's new tokens, number of accepted draft tokens, and number of tokens that it gained.
        """
        if self.ops is not None:
            gained = self.ops.commit(self.text_rows, self.live_slots.index, accepted.tokens, accepted.accepted)
            counts: list[int] = accepted.accepted.tolist()
            return first_of(accepted.tokens.tolist(), [count + 1 for count in counts]), counts, gained
        numbers = torch.stack([accepted.accepted, self.state().gain(accepted.tokens, accepted.accepted)[0]], dim=1)
        table: list[list[int]] = torch.cat([accepted.tokens, numbers], dim=1).tolist()  # one read of the device
        return [line[: line[-2] + 1] for line in table], [line[-2] for line in table], [line[-1] for line in table]
