"""Accept, recover, bonus and commit in a few small launches: the part of a round that follows the target's logits.

Shapes: B rows, k draft tokens, L = k + 1 positions, V vocabulary, S stop tokens. The rules are those of ``rules.py``,
    the commit is ``rows.RowState.gain``, the noise is that of ``sampling.py``. Every function here appends a row's new
    tokens to its text, updates its length, and returns the round's record [B, L + 3] int64: tokens, accepted, drafted,
    gained. A row that has ended (limit or stop token) gains nothing: the host may be a round behind. Kernels take L as
    ``per_row``, a runtime argument: one compiled kernel serves all L up to the next power of two (``LENGTH_UP``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import RowState
from paceline.core.values import Purpose
from paceline.kernels.gpu.draw import (
    BLOCK,
    Blocks,
    Noise,
    block_maxima,
    first_best,
    line_max,
    noisy_best,
    noisy_blocks,
    plain_best,
    scaled_logits,
)
from paceline.kernels.gpu.noise import bits24, near_gumbel, noise_key, salt, uniform
from paceline.kernels.gpu.state import RECORD_TAIL

_WARPS = 8


@triton.jit
def commit(
    row: tl.tensor,
    slot: tl.tensor,
    tokens: tl.tensor,
    accepted: tl.tensor,
    drafted: tl.tensor,
    text: tl.tensor,
    text_stride: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    limit: tl.tensor,
    stops: tl.tensor,
    live: tl.tensor,
    record: tl.tensor,
    per_row: tl.tensor,
    LENGTH_UP: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_UP: tl.constexpr,
) -> None:
    """Append ``accepted + 1`` of the tokens [LENGTH_UP] int64 to a row, up to its first stop token and its limit.

    Tokens below 0 are ``Undrawn``: none of them is appended, and none after them.
    """
    place = tl.arange(0, LENGTH_UP)
    before = tl.load(length + slot)
    room = tl.load(limit + slot) - before
    stop_place = tl.arange(0, STOPS_UP)
    stop = tl.load(stops + slot * STOPS + stop_place, mask=stop_place < STOPS, other=-1)
    last = tl.load(text + slot * text_stride + tl.maximum(before - 1, 0))
    ended = tl.max(((stop == last) & (stop >= 0)).to(tl.int32), 0) > 0
    ended = (ended & (before > tl.load(prompt_length + slot))) | (room <= 0) | (row >= tl.load(live))

    stopping = tl.max(((tokens[:, None] == stop[None, :]) & (stop >= 0)[None, :]).to(tl.int32), 1) > 0
    first_stop = tl.min(tl.where(stopping, place, LENGTH_UP), 0)
    first_undrawn = tl.min(tl.where(tokens < 0, place, LENGTH_UP), 0)
    gained = tl.minimum(tl.minimum(tl.minimum(accepted, first_stop) + 1, first_undrawn), room).to(tl.int64)
    gained = tl.where(ended, 0, gained)
    tl.store(text + slot * text_stride + before + place, tokens, mask=place < gained)
    tl.store(length + slot, before + gained)
    line = record + row * (per_row + 3)
    tl.store(line + place, tokens, mask=place < per_row)
    tl.store(line + per_row, tl.where(ended, 0, accepted).to(tl.int64))
    tl.store(line + per_row + 1, tl.where(ended, 0, drafted).to(tl.int64))
    tl.store(line + per_row + 2, gained)


@triton.jit
def drawn_or_not(
    token: tl.tensor, logits: tl.tensor, line: tl.tensor, line_stride: tl.tensor, real: tl.tensor
) -> tl.tensor:
    """The tokens drawn from lines, int64; -1 (``Undrawn.NOT_FINITE``) where their logit is NaN or infinite."""
    x = tl.load(logits + line * line_stride + tl.maximum(token, 0), mask=real, other=0.0).to(tl.float32)
    return tl.where(tl.abs(x) < float("inf"), token, -1).to(tl.int64)


@triton.jit
def leading(kept: tl.tensor, counts: tl.tensor, LENGTH_UP: tl.constexpr) -> tl.tensor:
    """Number of leading draft tokens that exist and are kept [LENGTH_UP]."""
    place = tl.arange(0, LENGTH_UP)
    return tl.min(tl.where(kept & (place < counts), LENGTH_UP, place), 0)


@triton.jit(do_not_specialize=["per_row"])
def coupled_kernel(
    logits: tl.tensor,
    line_stride: tl.tensor,
    values: tl.tensor,
    drawn: tl.tensor,
    draft_tokens: tl.tensor,
    counts: tl.tensor,
    seed: tl.tensor,
    rate: tl.tensor,
    synthetic_salt: tl.tensor,
    slots: tl.tensor,
    text: tl.tensor,
    text_stride: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    limit: tl.tensor,
    stops: tl.tensor,
    live: tl.tensor,
    record: tl.tensor,
    SYNTHETIC: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    per_row: tl.tensor,
    LENGTH_UP: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_UP: tl.constexpr,
) -> None:
    """Grid (B): accept draft tokens while they equal the target's draws, joined from blocks (values, drawn [B * L,
    blocks]).
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    place, block = tl.arange(0, LENGTH_UP), tl.arange(0, BLOCKS_UP)
    at = (row * per_row + place)[:, None] * BLOCKS + block[None, :]
    there = (place < per_row)[:, None] & (block < BLOCKS)[None, :]
    value = tl.load(values + at, mask=there, other=float("-inf"))
    token = tl.load(drawn + at, mask=there, other=2147483647)
    best = tl.max(value, 1)
    draws = tl.min(tl.where(value == best[:, None], token, 2147483647), 1).to(tl.int64)
    draws = tl.where(draws == 2147483647, -1, draws)  # all logits were NaN
    draws = drawn_or_not(draws, logits, row * per_row + place, line_stride, place < per_row)
    draft_token = tl.load(draft_tokens + row * (per_row - 1) + place, mask=place < per_row - 1, other=-1)
    drafted = tl.load(counts + row)
    if SYNTHETIC:
        a, b = noise_key(tl.load(seed + slot), tl.load(length + slot) + place, synthetic_salt)
        accepted = leading(uniform(a, b, tl.zeros_like(place)) < rate, drafted, LENGTH_UP)
        draws = tl.where(place < accepted, draft_token, draws)
    else:
        accepted = leading(draft_token == draws, drafted, LENGTH_UP)
    commit(
        row, slot, draws, accepted, drafted, text, text_stride, length, prompt_length, limit, stops, live, record,
        per_row, LENGTH_UP, STOPS, STOPS_UP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["per_row"])
def mass_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    slots: tl.tensor,
    masses: tl.tensor,
    line_stride: tl.tensor,
    vocab: tl.tensor,
    per_row: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N, blocks): each block's part of the softmax's denominator -> masses [N, blocks] float32."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + line * line_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + tl.load(slots + line // per_row))
    score = scaled_logits(x, line_max(maxima, line, BLOCKS, BLOCKS_UP), temperature)
    tl.store(masses + line * BLOCKS + block, tl.sum(tl.exp(score), 0))


@triton.jit
def draft_probabilities(
    logits: tl.tensor,
    maxima: tl.tensor,
    argmaxes: tl.tensor,
    masses: tl.tensor,
    line: tl.tensor,
    draft_token: tl.tensor,
    real: tl.tensor,
    temperature: tl.tensor,
    line_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
) -> tl.tensor:
    """Probability of each draft token [LENGTH_UP] under its line [LENGTH_UP]; 0 or 1 at temperature 0.

    It is NaN if the token's logit is infinite: no such token is accepted.
    """
    block = tl.arange(0, BLOCKS_UP)
    at = line[:, None] * BLOCKS + block[None, :]
    there = real[:, None] & (block < BLOCKS)[None, :]
    maximum = tl.load(maxima + at, mask=there, other=float("-inf"))
    top = tl.max(maximum, 1)
    argmax = tl.load(argmaxes + at, mask=there, other=2147483647)
    first = tl.min(tl.where(maximum == top[:, None], argmax, 2147483647), 1)
    mass = tl.sum(tl.load(masses + at, mask=there, other=0.0), 1)
    x = tl.load(logits + line * line_stride + draft_token, mask=real, other=0.0).to(tl.float32)
    warm = tl.exp(scaled_logits(x, tl.where(real, top, 0.0), temperature)) / tl.where(real, mass, 1.0)
    probability = tl.where(temperature == 0.0, (draft_token == first).to(tl.float32), warm)
    return tl.where(x == float("inf"), float("nan"), probability)


@triton.jit(do_not_specialize=["per_row"])
def rejection_kernel(
    p_logits: tl.tensor,
    p_maxima: tl.tensor,
    p_argmaxes: tl.tensor,
    p_masses: tl.tensor,
    p_stride: tl.tensor,
    q_logits: tl.tensor,
    q_maxima: tl.tensor,
    q_argmaxes: tl.tensor,
    q_masses: tl.tensor,
    q_stride: tl.tensor,
    draft_tokens: tl.tensor,
    counts: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    length: tl.tensor,
    slots: tl.tensor,
    salt: tl.tensor,
    accepted: tl.tensor,
    per_row: tl.tensor,
    LENGTH_UP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
) -> None:
    """Grid (B): accept draft token x where coin * q(x) < p(x) -> accepted [B] int64."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    place = tl.arange(0, LENGTH_UP)
    real = place < per_row - 1
    draft_token = tl.load(draft_tokens + row * (per_row - 1) + place, mask=real, other=0)
    temperature = tl.load(temperatures + slot)
    p = draft_probabilities(
        p_logits, p_maxima, p_argmaxes, p_masses, row * per_row + place, draft_token, real, temperature, p_stride,
        BLOCKS, BLOCKS_UP,
    )  # fmt: skip
    q = draft_probabilities(
        q_logits, q_maxima, q_argmaxes, q_masses, row * (per_row - 1) + place, draft_token, real, temperature, q_stride,
        BLOCKS, BLOCKS_UP,
    )  # fmt: skip
    a, b = noise_key(tl.load(seed + slot), tl.load(length + slot) + place, salt)
    coin = uniform(a, b, tl.zeros_like(place))
    kept = coin * q.to(tl.float64) < p.to(tl.float64)
    tl.store(accepted + row, leading(kept, tl.load(counts + row), LENGTH_UP).to(tl.int64))


@triton.jit
def probabilities(
    logits: tl.tensor,
    maxima: tl.tensor,
    argmaxes: tl.tensor,
    masses: tl.tensor,
    line: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    temperature: tl.tensor,
    line_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
) -> tl.tensor:
    """Probabilities of one block of tokens on one line."""
    block = tl.arange(0, BLOCKS_UP)
    x = tl.load(logits + line * line_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    mass = tl.sum(tl.load(masses + line * BLOCKS + block, mask=block < BLOCKS, other=0.0), 0)
    warm = tl.exp(scaled_logits(x, line_max(maxima, line, BLOCKS, BLOCKS_UP), temperature)) / mass
    cold = (column == first_best(maxima, argmaxes, line, BLOCKS, BLOCKS_UP)).to(tl.float32)
    return tl.where(temperature == 0.0, cold, warm)


@triton.jit(do_not_specialize=["per_row"])
def recover_kernel(
    p_logits: tl.tensor,
    p_maxima: tl.tensor,
    p_argmaxes: tl.tensor,
    p_masses: tl.tensor,
    p_stride: tl.tensor,
    q_logits: tl.tensor,
    q_maxima: tl.tensor,
    q_argmaxes: tl.tensor,
    q_masses: tl.tensor,
    q_stride: tl.tensor,
    accepted: tl.tensor,
    counts: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    length: tl.tensor,
    slots: tl.tensor,
    vocab: tl.tensor,
    salt: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    per_row: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (B, blocks): the block's best draw from max(p - q, 0), and from p alone -> values, tokens [2, B, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = tl.num_programs(0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    kept = tl.load(accepted + row)
    p = probabilities(
        p_logits, p_maxima, p_argmaxes, p_masses, row * per_row + kept, column, inside, temperature, p_stride,
        BLOCKS, BLOCKS_UP,
    )  # fmt: skip
    rest = p
    if kept < tl.load(counts + row):
        q = probabilities(
            q_logits, q_maxima, q_argmaxes, q_masses, row * (per_row - 1) + kept, column, inside, temperature, q_stride,
            BLOCKS, BLOCKS_UP,
        )  # fmt: skip
        rest = tl.maximum(p - q, 0.0)
    a, b = noise_key(tl.load(seed + slot), tl.load(length + slot) + kept, salt)
    noise = tl.zeros([BLOCK], tl.float32)
    if temperature > 0.0:
        noise = near_gumbel(bits24(a, b, column))
    at = row * BLOCKS + block
    for choice in tl.static_range(2):
        weight = rest if choice == 0 else p
        some = inside & (weight > 0)
        score = tl.where(some, tl.log(tl.where(some, weight, 1.0)), float("-inf"))
        if temperature > 0.0:
            best, found = noisy_best(score, noise, a, b, column, inside)
        else:
            best, found = plain_best(score, column, inside)
        tl.store(values + choice * rows * BLOCKS + at, best)
        tl.store(tokens + choice * rows * BLOCKS + at, found)


@triton.jit(do_not_specialize=["per_row"])
def finish_kernel(
    logits: tl.tensor,
    line_stride: tl.tensor,
    values: tl.tensor,
    drawn: tl.tensor,
    draft_tokens: tl.tensor,
    accepted: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    text: tl.tensor,
    text_stride: tl.tensor,
    length: tl.tensor,
    prompt_length: tl.tensor,
    limit: tl.tensor,
    stops: tl.tensor,
    live: tl.tensor,
    record: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    per_row: tl.tensor,
    LENGTH_UP: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_UP: tl.constexpr,
) -> None:
    """Grid (B): the accepted tokens, then the recovered or bonus token; drawn from p if rounding leaves p - q empty."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    place = tl.arange(0, LENGTH_UP)
    something = line_max(values, row, BLOCKS, BLOCKS_UP) > float("-inf")
    rest = first_best(values, drawn, row, BLOCKS, BLOCKS_UP)
    whole = first_best(values, drawn, row + rows, BLOCKS, BLOCKS_UP)
    kept = tl.load(accepted + row)
    token = drawn_or_not(tl.where(something, rest, whole), logits, row * per_row + kept, line_stride, True)
    draft_token = tl.load(draft_tokens + row * (per_row - 1) + place, mask=place < per_row - 1, other=0)
    tokens = tl.where(place < kept, draft_token, tl.where(place == kept, token, 0))
    commit(
        row, tl.load(slots + row), tokens, kept, tl.load(counts + row), text, text_stride, length, prompt_length, limit,
        stops, live, record, per_row, LENGTH_UP, STOPS, STOPS_UP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["record_stride", "per_row"])
def logprob_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    masses: tl.tensor,
    record: tl.tensor,
    own: tl.tensor,
    line_stride: tl.tensor,
    record_stride: tl.tensor,
    per_row: tl.tensor,
    LENGTH_UP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
) -> None:
    """Grid (B): log-probabilities of a record's tokens under their lines -> own [B, L] float32."""
    row = tl.program_id(0).to(tl.int64)
    place, block = tl.arange(0, LENGTH_UP), tl.arange(0, BLOCKS_UP)
    real = place < per_row
    line = row * per_row + place
    at = line[:, None] * BLOCKS + block[None, :]
    there = real[:, None] & (block < BLOCKS)[None, :]
    top = tl.max(tl.load(maxima + at, mask=there, other=float("-inf")), 1)
    mass = tl.sum(tl.load(masses + at, mask=there, other=0.0), 1)
    token = tl.maximum(tl.load(record + row * record_stride + place, mask=real, other=0), 0)
    x = tl.load(logits + line * line_stride + token, mask=real, other=0.0).to(tl.float32)
    tl.store(own + line, x - tl.where(real, top, 0.0) - tl.log(tl.where(real, mass, 1.0)), mask=real)


def _row_arguments(rows: RowState, record: Tensor) -> tuple[Tensor | int, ...]:
    """``commit``'s arguments that describe the rows."""
    of = rows.tables
    tables = of.length, of.prompt_length, of.limit, of.stops
    return (rows.slots.index, rows.text, rows.text.stride(0), *tables, rows.live, record)


def _shape(k: int, rows: RowState) -> dict[str, int]:
    stops = rows.tables.stops.shape[1]
    up = triton.next_power_of_2
    return {"per_row": k + 1, "LENGTH_UP": up(k + 1), "STOPS": stops, "STOPS_UP": up(stops)}


def coupled(
    draft: DraftTensors, logits: Tensor, rows: RowState, synthetic: float | None = None, block: int = BLOCK
) -> Tensor:
    """``rules.accept_matching`` for the draws from logits [B, k + 1, V], and commit -> the record.

    synthetic: accept each draft token with this probability instead, for benchmarks.
    """
    blocks = Blocks(logits.shape[-1], block)
    lines = logits.reshape(-1, blocks.vocab)
    values, tokens = noisy_blocks(lines, Noise.of(rows), 0, Purpose.DRAW, blocks)
    record = rows.text.new_empty(rows.rows, draft.k + 1 + RECORD_TAIL)
    coupled_kernel[(rows.rows,)](
        lines,
        lines.stride(0),
        values,
        tokens,
        draft.tokens,
        draft.counts,
        rows.tables.seed,
        0.0 if synthetic is None else synthetic,
        salt(Purpose.SYNTHETIC),
        *_row_arguments(rows, record),
        SYNTHETIC=synthetic is not None,
        num_warps=4,
        **blocks.shape,
        **_shape(draft.k, rows),
    )
    return record


def _softmax_tables(logits: Tensor, temperature: Tensor, slots: Tensor, blocks: Blocks) -> tuple[Tensor | int, ...]:
    """logits [B, L, V] -> the softmax's arguments for kernels: lines, maxima, argmaxes, masses, stride.

    temperature: [R] float32, of the rows in slots [B].
    """
    lines = logits.reshape(-1, blocks.vocab)
    maxima, tokens = block_maxima(lines, blocks)
    masses = torch.empty_like(maxima)
    mass_kernel[(lines.shape[0], blocks.count)](
        lines,
        maxima,
        temperature,
        slots,
        masses,
        lines.stride(0),
        blocks.vocab,
        per_row=logits.shape[1],
        BLOCK=blocks.size,
        num_warps=_WARPS,
        **blocks.shape,
    )
    return lines, maxima, tokens, masses, lines.stride(0)


def own_logprobs(logits: Tensor, record: Tensor, block: int = BLOCK) -> Tensor:
    """Log-probabilities of a record's tokens at temperature 1: logits [B, L, V] -> [B, L] float32."""
    rows, length, vocab = logits.shape
    blocks = Blocks(vocab, block)
    one = torch.ones(1, dtype=torch.float32, device=logits.device)
    all_at_one = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    lines, maxima, _, masses, stride = _softmax_tables(logits, one, all_at_one, blocks)
    own = torch.empty((rows, length), dtype=torch.float32, device=logits.device)
    logprob_kernel[(rows,)](
        lines, maxima, masses, record, own, stride, record.stride(0),
        per_row=length, LENGTH_UP=triton.next_power_of_2(length), num_warps=4, **blocks.shape,
    )  # fmt: skip
    return own


def rejection(draft: DraftTensors, logits: Tensor, rows: RowState, block: int = BLOCK) -> Tensor:
    """``rules.accept_by_ratio`` for the distributions of logits [B, k + 1, V], and commit -> the record.

    draft: with the logits that its tokens were drawn from.
    """
    assert draft.logits is not None, "draft tokens without logits follow the coupled rule"
    blocks = Blocks(logits.shape[-1], block)
    of, slots = rows.tables, rows.slots.index
    p, q = (_softmax_tables(table, of.temperature, slots, blocks) for table in (logits, draft.logits))
    record = rows.text.new_empty(rows.rows, draft.k + 1 + RECORD_TAIL)
    accepted = torch.empty_like(draft.counts)
    shape = _shape(draft.k, rows)
    own = of.temperature, of.seed, of.length, slots
    rejection_kernel[(rows.rows,)](
        *p, *q, draft.tokens, draft.counts, *own, salt(Purpose.ACCEPT), accepted,
        per_row=shape["per_row"], LENGTH_UP=shape["LENGTH_UP"], num_warps=4, **blocks.shape,
    )  # fmt: skip
    values = torch.empty((2, rows.rows, blocks.count), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((2, rows.rows, blocks.count), dtype=torch.int32, device=logits.device)
    recover_kernel[(rows.rows, blocks.count)](
        *p, *q, accepted, draft.counts, *own, blocks.vocab, salt(Purpose.RECOVER), values, tokens,
        per_row=shape["per_row"], BLOCK=blocks.size, num_warps=_WARPS, **blocks.shape,
    )  # fmt: skip
    finish_kernel[(rows.rows,)](
        p[0], p[-1], values, tokens, draft.tokens, accepted, draft.counts, *_row_arguments(rows, record),
        num_warps=4, **blocks.shape, **shape,
    )  # fmt: skip
    return record
