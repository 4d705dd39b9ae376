"""Checks that speculation does not change the output: what ``paceline verify`` runs on the user's own models.

Three checks. Greedy answers, and sampled answers under the coupled rule, must equal plain decoding's token by token,
for several batch sizes and speculation lengths. And many samples of a short continuation must follow the target's own
distribution, computed from plain forward passes: a chi-squared test for each acceptance rule.

In low precision, a token's logits depend in their last bits on how many tokens are computed together. Where two tokens
are tied within that noise, the answers may part; such a divergence is reported with its gap, and is no violation as
long as the gap is below the precision's tolerance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.config import AcceptanceName, EngineConfig, Length, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import noise_key, sequence_seed, uniform
from paceline.core.values import Purpose
from paceline.engine.prefixes import common_prefix_length
from paceline.llm import LLM

Ids = list[int]
Distribution = dict[tuple[int, ...], float]

# Logits: gaps up to this are near-ties of that precision.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
SIGNIFICANCE = 1e-4  # a distribution is violated if its p-value is below this
BRANCHES = (6, 3, 2)  # tokens with cells of their own at each depth; the others share one
SMALLEST_CELL = 5.0  # expected samples; rarer cells are counted together
REST = -1  # in a cell's path: all tokens that have no cell of their own


# Token by token


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between an answer and plain decoding. gap: the two tokens' distance in logits."""

    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float


@dataclass(frozen=True)
class Comparison:
    """One setting compared with plain decoding, over all prompts."""

    what: str
    batch_size: int
    length: Length
    answers: int
    divergences: tuple[FirstDifference, ...]
    precision: str

    @property
    def tolerance(self) -> float:
        """Logits: gaps up to this are near-ties of the precision."""
        return TOLERANCE[self.precision]

    @property
    def violated(self) -> bool:
        return any(divergence.gap > self.tolerance for divergence in self.divergences)


def compare_with_plain(
    llm: LLM, prompts: Sequence[Ids], params: SamplingParams, batch_sizes: Sequence[int], lengths: Sequence[Length]
) -> Iterator[Comparison]:
    """Compare every batch size and length with plain decoding one prompt at a time; coupled rule, same seeds."""
    each = [replace(params, seed=number) for number in range(len(prompts))]
    expected = _answers(llm.with_options(drafter=None, max_batch_size=1), prompts, each)
    precision = str(llm.engine.models.target.dtype).removeprefix("torch.")
    for batch_size in batch_sizes:
        for length in lengths:
            side = llm.with_options(acceptance="coupled", max_batch_size=batch_size, num_speculative_tokens=length)
            found = _answers(side, prompts, each)
            divergences = (
                first_divergence(llm, number, prompts[number], ours, theirs, each[number])
                for number, (theirs, ours) in enumerate(zip(expected, found, strict=True))
            )
            parted = tuple(divergence for divergence in divergences if divergence is not None)
            what = "greedy" if params.greedy else f"coupled, temperature {params.temperature:g}"
            yield Comparison(what, batch_size, length, len(prompts), parted, precision)


def _answers(llm: LLM, prompts: Sequence[Ids], params: Sequence[SamplingParams]) -> list[Ids]:
    outputs: list[RequestOutput] = llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def first_divergence(
    llm: LLM, number: int, prompt: Ids, found: Ids, expected: Ids, params: SamplingParams
) -> FirstDifference | None:
    """The first position where two answers differ, or None."""
    if found == expected:
        return None
    position = common_prefix_length(found, expected, len(found))
    theirs = expected[position] if position < len(expected) else None
    ours = found[position] if position < len(found) else None
    if theirs is None or ours is None:  # one answer is longer than the other: no tie explains that
        return FirstDifference(number, position, theirs, ours, math.inf)
    scores = _scores(llm, [*prompt, *expected[:position]], params)
    gap = float(scores.max() - scores[[theirs, ours]].min())
    return FirstDifference(number, position, theirs, ours, gap)


def _scores(llm: LLM, prefix: Ids, params: SamplingParams) -> Tensor:
    """The scores whose maximum is drawn, in logits [V]: with the position's noise if the answer is sampled."""
    logits = llm.engine.next_logits(prefix).double().cpu()
    if params.greedy or params.seed is None:
        return logits
    seed = torch.tensor(sequence_seed(params.seed, 0))
    key = noise_key(seed, torch.tensor(len(prefix)), Purpose.DRAW)
    noise = -torch.log(-torch.log(uniform(key, torch.arange(len(logits)))))
    return logits + params.temperature * noise


# The distribution


@dataclass(frozen=True)
class DistributionTest:
    """A chi-squared test of one acceptance rule. p_value: the probability of a larger statistic by chance.

    drafted, accepted: draft tokens in the samples. Without draft tokens the test says nothing about speculation.
    """

    acceptance: AcceptanceName
    samples: int
    drafted: int
    accepted: int
    cells: int
    statistic: float
    p_value: float

    @property
    def violated(self) -> bool:
        return self.p_value < SIGNIFICANCE


def exact_distribution(llm: LLM, prompt: Ids, branches: Sequence[int] = BRANCHES) -> Distribution:
    """Probabilities of the continuations of ``prompt``, from plain forward passes at temperature 1.

    A cell is a path of tokens: at each depth the most likely tokens are followed, all others end in REST.
    """
    if not branches:
        return {(): 1.0}
    probabilities = torch.softmax(llm.engine.next_logits(prompt).double(), -1)
    best = probabilities.topk(min(branches[0], len(probabilities)))
    distribution: Distribution = {(REST,): max(0.0, 1.0 - float(best.values.sum()))}
    for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        below = exact_distribution(llm, [*prompt, token], branches[1:])
        distribution |= {(token, *path): probability * p for path, p in below.items()}
    return distribution


def count_cells(continuations: Iterable[Ids], distribution: Distribution) -> list[int]:
    """The number of continuations in each cell of the distribution."""
    followed = {cell[:depth] for cell in distribution for depth in range(1, len(cell) + 1)}
    counts = Counter(_cell_of(ids, followed) for ids in continuations)
    return [counts[cell] for cell in distribution]


def _cell_of(ids: Ids, followed: set[tuple[int, ...]]) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    for token in ids:
        if (*path, token) not in followed:
            return (*path, REST)
        path = (*path, token)
    return path


def chi_squared(observed: Sequence[int], probabilities: Sequence[float]) -> tuple[float, int, float]:
    """Statistic, cells used and p-value; cells with few expected samples are counted together."""
    total = sum(observed)
    expected = [total * p for p in probabilities]
    rare = [i for i, e in enumerate(expected) if e < SMALLEST_CELL]
    pairs = [(observed[i], e) for i, e in enumerate(expected) if e >= SMALLEST_CELL]
    together = sum(expected[i] for i in rare)
    if together > 0:
        pairs.append((sum(observed[i] for i in rare), together))
    elif any(observed[i] for i in rare):
        return math.inf, len(pairs), 0.0  # a sample of probability 0
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    p_value = 1.0 if len(pairs) < 2 else float(torch.special.gammaincc(half[0], half[1]))
    return statistic, len(pairs), p_value


def distribution_test(llm: LLM, prompt: Ids, acceptance: AcceptanceName, samples: int) -> DistributionTest:
    """Sample short continuations of ``prompt`` under a rule, always drafting, and test them against the exact
    distribution.
    """
    distribution = exact_distribution(llm, prompt)
    params = SamplingParams(n=samples, max_tokens=len(BRANCHES), temperature=1.0, seed=0, ignore_eos=True)
    width = llm.config.speculation_width if acceptance == "coupled" else EngineConfig.speculation_width
    side = llm.with_options(acceptance=acceptance, num_speculative_tokens=len(BRANCHES), speculation_width=width)
    (output,) = side.generate([prompt], params, use_tqdm=False)
    counts = count_cells((answer.token_ids for answer in output.outputs), distribution)
    statistic, cells, p_value = chi_squared(counts, list(distribution.values()))
    metrics = [answer.metrics for answer in output.outputs]
    drafted, accepted = sum(m.drafted for m in metrics), sum(m.accepted for m in metrics)
    return DistributionTest(acceptance, samples, drafted, accepted, cells, statistic, p_value)
