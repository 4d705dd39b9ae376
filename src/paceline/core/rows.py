"""Sampling parameters of the rows as tensors. Shapes: R rows (capacity), B live rows, V vocabulary."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.config import MAX_LOGPROBS, SamplingParams
from paceline.core.ops import Cuts, DrawRows, Entries, Minimum, Penalties

_SCALARS: dict[str, torch.dtype] = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "repetition_penalty": torch.float32,
}
MAX_STOP_TOKENS = 8  # stop tokens of a row that a commit checks; the scheduler truncates at further ones
LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)  # number of most likely tokens that a compiled device program can report
_TABLES = (*_SCALARS, "floor", "seed", "prompt_length", "min_length")


class MaskQuery(Protocol):
    """Query to a row's constraint: which tokens may follow the row's text and some draft tokens."""

    def send(self) -> None:
        """Start the computation. All queries of a round are sent before the first ``mask`` call waits."""
        ...

    def mask(self, logits: Tensor) -> None:
        """Set the row's logits [L, V] at the queried positions to -inf for forbidden tokens, in place.

        Positions after a forbidden draft token or after the end of the answer are never drawn from and stay unchanged.
        An exception ends the answer, because the constraint cannot be enforced any longer.
        """
        ...


class Constraint(Protocol):
    """Restriction of a row's tokens, for example a grammar. It tracks the tokens that the row has gained."""

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        """Query ``places`` positions; position j follows the first ``first + j`` draft tokens."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens that the row has gained. Tokens after the end of the answer are ignored."""
        ...


@dataclass(frozen=True)
class StepFeatures:
    """Sampling features that a compiled device program must include; one program is compiled per combination.

    adjusts: penalties or a minimum length. cuts: min-p, top-k or top-p. logprobs: number of most likely tokens whose
    log-probabilities are reported beside those of the drawn tokens; None for no log-probabilities.
    """

    adjusts: bool = False
    cuts: bool = False
    logprobs: int | None = None


NOTHING = StepFeatures()


@dataclass(frozen=True)
class RowState:
    """State of B rows that acceptance rules, commit and stop tests use. Its tensors are views of the batch's own.

    text [B, P] int64; length, prompt_length, seed [B] int64; temperature [B] float32. top_k, min_length [B] int64;
    top_p, floor, presence_penalty, frequency_penalty, repetition_penalty [B] float32: see ``SamplingRows``.
    limit [B] int64: length at which a row must end. stops [B, S] int64: tokens that end a row, -1 for none.
    live [1] int64: number of live rows; later rows never gain tokens.
    may_sync: whether the host may wait for the device. It must be false while a CUDA graph is captured.
    """

    text: Tensor
    length: Tensor
    prompt_length: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    min_length: Tensor
    seed: Tensor
    limit: Tensor
    stops: Tensor
    live: Tensor
    may_sync: bool = True

    @property
    def rows(self) -> int:
        return self.length.shape[0]

    def gain(self, tokens: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Append each row's first accepted[i] + 1 tokens, truncated after its first stop token and at its limit.

        tokens: [B, k + 1] int64. accepted: [B] int64. Returns the number of tokens that each row gained, [B] int64, and
        whether the row had ended before, [B] bool.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        room = self.limit - self.length
        ended = self._stopped() | (room <= 0) | (torch.arange(self.rows, device=tokens.device) >= self.live)
        stopping = ((tokens[..., None] == self.stops[:, None]) & (self.stops >= 0)[:, None]).any(2)
        first_stop = torch.where(stopping, place, tokens.shape[1]).amin(1)
        gained = torch.minimum(torch.minimum(accepted, first_stop) + 1, room).masked_fill(ended, 0)
        at = self.length[:, None] + place
        self.text.scatter_(1, at, torch.where(place < gained[:, None], tokens, self.text.gather(1, at)))
        self.length.add_(gained)
        return gained, ended

    def _stopped(self) -> Tensor:
        """Whether each row's answer ends with one of its stop tokens, [B] bool."""
        last = self.text.gather(1, (self.length - 1).clamp(min=0)[:, None])
        return ((last == self.stops) & (self.stops >= 0)).any(1) & (self.length > self.prompt_length)


@dataclass(frozen=True)
class ConstraintAfterDraft:
    """A row's constraint after some draft tokens, for positions of a tree."""

    constraint: Constraint
    draft_tokens: Sequence[int]

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        return self.constraint.ask([*self.draft_tokens, *draft_tokens], len(self.draft_tokens) + first, places)

    def advance(self, tokens: Sequence[int]) -> None:
        raise NotImplementedError("draft tokens are not committed here")


class SamplingRows:
    """SamplingParams of each row on the device, and flags for the features that live rows use.

    Tensors [R]: temperature, top_k, top_p, presence_penalty, frequency_penalty, repetition_penalty, seed,
    prompt_length, floor (logarithm of min_p: the lowest logit relative to the largest, after temperature), min_length
    (length of prompt and answer in tokens before which no stop token may come).
    bias, stop_tokens: entries of the live rows; None if no live row has any.
    constraints: one per row, None where any token may follow.
    logprobs: number of most likely tokens whose log-probabilities live rows request beside those of their own tokens;
        None for no log-probabilities.
    scored: [B] int64, 1 for rows that request log-probabilities of their own tokens; None unless ``logprobs`` is 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor

    def __init__(self, capacity: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.params: list[SamplingParams] = [SamplingParams(temperature=0.0)] * capacity
        self.constraints: list[Constraint | None] = [None] * capacity
        self._held_back: list[tuple[int, ...]] = [()] * capacity  # stop tokens of each row that min_tokens forbids
        for name, dtype in _SCALARS.items():
            setattr(self, name, torch.zeros(capacity, dtype=dtype, device=device))
        self.repetition_penalty.fill_(1)  # the device divides free slots by it, too
        self.floor = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.seed = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.min_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.refresh(0)

    def set(
        self, row: int, params: SamplingParams, seed: int, prompt_length: int, stop_tokens: tuple[int, ...]
    ) -> None:
        """Set the parameters of a row. seed: its noise key. stop_tokens: tokens that min_tokens forbids."""
        self.params[row] = params
        for name in _SCALARS:
            getattr(self, name)[row] = getattr(params, name)
        self.floor[row] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.seed[row] = seed
        self.prompt_length[row] = prompt_length
        self.min_length[row] = prompt_length + params.min_tokens
        self._held_back[row] = stop_tokens if params.min_tokens else ()

    def copy_row(self, source: int, destination: int) -> None:
        self.params[destination] = self.params[source]
        self.constraints[destination] = self.constraints[source]
        self._held_back[destination] = self._held_back[source]
        for name in _TABLES:
            table = getattr(self, name)
            table[destination] = table[source]

    def part(self, first: int, stop: int) -> SamplingRows:
        """Rows ``first`` to ``stop`` - 1, as views of the same tensors."""
        part = copy.copy(self)
        part.params, part.constraints = self.params[first:stop], self.constraints[first:stop]
        part._held_back = self._held_back[first:stop]
        for name in _TABLES:
            setattr(part, name, getattr(self, name)[first:stop])
        part.refresh(stop - first)
        return part

    def repeated(self, rows: int, times: int) -> SamplingRows:
        """Copy each of the first ``rows`` rows ``times`` times in succession. The feature flags stay unchanged."""
        return self.picked([row for row in range(rows) for _ in range(times)])

    def picked(self, rows: Sequence[int]) -> SamplingRows:
        """Copy the named rows, which may repeat. The feature flags stay unchanged."""
        chosen, index = copy.copy(self), torch.tensor(rows, device=self.temperature.device)
        chosen.params, chosen._held_back = [self.params[row] for row in rows], [self._held_back[row] for row in rows]
        for name in _TABLES:
            setattr(chosen, name, getattr(self, name)[index])
        chosen._list_tokens(len(rows))
        return chosen

    def refresh(self, rows: int) -> None:
        """Update the feature flags for rows 0 to ``rows`` - 1. Call it whenever rows join, leave or move."""
        live = self.params[:rows]
        self.all_greedy = all(p.greedy for p in live)
        self.any_cut = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in live)
        self.largest_top_k = max((p.top_k for p in live), default=0)
        self.any_top_p = any(p.top_p < 1 for p in live)
        self.any_penalty = any(
            p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1 for p in live
        )
        self.any_bias = any(p.logit_bias for p in live)
        self.any_minimum = any(p.min_tokens > 0 for p in live)
        self.any_constraint = any(constraint is not None for constraint in self.constraints[:rows])
        self.any_long = self.any_minimum and max(map(len, self._held_back[:rows])) > MAX_STOP_TOKENS
        self.logprobs = max((p.scored for p in live if p.scored is not None), default=None)
        self.scored = torch.tensor([int(p.scored is not None) for p in live]) if self.logprobs == 0 else None
        self._list_tokens(rows)

    def _list_tokens(self, rows: int) -> None:
        """Collect bias and forbidden stop tokens of rows 0 to ``rows`` - 1."""
        device = self.seed.device
        self._drawing: DrawRows | None = None
        forbidden = [dict.fromkeys(tokens, -math.inf) for tokens in self._held_back[:rows]] if self.any_minimum else []
        self.bias = Entries.of([dict(p.logit_bias) for p in self.params[:rows]], device) if self.any_bias else None
        self.stop_tokens = Entries.of(forbidden, device) if self.any_minimum else None

    def drawing(self, text: Tensor, length: Tensor) -> DrawRows:
        """Parameters of the live rows for the kernels. text [R, P] and length [R] are those of the batch."""
        if self._drawing is None or self._drawing.positions is not length:
            self._drawing = DrawRows(self.temperature, self.seed, length, *self._features(text))
        return self._drawing

    def _features(self, text: Tensor) -> tuple[Cuts | None, Penalties | None, Minimum | None, Entries | None]:
        """Cuts, penalties, minimum length and bias, each None if no live row uses it."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return (
            Cuts(self.floor, self.top_k, self.top_p) if self.any_cut else None,
            Penalties(*penalties, text, self.prompt_length) if self.any_penalty else None,
            None if self.stop_tokens is None else Minimum(self.min_length, self.stop_tokens),
            self.bias,
        )

    @property
    def needs_host(self) -> bool:
        """Whether any live row uses a feature that compiled device programs do not support."""
        return self.any_bias or self.any_constraint or self.any_long

    @property
    def step_features(self) -> StepFeatures:
        """Features that a compiled device program must include for the live rows."""
        wanted = self.logprobs
        logprobs = None if wanted is None else next(size for size in LOGPROB_SIZES if size >= wanted)
        return StepFeatures(self.any_penalty or self.any_minimum, self.any_cut, logprobs)

    @property
    def adjusts(self) -> bool:
        """Whether any live row changes its logits before temperature is applied."""
        return self.any_penalty or self.any_bias or self.any_minimum or self.any_constraint
