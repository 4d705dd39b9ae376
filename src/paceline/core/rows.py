"""The rows' sampling parameters as tensors. R rows of capacity, V tokens of vocabulary."""

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
MAX_STOP_TOKENS = 8  # stop tokens of a row that a commit knows; the scheduler cuts at the others
LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)  # likely tokens that a program of the device tells: one of these
_TABLES = (*_SCALARS, "floor", "seed", "prompt_length", "min_length")


class MaskQuery(Protocol):
    """A question to a row's constraint: what may follow its text and some draft tokens."""

    def send(self) -> None:
        """Whoever works it out may begin. All questions of a round are sent before the first answer is waited for."""
        ...

    def mask(self, logits: Tensor) -> None:
        """Of the row's logits [L, V] at the places asked for, in place: -inf for the tokens that may not come there.

        What follows a draft token that may not stand there itself, or an end, is never drawn and stays as it is. Raises
        what ends the answer: it cannot be held to the constraint any longer.
        """
        ...


class Constraint(Protocol):
    """What may follow a row's text: a grammar, for example. It knows the tokens that the row has gained."""

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        """What may follow the first ``first + j`` draft tokens, for every j below ``places``."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """The row has gained these. What follows an end is ignored."""
        ...


@dataclass(frozen=True)
class StepFeatures:
    """What some rows want besides a temperature, as far as a program of the device can do it: its shape hangs on that.

    adjusts: penalties, or stop tokens that come later. cuts: min-p, top-k or top-p. logprobs: how many likely tokens'
    log-probabilities beside their own tokens'; None: none at all.
    """

    adjusts: bool = False
    cuts: bool = False
    logprobs: int | None = None


NOTHING = StepFeatures()


@dataclass(frozen=True)
class RowState:
    """What rules, commit and stop tests know of B rows, as views: host and device play with the same tensors.

    text [B, P]; length, prompt_length, seed [B] int64; temperature [B]. top_k, min_length [B] int64; top_p, floor,
    presence_penalty, frequency_penalty, repetition_penalty [B]: as in ``SamplingRows``. limit [B] int64: the length at
    which a row must end; stops [B, S] int64: tokens that end it, -1 none. live [1] int64: rows from here on do not
    play, whatever their state. reads: whether the host may wait for the device to tell something; never while a graph
    is captured.
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
        """Give each row its accepted [B] + 1 tokens of [B, k + 1], cut behind its first stop token and at its limit.

        Returns how many each has gained, and who gained nothing because it had ended before, [B].
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
        """[B] bool: whether a row's answer ends with one of its stop tokens."""
        last = self.text.gather(1, (self.length - 1).clamp(min=0)[:, None])
        return ((last == self.stops) & (self.stops >= 0)).any(1) & (self.length > self.prompt_length)


@dataclass(frozen=True)
class ConstraintAfterDraft:
    """A row's constraint, some draft tokens further on."""

    constraint: Constraint
    draft_tokens: Sequence[int]

    def ask(self, draft_tokens: Sequence[int], first: int, places: int) -> MaskQuery:
        return self.constraint.ask([*self.draft_tokens, *draft_tokens], len(self.draft_tokens) + first, places)

    def advance(self, tokens: Sequence[int]) -> None:
        raise NotImplementedError("guesses are no gain")


class SamplingRows:
    """Each row's SamplingParams on the device, and which features any live row uses (so that the others cost nothing).

    Tensors [R]: temperature, top_k, top_p, presence_penalty, frequency_penalty, repetition_penalty, seed,
    prompt_length, floor (the logarithm of min_p: what a logit may lie under the leader's, after temperature),
    min_length (tokens of prompt and answer before which no stop token may come).
    bias and stop_tokens of the live rows are None while none of them needs them.
    constraints: of each row, None where anything may follow.
    logprobs: how many likely tokens' log-probabilities live rows want besides their own tokens'; None: none at all.
    scored: [B] int64 where rows want those of their own tokens alone, 1 for these rows; else None.
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
        self._held_back: list[tuple[int, ...]] = [()] * capacity  # of each row: the tokens that min_tokens holds back
        for name, dtype in _SCALARS.items():
            setattr(self, name, torch.zeros(capacity, dtype=dtype, device=device))
        self.repetition_penalty.fill_(1)  # rows that nobody has yet are divided by it, too, where the device plays them
        self.floor = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.seed = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.min_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.refresh(0)

    def set(
        self, row: int, params: SamplingParams, seed: int, prompt_length: int, stop_tokens: tuple[int, ...]
    ) -> None:
        """Give a row its parameters; ``seed``: its own noise key, ``stop_tokens``: what min_tokens holds back."""
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
        """Rows first .. stop - 1, as views of the same tensors."""
        part = copy.copy(self)
        part.params, part.constraints = self.params[first:stop], self.constraints[first:stop]
        part._held_back = self._held_back[first:stop]
        for name in _TABLES:
            setattr(part, name, getattr(self, name)[first:stop])
        part.refresh(stop - first)
        return part

    def repeated(self, rows: int, times: int) -> SamplingRows:
        """Each of the first ``rows`` rows so many times in a row, as copies; what is used stays as it is."""
        return self.picked([row for row in range(rows) for _ in range(times)])

    def picked(self, each: Sequence[int]) -> SamplingRows:
        """These rows, as often as they are named, as copies; what is used stays as it is."""
        chosen, index = copy.copy(self), torch.tensor(each, device=self.temperature.device)
        chosen.params, chosen._held_back = [self.params[row] for row in each], [self._held_back[row] for row in each]
        for name in _TABLES:
            setattr(chosen, name, getattr(self, name)[index])
        chosen._list_tokens(len(each))
        return chosen

    def refresh(self, rows: int) -> None:
        """Note which features rows 0 .. rows - 1 use; called whenever rows come, go or move."""
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
        """What rows 0 .. rows - 1 say of single tokens."""
        device = self.seed.device
        self._drawing: DrawRows | None = None
        held = [dict.fromkeys(tokens, -math.inf) for tokens in self._held_back[:rows]] if self.any_minimum else []
        self.bias = Entries.of([dict(p.logit_bias) for p in self.params[:rows]], device) if self.any_bias else None
        self.stop_tokens = Entries.of(held, device) if self.any_minimum else None

    def drawing(self, text: Tensor, length: Tensor) -> DrawRows:
        """How the live rows draw, for the kernels: text [R, P] and length [R] are those of the batch."""
        if self._drawing is None or self._drawing.positions is not length:
            self._drawing = DrawRows(self.temperature, self.seed, length, *self._features(text))
        return self._drawing

    def _features(self, text: Tensor) -> tuple[Cuts | None, Penalties | None, Minimum | None, Entries | None]:
        """Those that some live row uses."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return (
            Cuts(self.floor, self.top_k, self.top_p) if self.any_cut else None,
            Penalties(*penalties, text, self.prompt_length) if self.any_penalty else None,
            None if self.stop_tokens is None else Minimum(self.min_length, self.stop_tokens),
            self.bias,
        )

    @property
    def needs_host(self) -> bool:
        """Whether any live row asks for what no program of the device does."""
        return self.any_bias or self.any_constraint or self.any_long

    @property
    def step_features(self) -> StepFeatures:
        """What a program of the device has to do for the live rows."""
        wanted = self.logprobs
        told = None if wanted is None else next(size for size in LOGPROB_SIZES if size >= wanted)
        return StepFeatures(self.any_penalty or self.any_minimum, self.any_cut, told)

    @property
    def adjusts(self) -> bool:
        """Whether any live row changes its logits before the temperature."""
        return self.any_penalty or self.any_bias or self.any_minimum or self.any_constraint
