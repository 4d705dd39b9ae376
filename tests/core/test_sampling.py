"""Sampling compared to a reference implementation in plain Python, one row and one position at a time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from batches import filled
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.sampling import (
    GUMBEL_HIGH,
    GUMBEL_LOW,
    NOISE_SPAN,
    Choices,
    adjust,
    draw,
    noise_key,
    noisy_argmax,
    probabilities,
    sequence_seed,
    uniform,
    warp,
)
from paceline.core.values import Purpose
from toy import slow_adjust, slow_distribution, slow_draw, slow_warp

pytestmark = pytest.mark.usefixtures("one_thread")

V = 12
STOPS = (1, 5)


def make_batch(starts: list[RowStart], answers: list[list[int]] | None = None, vocab: int = V) -> Batch:
    """Batch of rows with these prompts and the tokens of their answers so far."""
    batch = filled(starts, 64, vocab, free=1)
    for row, answer in enumerate(answers or []):
        batch.text[row, batch.lengths[row] : batch.lengths[row] + len(answer)] = torch.tensor(answer, dtype=torch.int64)
        batch.length[row] += len(answer)
        batch.lengths[row] += len(answer)
    batch.text[len(starts) :] = 3  # free slots and entries beyond a row's end must not matter
    for row, length in enumerate(batch.lengths[: len(starts)]):
        batch.text[row, length:] = 7
    return batch


@st.composite
def params_strategy(draw_from: st.DrawFn) -> SamplingParams:
    pick = draw_from
    return SamplingParams(
        temperature=pick(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=pick(st.sampled_from([0, 0, 1, 3, V, V + 5])),
        top_p=pick(st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6, 0.0])),
        min_p=pick(st.sampled_from([0.0, 0.0, 0.1, 0.9, 1.0])),
        typical_p=pick(st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-6])),
        epsilon_cutoff=pick(st.sampled_from([0.0, 0.0, 0.02, 0.4])),
        eta_cutoff=pick(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
        top_n_sigma=pick(st.sampled_from([0.0, 0.0, 0.5, 1.5, 3.0])),
        presence_penalty=pick(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=pick(st.sampled_from([0.0, 0.7, -0.5])),
        repetition_penalty=pick(st.sampled_from([1.0, 1.7, 0.5])),
        logit_bias=pick(st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 2.0, 50.0]), max_size=3)),
        min_tokens=pick(st.sampled_from([0, 0, 2, 5])),
        max_tokens=50,
    )


tokens = st.integers(0, V - 1)
row_strategy = st.tuples(
    st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6), params_strategy(), st.integers(0, 2**63 - 1)
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(row_strategy, min_size=1, max_size=4), k=st.integers(0, 4), noise=st.integers(0, 10**6))
def test_adjust_warp_distribution_and_draw_equal_the_slow_reference_at_every_position(
    rows: list[tuple[list[int], list[int], SamplingParams, int]], k: int, noise: int
) -> None:
    rng = random.Random(noise)
    batch = make_batch([RowStart(p, s, seed, STOPS) for p, _, s, seed in rows], [a for _, a, _, _ in rows])
    draft_tokens = torch.tensor([[rng.randrange(V) for _ in range(k)] for _ in rows], dtype=torch.int64).view(
        len(rows), k
    )
    logits = torch.tensor([[[rng.gauss(0, 3) for _ in range(V)] for _ in range(k + 1)] for _ in rows])
    before = logits.clone()
    adjusted = adjust(logits, batch, draft_tokens)
    assert torch.equal(logits, before), "adjust must not change its input"
    warped, distribution, drawn = (
        warp(adjusted, batch),
        probabilities(adjusted, batch),
        draw(logits, batch, draft_tokens),
    )
    native_distribution = Choices(logits, batch, draft_tokens).distribution()
    assert torch.equal(logits, before), "draws must not change their input"
    for row, (prompt, answer, params, seed) in enumerate(rows):
        for place in range(k + 1):
            text = answer + draft_tokens[row, :place].tolist()
            slow = slow_adjust(logits[row, place].tolist(), params, prompt, text, frozenset(STOPS))
            assert adjusted[row, place].tolist() == pytest.approx(slow, abs=1e-4)
            exact = adjusted[row, place].tolist()  # the next steps start from the rounded logits
            if params.temperature > 0:
                found, slow = warped[row, place].tolist(), slow_warp(exact, params)  # logits: up to a constant
                found, slow = [x - max(found) for x in found], [x - max(slow) for x in slow]
                assert found == pytest.approx(slow, rel=1e-4, abs=1e-4)
            assert distribution[row, place].tolist() == pytest.approx(slow_distribution(exact, params), abs=1e-4)
            assert native_distribution[row, place].tolist() == pytest.approx(slow_distribution(exact, params), abs=1e-4)
            assert drawn[row, place].item() == slow_draw(exact, params, seed, len(prompt) + len(text))


def test_a_draw_in_the_middle_of_a_block_is_the_draw_after_those_tokens() -> None:
    """Drawing position by position with ``first``, as drafters do, equals drawing all at once, as the target does."""
    params = SamplingParams(presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.3, min_tokens=4, seed=1)
    batch = make_batch([RowStart([2, 3], params, 77, STOPS), RowStart([4], SamplingParams(), 78)], [[6], []])
    draft_tokens, logits = torch.tensor([[2, 2, 9], [1, 1, 1]]), torch.randn(2, 4, V)
    together = draw(logits, batch, draft_tokens)
    for step in range(4):
        alone = draw(logits[:, step : step + 1], batch, draft_tokens[:, :step], step)
        assert torch.equal(alone[:, 0], together[:, step])


def test_stop_tokens_cannot_come_before_min_tokens_and_can_after() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9)
    batch = make_batch([RowStart([2, 3], params, 0, (1,))])
    logits = torch.zeros(1, 4, V)
    logits[..., 1] = 5
    assert draw(logits, batch, torch.zeros(1, 3, dtype=torch.int64)).tolist() == [[0, 0, 1, 1]]


def test_tokens_tied_with_the_kth_all_stay() -> None:
    batch = make_batch([RowStart([0], SamplingParams(top_k=2), 0)])
    logits = torch.tensor([[[3.0, 1.0, 1.0, 1.0, 0.0, *([-1.0] * (V - 5))]]])
    assert probabilities(logits, batch)[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("top_p", [0, 1e-30, 1e-6, 0.01])
def test_a_tiny_top_p_keeps_the_leader(top_p: float) -> None:
    batch = make_batch([RowStart([0], SamplingParams(top_p=top_p), 0)])
    logits = torch.randn(1, 3, V)
    assert torch.equal(probabilities(logits, batch), torch.nn.functional.one_hot(logits.argmax(-1), V).float())


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    batch = make_batch([RowStart([0], SamplingParams(top_p=0.75), 0)], vocab=4)
    distribution = probabilities(torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log(), batch)[0, 0]
    assert distribution.tolist() == pytest.approx([0.625, 0.375, 0, 0])


def test_the_order_is_min_p_top_k_top_p() -> None:
    """top_p applies to the renormalized distribution after min_p and top_k."""
    logits = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    both = make_batch([RowStart([0], SamplingParams(top_k=2, top_p=0.5), 0)], vocab=4)
    assert probabilities(logits, both)[0, 0].tolist() == pytest.approx([1, 0, 0, 0])  # 0.4 / 0.7 > 0.5 already
    cut = make_batch([RowStart([0], SamplingParams(min_p=0.8, top_k=3, top_p=0.9), 0)], vocab=4)
    assert probabilities(logits, cut)[0, 0].tolist() == pytest.approx([1, 0, 0, 0])


def test_greedy_rows_beside_sampled_ones_take_their_argmax_and_ties_go_to_the_smaller_token() -> None:
    logits = torch.zeros(3, 2, V)
    logits[:, 0, 4] = logits[:, 0, 9] = 1.0
    for other in (SamplingParams(temperature=0), SamplingParams(temperature=5.0)):
        starts = [RowStart([0], SamplingParams(temperature=0, top_p=0.5, top_k=3), 5), RowStart([0], other, 6)]
        batch = make_batch([*starts, RowStart([0], SamplingParams(temperature=0), 7)])
        drawn = draw(logits, batch)
        assert drawn[0].tolist() == drawn[2].tolist() == [4, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-28])
def test_a_temperature_next_to_zero_is_the_argmax(temperature: float) -> None:
    batch = make_batch([RowStart([0], SamplingParams(temperature=temperature), 5)])
    logits = 10 * torch.randn(1, 8, V)
    assert torch.equal(draw(logits, batch), logits.argmax(-1))
    assert torch.equal(probabilities(logits, batch).argmax(-1), logits.argmax(-1))


def test_a_rows_draw_does_not_depend_on_other_rows_or_its_slot() -> None:
    starts = [
        RowStart([1, 2], SamplingParams(), 11),
        RowStart([3], SamplingParams(temperature=0), 12),
        RowStart([4] * 9, SamplingParams(top_k=4, presence_penalty=1), 13),
        RowStart([5], SamplingParams(top_p=0.6, logit_bias={3: 4.0}), 14),
    ]
    logits, draft_tokens = torch.randn(4, 3, V), torch.randint(0, V, (4, 2))
    alone = [draw(logits[i : i + 1], make_batch([starts[i]]), draft_tokens[i : i + 1])[0].tolist() for i in range(4)]
    for order in itertools.permutations(range(4)):
        batch = make_batch([starts[i] for i in order])
        together = draw(logits[list(order)], batch, draft_tokens[list(order)])
        assert together.tolist() == [alone[i] for i in order]


# --- noise ------------------------------------------------------------------------------------------------------------


def noise(seed: int, positions: range, purpose: Purpose, count: int) -> torch.Tensor:
    key = noise_key(torch.tensor(seed), torch.tensor(list(positions))[:, None], purpose)
    return uniform(key, torch.arange(count))


def test_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    assert kstest(noise(1, range(1), Purpose.DRAW, 20_000)[0].numpy(), "uniform").pvalue > 1e-3
    assert kstest(noise(2, range(20_000), Purpose.DRAW, 1)[:, 0].numpy(), "uniform").pvalue > 1e-3
    seeds = torch.tensor([sequence_seed(7, sample) for sample in range(20_000)])
    assert kstest(uniform(noise_key(seeds, torch.tensor(5), Purpose.ACCEPT)).numpy(), "uniform").pvalue > 1e-3


def test_noise_never_is_zero_or_one() -> None:
    u = noise(3, range(500), Purpose.DRAW, 2000)
    assert u.min() >= 2.0**-25
    assert u.max() <= 1 - 2.0**-25


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *[((9, 0, a), (9, 0, b)) for a, b in itertools.combinations(Purpose, 2)],
        ((9, 0, Purpose.DRAW), (9, 1, Purpose.DRAW)),
        ((9, 0, Purpose.DRAW), (9, 4096, Purpose.DRAW)),
        ((9, 3, Purpose.DRAW), (10, 3, Purpose.DRAW)),
        ((9, 3, Purpose.DRAW), (9 + 2**32, 3, Purpose.DRAW)),
        ((0, 3, Purpose.DRAW), (2**62, 3, Purpose.DRAW)),
    ],
)
def test_noise_is_independent_between_purposes_positions_and_seeds(
    one: tuple[int, int, Purpose], other: tuple[int, int, Purpose]
) -> None:
    (x, y) = (noise(seed, range(at, at + 1), purpose, 30_000)[0] for seed, at, purpose in (one, other))
    cells = torch.histogramdd(torch.stack([x, y], 1), bins=[8, 8], range=[0, 1, 0, 1]).hist.flatten().double()
    assert chisquare(cells.numpy()).pvalue > 1e-4


def test_samples_of_a_request_have_seeds_of_their_own() -> None:
    seeds = {sequence_seed(seed, sample) for seed in range(300) for sample in range(300)}
    assert len(seeds) == 300 * 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_gumbel_noise_is_bounded_as_the_module_says() -> None:
    for u, bound in ((1 - 2.0**-25, GUMBEL_HIGH), (2.0**-25, GUMBEL_LOW)):
        assert -math.log(-math.log(u)) == pytest.approx(bound, abs=1e-9)
    assert GUMBEL_HIGH - GUMBEL_LOW < NOISE_SPAN


@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0, 30.0])
def test_noise_for_the_candidates_alone_gives_the_same_argmax_as_noise_for_all(spread: float) -> None:
    scores = spread * torch.randn(400, 300)
    key = noise_key(torch.arange(400), torch.arange(400) % 17, Purpose.DRAW)
    u = uniform((key[0][:, None], key[1][:, None]), torch.arange(300))
    full = (scores.double() - torch.log(-torch.log(u))).argmax(-1)
    assert torch.equal(noisy_argmax(scores, key), full)


def test_a_draw_is_a_sample_of_the_distribution() -> None:
    count, vocab = 20_000, 5
    scores = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    key = noise_key(torch.tensor([sequence_seed(3, s) for s in range(count)]), torch.tensor(4), Purpose.DRAW)
    found = torch.bincount(noisy_argmax(scores.expand(count, vocab), key), minlength=vocab)
    assert chisquare(found.numpy(), (scores.exp().double() / scores.exp().double().sum() * count).numpy()).pvalue > 1e-3
