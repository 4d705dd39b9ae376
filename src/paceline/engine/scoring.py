"""What is collected from a prompt's hidden states during its prefill: log-probabilities of its tokens, or one vector.

A request that only wants this ends with its prompt.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from paceline.config import PoolingName, SamplingParams
from paceline.core.outputs import TokenLogprob
from paceline.models.decoding.decoder import Decoder

CHUNK = 32  # positions whose logits are in memory together
SCORED = SamplingParams(max_tokens=1)  # of a request for the log-probabilities of its prompt
EMBEDDED = SamplingParams(max_tokens=1, keep_prefix=False)  # of a request for an embedding


@dataclass(eq=False)
class PromptReading(ABC):
    """What is collected from a text's hidden states."""

    token_ids: list[int]

    @property
    @abstractmethod
    def prefill_stop(self) -> int:
        """Tokens to read."""

    @abstractmethod
    def reusable(self, common: int, source: PromptReading | None) -> int:
        """Return how many of the first ``common`` tokens may be copied from a cache instead of being read.

        source: what is collected from the cached text, which has the same first ``common`` tokens.
        """

    @abstractmethod
    def copy(self, tokens: int, source: PromptReading | None) -> None:
        """Take over what the hidden states of the first ``tokens`` tokens would give; see ``reusable``."""

    @abstractmethod
    def again(self) -> PromptReading:
        """Return what to collect when the text is read again from its beginning."""

    @property
    @abstractmethod
    def is_nan(self) -> bool:
        """Whether the model's results for the text are NaN."""

    @abstractmethod
    def kept(self) -> PromptReading | None:
        """Return what other requests can take over once the text was read."""


@dataclass(eq=False)
class PromptScores(PromptReading):
    """Log-probabilities of the tokens from index ``first`` on, at least 1. The tokens before it are only read.

    top: number of likeliest tokens to report at each position.
    logprobs: by token; None for tokens that are not scored, or not yet.
    known: index of the first token to score whose log-probability is missing.
    """

    top: int = 1
    first: int = 1
    logprobs: list[TokenLogprob | None] = field(init=False)
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.logprobs, self.known = [None] * len(self.token_ids), self.first

    @property
    def prefill_stop(self) -> int:
        """Tokens to read: all but the last one, as nothing follows it."""
        return len(self.token_ids) - 1

    def reusable(self, common: int, source: PromptReading | None) -> int:
        """Return the tokens before the one whose hidden state gives the first missing log-probability."""
        known = self.first
        if isinstance(source, PromptScores) and source.top == self.top and source.first <= self.first:
            ours, theirs = (text.token_ids[common : common + 1] for text in (self, source))
            known = max(known, min(common + (ours == theirs), len(source.token_ids)))
        return min(common, known - 1)

    def copy(self, tokens: int, source: PromptReading | None) -> None:
        if tokens >= self.known:
            assert isinstance(source, PromptScores)
            self.note(source.logprobs[self.known : tokens + 1])

    def again(self) -> PromptScores:
        """Itself: what it has is not collected twice."""
        return self

    def note(self, logprobs: Sequence[TokenLogprob | None]) -> None:
        """Take the next log-probabilities."""
        known, self.known = self.known, self.known + len(logprobs)
        self.logprobs[known : self.known] = logprobs

    @property
    def is_nan(self) -> bool:
        return any(each is not None and math.isnan(each.logprob) for each in self.logprobs)

    def kept(self) -> PromptScores:
        """Return a copy for other requests: the caller may change its list."""
        kept = copy.copy(self)
        kept.logprobs = list(self.logprobs)
        return kept


@dataclass(eq=False)
class PooledStates(PromptReading):
    """One vector: the mean of the hidden states of all tokens, or the state of the "last" one.

    total: sum of the states read so far, or the last state [width]; None before the first. It is float64, so that the
        sizes of passes do not show.
    It reads every token: the states of a copied prefix would be missing.
    """

    pooling: PoolingName = "mean"
    total: Tensor | None = None

    @property
    def prefill_stop(self) -> int:
        """Tokens to read: all of them."""
        return len(self.token_ids)

    def reusable(self, common: int, source: PromptReading | None) -> int:
        return 0

    def copy(self, tokens: int, source: PromptReading | None) -> None:
        """Nothing: no token is copied."""

    def again(self) -> PooledStates:
        """Itself without the sum, which every token is added to anew."""
        self.total = None
        return self

    @property
    def is_nan(self) -> bool:
        return self.total is not None and not bool(self.total.isfinite().all())

    def kept(self) -> PromptReading | None:
        return None

    def pool(self, states: Tensor) -> None:
        """Take the states [tokens, width] of the next tokens."""
        if self.pooling == "last":
            self.total = states[-1].double()  # not the whole pass
            return
        part = states.double().sum(0)
        self.total = part if self.total is None else self.total + part

    @property
    def vector(self) -> Tensor:
        """The pooled vector [width] of a text that was read, of length 1, float32."""
        assert self.total is not None
        return normalize(self.total.float(), dim=0)


ReadPart: TypeAlias = tuple[PromptReading | None, int, Tensor]  # (reading, first position, its states [tokens, width])


def collect(decoder: Decoder, parts: Sequence[ReadPart]) -> None:
    """Give each reading the hidden states of its text's next tokens."""
    targets: list[tuple[PromptScores, int]] = []  # (scores, token index) that each row of ``wanted`` predicts
    wanted: list[Tensor] = []
    for reading, start, states in parts:
        if isinstance(reading, PooledStates):
            reading.pool(states)
        elif isinstance(reading, PromptScores):
            begin = max(start, reading.known - 1)
            wanted.append(states[begin - start :])
            targets += [(reading, position + 1) for position in range(begin, start + len(states))]
    hidden = torch.cat(wanted) if targets else torch.empty(0)
    for first in range(0, len(targets), CHUNK):
        _score(decoder, hidden[first : first + CHUNK], targets[first : first + CHUNK])


def _score(decoder: Decoder, states: Tensor, targets: Sequence[tuple[PromptScores, int]]) -> None:
    tokens, tops = [scores.token_ids[at] for scores, at in targets], [scores.top for scores, _ in targets]
    found = token_logprobs(decoder.logits(states), tokens, tops)
    for (scores, _), logprob in zip(targets, found, strict=True):
        scores.note([logprob])


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probabilities of ``tokens`` under logits [N, V], each with its ``tops[i]`` likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = (table.tolist() for table in logprobs.topk(min(max(tops), logprobs.shape[-1]), dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(top_ids[:top], top_values[:top], strict=True)))
        for token, value, top_values, top_ids, top in zip(tokens, own, values, ids, tops, strict=True)
    ]
