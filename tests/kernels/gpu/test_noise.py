"""Draws decided with float32 noise: the same tokens and values, to the bit, as with float64 noise for every token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl

from kernels.gpu.rows import DEVICE
from paceline.core import sampling
from paceline.core.values import Purpose
from paceline.kernels.gpu import draw as kernels
from paceline.kernels.gpu.noise import GUMBEL_ERROR, gumbel, near_gumbel, noise_key, salt

pytestmark = pytest.mark.usefixtures("one_thread")
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="looks into the interpreter")
LOGARITHM = DIVISION = 2.0**-22  # error bounds of lg2.approx (the worst that Triton may choose) and div.full
FAR = -60.0  # no noise lifts a token from here to the top
SIGNS = list(itertools.product([-1.0, 1.0], repeat=3))


@triton.jit
def exact_kernel(
    score: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    salt: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): the expected result of ``draw_kernel``, with float64 noise for every token."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(score + line * vocab + column, mask=inside, other=float("-inf"))
    a, b = noise_key(tl.load(seed + line), tl.load(position + line), salt)
    noisy = tl.where(inside, x.to(tl.float64) + gumbel(a, b, column), float("-inf"))
    best = tl.max(noisy, 0)
    place = line * tl.num_programs(1) + block
    tl.store(values + place, best)
    tl.store(tokens + place, tl.min(tl.where((noisy == best) & inside, column, 2147483647), 0))


@triton.jit
def near_kernel(first: tl.tensor, step: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, near_gumbel((first + place * step).to(tl.uint32)))


def noise_for(lines: int, temperature: float = 1.0, seed: int = 7) -> kernels.Noise:
    """Every line is a row of its own, at its own position."""
    temperatures = torch.full((lines,), temperature, device=DEVICE)
    seeds = torch.full((lines,), sampling.sequence_seed(seed, 0), device=DEVICE)
    return kernels.Noise(
        temperatures, seeds, torch.arange(3, 3 + lines, device=DEVICE), torch.arange(lines, device=DEVICE)
    )


def true_noise(noise: kernels.Noise, vocab: int) -> Tensor:
    """[N, V] float64."""
    key = sampling.noise_key(noise.seed[:, None], noise.length[:, None], Purpose.DRAW)
    return -torch.log(-torch.log(sampling.uniform(key, torch.arange(vocab, device=DEVICE))))


def exact(logits: Tensor, noise: kernels.Noise, blocks: kernels.Blocks) -> tuple[Tensor, Tensor]:
    lines, vocab = logits.shape
    scores = (logits - logits.amax(-1, keepdim=True)) / noise.temperature[:, None]
    values = torch.empty((lines, blocks.count), dtype=torch.float64, device=DEVICE)
    tokens = torch.empty((lines, blocks.count), dtype=torch.int32, device=DEVICE)
    exact_kernel[(lines, blocks.count)](
        scores, noise.seed, noise.length, values, tokens, vocab, salt(Purpose.DRAW), BLOCK=blocks.size
    )
    return values, tokens


def check(logits: Tensor, noise: kernels.Noise, block: int = 64) -> None:
    """Values and tokens of every block, to the bit, and the token drawn."""
    blocks = kernels.Blocks(logits.shape[1], block)
    found, expected = kernels.noisy_blocks(logits, noise, 0, Purpose.DRAW, blocks), exact(logits, noise, blocks)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0].view(torch.int64), expected[0].view(torch.int64))
    scores = (logits - logits.amax(-1, keepdim=True)) / noise.temperature[:, None]
    drawn = kernels.draw(logits[:, None], noise, 0, Purpose.DRAW, block=block)
    assert drawn[:, 0].tolist() == (scores.double() + true_noise(noise, logits.shape[1])).argmax(-1).tolist()


def nearly_tied(noise: kernels.Noise, vocab: int) -> Tensor:
    """Logits [N, V] whose two best noisy scores differ by as little as float32 logits allow."""
    true, lines = true_noise(noise, vocab), torch.arange(len(noise.length))
    order = true.argsort(-1)
    place = torch.randint(vocab - 1, (len(lines),), generator=torch.Generator().manual_seed(0))
    lower, upper = order[lines, place], order[lines, place + 1]
    logits = torch.full(true.shape, FAR, device=DEVICE)
    logits[lines, lower] = 0.0
    logits[lines, upper] = (true[lines, lower] - true[lines, upper]).float()
    return logits * noise.temperature[:, None]


def nearly_tied_and_coarse(noise: kernels.Noise, vocab: int) -> Tensor:
    """Logits [N, 2 V]: the largest in the second half; in the first two that nearly tie at -300, where float32 sums are
    multiples of 2^-15, so that one sum may be rounded up and the other down.
    """
    true, level, grid = true_noise(noise, vocab), -300.0, 2.0**-15
    logits = torch.full((len(true), 2 * vocab), level + FAR, device=DEVICE)
    logits[:, -1] = 0.0
    for line, values in enumerate(true):
        wanted = (level + values[:, None] - values[None, :]).float()  # of the second token, beside the first
        gap = (wanted.double() + values[None, :] - level - values[:, None]).abs()
        edge = (((level + values) / grid) % 1 - 0.5).abs() * grid
        cost = torch.maximum(gap, edge[:, None]).fill_diagonal_(torch.inf)
        first, second = divmod(int(cost.argmin()), vocab)
        logits[line, first], logits[line, second] = level, float(wanted[first, second])
    return logits


def off(value: Any, by: Any) -> Any:
    return (value.astype(np.float64) + by).astype(np.float32)


@pytest.fixture
def as_bad_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Disturb float32 logarithms and divisions by as much as the instructions' error bounds allow.

    Returns the directions for divisions, inner and outer logarithms; 0: a random one for each number.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    signs, calls, make = [0.0, 0.0, 0.0], itertools.count(), np.random.default_rng(0)

    def sign(which: int, shape: tuple[int, ...]) -> Any:
        return signs[which] or make.choice([-1.0, 1.0], shape)

    def logarithm(self: object, arg: Any) -> Any:
        x = arg.data
        if x.dtype != np.float32:
            return interpreter.TensorHandle(np.log(x), arg.dtype.scalar)
        binary = np.log2(x.astype(np.float64))
        error = LOGARITHM * np.where((x > 0.5) & (x < 2), 1.0, np.abs(binary))
        found = off(binary, sign(1 + next(calls) % 2, x.shape) * error) * np.float32(np.log(2))
        return interpreter.TensorHandle(found, arg.dtype.scalar)

    def division(self: object, a: Any, b: Any) -> Any:
        exact = a.data.astype(np.float64) / b.data
        return interpreter.TensorHandle(off(exact, sign(0, exact.shape) * DIVISION * np.abs(exact)), a.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_log", logarithm)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fdiv", division)
    return signs


def worst_error(first: int, count: int, step: int = 1) -> float:
    """The largest error of ``near_gumbel`` over ``count`` of the 2^24 uniforms."""
    worst, size = 0.0, min(count, 1 << 18)
    for start in range(0, count, size):
        out = torch.empty(size, device=DEVICE)
        begin = first + start * step
        near_kernel[(1,)](begin, step, out, BLOCK=size)
        bits = begin + torch.arange(size, device=DEVICE, dtype=torch.float64) * step
        true = -torch.log(-torch.log((bits + 0.5) * 2.0**-24))
        worst = max(worst, float((out.double() - true).abs().max()))
    return worst


def test_float32_noise_is_within_its_bound_for_every_uniform() -> None:
    assert worst_error(0, 1 << 24) < GUMBEL_ERROR / 2


@interpreted
@pytest.mark.parametrize("directions", SIGNS, ids=str)
def test_float32_noise_is_within_its_bound_with_the_worst_logarithms(
    directions: tuple[float, ...], as_bad_as_a_gpu: list[float]
) -> None:
    as_bad_as_a_gpu[:] = directions
    ends = max(worst_error(0, 1 << 16), worst_error((1 << 24) - (1 << 16), 1 << 16))
    assert max(ends, worst_error(5, 1 << 18, 61)) < GUMBEL_ERROR
    assert ends > GUMBEL_ERROR / 2  # else nothing was made worse


@pytest.mark.parametrize(
    ("temperature", "spread"), [(1.0, 0.0), (5.0, 0.01), (1.0, 3.0), (0.3, 3.0), (5.0, 300.0), (0.3, 300.0)]
)
def test_random_lines_draw_what_float64_draws(temperature: float, spread: float) -> None:
    logits = spread * torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(logits, noise_for(5, temperature), block=128)


@pytest.mark.parametrize("temperature", [1.0, *(pytest.param(other, marks=pytest.mark.slow) for other in (0.5, 2.0))])
def test_near_ties_are_decided_in_float64(temperature: float) -> None:
    """Two tokens whose scores differ by less than 1e-7, below float32's error."""
    noise = noise_for(60, temperature)
    logits = nearly_tied(noise, 64)
    first, second = (logits.double() / temperature + true_noise(noise, 64)).topk(2).values.T
    assert float((first - second).max()) < 1e-7
    check(logits, noise)


@interpreted
@pytest.mark.parametrize("make", [nearly_tied, nearly_tied_and_coarse])
@pytest.mark.usefixtures("as_bad_as_a_gpu")
def test_near_ties_are_decided_correctly_with_the_worst_logarithms_and_coarse_sums(make: Any) -> None:
    noise = noise_for(30)
    check(make(noise, 64), noise)


def test_equal_scores_go_to_the_smaller_token() -> None:
    """Tokens with one uniform and one logit."""
    noise, vocab = noise_for(40), 4096
    key = sampling.noise_key(noise.seed[:, None], noise.length[:, None], Purpose.DRAW)
    uniforms = sampling.uniform(key, torch.arange(vocab, device=DEVICE))
    logits, pairs = torch.full((40, vocab), FAR, device=DEVICE), 0
    for line, values in enumerate(uniforms):
        _, place, counts = values.unique(return_inverse=True, return_counts=True)
        equals = (counts[place] > 1).nonzero().flatten()
        if len(equals):
            logits[line, (place == place[equals[0]]).nonzero().flatten()] = 0.0
            pairs += 1
    assert pairs > 5
    check(logits, noise, block=vocab)


def test_blocks_with_masked_tokens() -> None:
    """Blocks of nothing but -inf, of one token, and of some."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[0, 64:] = -torch.inf
    logits[1, :199] = -torch.inf
    logits[2, 10:190] = -torch.inf
    logits[3, ::2] = -torch.inf
    logits[4, 1:] = -torch.inf
    check(logits, noise_for(6))


def test_greedy_lines_have_no_noise() -> None:
    logits = torch.randn(4, 200).to(DEVICE)
    logits[1] = 2.0
    logits[2, [150, 70, 71]] = 9.0
    logits[3, :128] = -torch.inf
    blocks = kernels.Blocks(200, 64)
    values, tokens = kernels.noisy_blocks(logits, noise_for(4, 0.0), 0, Purpose.DRAW, blocks)
    scores = torch.full((4, 256), -torch.inf, device=DEVICE)
    scores[:, :200] = logits - logits.amax(-1, keepdim=True)
    best = scores.view(4, 4, 64).max(-1)
    assert torch.equal(values, best.values.double())
    assert tokens.tolist() == (best.indices + torch.arange(0, 256, 64, device=DEVICE)).tolist()


@interpreted
def test_float64_noise_is_made_for_one_token_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(a: Any, b: Any, token: Any) -> Any:
        made.append(int(np.prod(token.shape)) if token.shape else 1)
        return gumbel(a, b, token)

    monkeypatch.setattr(kernels, "gumbel", counted)
    make = torch.Generator().manual_seed(3)
    blocks, lines = kernels.Blocks(8192, 4096), 40
    for temperature in (0.7, 1.0):
        logits = 4 * torch.randn(lines, 8192, generator=make)
        logits[:, 5000] = 30.0  # one block per line has the largest logit
        logits[lines // 2 :, 100:] = -torch.inf  # the rest after a cut
        kernels.noisy_blocks(logits, noise_for(lines, temperature), 0, Purpose.DRAW, blocks)
    assert len(made) == 2 * 2 * lines
    assert sum(count > 1 for count in made) <= 1  # by chance 0.003 of them
