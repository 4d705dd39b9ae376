"""What a request gives back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.config import RankName

# outranked: of best_of answers one that could not become one of the n best any more; it is never given back.
FinishReason = Literal["stop", "length", "abort", "deadline", "outranked", "error"]
TokenKind = Literal["accepted", "recovered", "bonus", "plain"]  # plain: the round had no draft tokens for the row


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability under the target model, before bias, penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens of that position, best first


@dataclass(frozen=True)
class Score:
    """A given continuation under the model, as it is (temperature 1, nothing added or cut).

    greedy: whether each of its tokens is the model's most likely one.
    """

    token_ids: list[int]
    logprobs: list[float]
    greedy: bool

    @property
    def logprob(self) -> float:
        """Of all of it: the sum."""
        return sum(self.logprobs)


@dataclass
class Metrics:
    """What one answer cost. Times in seconds from the request's arrival.

    cached_tokens: those of the prompt's that were copied from what had been read before, and not read again.
    rounds: target passes that decoded it (prefill not counted). drafted, accepted: draft tokens verified and kept.
    saved_by_sibling: rounds that kept a draft token which stood beside a better one: a chain would have ended there.
    synthetic_acceptance: None; in benchmarks the chance with which draft tokens were kept whatever they were: the text
    then
        means nothing.
    """

    arrival_time: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_by_sibling: int = 0
    synthetic_acceptance: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds: tokens a round gave on average; None before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival_time

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per output token after the first (TPOT)."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return None
        return 1000 * (self.finished - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Latency:
    """Milliseconds per token of a batch's first (fastest), last (slowest) and all (their mean) sequences.

    As BASS reports them (2404.15778); the first token of a sequence, which waits for its prompt, is not counted.
    """

    first: float
    last: float
    all: float

    @staticmethod
    def of(sequences: Iterable[Metrics]) -> Latency | None:
        """None unless some sequence has ended with two tokens or more."""
        paces = [pace for each in sequences if (pace := each.ms_per_token) is not None]
        return Latency(min(paces), max(paces), sum(paces) / len(paces)) if paces else None


@dataclass
class CompletionOutput:
    """One answer to a prompt, ``index`` in the order of sampling. ``logprobs`` only if asked for.

    cumulative_logprob: the sum of its tokens' log-probabilities under the model, where ``logprobs`` or a ranking of the
        answers are asked for.
    pieces: the text that each token let out; "" while a character or a stop string is open. Together they are ``text``.
    error: why it could not go on, where finish_reason is "error"; nobody else's answers are touched by it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_kinds: list[TokenKind] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    metrics: Metrics = field(default_factory=Metrics)
    error: Exception | None = None
    cumulative_logprob: float | None = None

    @property
    def mean_logprob(self) -> float | None:
        """``cumulative_logprob`` over the number of tokens; None without tokens, too."""
        total = self.cumulative_logprob
        return None if total is None or not self.token_ids else total / len(self.token_ids)

    def score(self, by: RankName) -> float:
        """What answers are ranked by; without tokens the least of all."""
        score = self.mean_logprob if by == "mean_logprob" else self.cumulative_logprob
        return -math.inf if score is None or not self.token_ids else score

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answers.

    outputs: the answers given back: as long as it runs all of them, in the order of sampling; once it has ended the n
        best, the best first, if they are ranked (``SamplingParams.rank_by``).
    candidates: all answers that are made (``best_of``), always in the order of sampling.
    prompt_logprobs: of each of the prompt's tokens, None for the first; None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    n: int | None = None
    rank_by: RankName | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    candidates: list[CompletionOutput] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.candidates = self.outputs

    def close(self) -> None:
        """All its answers have ended: choose those given back."""
        order = self.candidates if self.rank_by is None else ranked(self.candidates, self.rank_by)
        self.outputs = order[: self.n]

    @property
    def cached_tokens(self) -> int:
        """Of the prompt's tokens, those that no answer of it had to read: ``Metrics.cached_tokens``."""
        return min((output.metrics.cached_tokens for output in self.candidates), default=0)

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.candidates)

    @property
    def error(self) -> Exception | None:
        """What ended the request, answers and all; None where nothing went wrong."""
        return next((output.error for output in self.candidates if output.error is not None), None)


_ROUNDING = 1e-3  # of sums of log-probabilities


def is_outranked(answer: CompletionOutput, rivals: Sequence[CompletionOutput], n: int, by: RankName, most: int) -> bool:
    """Whether n rivals have ended by themselves that an unfinished answer cannot pass, however it goes on.

    No token's log-probability is above 0. So a sum can only fall, and a mean over at most ``most`` tokens cannot rise
    above what the sum so far would be over all of these.
    """
    total = answer.cumulative_logprob
    ended = sorted((rival.score(by) for rival in rivals if rival.finish_reason == "stop"), reverse=True)
    if total is None or len(ended) < n:
        return False
    return ended[n - 1] > (total + _ROUNDING) / (1 if by == "logprob" else most)


def ranked(answers: Sequence[CompletionOutput], by: RankName) -> list[CompletionOutput]:
    """Best first: those that ended by themselves before those that were cut; equals in the order given.

    An answer that reached max_tokens was cut, too: its last word is not the model's, and loops are very likely text.
    """
    return sorted(answers, key=lambda answer: (answer.finish_reason != "stop", -answer.score(by)))
