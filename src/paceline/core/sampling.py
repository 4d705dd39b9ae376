"""From logits to a token: constraint, bias, penalties, minimum length, temperature, min-p, top-k, top-p, the draw.

Shapes: B rows, L positions, V vocabulary, G draft tokens. Position j of a call is drawn after each row's text and its
first ``first + j`` draft tokens, so penalties know the draft tokens before it.

``adjust``, ``warp`` and ``probabilities`` are torch, for GPUs and as the twin and judge of the kernels, which on a CPU
do all of it in one call (``Choices``).

All noise is a function of (row's seed, position, purpose, token): a row's draw never depends on its neighbours, on the
drafter or on how many rounds it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.ops import DrawInputs, HostOps
from paceline.core.rows import Constraint, MaskQuery, RowState, StepFeatures


class Purpose(IntEnum):
    """What a random number is for: different purposes never share one."""

    DRAW = 1  # the target's own token; under the coupled rule the drafter draws with it too
    DRAFT = 2  # a drafter's independent draft token (rejection rule)
    ACCEPT = 3  # the coin that keeps a draft token (rejection rule)
    RECOVER = 4  # the token instead of the first rejected draft token, or after the last kept one (rejection rule)
    SYNTHETIC = 5  # the coin of benchmarks with synthetic acceptance


# --- counter-based noise -----------------------------------------------------

_MASK32 = 0xFFFFFFFF
# A uniform of 24 bits, (h + 1/2) / 2^24, bounds its Gumbel transform -log(-log u): only tokens near the leader can win.
_UNIFORM_BITS = 24
GUMBEL_HIGH = -math.log(-math.log1p(-(2.0 ** -(_UNIFORM_BITS + 1))))
GUMBEL_LOW = -math.log(-math.log(2.0 ** -(_UNIFORM_BITS + 1)))
NOISE_SPAN = GUMBEL_HIGH - GUMBEL_LOW + 1e-3
_FIRST_NUCLEUS = 64  # tokens sorted at first when top_p cuts
_MASS_BITS = 30
LOG2_E = float.fromhex("0x1.715476p0")
# 2^x for x from -1/2 to 1/2, relative error 2e-7; every number is one of float32.
TWO_TO = (
    *map(float.fromhex, ("0x1.5bba06p-10", "0x1.3cea8ap-7", "0x1.c6b754p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1")),
    1.0,
)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (Wellons' lowbias32: xor-shift and multiply) on int64 tensors holding 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def noise_key(seed: Tensor, position: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor]:
    """Two 32-bit words for (seed, position, purpose); seed and position int64, broadcast together."""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    salt = (0x9E3779B9 * purpose) & _MASK32
    a = _mix(_mix(_mix(low ^ salt) ^ high) ^ position)
    b = _mix(_mix(_mix(high ^ 0x85EBCA6B) ^ low) ^ position ^ salt)
    return a, b


def uniform(key: tuple[Tensor, Tensor], token: Tensor | int = 0) -> Tensor:
    """Uniform numbers in (0, 1), float64, 24 bits, one for each key (and token)."""
    h = _mix(_mix(key[0] ^ token) ^ key[1])
    return ((h >> (32 - _UNIFORM_BITS)).double() + 0.5) * 2.0**-_UNIFORM_BITS


def sequence_seed(seed: int, sample: int) -> int:
    """The noise key of answer number ``sample`` to a request with this seed: 63 bits, so that it fits an int64."""
    word = (seed * 0x9E3779B97F4A7C15 + sample * 0xD1B54A32D192ED03) & (2**64 - 1)
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (word ^ (word >> 31)) >> 1


# --- the distribution -----------------------------------------------------------------


def adjust(logits: Tensor, batch: Batch, draft_tokens: Tensor, first: int = 0) -> Tensor:
    """Constraint, bias, penalties, minimum length: logits [B, L, V] (not changed) -> [B, L, V].

    draft_tokens: [B, >= first + L - 1].
    """
    rows = batch.sampling
    if not rows.adjusts:
        return logits
    logits = logits.clone()
    if rows.any_constraint:  # first, as in the kernels: a logits processor reads what the model said
        _constrain(logits, batch, draft_tokens, first)
    if rows.bias is not None:
        logits[rows.bias.rows, :, rows.bias.tokens] += rows.bias.values[:, None]
    if rows.any_penalty:
        _penalise(logits, batch.state(batch.rows), draft_tokens, first)
    if rows.stop_tokens is not None:
        early = _positions(batch, logits.shape[1], first) < rows.min_length[: batch.rows, None]
        row, token = rows.stop_tokens.rows, rows.stop_tokens.tokens
        logits[row, :, token] = logits[row, :, token].masked_fill(early[row], -math.inf)
    return logits


def _constrain(logits: Tensor, batch: Batch, draft_tokens: Tensor, first: int) -> None:
    """What each row's constraint forbids, in place."""
    tokens, places = draft_tokens.tolist(), logits.shape[1]
    asked = [
        (row, constraint.ask(tokens[row], first, places))
        for row, constraint in enumerate(batch.sampling.constraints[: batch.rows])
        if constraint is not None
    ]
    for _, question in asked:
        question.send()
    for row, question in asked:
        question.mask(logits[row])


def _positions(batch: Batch, count: int, first: int = 0) -> Tensor:
    """[B, count]: the positions that the tokens drawn will have."""
    return batch.live_length[:, None] + torch.arange(first, first + count, device=batch.device)


def count_tokens(rows: RowState, vocab_size: int) -> tuple[Tensor, Tensor]:
    """[B, V] float32: how often each token stands in a row's answer, and in its whole text."""
    column = torch.arange(rows.text.shape[1], device=rows.length.device)
    text = column < rows.length[:, None]
    answer = text & (column >= rows.prompt_length[:, None])
    counts = torch.zeros(rows.rows, vocab_size, dtype=torch.float32, device=rows.length.device)
    seen = torch.zeros_like(counts).scatter_add_(1, rows.text, text.float())
    return counts.scatter_add_(1, rows.text, answer.float()), seen


def _penalise(logits: Tensor, rows: RowState, draft_tokens: Tensor, first: int) -> None:
    """Presence, frequency and repetition penalties, in place; position j counts the text and the draft tokens before
    it.
    """
    counts, seen = count_tokens(rows, logits.shape[-1])
    presence, frequency = rows.presence_penalty[:, None], rows.frequency_penalty[:, None]
    repetition = rows.repetition_penalty[:, None]
    one = counts.new_ones(rows.rows, 1)
    for draft_token in range(first + logits.shape[1]):
        if draft_token >= first:
            here = logits[:, draft_token - first]
            repeated = torch.where(here > 0, here / repetition, here * repetition)
            here.copy_(torch.where(seen > 0, repeated, here) - presence * (counts > 0) - frequency * counts)
        if draft_token < draft_tokens.shape[1]:
            counts.scatter_add_(1, draft_tokens[:, draft_token, None], one)
            seen.scatter_add_(1, draft_tokens[:, draft_token, None], one)


def _hold_back(logits: Tensor, rows: RowState, first: int) -> None:
    """Minimum length, in place: no stop token before it, of those that a commit knows."""
    position = rows.length[:, None] + torch.arange(first, first + logits.shape[1], device=logits.device)
    early = (position < rows.min_length[:, None])[..., None] & (rows.stops >= 0)[:, None]
    lowered = torch.where(early, -math.inf, math.inf).to(logits.dtype)
    logits.scatter_reduce_(2, rows.stops.clamp(min=0)[:, None].expand_as(early), lowered, "amin")


def shaped(logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int = 0) -> Tensor:
    """Penalties, minimum length, min-p, top-k and top-p where nothing may be read: logits [B, L, V] (not changed).

    -> [B, L, V] whose softmax at the rows' temperatures is the distribution; the twin of ``gpu.shape.shaped``.
    """
    logits = logits.float()
    if asks.adjusts:
        logits = logits.clone()
        _penalise(logits, rows, draft_tokens, first)
        _hold_back(logits, rows, first)
    if asks.cuts:
        cut = _cut(_scale(logits, rows.temperature), rows, logits.shape[-1], any_top_p=True)
        logits = logits.masked_fill(cut == -math.inf, -math.inf)
    return logits


def warp(logits: Tensor, batch: Batch) -> Tensor:
    """Temperature, min-p, top-k, top-p: [B, L, V] -> logits whose softmax is the distribution; tokens cut have -inf.

    Rows at temperature 0 are not divided: their draw is the argmax.
    """
    rows, live = batch.sampling, batch.rows
    scaled = _scale(logits, rows.temperature[:live])
    return _cut(scaled, batch.state(live), rows.largest_top_k, any_top_p=rows.any_top_p) if rows.any_cut else scaled


def _cut(scaled: Tensor, rows: RowState, largest_top_k: int, *, any_top_p: bool) -> Tensor:
    """Min-p, top-k, top-p: logits [B, L, V] over their temperature, the leader's 0; what is cut has -inf."""
    floor = rows.floor[:, None, None]  # under the leader's 0; -inf cuts nothing
    if largest_top_k:
        floor = torch.maximum(floor, _top_k_floor(scaled, rows.top_k, largest_top_k))
    scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if any_top_p:
        scaled = scaled.masked_fill(scaled < _top_p_floor(scaled, rows.top_p, may_sync=rows.may_sync), -math.inf)
    return scaled


def _scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [B, L, V] over temperature [B]; rows at 0 are not divided.

    The leader's logit becomes 0: next to temperature 0 the others' distance to it survives rounding.
    """
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def _top_k_floor(scaled: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """[B, L, 1]: each row's top_k-th logit (tokens tied with it stay too); -inf where top_k is 0."""
    largest = min(largest, scaled.shape[-1])
    best = scaled.topk(largest, dim=-1).values
    place = (top_k.clamp(1, largest) - 1)[:, None, None].expand(-1, scaled.shape[1], 1)
    return best.gather(-1, place).masked_fill((top_k == 0)[:, None, None], -math.inf)


def masses(scaled: Tensor) -> Tensor:
    """e^scaled in units of 2^-30 of the leader's, rounded: int64. scaled: at most 0.

    Whole numbers, so that sums have no order and rounding decides no tie; and made of float32 multiplications and
    additions alone, each rounded for itself, which the kernels repeat to the bit.
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
    """[B, L, 1]: the smallest logit of the nucleus: tokens above which less than top_p of the mass lies.

    Only as many tokens are sorted as the widest nucleus has, found by doubling: nuclei are short, vocabularies are not.
    Where nothing may be read all are.
    """
    share = torch.where(top_p < 1, top_p, 0.0).double()[:, None, None]  # rows without a nucleus need no sorting
    limit = (share * masses(scaled).sum(-1, keepdim=True).double()).clamp(min=1.0)  # the leader stays
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
    """The distribution that tokens are drawn from: adjusted logits [B, L, V] -> float32 [B, L, V]; one-hot at
    temperature 0.
    """
    return _distribution(warp(logits, batch), batch.sampling.temperature[: batch.rows])


def probabilities_at_temperature(logits: Tensor, rows: RowState) -> Tensor:
    """The same for rows that ask for nothing but a temperature."""
    return _distribution(_scale(logits.float(), rows.temperature), rows.temperature)


def _distribution(warped: Tensor, temperature: Tensor) -> Tensor:
    leader = torch.zeros_like(warped).scatter_(-1, warped.argmax(-1, keepdim=True), 1.0)
    return torch.where((temperature == 0)[:, None, None], leader, warped.softmax(-1))


# --- the draw ----------------------------------------------------------------


class Choices:
    """Logits as the model gave them, float32, and what may be asked of them.

    logits: [B, L, V], changed while they are read and then as before. draft tokens: [B, >= first + L - 1]; None for
    none.
    counts: [B], how many draft tokens are real; logits may then be [N, V], of the unseen tokens and the real draft
    tokens alone.
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
        self._draft_tokens = batch.tokens.new_empty(batch.rows, 0) if draft_tokens is None else draft_tokens
        self._tree: Draft | None = None
        self.ops: HostOps | None = batch.ops if logits.dtype == torch.float32 else None

    @staticmethod
    def after(draft: Draft, logits: Tensor, batch: Batch) -> Choices:
        """What may follow each row's unseen token and its draft tokens; after those of a tree the kernels alone can
        say.
        """
        choices = Choices(logits, batch, draft.tokens, counts=draft.counts)
        choices._tree = draft if draft.parents is not None else None
        return choices

    @cached_property
    def places(self) -> DrawInputs:
        """For the kernels."""
        batch = self._batch
        rows = batch.sampling.drawing(batch.tokens, batch.length)
        instead = self._constrained() if batch.sampling.any_constraint else None
        parents = None if self._tree is None else self._tree.parents
        return DrawInputs(self._logits, rows, self._draft_tokens, self._counts, self._first, instead, parents)

    def _constrained(self) -> Sequence[Tensor | None]:
        """Copies of the logits of the rows that have a constraint, without what it forbids."""
        rows = self._of_rows()
        asked = [
            None if constraint is None else self._questions(constraint, row, len(logits))
            for row, (constraint, logits) in enumerate(zip(self._batch.sampling.constraints, rows, strict=False))
        ]
        for questions in asked:
            for _, question in questions or ():
                question.send()
        return [
            None if questions is None else _masked(questions, logits)
            for questions, logits in zip(asked, rows, strict=True)
        ]

    def _questions(self, constraint: Constraint, row: int, places: int) -> list[tuple[slice, MaskQuery]]:
        """What may come at a row's places: one question along a chain; of a tree each node has a state of its own."""
        if self._tree is None:
            return [(slice(None), constraint.ask(self._draft_tokens[row].tolist(), self._first, places))]
        count = int(self._tree.counts[row])
        ways = enumerate(self._tree.token_paths[row][: count + 1])
        return [(slice(place, place + 1), constraint.ask(way, len(way), 1)) for place, way in ways]

    def _of_rows(self) -> Sequence[Tensor]:
        """Each row's logits [places, V]."""
        if self._logits.dim() == 3:
            return self._logits.unbind()
        assert self._counts is not None
        ends = (self._counts + 1).cumsum(0).tolist()
        return [self._logits[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def adjusted(self) -> Tensor:
        """In torch."""
        return adjust(self._logits, self._batch, self._draft_tokens, self._first)

    def draw(self, purpose: Purpose = Purpose.DRAW) -> Tensor:
        """A token for every place: [B, L] int64. Greedy rows take their argmax."""
        if self.ops is not None:
            return self.ops.draw(self.places, purpose)
        return _draw_adjusted(self.adjusted, self._batch, self._first, purpose)

    def distribution(self) -> Tensor:
        """What tokens are drawn from: float32 [B, L, V]; one-hot at temperature 0."""
        if self.ops is not None:
            return self.ops.probabilities(self.places)
        return probabilities(self.adjusted, self._batch)

    def likelihood(self, tokens: Tensor) -> Tensor:
        """The softmax of the adjusted logits at tokens [B, L] -> [B, L]; whatever the rows' temperatures."""
        if self.ops is not None:
            return self.ops.likelihood(self.places, tokens)
        logits = self.adjusted
        return (logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)).exp()


def _masked(questions: Sequence[tuple[slice, MaskQuery]], logits: Tensor) -> Tensor:
    """A copy without what the answers to questions forbid at their places."""
    masked = logits.clone(memory_format=torch.contiguous_format)
    for places, question in questions:
        question.mask(masked[places])
    return masked


def draw(
    logits: Tensor, batch: Batch, draft_tokens: Tensor | None = None, first: int = 0, purpose: Purpose = Purpose.DRAW
) -> Tensor:
    """A token for every place: logits [B, L, V] as the model gave them -> [B, L] int64."""
    return Choices(logits, batch, draft_tokens, first).draw(purpose)


def _draw_adjusted(logits: Tensor, batch: Batch, first: int, purpose: Purpose) -> Tensor:
    """In torch, from adjusted logits."""
    rows, live = batch.sampling, batch.rows
    if rows.all_greedy:
        return logits.argmax(-1)
    temperature = rows.temperature[:live]
    if rows.any_cut:
        logits, temperature = warp(logits, batch), (temperature > 0).float()
    key = noise_key(rows.seed[:live, None], _positions(batch, logits.shape[1], first), purpose)
    return _draw(logits, temperature, key)


def draw_at_temperature(logits: Tensor, rows: RowState, first: int = 0, purpose: Purpose = Purpose.DRAW) -> Tensor:
    """In torch, for rows that ask for nothing but a temperature: logits [B, L, V] -> [B, L] int64."""
    position = rows.length[:, None] + torch.arange(first, first + logits.shape[1], device=logits.device)
    key = noise_key(rows.seed[:, None], position, purpose)
    return _draw(logits.float(), rows.temperature, key, may_sync=rows.may_sync)


def _draw(logits: Tensor, temperature: Tensor, key: tuple[Tensor, Tensor], *, may_sync: bool = True) -> Tensor:
    """logits [B, L, V], temperature [B], a key [B, L] for each place -> [B, L]: the native kernel's twin in torch."""
    live, length, vocab = logits.shape
    noisy = (temperature[:, None] > 0).expand(live, length)
    scores = _scale(logits, temperature).view(-1, vocab)
    keys = key[0].flatten(), key[1].flatten()
    return noisy_argmax(scores, keys, noisy.flatten(), may_sync=may_sync).view(live, length)


def noisy_argmax(
    scores: Tensor, key: tuple[Tensor, Tensor], noisy: Tensor | None = None, *, may_sync: bool = True
) -> Tensor:
    """argmax of scores [N, V] + Gumbel noise, a sample of softmax(scores): [N] int64. Rows not ``noisy`` [N] get none.

    The noise is bounded, so it is made only for tokens that it can carry past the leader; for all of them where
    nothing may be read from the device, which does not say how many these are. Ties go to the smaller token.
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
    return token.new_full(leader.shape, scores.shape[-1]).scatter_reduce_(0, line, token, "amin")


def _noisy(scores: Tensor, key: tuple[Tensor, Tensor], noisy: Tensor | None) -> Tensor:
    """scores [N, V] with everybody's noise, float64."""
    gumbel = _gumbel((key[0][:, None], key[1][:, None]), torch.arange(scores.shape[-1], device=scores.device))
    return scores.double() + (gumbel if noisy is None else gumbel * noisy[:, None])


def _gumbel(key: tuple[Tensor, Tensor], token: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform(key, token)))
