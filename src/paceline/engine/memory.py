"""What the engine will take, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from paceline.config import MAX_SPECULATION_LENGTH, EngineConfig
from paceline.core.cache import KVCache
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import available_memory
from paceline.core.row_tables import grows_on
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.native import NativeHead
from paceline.engine.native_round import kept_bytes
from paceline.errors import CapacityError
from paceline.models.base import AnyModel

GIB = 2**30
LEAST_ROW = 128  # tokens that all rows can have at once, or there are too many of them
_LOGITS_COPIES = 4  # logits, adjusted, scaled, probabilities: alive at once in the worst round
_ACTIVATIONS = 12  # widths of the hidden state alive at once while a chunk is prefilled
_SCORED_AT_ONCE = 4096  # tokens of texts whose log-probabilities are asked for, at least those of the longest one
_LEFT_ALONE = 0.1  # of a machine's free memory, where rows wait for memory: other programs grow, too


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. ``caches`` (target's and draft model's) is what they may take together; ``workspace`` is for all rows.

    scoring: the caches of texts whose log-probabilities are asked for; they are made when the first one comes.
    """

    weights: int
    caches: int
    workspace: int
    scoring: int

    @property
    def to_allocate(self) -> int:
        return self.caches + self.workspace + self.scoring

    def __str__(self) -> str:
        parts = {"weights": self.weights, "caches": self.caches, "workspace": self.workspace, "scoring": self.scoring}
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def plan_memory(
    target: AnyModel, draft: AnyModel | None, config: EngineConfig, rows: int, positions: int
) -> MemoryPlan:
    """What ``rows`` rows of ``positions`` tokens take."""
    models = [target] if draft is None else [target, draft]
    tokens = rows * (min(config.max_draft_tokens * config.most_width, MAX_SPECULATION_LENGTH) + 1)
    logits = _LOGITS_COPIES * tokens * target.vocab_size * 4
    activations = _ACTIVATIONS * max(tokens, config.prefill_chunk) * target.kv_heads * target.head_dim * 4 * 8
    if isinstance(draft, NativeHead):
        said = rows * target.vocab_size * 4
        workspace = logits + activations + said + kept_bytes(target, tokens, len(draft.taps))
    else:
        workspace = logits + activations + kept_bytes(target, tokens)
    caches = rows * row_bytes(target, draft, config, positions)
    scoring = scoring_room(target, rows, positions).limit
    return MemoryPlan(sum(m.weight_bytes() for m in models), caches, workspace, scoring)


def scoring_room(target: AnyModel, rows: int, positions: int) -> KVCacheBudget:
    """For the caches of texts whose log-probabilities are asked for: the longest fits, of shorter ones several do."""
    at_once = max(1, min(rows, _SCORED_AT_ONCE // positions))
    return KVCacheBudget(
        at_once * _cache_bytes(target, positions), rows, positions, cache(partial(_cache_bytes, target))
    )


def row_bytes(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> int:
    """What a row of so many tokens takes in all caches, in bytes."""
    cached = [target] if draft is None or not config.asks_draft_model else [target, draft]
    return sum(_cache_bytes(model, positions) for model in cached)


def _cache_bytes(model: AnyModel, positions: int) -> int:
    """Keys and values of a row; of a head the streams that it reads, too."""
    if grows_on(model.device):
        kept = KVCache.row_bytes(2, (model.layers, model.kv_heads, model.head_dim), positions, model.dtype)
    else:
        kept = KVCache.bytes_for(model.layers, 1, model.kv_heads, positions, model.head_dim, model.dtype)
    return kept + (model.stream_bytes(positions) if isinstance(model, HeadModel) else 0)


def check_memory(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> KVCacheBudget:
    """The room for the caches of ``config.max_batch_size`` rows of at most ``positions`` tokens.

    Where rows grow, one that is as long as it may be has to fit, and all of them while they are short. Elsewhere all
    have to fit at their longest. Raises CapacityError. The weights are loaded already; the rest is not.
    """
    rows = config.max_batch_size
    plan = plan_memory(target, draft, config, rows, positions)
    if config.memory_limit is None:
        free, what = available_memory(target.device), "free"
    else:
        free, what = config.memory_limit - plan.weights, "left under memory_limit after the weights"
    room = KVCacheBudget(plan.caches, rows, positions, cache(partial(row_bytes, target, draft, config)))
    if plan.to_allocate <= free:
        return room
    grow = _rows_grow(target, draft, config)
    if grow:
        kept_free = 0 if config.memory_limit is not None else int(_LEFT_ALONE * max(0, free))
        short = replace(room, limit=free - plan.workspace - plan.scoring - kept_free)
        least = min(LEAST_ROW, positions)
        if short.max_rows(positions) >= 1 and short.max_rows(least) >= rows:
            return short
        what += f", of which {kept_free / GIB:.2f} are left alone" if kept_free else ""
        plan = replace(plan, caches=max(room.bytes_for(positions), rows * room.bytes_for(least)))
    raise CapacityError(
        f"{_wanted(rows, positions, grow=grow)} need {plan}, but {max(0, free) / GIB:.2f} GiB are {what}: "
        f"{_hint(target, draft, config, positions, free)}; lower max_batch_size or max_model_len"
    )


def _wanted(rows: int, positions: int, *, grow: bool) -> str:
    if grow and positions > LEAST_ROW:
        return f"one row of max_model_len={positions} tokens and max_batch_size={rows} rows of {LEAST_ROW}"
    return f"max_batch_size={rows} rows of max_model_len={positions} tokens"


def _rows_grow(target: AnyModel, draft: AnyModel | None, config: EngineConfig) -> bool:
    """Whether they take the memory that they use.

    A round of the device plays free rows along, whatever they hold; ranks that share a target hear of no row's size.
    """
    models = [target] if draft is None else [target, draft]
    return all(grows_on(model.device) for model in models) and config.rounds != "device" and config.tensor_parallel == 1


def _hint(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int, free: int) -> str:
    """How many rows fit at their longest."""

    def fit(rows: int) -> bool:
        return plan_memory(target, draft, config, rows, positions).to_allocate <= free

    fits = max(filter(fit, range(1, config.max_batch_size)), default=0)
    return f"{fits} rows of this length would fit" if fits else "not even one row of this length fits"
