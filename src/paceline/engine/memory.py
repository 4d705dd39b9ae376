"""Plans the engine's memory before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from paceline.config import MAX_SPECULATION_LENGTH, EngineConfig
from paceline.core.cache import KVCache
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import available_memory
from paceline.core.recurrent_state import WINDOW
from paceline.core.row_tables import grows_on
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.native import NativeHead
from paceline.drafters.vocabulary_size import short_head_bytes
from paceline.engine.rounds.kernels import runs_native_rounds, workspace_bytes
from paceline.errors import CapacityError
from paceline.models.base import AnyModel, kv_layers_of, state_shape_of

GIB = 2**30
LEAST_ROW = 128  # tokens that all rows must be able to hold at once
_LOGITS_COPIES = 4  # logits, adjusted, scaled, probabilities: alive together in the largest round
_ACTIVATIONS = 12  # tensors of the hidden state's width alive together while a chunk is prefilled
_LEFT_ALONE = 0.1  # fraction of free memory left to other programs, if rows have to wait for memory


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes.

    weights: of all models; loaded already.
    states: of recurrent layers, of all rows.
    caches: limit of the KV caches of target and draft model together.
    workspace: temporary tensors of a round and of a prefill chunk, and the output head of a short draft vocabulary.
    """

    weights: int
    states: int
    caches: int
    workspace: int

    @property
    def to_allocate(self) -> int:
        return self.states + self.caches + self.workspace

    def __str__(self) -> str:
        states = {"recurrent states": self.states} if self.states else {}
        parts = {"weights": self.weights, **states, "caches": self.caches, "workspace": self.workspace}
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def plan_memory(
    target: AnyModel, draft: AnyModel | None, config: EngineConfig, rows: int, positions: int
) -> MemoryPlan:
    """Return the memory for ``rows`` rows of ``positions`` tokens."""
    models = [target] if draft is None else [target, draft]
    tokens = rows * (min(config.max_draft_tokens * config.most_width, MAX_SPECULATION_LENGTH) + 1)
    logits = _LOGITS_COPIES * tokens * target.vocab_size * 4
    activations = _ACTIVATIONS * max(tokens, config.prefill_chunk) * target.kv_heads * target.head_dim * 4 * 8
    taps = len(draft.taps) if isinstance(draft, NativeHead) else 0
    drafts_natively = draft is not None and (isinstance(draft, NativeHead) or runs_native_rounds(draft))
    draft_logits = rows * target.vocab_size * 4 if drafts_natively else 0  # NativeDrafting.scratch
    workspace = logits + activations + draft_logits + workspace_bytes(target, tokens, taps)
    workspace += short_head_bytes(target, draft, config)
    caches = rows * row_bytes(target, draft, config, positions)
    weights = sum(m.weight_bytes() for m in models)
    return MemoryPlan(weights, state_bytes(target, config, rows), caches, workspace)


def state_bytes(target: AnyModel, config: EngineConfig, rows: int) -> int:
    """Return the bytes of the recurrent states of all rows, saved ones included."""
    shape = state_shape_of(target)
    if shape is None:
        return 0
    drafted = min(config.max_draft_tokens * config.most_width, MAX_SPECULATION_LENGTH) + 1
    window = drafted if grows_on(target.device) else WINDOW  # on a CPU the pages behind it stay untouched
    return rows * shape.slot_bytes(window) + shape.state_bytes


def row_bytes(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> int:
    """Return the bytes of a row of ``positions`` tokens in all caches."""
    cached = [target] if draft is None or not config.asks_draft_model else [target, draft]
    return sum(_cache_bytes(model, positions) for model in cached)


def _cache_bytes(model: AnyModel, positions: int) -> int:
    """Return the bytes of a row's keys and values, and of the hidden states that a draft head stores."""
    layers, fused = kv_layers_of(model), 0
    if isinstance(model, HeadModel):
        fused, positions = model.fused_bytes(positions), positions + model.slots_behind
    if grows_on(model.device):
        kept = sum(KVCache.row_bytes(2, (1, *shape), positions, model.dtype) for shape in layers)
    else:
        heads, dims = [each.heads for each in layers], [each.dim for each in layers]
        kept = KVCache.bytes_for(len(layers), 1, heads, positions, dims, model.dtype)
    return kept + fused


def check_memory(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> KVCacheBudget:
    """Return the memory for the caches of ``config.max_batch_size`` rows of at most ``positions`` tokens.

    If rows grow, one row of ``positions`` tokens must fit, and all rows at ``LEAST_ROW`` tokens. If not, all rows must
    fit at full length. The weights are loaded already; the rest is not allocated yet. Raises CapacityError.
    """
    rows = config.max_batch_size
    plan = plan_memory(target, draft, config, rows, positions)
    if config.memory_limit is None:
        free, source = available_memory(target.device), "free"
    else:
        free, source = config.memory_limit - plan.weights, "left under memory_limit after the weights"
    room = KVCacheBudget(plan.caches, rows, positions, cache(partial(row_bytes, target, draft, config)))
    if plan.to_allocate <= free:
        return room
    rows_grow = _rows_grow(target, draft, config)
    if rows_grow:
        kept_free = 0 if config.memory_limit is not None else int(_LEFT_ALONE * max(0, free))
        short_room = replace(room, limit=free - plan.states - plan.workspace - kept_free)
        least_row = min(LEAST_ROW, positions)
        if short_room.max_rows(positions) >= 1 and short_room.max_rows(least_row) >= rows:
            return short_room
        source += f", of which {kept_free / GIB:.2f} are left to other programs" if kept_free else ""
        plan = replace(plan, caches=max(room.bytes_for(positions), rows * room.bytes_for(least_row)))
    raise CapacityError(
        f"{_wanted(rows, positions, rows_grow=rows_grow)} need {plan}, but {max(0, free) / GIB:.2f} GiB are {source}: "
        f"{_hint(target, draft, config, positions, free)}; lower max_batch_size or max_model_len"
    )


def _wanted(rows: int, positions: int, *, rows_grow: bool) -> str:
    if rows_grow and positions > LEAST_ROW:
        return f"one row of max_model_len={positions} tokens and max_batch_size={rows} rows of {LEAST_ROW}"
    return f"max_batch_size={rows} rows of max_model_len={positions} tokens"


def _rows_grow(target: AnyModel, draft: AnyModel | None, config: EngineConfig) -> bool:
    """Whether rows take only the memory that their tokens need.

    They do not if rounds run on the device, which writes to free rows, too, or if ranks share a target: those are not
    told the rows' sizes.
    """
    models = [target] if draft is None else [target, draft]
    return all(grows_on(model.device) for model in models) and config.rounds != "device" and config.tensor_parallel == 1


def _hint(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int, free: int) -> str:
    """Return how many rows of full length would fit, in words."""

    def fit(rows: int) -> bool:
        return plan_memory(target, draft, config, rows, positions).to_allocate <= free

    fits = max(filter(fit, range(1, config.max_batch_size)), default=0)
    return f"{fits} rows of this length would fit" if fits else "not even one row of this length fits"
