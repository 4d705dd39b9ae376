"""The kernels once more in plain torch. Nothing here reads the device, so a round made of it can be captured, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline.gpu.state import Guesses, PackedHeads, RowState
from paceline.sampling import Purpose, noise_key, uniform


def noisy(scores: Tensor, seed: Tensor, position: Tensor, purpose: Purpose, ids: Tensor | None = None) -> Tensor:
    """scores [..., V] float64 plus the Gumbel noise of every token; seed and position [...]."""
    token = torch.arange(scores.shape[-1], device=scores.device) if ids is None else ids
    a, b = noise_key(seed, position, purpose)
    return scores - torch.log(-torch.log(uniform((a[..., None], b[..., None]), token)))


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [B, L, V], temperature [B] -> the leader at 0, divided by the temperature where that is not 0."""
    heat = temperature[:, None, None]
    return (logits - logits.amax(-1, keepdim=True)) / torch.where(heat == 0, 1.0, heat)


def draw(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    length: Tensor,
    first: int,
    purpose: Purpose,
    ids: Tensor | None = None,
) -> Tensor:
    """A token for every position: logits [B, L, V], the rest [B] -> [B, L] int64. See ``gpu.draw.draw``."""
    score = scaled(logits.float(), temperature).double()
    position = length[:, None] + first + torch.arange(logits.shape[1], device=logits.device)
    warm = noisy(score, seed[:, None].expand_as(position), position, purpose, ids)
    column = torch.where((temperature > 0)[:, None, None], warm, score).argmax(-1)
    return column if ids is None else ids[column]


def coupled(guesses: Guesses, logits: Tensor, rows: RowState, synthetic: float | None = None) -> Tensor:
    """See ``gpu.accept.coupled``."""
    draws = draw(logits, rows.temperature, rows.seed, rows.length, 0, Purpose.DRAW)
    if synthetic is None:
        accepted = _leading(guesses.tokens == draws[:, :-1], guesses.counts)
        return commit(draws, accepted, guesses, rows)
    accepted = _leading(_coins(rows, guesses.k, Purpose.SYNTHETIC) < synthetic, guesses.counts)
    place = torch.arange(guesses.k, device=draws.device)
    kept = torch.where(place < accepted[:, None], guesses.tokens, draws[:, :-1])
    return commit(torch.cat([kept, draws[:, -1:]], dim=1), accepted, guesses, rows)


def rejection(guesses: Guesses, logits: Tensor, rows: RowState) -> Tensor:
    """See ``gpu.accept.rejection``."""
    if guesses.logits is None:
        return coupled(guesses, logits, rows)
    p, q = (_probabilities(table.float(), rows.temperature) for table in (logits, guesses.logits))
    p_guess, q_guess = (t[:, : guesses.k].gather(-1, guesses.tokens[..., None]).squeeze(-1) for t in (p, q))
    accepted = _leading(_coins(rows, guesses.k, Purpose.ACCEPT) * q_guess < p_guess, guesses.counts)
    last = _last(p, q, accepted, guesses.counts, rows)
    padded = torch.cat([guesses.tokens, last[:, None]], dim=1).scatter(1, accepted[:, None], last[:, None])
    beyond = torch.arange(padded.shape[1], device=padded.device) > accepted[:, None]
    return commit(padded.masked_fill(beyond, 0), accepted, guesses, rows)


def _coins(rows: RowState, k: int, purpose: Purpose) -> Tensor:
    """[B, k] float64."""
    position = rows.length[:, None] + torch.arange(k, device=rows.length.device)
    return uniform(noise_key(rows.seed[:, None], position, purpose))


def _leading(kept: Tensor, counts: Tensor) -> Tensor:
    real = torch.arange(kept.shape[1], device=kept.device) < counts[:, None]
    return (kept & real).long().cumprod(1).sum(1)


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    warm = scaled(logits, temperature).softmax(-1)
    leader = torch.zeros_like(warm).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((temperature == 0)[:, None, None], leader, warm)


def _last(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, rows: RowState) -> Tensor:
    """[B]: the recovered or the bonus token."""
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_here = p.gather(1, here).squeeze(1)
    q_here = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1).gather(1, here).squeeze(1)
    rest = (p_here - q_here * (accepted < counts)[:, None]).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_here).log().double()
    warm = noisy(rest, rows.seed, rows.length + accepted, Purpose.RECOVER)
    return torch.where((rows.temperature > 0)[:, None], warm, rest).argmax(-1)


def commit(tokens: Tensor, accepted: Tensor, guesses: Guesses, rows: RowState) -> Tensor:
    """tokens [B, k + 1]: give each row its accepted + 1, cut at its end -> the record."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    last = rows.text.gather(1, (rows.length - 1).clamp(min=0)[:, None])
    stopped = ((last == rows.stops) & (rows.stops >= 0)).any(1) & (rows.length > rows.prompt_length)
    room = rows.limit - rows.length
    ended = stopped | (room <= 0) | (torch.arange(rows.rows, device=tokens.device) >= rows.live)
    stops = rows.stops[:, None]
    stopping = ((tokens[..., None] == stops) & (stops >= 0)).any(2)
    first_stop = torch.where(stopping, place, tokens.shape[1]).amin(1)
    gained = torch.minimum(torch.minimum(accepted, first_stop) + 1, room).masked_fill(ended, 0)
    at = rows.length[:, None] + place
    text = torch.where(place < gained[:, None], tokens, rows.text.gather(1, at))
    rows.text.scatter_(1, at, text)
    rows.length.add_(gained)
    numbers = accepted.masked_fill(ended, 0), guesses.counts.masked_fill(ended, 0), gained
    return torch.cat([tokens, torch.stack(numbers, dim=1)], dim=1)


def turn_and_store(packed: PackedHeads, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """See ``gpu.rotary.turn_and_store``."""
    turned = packed.heads + packed.kv_heads
    qk, v = packed.table.split_with_sizes([turned, packed.kv_heads], dim=2)
    if packed.rotation is not None:
        cos, sin = packed.rotation
        if packed.norm is not None:
            qk = functional.rms_norm(qk, (qk.shape[-1],), None, packed.eps) * packed.norm
        qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
    q, k = qk.split_with_sizes([packed.heads, packed.kv_heads], dim=2)
    row = torch.arange(positions.shape[0], device=positions.device)[:, None]
    place = positions.clamp(max=keys.shape[2] - 1)
    keys[row, :, place] = k.to(keys.dtype)
    values[row, :, place] = v.to(values.dtype)
    return q.transpose(1, 2)
