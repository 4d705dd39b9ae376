"""From logits to a token: constraint, bias, penalties, minimum length, temperature, truncation, cuts, the draw.

Truncation: typical sampling, epsilon, eta, top-n-sigma (core.truncation). Cuts: min-p, top-k, top-p, in this order.

Shapes: B rows, L positions, V vocabulary, G draft tokens. Position j of a call is drawn after each row's text and its
first ``first + j`` draft tokens, so penalties count the draft tokens before it.

``adjust``, ``warp`` and ``probabilities`` use torch. They serve GPUs, and they are the reference implementation of the
CPU kernels, which do all steps in one call (``Choices``).

All noise is a function of (row's seed, position, purpose, token). A row's draw therefore does not depend on other rows,
on the drafter or on the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.draft import Undrawn
from paceline.core.draft_tensors import DraftTensors
from paceline.core.ops import HostOps
from paceline.core.rows import Constraint, RowState, RowValues, StepFeatures
from paceline.core.truncation import truncated
from paceline.core.values import DrawInputs, Purpose

# --- counter-based noise -----------------------------------------------------

_MASK32 = 0xFFFFFFFF
# A uniform number of 24 bits, (h + 1/2) / 2^24, bounds its Gumbel transform -log(-log u), so only tokens whose score is
# within NOISE_SPAN of the largest can win.
_UNIFORM_BITS = 24
GUMBEL_HIGH = -math.log(-math.log1p(-(2.0 ** -(_UNIFORM_BITS + 1))))
GUMBEL_LOW = -math.log(-math.log(2.0 ** -(_UNIFORM_BITS + 1)))
NOISE_SPAN = GUMBEL_HIGH - GUMBEL_LOW + 1e-3
_FIRST_NUCLEUS = 64  # tokens that top_p sorts first; the number grows until the nucleus fits
_MASS_BITS = 30
LOG2_E = float.fromhex("0x1.715476p0")
# Polynomial for 2^x, x from -1/2 to 1/2, relative error 2e-7; every coefficient is exact in float32.
TWO_TO = (
    *map(float.fromhex, ("0x1.5bba06p-10", "0x1.3cea8ap-7", "0x1.c6b754p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1")),
    1.0,
)


def _mix(x: Tensor) -> Tensor:
    """Hash int64 tensors that hold 32-bit values with Wellons' lowbias32 (xor-shift and multiply)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def noise_key(seed: Tensor, position: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor]:
    """Hash (seed, position, purpose) to two 32-bit words. seed, position: int64, broadcast together."""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    salt = (0x9E3779B9 * purpose) & _MASK32
    a = _mix(_mix(_mix(low ^ salt) ^ high) ^ position)
    b = _mix(_mix(_mix(high ^ 0x85EBCA6B) ^ low) ^ position ^ salt)
    return a, b


def uniform(key: tuple[Tensor, Tensor], token: Tensor | int = 0) -> Tensor:
    """Uniform numbers in (0, 1), float64 with 24 random bits, one for each key and token (broadcast together)."""
    h = _mix(_mix(key[0] ^ token) ^ key[1])
    return ((h >> (32 - _UNIFORM_BITS)).double() + 0.5) * 2.0**-_UNIFORM_BITS


def sequence_seed(seed: int, sample: int) -> int:
    """Noise key of sample number ``sample`` of a request with this seed: 63 bits, so that it fits an int64.

    Seeds that differ by 2**64 have the same key.
    """
    word = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1B54A32D192ED03) & (2**64 - 1)
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (word ^ (word >> 31)) >> 1


# --- the distribution -----------------------------------------------------------------


def adjust(logits: Tensor, batch: Batch, draft_tokens: Tensor, first: int = 0) -> Tensor:
    """Apply constraint, bias, penalties and minimum length: logits [B, L, V] -> [B, L, V]. The input is not changed.

    draft_tokens: [B, >= first + L - 1] int64.
    """
    rows = batch.sampling
    if not rows.adjusts:
        return logits
    logits = logits.clone()
    if rows.any_constraint:  # first, as in the kernels: logits processors read the model's own logits
        _constrain(logits, batch, draft_tokens, first)
    if rows.bias is not None:
        logits[rows.bias.rows, :, rows.bias.tokens] += rows.bias.values[:, None]
    if rows.any_penalty:
        _penalise(logits, batch.state(), draft_tokens, first, int(batch.live_length.max()))
    if rows.stop_tokens is not None:
        early = _positions(batch, logits.shape[1], first) < batch.live_slots.of(rows.min_length)[:, None]
        row, token = rows.stop_tokens.rows, rows.stop_tokens.tokens
        logits[row, :, token] = logits[row, :, token].masked_fill(early[row], -math.inf)
    return logits


def _constrain(logits: Tensor, batch: Batch, draft_tokens: Tensor, first: int) -> None:
    """Set logits of tokens that each row's constraint forbids to -inf, in place."""
    for constraint, tokens, own in zip(batch.sampling.constraints, draft_tokens.tolist(), logits, strict=True):
        if constraint is not None:
            constraint.mask(tokens, first, own)


def _positions(batch: Batch, count: int, first: int = 0) -> Tensor:
    """Positions in the text of the tokens to draw, [B, count] int64."""
    return batch.live_length[:, None] + torch.arange(first, first + count, device=batch.device)


def count_tokens(rows: RowState, vocab_size: int, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Number of occurrences of each token in a row's answer, and in its whole text: [B, V] float32 each.

    longest: length of the longest text, where the caller may wait for it; None: all positions are counted.
    """
    values = rows.values
    tokens = rows.slots.of(rows.text[:, :longest])
    column = torch.arange(tokens.shape[1], device=tokens.device)
    text = column < values.length[:, None]
    answer = text & (column >= values.prompt_length[:, None])
    counts = torch.zeros(rows.rows, vocab_size, dtype=torch.float32, device=tokens.device)
    seen = torch.zeros_like(counts).scatter_add_(1, tokens, text.float())
    return counts.scatter_add_(1, tokens, answer.float()), seen


def _penalise(logits: Tensor, rows: RowState, draft_tokens: Tensor, first: int, longest: int | None = None) -> None:
    """Apply presence, frequency and repetition penalties in place; position j counts the draft tokens before it."""
    counts, seen = count_tokens(rows, logits.shape[-1], longest)
    values = rows.values
    presence, frequency = values.presence_penalty[:, None], values.frequency_penalty[:, None]
    repetition = values.repetition_penalty[:, None]
    one = counts.new_ones(rows.rows, 1)
    for place in range(first + logits.shape[1]):
        if place >= first:
            here = logits[:, place - first]
            repeated = torch.where(here > 0, here / repetition, here * repetition)
            here.copy_(torch.where(seen > 0, repeated, here) - presence * (counts > 0) - frequency * counts)
        if place < draft_tokens.shape[1]:
            counts.scatter_add_(1, draft_tokens[:, place, None], one)
            seen.scatter_add_(1, draft_tokens[:, place, None], one)


def _hold_back(logits: Tensor, rows: RowValues, first: int) -> None:
    """Apply the minimum length in place: the first ``MAX_STOP_TOKENS`` stop tokens cannot come before it."""
    position = rows.length[:, None] + torch.arange(first, first + logits.shape[1], device=logits.device)
    early = (position < rows.min_length[:, None])[..., None] & (rows.stops >= 0)[:, None]
    lowered = torch.where(early, -math.inf, math.inf).to(logits.dtype)
    logits.scatter_reduce_(2, rows.stops.clamp(min=0)[:, None].expand_as(early), lowered, "amin")


def shaped(logits: Tensor, rows: RowState, features: StepFeatures, draft_tokens: Tensor, first: int = 0) -> Tensor:
    """Apply penalties, minimum length, truncation, min-p, top-k and top-p without reading the device.

    logits: [B, L, V], not changed. draft_tokens: [B, G] int64. Returns logits [B, L, V] whose softmax at the rows'
    temperatures is the distribution. This is the reference implementation of ``gpu.shape.shaped``.
    """
    logits = logits.float()
    if features.adjusts:
        logits = logits.clone()
        _penalise(logits, rows, draft_tokens, first)
        _hold_back(logits, rows.values, first)
    if features.truncates:
        logits = truncate(logits, rows.values)
    if features.cuts:
        scaled = _scale(logits, rows.values.temperature)
        cut = _cut(scaled, rows.values, logits.shape[-1], any_top_p=True, may_sync=rows.may_sync)
        logits = logits.masked_fill(cut == -math.inf, -math.inf)
    return logits


def truncate(logits: Tensor, rows: RowValues) -> Tensor:
    """Cut tokens by the shape of the rows' distributions: logits float32 [B, L, V] -> [B, L, V], -inf where cut."""
    scaled = _scale(logits, rows.temperature)
    return truncated(logits, rows.temperature, rows.truncation, -scaled, masses(scaled))


def warp(logits: Tensor, batch: Batch) -> Tensor:
    """Apply temperature, truncation and cuts: logits [B, L, V] -> [B, L, V] whose softmax is the distribution.

    Tokens that are cut have -inf. Rows at temperature 0 are not divided; their draw is the argmax.
    """
    rows, values = batch.sampling, batch.state().values
    logits = truncate(logits.float(), values) if rows.any_truncation else logits
    scaled = _scale(logits, values.temperature)
    return _cut(scaled, values, rows.largest_top_k, any_top_p=rows.any_top_p) if rows.any_cut else scaled


def _cut(scaled: Tensor, rows: RowValues, largest_top_k: int, *, any_top_p: bool, may_sync: bool = True) -> Tensor:
    """Apply min-p, top-k and top-p: tokens that are cut become -inf. scaled: [B, L, V], see ``_scale``."""
    floor = rows.floor[:, None, None]  # relative to the largest logit, which is 0; -inf cuts nothing
    if largest_top_k:
        floor = torch.maximum(floor, _top_k_floor(scaled, rows.top_k, largest_top_k))
    scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if any_top_p:
        scaled = scaled.masked_fill(scaled < _top_p_floor(scaled, rows.top_p, may_sync=may_sync), -math.inf)
    return scaled


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide logits [B, L, V] by temperature [B]; rows at 0 are not divided.

    The largest logit becomes 0, so that its distance to the others survives rounding at temperatures close to 0.
    """
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def _top_k_floor(scaled: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Each row's top_k-th largest logit, [B, L, 1]; tokens tied with it stay. -inf where top_k is 0."""
    largest = min(largest, scaled.shape[-1])
    best = scaled.topk(largest, dim=-1).values
    place = (top_k.clamp(1, largest) - 1)[:, None, None].expand(-1, scaled.shape[1], 1)
    return best.gather(-1, place).masked_fill((top_k == 0)[:, None, None], -math.inf)


def masses(scaled: Tensor) -> Tensor:
    """Compute e^scaled, rounded to multiples of 2^-30, as int64 in units of 2^-30. scaled: at most 0.

    Sums of whole numbers do not depend on their order. The computation uses only float32 multiplications and additions,
    each rounded separately, which the kernels reproduce to the bit.
    """
    exponent = (scaled.float() * LOG2_E).clamp(min=-64.0)
    whole = exponent.round()
    part = exponent - whole
    power = torch.full_like(part, TWO_TO[0])
    for coefficient in TWO_TO[1:]:
        power = power * part + coefficient
    scale = ((whole.int() + (127 + _MASS_BITS)) << 23).view(torch.float32)
    return (power * scale).round().long()


def _top_p_floor(scaled: Tensor, top_p: Tensor, *, may_sync: bool = True) -> Tensor:
    """Smallest logit of the nucleus, [B, L, 1].

    The nucleus has all tokens above which less than top_p of the mass lies. The number of sorted tokens grows by
    factors of 4 until it covers the widest nucleus, because nuclei are much smaller than vocabularies. Without
    ``may_sync`` all tokens are sorted.
    """
    fraction = torch.where(top_p < 1, top_p, 0.0).double()[:, None, None]  # rows without top_p need no sorting
    limit = (fraction * masses(scaled).sum(-1, keepdim=True).double()).clamp(min=1.0)  # the largest logit stays
    size = min(_FIRST_NUCLEUS, scaled.shape[-1]) if may_sync else scaled.shape[-1]
    while True:
        ordered = scaled.topk(size, dim=-1).values
        mass = masses(ordered)
        before = (mass.cumsum(-1) - mass).double()
        if size == scaled.shape[-1] or bool((before[..., -1:] >= limit).all()):
            break
        size = min(4 * size, scaled.shape[-1])
    floor = ordered.masked_fill(before >= limit, math.inf).amin(-1, keepdim=True)
    return torch.where((top_p < 1)[:, None, None], floor, -math.inf)


def probabilities(logits: Tensor, batch: Batch) -> Tensor:
    """Distribution that tokens are drawn from: adjusted logits [B, L, V] -> float32 [B, L, V].

    It is one-hot at temperature 0.
    """
    return _distribution(warp(logits, batch), batch.live_slots.of(batch.sampling.temperature))


def probabilities_at_temperature(logits: Tensor, rows: RowState) -> Tensor:
    """Distribution of rows that use only a temperature: logits [B, L, V] -> float32 [B, L, V]."""
    temperature = rows.values.temperature
    return _distribution(_scale(logits.float(), temperature), temperature)


def _distribution(warped: Tensor, temperature: Tensor) -> Tensor:
    leader = torch.zeros_like(warped).scatter_(-1, warped.argmax(-1, keepdim=True), 1.0)
    return torch.where((temperature == 0)[:, None, None], leader, warped.softmax(-1))


# --- the draw ----------------------------------------------------------------


class Choices:
    """Model logits of some positions, with the draws and distributions that follow from them.

    logits: [B, L, V]. They are changed temporarily while a method runs. With ``counts`` they may be [N, V], for the
        pending tokens and real draft tokens only.
    draft_tokens: [B, >= first + L - 1] int64; None if there are none.
    counts: [B] int64, number of real draft tokens.
    """

    def __init__(
        self,
        logits: Tensor,
        batch: Batch,
        draft_tokens: Tensor | None = None,
        first: int = 0,
        counts: Tensor | None = None,
    ) -> None:
        self._logits, self._batch, self._first, self._counts = logits, batch, first, counts
        self._draft_tokens = batch.text.new_empty(batch.rows, 0) if draft_tokens is None else draft_tokens
        self._tree: DraftTensors | None = None
        self.ops: HostOps | None = batch.ops if logits.dtype == torch.float32 else None

    @staticmethod
    def after(draft: DraftTensors, logits: Tensor, batch: Batch) -> Choices:
        """Choices after each row's pending token and draft tokens. For trees only the kernels can evaluate them."""
        choices = Choices(logits, batch, draft.tokens, counts=draft.counts)
        choices._tree = draft if draft.parents is not None else None
        return choices

    @cached_property
    def places(self) -> DrawInputs:
        """Arguments for the kernels."""
        batch = self._batch
        rows = batch.sampling.drawing(batch.text, batch.length)
        masked = self._constrained() if batch.sampling.any_constraint else None
        parents = None if self._tree is None else self._tree.parents
        return DrawInputs(self._logits, rows, self._draft_tokens, self._counts, self._first, masked, parents)

    def _constrained(self) -> Sequence[Tensor | None]:
        """Masked copies of the logits of rows that have a constraint; None for other rows."""
        rows = zip(self._batch.sampling.constraints, self._of_rows(), strict=True)
        return [
            None if constraint is None else self._masked(constraint, row, logits)
            for row, (constraint, logits) in enumerate(rows)
        ]

    def _masked(self, constraint: Constraint, row: int, logits: Tensor) -> Tensor:
        """Masked copy of a row's logits [positions, V]: masked at once for a chain, node by node for a tree."""
        masked = logits.clone(memory_format=torch.contiguous_format)
        if self._tree is None:
            constraint.mask(self._draft_tokens[row].tolist(), self._first, masked)
            return masked
        for place, path in enumerate(self._tree.paths[row]):
            constraint.mask(path, len(path), masked[place : place + 1])
        return masked

    def _of_rows(self) -> Sequence[Tensor]:
        """Logits of each row, [positions, V]."""
        if self._logits.dim() == 3:
            return self._logits.unbind()
        assert self._counts is not None
        ends = (self._counts + 1).cumsum(0).tolist()
        return [self._logits[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def adjusted(self) -> Tensor:
        """Adjusted logits [B, L, V], computed by torch."""
        return adjust(self._logits, self._batch, self._draft_tokens, self._first)

    def draw(self, purpose: Purpose = Purpose.DRAW) -> Tensor:
        """Draw a token for every position: [B, L] int64, 0 where all logits are NaN. Greedy rows take the argmax."""
        if self.ops is not None:
            return self.ops.draw(self.places, purpose)
        return _draw_adjusted(self.adjusted, self._batch, self._first, purpose).clamp(min=0)

    def distribution(self) -> Tensor:
        """Distribution that tokens are drawn from: float32 [B, L, V], one-hot at temperature 0."""
        if self.ops is not None:
            return self.ops.probabilities(self.places)
        return probabilities(self.adjusted, self._batch)

    def likelihood(self, tokens: Tensor) -> Tensor:
        """Softmax of the adjusted logits at tokens [B, L] int64, without temperature: [B, L] float32."""
        if self.ops is not None:
            return self.ops.likelihood(self.places, tokens)
        logits = self.adjusted
        return (logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)).exp()


def draw(
    logits: Tensor, batch: Batch, draft_tokens: Tensor | None = None, first: int = 0, purpose: Purpose = Purpose.DRAW
) -> Tensor:
    """Draw a token for every position: model logits [B, L, V] -> [B, L] int64. draft_tokens: [B, G] int64.

    Positions without a finite largest logit, and in torch those with any NaN, get ``Undrawn``.
    """
    choices = Choices(logits, batch, draft_tokens, first)
    if choices.ops is not None:
        return checked(choices.draw(purpose), logits, logits)
    return checked(_draw_adjusted(choices.adjusted, batch, first, purpose), choices.adjusted, logits)


def checked(tokens: Tensor, adjusted: Tensor, logits: Tensor) -> Tensor:
    """Replace drawn tokens [B, L] by ``Undrawn`` where their logit is not finite, or the token is -1.

    adjusted: logits [B, L, V] that they were drawn from. logits: the model's own.
    """
    at = tokens.clamp(min=0)[..., None]
    drawn_from, own = (table.gather(-1, at)[..., 0].isfinite() for table in (adjusted, logits))
    reason = torch.where(own, Undrawn.ALL_FORBIDDEN, Undrawn.NOT_FINITE)
    return torch.where(drawn_from & (tokens >= 0), tokens, reason)


def _draw_adjusted(logits: Tensor, batch: Batch, first: int, purpose: Purpose) -> Tensor:
    """Draw with torch from adjusted logits [B, L, V]: [B, L] int64."""
    rows, slots = batch.sampling, batch.live_slots
    if rows.all_greedy:
        return logits.argmax(-1)
    temperature = slots.of(rows.temperature)
    if rows.any_cut or rows.any_truncation:
        logits, temperature = warp(logits, batch), (temperature > 0).float()
    key = noise_key(slots.of(rows.seed)[:, None], _positions(batch, logits.shape[1], first), purpose)
    return _draw(logits, temperature, key)


def draw_at_temperature(logits: Tensor, rows: RowState, first: int = 0, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """Draw with torch for rows that use only a temperature: logits [B, L, V] -> [B, L] int64."""
    values = rows.values
    position = values.length[:, None] + torch.arange(first, first + logits.shape[1], device=logits.device)
    key = noise_key(values.seed[:, None], position, purpose)
    return _draw(logits.float(), values.temperature, key, may_sync=rows.may_sync)


def _draw(logits: Tensor, temperature: Tensor, key: tuple[Tensor, Tensor], *, may_sync: bool = True) -> Tensor:
    """Draw from logits [B, L, V] at temperature [B] with a noise key [B, L]: [B, L] int64.

    This is the reference implementation of the native kernel.
    """
    live, length, vocab = logits.shape
    noisy = (temperature[:, None] > 0).expand(live, length)
    scores = _scale(logits, temperature).view(-1, vocab)
    keys = key[0].flatten(), key[1].flatten()
    return noisy_argmax(scores, keys, noisy.flatten(), may_sync=may_sync).view(live, length)


def noisy_argmax(
    scores: Tensor, key: tuple[Tensor, Tensor], noisy: Tensor | None = None, *, may_sync: bool = True
) -> Tensor:
    """Sample from softmax(scores) as the argmax of scores [N, V] plus Gumbel noise: [N] int64.

    noisy: [N] bool, rows that get noise; None adds it to all. The noise is bounded, so it is computed only for tokens
    that can win. Without ``may_sync`` it is computed for all tokens. Ties go to the smaller token id. A row with a NaN
    gets -1, or without ``may_sync`` its first token with a NaN.
    """
    if not may_sync:
        return _noisy(scores, key, noisy).argmax(-1)
    leader = scores.amax(-1)
    line, token = (scores > (leader - NOISE_SPAN)[:, None]).nonzero(as_tuple=True)
    gumbel = _gumbel((key[0][line], key[1][line]), token)
    if noisy is not None:
        gumbel = gumbel * noisy[line]
    value = scores[line, token].double() + gumbel
    best = value.new_full(leader.shape, -math.inf).scatter_reduce_(0, line, value, "amax")
    token = torch.where(value == best[line], token, scores.shape[-1])
    first = token.new_full(leader.shape, scores.shape[-1]).scatter_reduce_(0, line, token, "amin")
    return torch.where(first < scores.shape[-1], first, -1)


def _noisy(scores: Tensor, key: tuple[Tensor, Tensor], noisy: Tensor | None) -> Tensor:
    """Scores [N, V] plus the noise of every token, float64."""
    gumbel = _gumbel((key[0][:, None], key[1][:, None]), torch.arange(scores.shape[-1], device=scores.device))
    return scores.double() + (gumbel if noisy is None else gumbel * noisy[:, None])


def _gumbel(key: tuple[Tensor, Tensor], token: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform(key, token)))
