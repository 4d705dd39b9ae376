"""Timing of one batch, and the order of measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

from paceline.config import SamplingParams
from paceline.core.outputs import Latency, Metrics, RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM

Side = TypeVar("Side")


def turns(sides: Sequence[Side], repeats: int) -> list[list[Side]]:
    """The order of the sides in each repeat: each repeat begins with another one, so that none is always the last."""
    starts = [repeat % len(sides) for repeat in range(repeats)]
    return [[*sides[start:], *sides[:start]] for start in starts]


def split_times(short: float, long: float, rounds: int) -> tuple[float, float]:
    """Prefill and decoding seconds, from the seconds until the first tokens and until the end of ``rounds`` rounds."""
    a_round = max(0.0, long - short) / max(1, rounds - 1)
    prefill = max(0.0, short - a_round)
    return prefill, max(long - prefill, 1e-9)


@dataclass(frozen=True)
class BatchRun:
    """The outputs and the time of a batch. seconds: from the first request's arrival to the last answer's end."""

    seconds: float
    outputs: list[RequestOutput]

    @property
    def metrics(self) -> list[Metrics]:
        """Metrics of every answer."""
        return [answer.metrics for output in self.outputs for answer in output.outputs]

    @property
    def token_ids(self) -> list[list[int]]:
        """Token ids of every answer."""
        return [answer.token_ids for output in self.outputs for answer in output.outputs]

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all answers per second of the whole run, prefill included."""
        return self.tokens / self.seconds

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token of a sequence, without its first token: the mean over the sequences."""
        return statistics.fmean(m.ms_per_token for m in self.metrics if m.ms_per_token is not None)

    @property
    def latency(self) -> Latency | None:
        """Milliseconds per token of the first, the last and all sequences."""
        return Latency.of(self.metrics)

    @property
    def seconds_to_last_first_token(self) -> float:
        """Seconds until every answer had its first token: prefill and about one round."""
        begun = [m.first_token for m in self.metrics if m.first_token is not None]
        return max(begun) - min(m.arrival_time for m in self.metrics)

    @property
    def prefill_and_decode_seconds(self) -> tuple[float, float]:
        """See ``split_times``."""
        return split_times(self.seconds_to_last_first_token, self.seconds, self.rounds)

    @property
    def rounds(self) -> int:
        """Rounds of the slowest sequence."""
        return max(m.rounds for m in self.metrics)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted, all sequences together; None if nothing was drafted."""
        drafted = sum(m.drafted for m in self.metrics)
        return sum(m.accepted for m in self.metrics) / drafted if drafted else None

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds, all sequences together: tokens per round and sequence."""
        return 1 + sum(m.accepted for m in self.metrics) / sum(m.rounds for m in self.metrics)

    @property
    def drafted_a_round(self) -> float:
        """Draft tokens verified per round and sequence."""
        return sum(m.drafted for m in self.metrics) / sum(m.rounds for m in self.metrics)

    @property
    def drafted_per_position(self) -> list[int]:
        """Rounds of all sequences whose verified draft was at least 1, 2, ... tokens deep."""
        return _added(m.drafted_per_position for m in self.metrics)

    @property
    def accepted_per_position(self) -> list[int]:
        """Rounds of all sequences that accepted at least 1, 2, ... draft tokens."""
        return _added(m.accepted_per_position for m in self.metrics)

    @property
    def saved_by_sibling(self) -> float:
        """Fraction of all sequences' rounds that accepted a draft token with a higher-ranked sibling."""
        return sum(m.saved_by_sibling for m in self.metrics) / sum(m.rounds for m in self.metrics)


def _added(counts: Iterable[list[int]]) -> list[int]:
    return [sum(position) for position in zip_longest(*counts, fillvalue=0)]


def questions(llm: LLM, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, through the chat template if the model has one."""
    tokenizer = llm.requests.tokenizer
    if not tokenizer.huggingface.chat_template:
        return [tokenizer.encode(text) for text in texts]
    return [llm.tokens_of_chat([{"role": "user", "content": text}]) for text in texts]


def run_batch(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    references: Sequence[Sequence[str]] | None = None,
) -> BatchRun:
    """Run all prompts at once and time the batch."""
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, references=references, use_tqdm=False)
    return BatchRun(time.perf_counter() - started, outputs)
