"""Sampling parameters of the rows as tensors. Shapes: R slots, B live rows, V vocabulary."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.config import MAX_LOGPROBS, SamplingParams
from paceline.core.draft import Undrawn
from paceline.core.slots import Slots
from paceline.core.uploads import store
from paceline.core.values import Cuts, DrawRows, Entries, Minimum, Penalties, Truncation

_SCALARS: dict[str, torch.dtype] = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "repetition_penalty": torch.float32,
    **dict.fromkeys(Truncation._fields, torch.float32),
}
DEVICE_BIASES = 1024  # entries of a row's logit_bias that device rounds can add; OpenAI allows 300
MAX_STOP_TOKENS = 8  # stop tokens of a row that a commit checks; the scheduler truncates at further ones
LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)  # number of most likely tokens that a compiled device program can report
_TABLES = (*_SCALARS, "floor", "seed", "prompt_length", "min_length")


class Constraint(Protocol):
    """Restriction of a row's tokens, for example a grammar. It tracks the tokens that the row has gained."""

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        """Set the row's logits [L, V] to -inf for forbidden tokens, in place.

        Position j follows the row's text and the first ``first + j`` draft tokens. Positions after a forbidden draft
        token or after the end of the answer are never drawn from and stay unchanged.
        An exception ends the answer, because the constraint cannot be enforced any longer.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens that the row has gained. Tokens after the end of the answer are ignored."""
        ...

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        """Whether any token may follow each beginning of the draft tokens, so that no position needs a mask."""
        ...

    @property
    def reads_logits(self) -> bool:
        """Whether ``mask`` needs the model's logits, or changes more than which tokens may come."""
        ...


@dataclass(frozen=True)
class StepFeatures:
    """Sampling features that a compiled device program must include; one program is compiled per combination.

    adjusts: penalties or a minimum length. cuts: min-p, top-k or top-p. truncates: cuts by the shape of the
    distribution. logprobs: number of most likely tokens whose
    log-probabilities are reported beside those of the drawn tokens; None for no log-probabilities. biases: logit
    biases. masks: masks that the host makes for each round. adapters: whether a row has an adapter.
    """

    adjusts: bool = False
    cuts: bool = False
    truncates: bool = False
    logprobs: int | None = None
    biases: bool = False
    masks: bool = False
    adapters: bool = False


NOTHING = StepFeatures()


class RowValues(NamedTuple):
    """Numbers of rows that acceptance rules, commit and stop tests use: [R] each, or [B] for B of the rows.

    length, prompt_length, seed, top_k, min_length: int64. temperature, top_p, floor, presence_penalty,
    frequency_penalty, repetition_penalty and those of ``Truncation``: float32. See ``SamplingRows``.
    limit: int64, length at which a row must end. stops: [R, S] int64, tokens that end a row, -1 for none.
    """

    length: Tensor
    prompt_length: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    typical_p: Tensor
    epsilon_cutoff: Tensor
    eta_cutoff: Tensor
    top_n_sigma: Tensor
    min_length: Tensor
    seed: Tensor
    limit: Tensor
    stops: Tensor

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.typical_p, self.epsilon_cutoff, self.eta_cutoff, self.top_n_sigma)


@dataclass(frozen=True)
class RowState:
    """B rows of a batch: its tables, and the slots of the rows in them.

    text: [R, P] int64. tables: by slot. live: [1] int64, number of live rows; later ones never gain tokens.
    may_sync: whether the host may wait for the device. It must be false while a CUDA graph is captured.
    """

    text: Tensor
    tables: RowValues
    slots: Slots
    live: Tensor
    may_sync: bool = True

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def length(self) -> Tensor:
        """Length of each row now, [B] int64."""
        return self.tables.length[self.slots.where]

    @cached_property
    def values(self) -> RowValues:
        """The rows' own numbers, [B] each. They are read once: not to be used after a commit."""
        return RowValues(*map(self.slots.of, self.tables))

    def text_at(self, place: Tensor) -> Tensor:
        """Tokens [B, L] of the rows at ``place`` [B, L]; positions beyond the memory give its last token."""
        return self.text[self.slots.index[:, None], place.clamp(max=self.text.shape[1] - 1)]

    def text_from(self, start: Tensor, count: int) -> Tensor:
        """Tokens [B, count] of the rows from position start [B] on; undefined beyond their lengths."""
        return self.text_at(start[:, None] + torch.arange(count, device=start.device))

    def gain(self, tokens: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Append each row's first accepted[i] + 1 tokens, truncated after its first stop token and at its limit.

        tokens: [B, k + 1] int64; those that are ``Undrawn`` are not appended. accepted: [B] int64.
        Returns the number of tokens that each row gained, [B] int64, and whether the row had ended before, [B] bool.
        """
        length, limit, stops = self._ends()
        place = torch.arange(tokens.shape[1], device=tokens.device)
        room, ended = limit - length, self.ended()
        stopping = ((tokens[..., None] == stops[:, None]) & (stops >= 0)[:, None]).any(2)
        first_stop = torch.where(stopping, place, tokens.shape[1]).amin(1)
        first_undrawn = torch.where(tokens < 0, place, tokens.shape[1]).amin(1)
        end = torch.minimum(torch.minimum(accepted, first_stop) + 1, first_undrawn)
        gained = torch.minimum(end, room).masked_fill(ended, 0)
        at = length[:, None] + place
        self.text[self.slots.index[:, None], at] = torch.where(place < gained[:, None], tokens, self.text_at(at))
        self.tables.length[self.slots.where] = length + gained
        return gained, ended

    def ended(self) -> Tensor:
        """Whether each row gains no tokens any more: it is idle, or its answer is complete. [B] bool."""
        length, limit, stops = self._ends()
        idle = torch.arange(self.rows, device=length.device) >= self.live
        return self._stopped(length, stops) | (limit <= length) | idle

    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Length, limit [B] and stop tokens [B, S] of the rows now."""
        return self.slots.of(self.tables.length), self.slots.of(self.tables.limit), self.slots.of(self.tables.stops)

    def _stopped(self, length: Tensor, stops: Tensor) -> Tensor:
        """Whether each row's answer ends with one of its stop tokens, [B] bool."""
        last = self.text_at((length - 1).clamp(min=0)[:, None])
        prompt_length = self.slots.of(self.tables.prompt_length)
        return ((last == stops) & (stops >= 0)).any(1) & (length > prompt_length)


@dataclass(frozen=True)
class ConstraintAfterDraft:
    """A row's constraint after some draft tokens, for positions of a tree."""

    constraint: Constraint
    draft_tokens: Sequence[int]

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        self.constraint.mask([*self.draft_tokens, *draft_tokens], len(self.draft_tokens) + first, logits)

    def advance(self, tokens: Sequence[int]) -> None:
        raise NotImplementedError("draft tokens are not committed here")

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        return self.constraint.is_free([*self.draft_tokens, *draft_tokens])

    @property
    def reads_logits(self) -> bool:
        return self.constraint.reads_logits


class _Settings(NamedTuple):
    """What a slot's sequence asks for. held_back: its stop tokens, if min_tokens forbids them."""

    params: SamplingParams
    constraint: Constraint | None = None
    held_back: tuple[int, ...] = ()


class SamplingRows:
    """SamplingParams of each slot on the device, and what the live rows use of them.

    Tensors [R], by slot: temperature, top_k, top_p, presence_penalty, frequency_penalty, repetition_penalty,
    typical_p, epsilon_cutoff, eta_cutoff, top_n_sigma, seed, prompt_length, floor (logarithm of min_p: the lowest logit
    relative to the largest, after temperature), min_length (length of prompt and answer in tokens before which no stop
    token may come).

    Of the live rows, in their order:

    params, constraints: one per row; a constraint is None where any token may follow.
    bias, stop_tokens: entries of the rows; None if no row has any.
    logprobs: number of most likely tokens whose log-probabilities rows request beside those of their own tokens; None
        for no log-probabilities.
    scored: [B] int64, 1 for rows that request log-probabilities of their own tokens; None unless ``logprobs`` is 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    typical_p: Tensor
    epsilon_cutoff: Tensor
    eta_cutoff: Tensor
    top_n_sigma: Tensor
    _drawing: DrawRows | None

    def __init__(self, capacity: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._of_slots = [_Settings(SamplingParams(temperature=0.0))] * capacity
        for name, dtype in _SCALARS.items():
            setattr(self, name, torch.zeros(capacity, dtype=dtype, device=device))
        self.repetition_penalty.fill_(1)  # the device divides free slots by it, too
        self.floor = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.seed = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.min_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        # By slot, for device rounds; filled up with token 0 and bias 0.
        self._bias_tokens = torch.zeros((capacity, DEVICE_BIASES), dtype=torch.int64, device=device)
        self._bias_values = torch.zeros((capacity, DEVICE_BIASES), dtype=torch.float32, device=device)
        self.refresh(Slots.listed((), self.seed.device))

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_length: int,
        stop_tokens: tuple[int, ...],
        constraint: Constraint | None = None,
    ) -> None:
        """Set the parameters of a slot. seed: its noise key. stop_tokens: tokens that min_tokens forbids."""
        if params.logit_bias or self._of_slots[slot].params.logit_bias:
            self._set_bias(slot, {} if len(params.logit_bias) > DEVICE_BIASES else params.logit_bias)
        self._of_slots[slot] = _Settings(params, constraint, stop_tokens if params.min_tokens else ())
        for name in _SCALARS:
            getattr(self, name)[slot].fill_(getattr(params, name))
        self.floor[slot].fill_(math.log(params.min_p) if params.min_p > 0 else -math.inf)
        self.seed[slot].fill_(seed)
        self.prompt_length[slot].fill_(prompt_length)
        self.min_length[slot].fill_(prompt_length + params.min_tokens)

    def _set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        for table, entries in ((self._bias_tokens, bias.keys()), (self._bias_values, bias.values())):
            table[slot].zero_()
            store(table[slot, : len(bias)], [*entries])

    def biased(self, logits: Tensor, slots: Slots) -> Tensor:
        """Add the biases of the rows in ``slots`` to logits [B, L, V], in a copy, without reading the device."""
        shape = (-1, logits.shape[1], -1)
        tokens, values = (slots.of(table)[:, None].expand(shape) for table in (self._bias_tokens, self._bias_values))
        return logits.float().scatter_add(2, tokens, values)

    def part(self, slots: Slots) -> SamplingRows:
        """The rows in ``slots``, with the same tensors."""
        part = copy.copy(self)
        part.refresh(slots)
        return part

    def picked(self, rows: Sequence[int]) -> SamplingRows:
        """Copies of the named live rows, which may repeat, in slots 0, 1, ... The feature flags stay unchanged."""
        chosen, index = copy.copy(self), torch.tensor(rows, device=self.temperature.device)
        for name in _TABLES:
            setattr(chosen, name, self._slots.of(getattr(self, name))[index])
        chosen._of_slots = [self._of_rows[row] for row in rows]
        chosen._list_rows(Slots.listed(range(len(rows)), index.device))
        return chosen

    def refresh(self, slots: Slots) -> None:
        """Note the slots of the live rows. Call it whenever rows join or leave."""
        self._list_rows(slots)
        live = self.params
        self.all_greedy = all(p.greedy for p in live)
        self.any_cut = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in live)
        self.any_truncation = any(p.truncates for p in live)
        self.any_adapter = any(p.adapter is not None for p in live)
        self.largest_top_k = max((p.top_k for p in live), default=0)
        self.any_top_p = any(p.top_p < 1 for p in live)
        self.any_penalty = any(
            p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1 for p in live
        )
        self.any_constraint = any(constraint is not None for constraint in self.constraints)
        held_back = max((len(settings.held_back) for settings in self._of_rows), default=0)
        self.any_long = self.any_minimum and held_back > MAX_STOP_TOKENS
        self.logprobs = max((p.scored for p in live if p.scored is not None), default=None)
        self.scored = torch.tensor([int(p.scored is not None) for p in live]) if self.logprobs == 0 else None

    def _list_rows(self, slots: Slots) -> None:
        """List parameters, bias and forbidden stop tokens of the rows in ``slots``."""
        assert slots.numbers is not None
        device = self.seed.device
        self._slots, self._drawing = slots, None
        self._of_rows = [self._of_slots[slot] for slot in slots.numbers]
        self.params = [settings.params for settings in self._of_rows]
        self.constraints = [settings.constraint for settings in self._of_rows]
        self.any_bias = any(p.logit_bias for p in self.params)
        self.any_minimum = any(p.min_tokens > 0 for p in self.params)
        forbidden = [dict.fromkeys(settings.held_back, -math.inf) for settings in self._of_rows]
        self.bias = Entries.of([dict(p.logit_bias) for p in self.params], device) if self.any_bias else None
        self.stop_tokens = Entries.of(forbidden, device) if self.any_minimum else None

    def advance(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append each live row's new tokens to its constraint, which says why it forbids all of them if it does."""
        for constraint, gained in zip(self.constraints, tokens, strict=True):
            if constraint is None:
                continue
            if gained and gained[-1] < 0:
                gained = [*gained[:-1], *([0] if gained[-1] == Undrawn.ALL_FORBIDDEN else [])]
            constraint.advance(gained)

    def drawing(self, text: Tensor, length: Tensor) -> DrawRows:
        """Parameters of the live rows for the kernels. text [R, P] and length [R] are those of the batch."""
        if self._drawing is None or self._drawing.positions is not length:
            slots = self._slots.index
            self._drawing = DrawRows(self.temperature, self.seed, length, *self._features(text), slots=slots)
        return self._drawing

    def _features(
        self, text: Tensor
    ) -> tuple[Cuts | None, Truncation | None, Penalties | None, Minimum | None, Entries | None]:
        """Cuts, truncation, penalties, minimum length and bias, each None if no live row uses it."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return (
            Cuts(self.floor, self.top_k, self.top_p) if self.any_cut else None,
            Truncation(*(getattr(self, name) for name in Truncation._fields)) if self.any_truncation else None,
            Penalties(*penalties, text, self.prompt_length) if self.any_penalty else None,
            None if self.stop_tokens is None else Minimum(self.min_length, self.stop_tokens),
            self.bias,
        )

    @property
    def needs_host(self) -> bool:
        """Whether any live row uses a feature that compiled device programs do not support."""
        return self.any_long or self.any_long_bias or self.any_processor

    @property
    def any_long_bias(self) -> bool:
        """Whether any live row has more logit biases than device rounds can add."""
        return any(len(params.logit_bias) > DEVICE_BIASES for params in self.params)

    @property
    def any_processor(self) -> bool:
        """Whether the constraint of any live row reads the model's logits."""
        return any(constraint is not None and constraint.reads_logits for constraint in self.constraints)

    @property
    def step_features(self) -> StepFeatures:
        """Features that a compiled device program must include for the live rows."""
        wanted = self.logprobs
        logprobs = None if wanted is None else next(size for size in LOGPROB_SIZES if size >= wanted)
        adjusts = self.any_penalty or self.any_minimum
        cuts = self.any_cut, self.any_truncation
        others = {"biases": self.any_bias, "masks": self.any_constraint, "adapters": self.any_adapter}
        return StepFeatures(adjusts, *cuts, logprobs, **others)

    @property
    def adjusts(self) -> bool:
        """Whether any live row changes its logits before temperature is applied."""
        return self.any_penalty or self.any_bias or self.any_minimum or self.any_constraint
