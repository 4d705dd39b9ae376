"""Draw a token from every line of logits: temperature and counter-based noise in the kernel, no probabilities in
memory.

Shapes: N lines (B rows x L positions), V vocabulary. A line is divided into blocks, one program each; the kernel that
    needs the result joins the blocks. The arithmetic is that of ``sampling.draw``: the largest logit becomes 0 in
    float32, the noise is float64, ties go to the smaller token. The exact noise is rarely needed: float32 shows which
    tokens may be a block's best, nearly always one (see ``noisy_best``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.rows import RowState
from paceline.kernels.gpu.noise import GUMBEL_ERROR, bits24, gumbel, near_gumbel, noise_key, salt

BLOCK = 4096
_WARPS = 8
MARGIN = tl.constexpr(2 * GUMBEL_ERROR)
_ROUNDING = tl.constexpr(2.0**-22)  # relative to the best score


@triton.jit
def block_maxima_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    argmaxes: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): each block's largest logit -> maxima [N, blocks] and its first token -> argmaxes, int32."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + line * line_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    tl.store(maxima + line * BLOCKS + block, best)
    tl.store(argmaxes + line * BLOCKS + block, tl.min(tl.where(x == best, column, vocab), 0))


@triton.jit
def line_max(maxima: tl.tensor, line: tl.tensor, BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr) -> tl.tensor:
    """The largest logit of a line."""
    block = tl.arange(0, BLOCKS_UP)
    return tl.max(tl.load(maxima + line * BLOCKS + block, mask=block < BLOCKS, other=float("-inf")), 0)


@triton.jit
def first_best(
    values: tl.tensor, tokens: tl.tensor, line: tl.tensor, BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr
) -> tl.tensor:
    """The token of a line's largest value; the smallest token of equal ones; 0 where every value is NaN."""
    block = tl.arange(0, BLOCKS_UP)
    value = tl.load(values + line * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    token = tl.load(tokens + line * BLOCKS + block, mask=block < BLOCKS, other=2147483647)
    found = tl.min(tl.where(value == tl.max(value, 0), token, 2147483647), 0)
    return tl.where(found == 2147483647, 0, found)  # the result is used as an index


@triton.jit
def scaled_logits(x: tl.tensor, top: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits minus the largest one, divided by the temperature (unless it is 0): ``sampling.warp`` without cuts."""
    below = tl.where(x == float("inf"), 0.0, x - top)  # inf - inf would be NaN, and inf is the largest logit
    return tl.div_rn(below, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(x))


@triton.jit
def plain_best(score: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A block's largest score as float64, and the smallest token that has it."""
    best = tl.max(tl.where(inside, score, float("-inf")), 0)
    found = tl.min(tl.where((score == best) & inside, token, 2147483647), 0)
    return best.to(tl.float64), found


@triton.jit
def noisy_best(
    score: tl.tensor, noise: tl.tensor, a: tl.tensor, b: tl.tensor, token: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """A block's largest score + float64 noise, and the smallest token that has it. noise: ``near_gumbel``'s float32.

    ``top`` is the largest approximate sum. An approximate sum x is off by GUMBEL_ERROR and its own rounding, 2^-24 |x|.
    The true best's is therefore at least top - 2 GUMBEL_ERROR - 2^-24 (|top| + |x|), and |x| is |top| up to the margin
    itself: with the subtraction's own rounding less than 4 * 2^-24 |top| are lost. A lower sum cannot win. A single
    remaining token needs no comparison, only its value; scores that are all -inf need none either.
    """
    near = tl.where(inside, score + noise, float("-inf"))
    top = tl.max(near, 0)
    close = (near >= top - (MARGIN + _ROUNDING * tl.abs(top))) & inside
    found = tl.min(tl.where(close, token, 2147483647), 0)
    if (tl.sum(close.to(tl.int32), 0) == 1) | (top == float("-inf")):
        best = tl.max(tl.where(close, score, float("-inf")), 0).to(tl.float64) + gumbel(a, b, found)
    else:  # float32 cannot decide, or a score is NaN
        best, found = plain_best(score.to(tl.float64) + gumbel(a, b, token), token, inside)
    return best, found


@triton.jit(do_not_specialize=["first", "per_row"])
def draw_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    ids: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    length: tl.tensor,
    slots: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    first: tl.tensor,
    salt: tl.tensor,
    per_row: tl.tensor,
    CUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): each block's best noisy score -> values [N, blocks] float64, its token -> tokens, int32.

    Line b * per_row + j stands at position length[slots[b]] + first + j. CUT: column c is token ids[c] (ascending).
    """
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + line // per_row)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + slot)
    score = scaled_logits(x, line_max(maxima, line, BLOCKS, BLOCKS_UP), temperature)
    token = column
    if CUT:
        token = tl.load(ids + column, mask=inside, other=0).to(tl.int32)
    if temperature > 0.0:
        position = tl.load(length + slot) + first + line % per_row
        a, b = noise_key(tl.load(seed + slot), position, salt)
        best, found = noisy_best(score, near_gumbel(bits24(a, b, token)), a, b, token, inside)
    else:
        best, found = plain_best(score, token, inside)
    tl.store(values + line * BLOCKS + block, best)
    tl.store(tokens + line * BLOCKS + block, found)


@triton.jit
def pick_kernel(
    values: tl.tensor, tokens: tl.tensor, out: tl.tensor, BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr
) -> None:
    """Grid (N): the best of a line's blocks -> out [N] int64."""
    line = tl.program_id(0).to(tl.int64)
    tl.store(out + line, first_best(values, tokens, line, BLOCKS, BLOCKS_UP).to(tl.int64))


@dataclass(frozen=True)
class Blocks:
    """The division of a line of ``vocab`` logits into blocks."""

    vocab: int
    size: int = BLOCK

    @property
    def count(self) -> int:
        return -(-self.vocab // self.size)

    @property
    def shape(self) -> dict[str, int]:
        """The kernels' constants."""
        return {"BLOCKS": self.count, "BLOCKS_UP": int(triton.next_power_of_2(self.count))}


@dataclass(frozen=True)
class Noise:
    """The inputs of B rows' draws besides their logits: temperature [R] float32, seed and length [R] int64, by slot.

    slots: [B] int64.
    """

    temperature: Tensor
    seed: Tensor
    length: Tensor
    slots: Tensor

    @staticmethod
    def of(rows: RowState) -> Noise:
        """The noise of the batch's rows."""
        return Noise(rows.tables.temperature, rows.tables.seed, rows.tables.length, rows.slots.index)


def block_maxima(logits: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> each block's largest [N, blocks] float32 and the first token that has it, int32."""
    lines = logits.shape[0]
    maxima = torch.empty((lines, blocks.count), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((lines, blocks.count), dtype=torch.int32, device=logits.device)
    block_maxima_kernel[(lines, blocks.count)](
        logits, maxima, tokens, logits.stride(0), blocks.vocab, BLOCKS=blocks.count, BLOCK=blocks.size, num_warps=_WARPS
    )
    return maxima, tokens


def noisy_blocks(
    logits: Tensor, noise: Noise, first: int, purpose: int, blocks: Blocks, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [B * L, V] -> each block's best noisy score [B * L, blocks] float64 and its token, int32."""
    lines, rows = logits.shape[0], noise.slots.shape[0]
    maxima, _ = block_maxima(logits, blocks)
    values = torch.empty((lines, blocks.count), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((lines, blocks.count), dtype=torch.int32, device=logits.device)
    draw_kernel[(lines, blocks.count)](
        logits,
        maxima,
        tokens if ids is None else ids,
        noise.temperature,
        noise.seed,
        noise.length,
        noise.slots,
        values,
        tokens,
        logits.stride(0),
        blocks.vocab,
        first,
        salt(purpose),
        per_row=lines // rows,
        CUT=ids is not None,
        BLOCK=blocks.size,
        num_warps=_WARPS,
        **blocks.shape,
    )
    return values, tokens


def draw(
    logits: Tensor, noise: Noise, first: int, purpose: int, ids: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """Draw a token for every line: logits [B, L, V] -> [B, L] int64; position j stands at length + first + j.

    ids [V] int64, ascending: the tokens that the columns stand for, if the vocabulary is cut.
    """
    rows, length, vocab = logits.shape
    blocks = Blocks(vocab, block)
    lines = logits.reshape(-1, vocab)
    values, tokens = noisy_blocks(lines, noise, first, purpose, blocks, ids)
    out = torch.empty((rows, length), dtype=torch.int64, device=logits.device)
    pick_kernel[(rows * length,)](values, tokens, out, num_warps=1, **blocks.shape)
    return out
