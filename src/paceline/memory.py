"""What the engine will take, computed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cache import KVCache
from paceline.errors import CapacityError
from paceline.hardware import available_memory
from paceline.heads.decoder import HeadModel
from paceline.heads.native import NativeHead
from paceline.models.base import AnyModel
from paceline.native_round import kept_bytes
from paceline.params import MAX_SPECULATION_LENGTH, EngineConfig

GIB = 2**30
_LOGITS_COPIES = 4  # logits, adjusted, scaled, probabilities: alive at once in the worst round
_ACTIVATIONS = 12  # widths of the hidden state alive at once while a chunk is prefilled


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes. ``caches`` (target's and draft model's) and ``workspace`` are for ``rows`` rows."""

    weights: int
    caches: int
    workspace: int

    @property
    def to_allocate(self) -> int:
        return self.caches + self.workspace

    def __str__(self) -> str:
        parts = {"weights": self.weights, "caches": self.caches, "workspace": self.workspace}
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def plan_memory(
    target: AnyModel, draft: AnyModel | None, config: EngineConfig, rows: int, positions: int
) -> MemoryPlan:
    """What ``rows`` rows of ``positions`` tokens take."""
    models = [target] if draft is None else [target, draft]
    cached = models if config.asks_draft_model else [target]
    caches = sum(_cache_bytes(model, rows, positions) for model in cached)
    tokens = rows * (min(config.most_guesses * config.most_width, MAX_SPECULATION_LENGTH) + 1)
    logits = _LOGITS_COPIES * tokens * target.vocab_size * 4
    activations = _ACTIVATIONS * max(tokens, config.prefill_chunk) * target.kv_heads * target.head_dim * 4 * 8
    if isinstance(draft, NativeHead):
        said = rows * target.vocab_size * 4
        workspace = logits + activations + said + kept_bytes(target, tokens, len(draft.taps))
    else:
        workspace = logits + activations + kept_bytes(target, tokens)
    return MemoryPlan(sum(m.weight_bytes() for m in models), caches, workspace)


def _cache_bytes(model: AnyModel, rows: int, positions: int) -> int:
    """Keys and values; of a head the streams that it reads, too."""
    cache = KVCache.bytes_for(model.layers, rows, model.kv_heads, positions, model.head_dim, model.dtype)
    return cache + (model.stream_bytes(rows, positions) if isinstance(model, HeadModel) else 0)


def check_memory(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> MemoryPlan:
    """The plan for ``config.max_batch_size`` rows of ``positions`` tokens; CapacityError if it does not fit.

    The weights are loaded already; the caches and the workspace are not.
    """
    plan = plan_memory(target, draft, config, config.max_batch_size, positions)
    if config.memory_limit is None:
        free, what = available_memory(target.device), "free"
    else:
        free, what = config.memory_limit - plan.weights, "left under memory_limit after the weights"
    if plan.to_allocate <= free:
        return plan
    fits = max(
        (
            n
            for n in range(config.max_batch_size)
            if plan_memory(target, draft, config, n, positions).to_allocate <= free
        ),
        default=0,
    )
    hint = f"{fits} rows of this length would fit" if fits else "not even one row of this length fits"
    raise CapacityError(
        f"max_batch_size={config.max_batch_size} rows of max_model_len={positions} tokens need {plan}, "
        f"but {max(0, free) / GIB:.2f} GiB are {what}: {hint}; lower max_batch_size or max_model_len"
    )
