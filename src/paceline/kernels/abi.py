"""The extension's interface for ctypes. Written by csrc/bindings.py: do not edit."""

# fmt: off
# ruff: noqa: I001
from __future__ import annotations

from ctypes import (
    CFUNCTYPE, POINTER, Structure,
    c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p,
)
from enum import IntEnum

Callback = CFUNCTYPE(c_int32)


class Problem(c_char_p):
    """A call's error message, or null; ``native`` reads it."""


class NewObject(c_void_p):
    """The address of an object that the library made; null if there was no memory for it."""


PANEL = 32
INPUT_MULTIPLE = 64
ROW_MULTIPLE = 16
KEY_BLOCK = 256
PAGE_POSITIONS = 64
ACTIVATION_GROUP = 64
ROUTER_PANEL = 16
INT8_ZERO = 128
HEADS_OF_PART = 4
MOST_TAPS = 8
WALK_TOKENS = 64
WIDEST_BLOCK = 64
MAX_QUERIES = 64


class Format(IntEnum):
    """csrc: Format."""

    INT8 = 0
    BF16 = 1
    INT4 = 2


class CacheElement(IntEnum):
    """csrc: CacheElement."""

    CACHE_FLOAT32 = 0
    CACHE_BF16 = 1
    CACHE_INT8 = 2


class Epilogue(IntEnum):
    """csrc: Epilogue."""

    STORE = 0
    ADD = 1
    SWIGLU = 2
    GEGLU = 3
    CLAMPED_SWIGLU = 4
    SILU = 5
    GELU = 6
    EXACT_GELU = 7
    RELU = 8
    RELU2 = 9
    XIELU = 10
    CAP = 11


class RecurrentKind(IntEnum):
    """csrc: RecurrentKind."""

    NOT_RECURRENT = 0
    DELTA_NET = 1
    SHORT_CONV = 2
    MAMBA2 = 3


class Activation(IntEnum):
    """csrc: Activation."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SILU = 2
    GELU = 3
    RELU = 4
    RELU2 = 5
    XIELU = 6


class Changed(IntEnum):
    """csrc: Changed."""

    CHANGED_QKV = 0
    CHANGED_ATTENTION_OUT = 1
    CHANGED_GATE_UP = 2
    CHANGED_DOWN = 3
    CHANGED_LAYERS = 4


class Phase(IntEnum):
    """csrc: Phase."""

    EMBED = 0
    PREPARE = 1
    PRODUCTS = 2
    ROTARY = 3
    ATTENTION = 4
    PHASES = 5


class CLinear(Structure):
    """csrc: Linear."""

    _fields_ = (
        ("weights", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32),
        ("format", c_int32), ("group", c_int32), ("order", c_void_p),
    )


class CRecurrent(Structure):
    """csrc: Recurrent."""

    _fields_ = (
        ("first", CLinear), ("second", CLinear), ("gates", CLinear), ("conv", c_void_p), ("rate", c_void_p),
        ("bias", c_void_p), ("norm", c_void_p), ("conv_bias", c_void_p), ("skip", c_void_p), ("epsilon", c_float),
        ("least_step", c_float), ("place", c_int32),
    )


class CTokenInput(Structure):
    """csrc: TokenInput."""

    _fields_ = (
        ("gate", CLinear), ("out", CLinear), ("norm", c_void_p),
    )


class CRouter(Structure):
    """csrc: Router."""

    _fields_ = (
        ("weights", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32),
    )


class CExpertsNorms(Structure):
    """csrc: ExpertsNorms."""

    _fields_ = (
        ("router", c_void_p), ("before", c_void_p), ("after", c_void_p), ("shared_after", c_void_p),
    )


class CExperts(Structure):
    """csrc: Experts."""

    _fields_ = (
        ("router", CRouter), ("gate_up", POINTER(CLinear)), ("down", POINTER(CLinear)), ("count", c_int32),
        ("used", c_int32), ("normalised", c_int32), ("sigmoid", c_int32), ("groups", c_int32), ("used_groups", c_int32),
        ("group_best", c_int32), ("margin", c_float), ("correction", c_void_p), ("shared_scale", c_float),
        ("factors", c_void_p), ("norms", POINTER(CExpertsNorms)), ("latent_in", CLinear), ("latent_out", CLinear),
    )


class CLatent(Structure):
    """csrc: Latent."""

    _fields_ = (
        ("query_up", CLinear), ("absorb", POINTER(CLinear)), ("expand", POINTER(CLinear)), ("query_norm", c_void_p),
        ("norm", c_void_p), ("query_rank", c_int32), ("rank", c_int32), ("rotary_dim", c_int32), ("key_dim", c_int32),
        ("value_dim", c_int32), ("epsilon", c_float),
    )


class CBlockConv(Structure):
    """csrc: BlockConv."""

    _fields_ = (
        ("project", CLinear), ("base", c_void_p), ("taps", c_int32), ("group", c_int32),
    )


class CLowRank(Structure):
    """csrc: LowRank."""

    _fields_ = (
        ("down", CRouter), ("up", CRouter),
    )


class CLayer(Structure):
    """csrc: Layer."""

    _fields_ = (
        ("qkv", CLinear), ("attention_out", CLinear), ("gate_up", CLinear), ("down", CLinear), ("input_norm", c_void_p),
        ("post_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("window", c_int64),
        ("attention_out_norm", c_void_p), ("mlp_out_norm", c_void_p), ("cosine", c_void_p), ("sine", c_void_p),
        ("rotary_half", c_int32), ("scale", c_float), ("norm_all", c_int32), ("activation", c_int32),
        ("recurrent", POINTER(CRecurrent)), ("gated", c_int32), ("place", c_int32), ("table", c_int32),
        ("reads_only", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("dim", c_int32), ("value_dim", c_int32),
        ("looks_ahead", c_int32), ("v_norm", c_void_p), ("input", POINTER(CTokenInput)), ("scale_out", c_void_p),
        ("experts", POINTER(CExperts)), ("sinks", c_void_p), ("latent", POINTER(CLatent)), ("norm_after", c_int32),
        ("cap", c_float), ("balance", c_void_p), ("parallel", c_int32), ("plain", c_int32), ("shape", c_void_p),
        ("convs", POINTER(CBlockConv)), ("attended", c_void_p), ("activated", c_void_p),
        ("changes", POINTER(CLowRank) * 4),
    )


class CFusion(Structure):
    """csrc: Fusion."""

    _fields_ = (
        ("fuse", CLinear), ("tap_norms", c_void_p), ("joint_norm", c_void_p), ("hidden_norm", c_void_p),
        ("targets", c_void_p), ("mask", c_void_p), ("mask_token", c_int64), ("vocabulary", c_int64),
        ("tap_count", c_int32), ("target_width", c_int32), ("normed_residual", c_int32), ("normed_state", c_int32),
        ("embedding_norm", c_void_p), ("block", c_int32),
    )


class CRecurrentShape(Structure):
    """csrc: RecurrentShape."""

    _fields_ = (
        ("kind", c_int32), ("taps", c_int32), ("channels", c_int32), ("gates", c_int32), ("state", c_int32),
        ("key_heads", c_int32), ("value_heads", c_int32), ("key_dim", c_int32), ("value_dim", c_int32),
    )


class CTokenInputs(Structure):
    """csrc: TokenInputs."""

    _fields_ = (
        ("table", CLinear), ("project", CLinear), ("norm", c_void_p), ("width", c_int32), ("table_scale", c_float),
        ("project_scale", c_float), ("sum_scale", c_float),
    )


class CRanks(Structure):
    """csrc: Ranks."""

    _fields_ = (
        ("rank", c_int32), ("count", c_int32), ("hidden", c_void_p), ("tokens", c_void_p), ("memory", c_void_p),
        ("floats", c_int64), ("patience", c_float),
    )


class CModelSpec(Structure):
    """csrc: ModelSpec."""

    _fields_ = (
        ("layers", POINTER(CLayer)), ("head", CLinear), ("embedding", c_void_p), ("final_norm", c_void_p),
        ("positions", c_int64), ("layer_count", c_int32), ("width", c_int32), ("epsilon", c_float),
        ("embed_scale", c_float), ("tap_scale", c_float), ("fusion", POINTER(CFusion)), ("recurrent", CRecurrentShape),
        ("inputs", POINTER(CTokenInputs)), ("logits_cap", c_float), ("centred", c_int32), ("places", c_void_p),
        ("embedding_norm", c_void_p), ("adapters", c_int32), ("ranks", POINTER(CRanks)),
    )


class CCacheVectors(Structure):
    """csrc: CacheVectors."""

    _fields_ = (
        ("data", c_void_p), ("pages", c_void_p), ("layer_stride", c_int64), ("page_stride", c_int64),
        ("head_stride", c_int64), ("position_stride", c_int64),
    )


class CKVTable(Structure):
    """csrc: KVTable."""

    _fields_ = (
        ("keys", CCacheVectors), ("values", CCacheVectors), ("layers", c_int64), ("heads", c_int64),
    )


class CCache(Structure):
    """csrc: Cache."""

    _fields_ = (
        ("tables", POINTER(CKVTable)), ("table_count", c_int64), ("rows", c_int64), ("capacity", c_int64),
        ("element", c_int32), ("state", c_void_p), ("tail", c_void_p), ("inputs", c_void_p), ("base", c_void_p),
        ("count", c_void_p), ("window", c_int64), ("references", c_void_p), ("adapter_of", c_void_p),
    )


class CPath(Structure):
    """csrc: Path."""

    _fields_ = (
        ("from", c_int64), ("last", c_int64), ("slots", c_void_p),
    )


class CAttention(Structure):
    """csrc: Attention."""

    _fields_ = (
        ("qkv", c_void_p), ("qkv_stride", c_size_t), ("out", c_void_p), ("out_stride", c_size_t),
        ("positions", c_void_p), ("slots", c_void_p), ("ends", c_void_p), ("paths", POINTER(CPath)),
        ("keys", CCacheVectors), ("values", CCacheVectors), ("blocks", c_size_t), ("element", c_int32),
        ("heads", c_int), ("kv_heads", c_int), ("dim", c_int), ("value_dim", c_int), ("capacity", c_int64),
        ("window", c_int64), ("scale", c_float), ("q_norm", c_void_p), ("k_norm", c_void_p), ("v_norm", c_void_p),
        ("epsilon", c_float), ("gates", c_size_t), ("norm_all", c_bool), ("sinks", c_void_p), ("norm_after", c_bool),
        ("cap", c_float), ("balance", c_void_p),
    )


class CRotary(Structure):
    """csrc: Rotary."""

    _fields_ = (
        ("cosine", c_void_p), ("sine", c_void_p), ("half", c_int), ("positions", c_int64),
    )


class CKept(Structure):
    """csrc: Kept."""

    _fields_ = (
        ("states", c_void_p), ("capacity", c_int64), ("bf16", c_int32),
    )


class CEntries(Structure):
    """csrc: Entries."""

    _fields_ = (
        ("starts", c_void_p), ("tokens", c_void_p), ("values", c_void_p),
    )


class CDrawRows(Structure):
    """csrc: DrawRows."""

    _fields_ = (
        ("temperature", c_void_p), ("seeds", c_void_p), ("length", c_void_p), ("deepest", c_void_p),
        ("top_k", c_void_p), ("top_p", c_void_p), ("typical_p", c_void_p), ("epsilon_cutoff", c_void_p),
        ("eta_cutoff", c_void_p), ("top_n_sigma", c_void_p), ("presence", c_void_p), ("frequency", c_void_p),
        ("repetition", c_void_p), ("text", c_void_p), ("text_stride", c_int64), ("prompt_length", c_void_p),
        ("min_length", c_void_p), ("bias", CEntries), ("stops", CEntries), ("slots", c_void_p),
    )


class CShortHead(Structure):
    """csrc: ShortHead."""

    _fields_ = (
        ("head", CLinear), ("targets", c_void_p),
    )


class CDraftCall(Structure):
    """csrc: DraftCall."""

    _fields_ = (
        ("by", CDrawRows), ("text", c_void_p), ("text_stride", c_int64), ("kept", CKept), ("rows", c_int64),
        ("slots", c_void_p), ("start", c_void_p), ("stop", c_void_p), ("counts", c_void_p), ("draft_stride", c_int64),
        ("draft_tokens", c_void_p), ("drawn", c_void_p), ("chances", c_void_p), ("probabilities", c_void_p),
        ("logits", c_void_p), ("instead", c_void_p), ("before_draw", Callback), ("continue_drafting", Callback),
        ("purpose", c_uint32), ("width", c_int64), ("parents", c_void_p), ("ranks", c_void_p),
        ("shortened", POINTER(CShortHead)),
    )


class CRowSources(Structure):
    """csrc: RowSources."""

    _fields_ = (
        ("references", c_void_p), ("answers", c_void_p), ("number", c_int64), ("first", c_int64),
    )


class CDrawCall(Structure):
    """csrc: DrawCall."""

    _fields_ = (
        ("by", CDrawRows), ("logits", c_void_p), ("instead", c_void_p), ("draft_tokens", c_void_p),
        ("counts", c_void_p), ("parents", c_void_p), ("rows", c_int64), ("block", c_int64), ("stride", c_int64),
        ("vocabulary", c_int64), ("draft_stride", c_int64), ("first", c_int64), ("packed", c_int32),
        ("purpose", c_uint32),
    )


class CLogprobCall(Structure):
    """csrc: LogprobCall."""

    _fields_ = (
        ("logits", c_void_p), ("tokens", c_void_p), ("accepted", c_void_p), ("wanted", c_void_p), ("counts", c_void_p),
        ("rows", c_int64), ("block", c_int64), ("stride", c_int64), ("vocabulary", c_int64), ("most", c_int64),
        ("packed", c_int32), ("own", c_void_p), ("ids", c_void_p), ("values", c_void_p),
    )


class CTextRows(Structure):
    """csrc: TextRows."""

    _fields_ = (
        ("text", c_void_p), ("length", c_void_p), ("prompt_length", c_void_p), ("limit", c_void_p), ("stops", c_void_p),
        ("stop_count", c_int64), ("text_stride", c_int64),
    )


class CRoundCall(Structure):
    """csrc: RoundCall."""

    _fields_ = (
        ("by", CDrawRows), ("text", CTextRows), ("slots", c_void_p), ("draft_tokens", c_void_p), ("counts", c_void_p),
        ("parents", c_void_p), ("draft_stride", c_int64), ("rows", c_int64), ("block", c_int64), ("tokens", c_void_p),
        ("accepted", c_void_p), ("gained", c_void_p), ("path", c_void_p), ("hidden", c_void_p), ("logits", c_void_p),
        ("room", c_int64), ("purpose", c_uint32), ("head", c_void_p), ("kept", CKept), ("taps", c_void_p),
        ("tap_count", c_int64), ("features", c_void_p), ("draft", POINTER(CDraftCall)), ("drafter", c_void_p),
        ("draft_cache", POINTER(CCache)), ("draft_seconds", c_void_p),
    )


STRUCTS: tuple[type[Structure], ...] = (
    CLinear, CRecurrent, CTokenInput, CRouter, CExpertsNorms, CExperts, CLatent, CBlockConv, CLowRank, CLayer, CFusion,
    CRecurrentShape, CTokenInputs, CRanks, CModelSpec, CCacheVectors, CKVTable, CCache, CPath, CAttention, CRotary,
    CKept, CEntries, CDrawRows, CShortHead, CDraftCall, CRowSources, CDrawCall, CLogprobCall, CTextRows, CRoundCall,
)
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pl_interface": (c_char_p, ()),
    "pl_layout": (c_void_p, ()),
    "pl_kernels": (c_void_p, (c_char_p,)),
    "pl_obstacle": (c_char_p, (c_char_p,)),
    "pl_multiplies_correctly": (c_int, (c_void_p,)),
    "pl_pool_new": (c_void_p, (c_int, c_int, c_void_p, c_void_p, c_void_p)),
    "pl_pool_free": (None, (c_void_p,)),
    "pl_arena_new": (c_void_p, (c_size_t,)),
    "pl_place": (c_int, (c_void_p, c_void_p, c_int, c_size_t)),
    "pl_arena_free": (None, (c_void_p, c_size_t)),
    "pl_model_new": (NewObject, (c_void_p, c_void_p)),
    "pl_model_free": (None, (c_void_p,)),
    "pl_experts_read": (c_int64, (c_void_p,)),
    "pl_ranks_ended": (c_int, (c_void_p,)),
    "pl_forward": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int,
        c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_logits": (Problem, (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
    "pl_linear": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_size_t)),
    "pl_quantise": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_void_p)),
    "pl_embed": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "pl_attend": (Problem, (c_void_p, c_void_p, c_void_p, c_int64, c_int)),
    "pl_read": (c_uint64, (c_void_p, c_void_p, c_size_t)),
    "pl_source_hash": (c_char_p, ()),
    "pl_copy_columns": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)),
    "pl_keep_fused": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "pl_inject": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "pl_draft": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_texts_new": (NewObject, (c_int64,)),
    "pl_texts_free": (None, (c_void_p,)),
    "pl_texts_held": (c_int64, (c_void_p,)),
    "pl_texts_size": (c_int64, (c_void_p, c_int64)),
    "pl_texts_count": (c_int64, (c_void_p,)),
    "pl_texts_copy": (None, (c_void_p, c_void_p, c_void_p)),
    "pl_texts_append": (Problem, (c_void_p, c_int64, c_void_p, c_int64)),
    "pl_lookup": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64,
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_lookup_all": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64,
        c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_exchange_bytes": (c_size_t, (c_int, c_size_t)),
    "pl_draw": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_accept": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_probabilities": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_likelihood": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pl_logprobs": (Problem, (c_void_p, c_void_p, c_void_p)),
    "pl_gain": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
    "pl_round": (Problem, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
}
INTERFACE = "c885e294304e974d"
