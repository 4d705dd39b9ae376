"""Plans the engine's memory before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from paceline.config import MAX_SPECULATION_LENGTH, EngineConfig
from paceline.core.cache import KVCache
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import available_memory, return_cached_memory
from paceline.core.recurrent_state import WINDOW
from paceline.core.row_tables import grows_on
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.native import NativeHead
from paceline.drafters.vocabulary_size import short_head_bytes
from paceline.engine.cache_dtype import cache_dtype
from paceline.engine.rounds.kernels import runs_native_rounds, workspace_bytes
from paceline.errors import CapacityError, ParameterError
from paceline.kernels.attention import chosen_backend
from paceline.models.base import AnyModel, FlatModel, is_paged, kv_layers_of, state_shape_of
from paceline.models.torch.transformer import Transformer

GIB = 2**30
LEAST_ROW = 128  # tokens that all rows must be able to hold at once
_LOGITS_COPIES = 4  # logits, adjusted, scaled, probabilities: alive together in the largest round
_ACTIVATIONS = 12  # tensors of the hidden state's width alive together while a chunk is prefilled
_LEFT_ALONE = 0.1  # fraction of free memory left to other programs, and on CUDA to graphs: up to 1.7 GiB of 100
_LENGTH_STEP = 256  # tokens: lengths that are chosen because the default does not fit are multiples
_SHORTEST = 512  # tokens: a shorter context is not chosen, but refused
# Share of the free memory beyond what rows may take that prefixes fill by default. The rest is left to programs that
# start later, to other models of a server, and to the system's copies of files.
_PREFIX_SHARE = 0.25
MAX_PREFIXES = 256  # slots beside the rows': each is looked at when a request begins


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes.

    weights: of all models; loaded already.
    states: of recurrent layers, of all rows.
    caches: limit of the KV caches of target and draft model together.
    head: caches of a draft head where the target's rows have pages, and its own do not: all rows' at full length.
    workspace: temporary tensors of a round and of a prefill chunk, and the output head of a short draft vocabulary.
    """

    weights: int
    states: int
    caches: int
    workspace: int
    head: int = 0

    @property
    def beside_caches(self) -> int:
        """Bytes to allocate that do not depend on how far rows grow."""
        return self.states + self.workspace + self.head

    @property
    def to_allocate(self) -> int:
        return self.beside_caches + self.caches

    def __str__(self) -> str:
        states = {"recurrent states": self.states} if self.states else {}
        head = {"caches of the draft head": self.head} if self.head else {}
        parts = {"weights": self.weights, **states, "caches": self.caches, **head, "workspace": self.workspace}
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())


def plan_memory(
    target: AnyModel, draft: AnyModel | None, config: EngineConfig, rows: int, positions: int
) -> MemoryPlan:
    """Return the memory for ``rows`` rows of ``positions`` tokens."""
    models = [target] if draft is None else [target, draft]
    tokens = rows * (_most_drafted(config) + 1)
    logits = _LOGITS_COPIES * tokens * target.vocab_size * 4
    activations = _ACTIVATIONS * max(tokens, config.prefill_chunk) * target.kv_heads * target.head_dim * 4 * 8
    taps = len(draft.taps) if isinstance(draft, NativeHead) else 0
    drafts_natively = draft is not None and (isinstance(draft, NativeHead) or runs_native_rounds(draft))
    draft_logits = rows * target.vocab_size * 4 if drafts_natively else 0  # NativeDrafting.scratch
    workspace = logits + activations + draft_logits + workspace_bytes(target, tokens, taps)
    workspace += short_head_bytes(target, draft, config) + _attention_bytes(target, config, rows, positions)
    if has_pages(target, config):
        workspace += row_bytes(target, draft, config, 1)  # page 0, which is no row's
    caches = rows * row_bytes(target, draft, config, positions)
    weights = sum(m.weight_bytes() for m in models)
    head = rows * _head_bytes(target, draft, config, positions)
    return MemoryPlan(weights, state_bytes(target, config, rows), caches, workspace, head)


def _most_drafted(config: EngineConfig) -> int:
    """Return the maximum draft tokens of a row in a round; 0 without a drafter."""
    if not config.draft_tokens:
        return 0
    return min(config.max_draft_tokens * config.most_width, MAX_SPECULATION_LENGTH)


def _attention_bytes(target: AnyModel, config: EngineConfig, rows: int, positions: int) -> int:
    """Return the bytes of the results of splits, which are many only with ``deterministic``; else 0."""
    if not config.deterministic or not isinstance(target, Transformer):
        return 0
    from paceline.kernels.attention.ragged import scratch_bytes  # needs triton, as ``deterministic`` does

    length = max(_most_drafted(config) + 1, config.prefill_chunk // rows)
    shapes = {(each.heads, each.head_dim) for each in target.spec.attentions}
    return max(scratch_bytes(rows, heads, length, dim, positions + 1) for heads, dim in shapes)


def state_bytes(target: AnyModel, config: EngineConfig, rows: int) -> int:
    """Return the bytes of the recurrent states of all rows, saved ones included."""
    shape = state_shape_of(target)
    if shape is None:
        return 0
    window = (
        _most_drafted(config) + 1 if grows_on(target.device) else WINDOW
    )  # on a CPU the pages behind it stay untouched
    return rows * shape.slot_bytes(window) + shape.state_bytes


def _prefix_state_bytes(target: AnyModel, config: EngineConfig) -> int:
    """Return the bytes of the recurrent states of a slot that keeps a prefix: its own, and one saved earlier."""
    return state_bytes(target, config, 2) - state_bytes(target, config, 1)


def row_bytes(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> int:
    """Return the bytes of a row of ``positions`` tokens in all caches, but those that ``_head_bytes`` counts."""
    own = _cache_bytes(target, config, positions)
    if draft is None or not config.asks_draft_model or _is_beside_pages(target, draft, config):
        return own
    return own + _cache_bytes(draft, config, positions)


def _head_bytes(target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int) -> int:
    """Return the bytes of a row of a draft head without pages, beside a target that has some; 0 without such a head."""
    if draft is None or not config.asks_draft_model or not _is_beside_pages(target, draft, config):
        return 0
    return _cache_bytes(draft, config, positions)


def _is_beside_pages(target: AnyModel, draft: AnyModel, config: EngineConfig) -> bool:
    return has_pages(target, config) and not has_pages(draft, config)


def has_pages(model: AnyModel, config: EngineConfig) -> bool:
    """Return whether a model's rows have pages that ragged attention reads.

    A head's have none, nor do those of a target that ranks share, which are not told the pages.
    """
    if isinstance(model, FlatModel | HeadModel) or config.tensor_parallel > 1:
        return False
    return chosen_backend(config.attention, model.device) == "ragged"


def _cache_bytes(model: AnyModel, config: EngineConfig, positions: int) -> int:
    """Return the bytes of a row's keys and values, and of the hidden states that a draft head stores."""
    layers, dtype, fused = kv_layers_of(model), cache_dtype(model, config), 0
    if isinstance(model, HeadModel):
        fused, positions = model.fused_bytes(positions), positions + model.slots_behind
    paged = is_paged(model) or has_pages(model, config)
    if grows_on(model.device) or paged:
        kept = KVCache.growing_bytes(layers, positions, dtype, paged=paged)
    else:
        kept = KVCache.bytes_for(layers, 1, positions, dtype)
    return kept + fused


@dataclass(frozen=True)
class FittedRows:
    """Rows that fit into memory.

    rows: sequences at once. positions: tokens of the longest. budget: memory of their caches.
    pool: pages of each cache that ragged attention reads; None: rows have none.
    note: why they are fewer or shorter than by default, for the start line; empty if they are not.
    """

    rows: int
    positions: int
    budget: KVCacheBudget
    pool: int | None = None
    note: str = ""


def fit_memory(
    target: AnyModel, draft: AnyModel | None, config: EngineConfig, positions: int, free: int | None = None
) -> FittedRows:
    """Return the rows of at most ``positions`` tokens that an engine can have.

    free: bytes beside the weights; None: those that are free on the device, or left under ``config.memory_limit``.

    If rows grow, one row of ``positions`` tokens must fit, and all rows at ``LEAST_ROW`` tokens. If not, all rows must
    fit at full length. What ``config`` leaves to its default becomes smaller until it fits: the number of rows first,
    then their length; where rows grow their length first, as few rows need no less for the longest. The weights are
    loaded already; the rest is not allocated yet. Raises CapacityError if sizes that were asked for do not fit,
    ParameterError for ``prefix_memory`` where it would have no effect.
    """
    machine = _Memory.of(target, draft, config, free)
    if config.prefix_memory and not machine.keeps_apart:
        allowed = "0 or left out here: only on the CPU kernels of Linux do prefixes take memory of their own"
        raise ParameterError("prefix_memory", config.prefix_memory, allowed)
    if (fitted := machine.fitted(config.rows, positions)) is not None:
        return fitted
    note = machine.shortage(config.rows, positions)
    shortens = config.max_model_len is None
    if shortens and machine.rows_grow and (fitted := machine.shorter(config.rows, positions, note)) is not None:
        return fitted
    if config.max_batch_size is None:
        rows = _most(lambda rows: machine.budget(rows, positions) is not None, config.rows)
        if (fitted := machine.fitted(rows, positions, note) if rows else None) is not None:
            return fitted
    rows = 1 if config.max_batch_size is None else config.rows
    if shortens and (fitted := machine.shorter(rows, positions, note)) is not None:
        return fitted
    raise CapacityError(machine.refusal(config.rows, positions))


def default_length(target: AnyModel, draft: AnyModel | None, config: EngineConfig, limit: int) -> int:
    """Return the default of ``max_model_len``: where rows grow on a CPU ``limit``, the models' own, elsewhere less."""
    own = grows_on(target.device) and _rows_grow(target, draft, config)
    return limit if own else min(limit, config.DEFAULT_MAX_MODEL_LEN)


def most_that_fit(target: AnyModel, config: EngineConfig, positions: int, free: int, limit: int) -> int:
    """Return how many rows of ``positions`` tokens, at most ``limit``, fit at once into ``free`` bytes."""
    machine = _Memory.of(target, None, config, free)
    room = free - machine.kept_free
    return _most(lambda rows: machine.plan(rows, positions).to_allocate <= room, limit)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to ``limit`` that fits, 0 if none does; smaller ones fit, too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class _Memory:
    """Memory that an engine may take, beside its weights.

    free: bytes. source: where they are, in words.
    kept_free: bytes of them for other programs and CUDA graphs, if sizes are chosen or rows wait for memory.
    """

    target: AnyModel
    draft: AnyModel | None
    config: EngineConfig
    free: int
    source: str
    kept_free: int

    @classmethod
    def of(cls, target: AnyModel, draft: AnyModel | None, config: EngineConfig, free: int | None) -> _Memory:
        if free is None and config.memory_limit is None:
            return_cached_memory(target.device)
            free = available_memory(target.device)
        if free is not None:
            return cls(target, draft, config, free, "free", int(_LEFT_ALONE * max(0, free)))
        assert config.memory_limit is not None
        weights = sum(model.weight_bytes() for model in (target, draft) if model is not None)
        return cls(target, draft, config, config.memory_limit - weights, "left under memory_limit after the weights", 0)

    def plan(self, rows: int, positions: int) -> MemoryPlan:
        return plan_memory(self.target, self.draft, self.config, rows, positions)

    def fitted(self, rows: int, positions: int, note: str = "") -> FittedRows | None:
        """Return these rows with the memory for their caches; None if they do not fit."""
        if (budget := self.budget(rows, positions)) is None:
            return None
        pool = budget.limit // budget.bytes_for(1) if has_pages(self.target, self.config) else None
        return FittedRows(rows, positions, budget, pool, note)

    def budget(self, rows: int, positions: int) -> KVCacheBudget | None:
        """Return the memory for the caches of these rows; None if they do not fit."""
        plan, asked = self.plan(rows, positions), self.config.prefix_memory or 0
        plan = replace(plan, caches=self._row_limit(rows, positions, plan.caches))
        room = self._room(plan, rows, positions)
        asked_for = None not in (self.config.max_batch_size, self.config.max_model_len)
        spare = self.free - plan.to_allocate - asked
        at_need = self.rows_grow and grows_on(self.target.device)  # memory that nobody uses stays the system's
        if spare >= (0 if asked_for or at_need else self.kept_free):
            beside = (
                asked if self.config.prefix_memory is not None else int(_PREFIX_SHARE * max(0, spare - self.kept_free))
            )
            return replace(room, limit=room.limit + beside) if room.slots > rows else room
        if not self.rows_grow:
            return None
        short = replace(room, limit=self.free - plan.beside_caches - self.kept_free)
        fits = short.max_rows(positions, asked) >= 1 and short.max_rows(min(LEAST_ROW, positions), asked) >= rows
        return short if fits else None

    def _row_limit(self, rows: int, positions: int, whole: int) -> int:
        """Return the bytes that rows may take. whole: those of all at their longest.

        A length that nobody asked for takes no memory from other programs, or from other models of a server: rows that
        grow get what they would have elsewhere, or what one of them needs.
        """
        usual = self.config.DEFAULT_MAX_MODEL_LEN
        if not self.rows_grow or self.config.max_model_len is not None or positions <= usual:
            return whole
        row = partial(row_bytes, self.target, self.draft, self.config)
        return min(whole, max(row(positions), rows * row(usual)))

    def shorter(self, rows: int, positions: int, note: str) -> FittedRows | None:
        """Return rows of the longest length that fits; None if that is too short. note: why they are shorter."""
        steps = _most(lambda steps: self.budget(rows, steps * _LENGTH_STEP) is not None, positions // _LENGTH_STEP)
        longest = steps * _LENGTH_STEP
        return self.fitted(rows, longest, note) if longest >= _SHORTEST else None

    def _room(self, plan: MemoryPlan, rows: int, positions: int) -> KVCacheBudget:
        """Return the budget of these rows, with slots for prefixes where slots take only the memory that they use."""
        bytes_for = cache(partial(row_bytes, self.target, self.draft, self.config))
        if not self.keeps_apart:
            return KVCacheBudget(plan.caches, rows, rows, positions, bytes_for)
        states = _prefix_state_bytes(self.target, self.config)
        return KVCacheBudget(plan.caches, rows, rows + MAX_PREFIXES, positions, bytes_for, states)

    @property
    def keeps_apart(self) -> bool:
        """Whether prefixes have slots beside the rows'.

        Slots that do not grow take as much memory as rows. Models in torch are faster if their rows are neighbours.
        """
        config = self.config
        wanted = config.prefix_cache and config.prefix_memory != 0
        return wanted and self.rows_grow and isinstance(self.target, FlatModel)

    @property
    def rows_grow(self) -> bool:
        return _rows_grow(self.target, self.draft, self.config)

    def shortage(self, rows: int, positions: int) -> str:
        """Say what these rows need, where rows grow one of them, and what there is."""
        needed = self.plan(1 if self.rows_grow else rows, positions).to_allocate
        wanted = f"one row of {positions} tokens needs" if self.rows_grow else f"{rows} rows of {positions} tokens need"
        return f"{wanted} {needed / GIB:.2f} GiB beside the weights, {max(0, self.free) / GIB:.2f} are {self.source}"

    def refusal(self, rows: int, positions: int) -> str:
        """Say what these rows need, what there is, and what would fit."""
        plan, source = self.plan(rows, positions), self.source
        if self.rows_grow:
            row = partial(row_bytes, self.target, self.draft, self.config)
            source += f", of which {self.kept_free / GIB:.2f} are left to other programs" if self.kept_free else ""
            plan = replace(plan, caches=max(row(positions), rows * row(min(LEAST_ROW, positions))))
        prefixes = f", prefixes {asked / GIB:.2f} GiB" if (asked := self.config.prefix_memory) else ""
        return (
            f"{_wanted(rows, positions, rows_grow=self.rows_grow)} need {plan}{prefixes}, "
            f"but {max(0, self.free) / GIB:.2f} GiB are {source}: "
            f"{self._hint(rows, positions)}; lower max_batch_size or max_model_len"
        )

    def _hint(self, rows: int, positions: int) -> str:
        """Return how many rows of full length would fit, in words."""
        fits = _most(lambda rows: self.plan(rows, positions).to_allocate <= self.free, rows - 1)
        return f"{fits} rows of this length would fit" if fits else "not even one row of this length fits"


def _wanted(rows: int, positions: int, *, rows_grow: bool) -> str:
    if rows_grow and positions > LEAST_ROW:
        return f"one row of max_model_len={positions} tokens and max_batch_size={rows} rows of {LEAST_ROW}"
    return f"max_batch_size={rows} rows of max_model_len={positions} tokens"


def _rows_grow(target: AnyModel, draft: AnyModel | None, config: EngineConfig) -> bool:
    """Whether rows take only the memory that their tokens need.

    Without pages they do not if rounds run on the device, which writes to free rows, too, or if ranks share a target:
    those are not told the rows' sizes.
    """
    if has_pages(target, config):
        return True
    models = [target] if draft is None else [target, draft]
    return all(grows_on(model.device) for model in models) and config.rounds != "device" and config.tensor_parallel == 1
