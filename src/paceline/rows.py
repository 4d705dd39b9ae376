"""The rows' sampling parameters as tensors. R rows of capacity, V tokens of vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.params import SamplingParams

_SCALARS: dict[str, torch.dtype] = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "repetition_penalty": torch.float32,
}


class Constraint(Protocol):
    """What may follow a row's text: a grammar, for example. It knows the tokens that the row has gained."""

    def mask(self, logits: Tensor, guesses: Sequence[int], first: int) -> None:
        """Of a row's logits [L, V], in place: -inf for the tokens that may not follow the first ``first + j`` guesses.

        What follows a guess that may not stand there itself, or an end, is never drawn and stays as it is.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """The row has gained these. What follows an end is ignored."""
        ...


@dataclass(frozen=True)
class After:
    """A row's constraint, some guesses further on."""

    constraint: Constraint
    guesses: Sequence[int]

    def mask(self, logits: Tensor, guesses: Sequence[int], first: int) -> None:
        self.constraint.mask(logits, [*self.guesses, *guesses], len(self.guesses) + first)

    def advance(self, tokens: Sequence[int]) -> None:
        raise NotImplementedError("guesses are no gain")


class SamplingRows:
    """Each row's SamplingParams on the device, and which features any live row uses (so that the others cost nothing).

    Tensors [R]: temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, seed,
    prompt_length, min_length (tokens of prompt and answer before which no stop token may come).
    bias [R, V] and stop_tokens [R, V] are None while no live row needs them.
    constraints: of each row, None where anything may follow.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor

    def __init__(self, capacity: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.params: list[SamplingParams] = [SamplingParams(temperature=0.0)] * capacity
        self.constraints: list[Constraint | None] = [None] * capacity
        for name, dtype in _SCALARS.items():
            setattr(self, name, torch.zeros(capacity, dtype=dtype, device=device))
        self.seed = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.prompt_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.min_length = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._bias: Tensor | None = None  # made when the first row needs it; rows still in prefill may hold entries
        self._stop_tokens: Tensor | None = None
        self.refresh(0)

    @property
    def bias(self) -> Tensor | None:
        return self._bias if self.any_bias else None

    @property
    def stop_tokens(self) -> Tensor | None:
        return self._stop_tokens if self.any_minimum else None

    def set(
        self, row: int, params: SamplingParams, seed: int, prompt_length: int, stop_tokens: tuple[int, ...]
    ) -> None:
        """Give a row its parameters; ``seed``: its own noise key, ``stop_tokens``: what min_tokens holds back."""
        self.params[row] = params
        for name in _SCALARS:
            getattr(self, name)[row] = getattr(params, name)
        self.seed[row] = seed
        self.prompt_length[row] = prompt_length
        self.min_length[row] = prompt_length + params.min_tokens
        self._bias = self._fill(self._bias, row, dict(params.logit_bias))
        self._stop_tokens = self._fill(
            self._stop_tokens, row, dict.fromkeys(stop_tokens, 1.0) if params.min_tokens else {}
        )

    def _fill(self, table: Tensor | None, row: int, entries: dict[int, float]) -> Tensor | None:
        if table is None:
            if not entries:
                return None
            table = torch.zeros(len(self.params), self.vocab_size, device=self.seed.device)
        table[row] = 0
        for token, value in entries.items():
            table[row, token] = value
        return table

    def copy_row(self, source: int, destination: int) -> None:
        self.params[destination] = self.params[source]
        self.constraints[destination] = self.constraints[source]
        names = [*_SCALARS, "seed", "prompt_length", "min_length"]
        tables = [getattr(self, name) for name in names] + [self._bias, self._stop_tokens]
        for table in tables:
            if table is not None:
                table[destination] = table[source]

    def part(self, first: int, stop: int) -> SamplingRows:
        """Rows first .. stop - 1, as views of the same tensors."""
        part = copy.copy(self)
        part.params, part.constraints = self.params[first:stop], self.constraints[first:stop]
        for name in [*_SCALARS, "seed", "prompt_length", "min_length", "_bias", "_stop_tokens"]:
            table = getattr(self, name)
            setattr(part, name, None if table is None else table[first:stop])
        part.refresh(stop - first)
        return part

    def select(self, index: Tensor) -> SamplingRows:
        """The rows of an index [N], as copies; which features are used stays as it is."""
        chosen = copy.copy(self)
        for name in [*_SCALARS, "seed", "prompt_length", "min_length", "_bias", "_stop_tokens"]:
            table = getattr(self, name)
            setattr(chosen, name, None if table is None else table[index])
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
        self.logprobs = max((p.logprobs for p in live if p.logprobs is not None), default=None)

    @property
    def adjusts(self) -> bool:
        """Whether any live row changes its logits before the temperature."""
        return self.any_penalty or self.any_bias or self.any_minimum or self.any_constraint

    @property
    def untouched(self) -> bool:
        """Whether nothing but temperature and noise stands between any live row's logits and its draws."""
        return not self.adjusts and (self.all_greedy or not self.any_cut)
