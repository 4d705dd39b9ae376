"""Results of requests: answers, their tokens, metrics and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.chat.values import AssistantMessage
from paceline.config import RankName

# outranked: one of best_of answers that could no longer become one of the n best. It is never returned.
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
    """Log-probabilities of a given continuation under the unmodified model (temperature 1).

    token_ids: the tokens of prompt and continuation together, from the first one that the prompt alone does not have.
    greedy: whether every token is the model's most likely one.
    error: why the continuation was skipped (``on_error="skip"``); it then has no tokens. None if it was scored.
    """

    token_ids: list[int]
    logprobs: list[float]
    greedy: bool
    error: Exception | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation: the sum over its tokens; -inf if it was skipped."""
        return sum(self.logprobs) if self.error is None else -math.inf


@dataclass
class Metrics:
    """Cost of one answer. Points in time are in seconds of time.monotonic.

    cached_tokens: prompt tokens whose keys and values were copied from an earlier prefill.
    preempted: times that the row gave way to older ones, because memory was short. recomputed_tokens: of prompt and
        answer, that were therefore read again.
    rounds: target passes that decoded the answer, without prefill.
    drafted, accepted: number of draft tokens verified, and of those accepted.
    drafted_per_position, accepted_per_position: rounds whose verified draft was at least 1, 2, ... tokens deep, and
        those that accepted as many. The rate of a position is their quotient, given that those before were drafted.
    saved_by_sibling: rounds that accepted a lower-ranked sibling in a tree, where a chain would have ended.
    synthetic_acceptance: fixed acceptance probability of a benchmark, whose text is meaningless; None otherwise.
    """

    arrival_time: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_by_sibling: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    synthetic_acceptance: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens divided by drafted ones; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean number of tokens per round, 1 + accepted / rounds; None before the first round."""
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
    """Milliseconds per token in a batch: of the fastest sequence (first), the slowest (last), and their mean (all).

    BASS (2404.15778) reports the same figures. The first token of a sequence, which waits for prefill, is not counted.
    """

    first: float
    last: float
    all: float

    @staticmethod
    def of(sequences: Iterable[Metrics]) -> Latency | None:
        """Latency over the sequences that ended with at least two tokens; None if there are none."""
        times_ms = [ms for sequence in sequences if (ms := sequence.ms_per_token) is not None]
        return Latency(min(times_ms), max(times_ms), sum(times_ms) / len(times_ms)) if times_ms else None


@dataclass
class CompletionOutput:
    """One answer to a prompt. ``index`` counts the answers of a request in the order of sampling.

    logprobs: log-probability of each token; None unless requested.
    cumulative_logprob: sum of the tokens' log-probabilities under the model; None unless ``logprobs`` or a ranking was
        requested.
    pieces: text that each token added, "" while a character or a possible stop string is incomplete. They join to
        ``text``.
    error: the exception that ended this answer if finish_reason is "error". Other requests are not affected.
    read_message: splits the text of a chat's answer; None for other answers.
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
    read_message: Callable[[str], AssistantMessage] | None = field(default=None, repr=False, compare=False)
    _message: tuple[str, AssistantMessage] | None = field(default=None, repr=False, compare=False)

    @property
    def message(self) -> AssistantMessage | None:
        """A chat's answer without its syntax: thoughts, text and tool calls. None for other answers."""
        if self.read_message is not None and (self._message is None or self._message[0] != self.text):
            self._message = self.text, self.read_message(self.text)
        return None if self._message is None else self._message[1]

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the message as it is, without what reads it."""
        return {**vars(self), "_message": self.message and (self.text, self.message), "read_message": None}

    @property
    def mean_logprob(self) -> float | None:
        """``cumulative_logprob`` divided by the number of tokens; None if it is None or there are no tokens."""
        total = self.cumulative_logprob
        return None if total is None or not self.token_ids else total / len(self.token_ids)

    def score(self, by: RankName) -> float:
        """Value that answers are ranked by; -inf for an answer without tokens."""
        score = self.mean_logprob if by == "mean_logprob" else self.cumulative_logprob
        return -math.inf if score is None or not self.token_ids else score

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its answers.

    outputs: the answers to return. While the request runs these are all of them, in the order of sampling. Once it has
        ended these are the n best, best first, if answers are ranked (``SamplingParams.rank_by``).
    candidates: all answers that are sampled (``best_of``), always in the order of sampling.
    prompt_logprobs: log-probability of each prompt token, None for the first one; None unless requested.
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
        """Choose the answers to return; call it once all answers have ended."""
        order = self.candidates if self.rank_by is None else ranked(self.candidates, self.rank_by)
        self.outputs = order[: self.n]

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that every answer found cached: the minimum of ``Metrics.cached_tokens``."""
        return min((output.metrics.cached_tokens for output in self.candidates), default=0)

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.candidates)

    @property
    def error(self) -> Exception | None:
        """First error among the answers; None if all went well."""
        return next((output.error for output in self.candidates if output.error is not None), None)


_ROUNDING = 1e-3  # error bound for sums of log-probabilities


def is_outranked(
    answer: CompletionOutput, rivals: Sequence[CompletionOutput], n: int, by: RankName, max_tokens: int
) -> bool:
    """Whether n rivals have stopped by themselves with scores that an unfinished answer can no longer reach.

    No log-probability is above 0, so a sum can only fall. A mean over at most ``max_tokens`` tokens cannot exceed the
    current sum divided by ``max_tokens``.
    """
    total = answer.cumulative_logprob
    ended = sorted((rival.score(by) for rival in rivals if rival.finish_reason == "stop"), reverse=True)
    if total is None or len(ended) < n:
        return False
    return ended[n - 1] > (total + _ROUNDING) / (1 if by == "logprob" else max_tokens)


def ranked(answers: Sequence[CompletionOutput], by: RankName) -> list[CompletionOutput]:
    """Sort answers best first. Answers that stopped by themselves precede truncated ones; ties keep their order.

    An answer that reached max_tokens counts as truncated: the model did not end it, and repetitive text has a high
    likelihood.
    """
    return sorted(answers, key=lambda answer: (answer.finish_reason != "stop", -answer.score(by)))
