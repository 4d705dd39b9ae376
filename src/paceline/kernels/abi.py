"""The extension's interface for ctypes: the structs and functions of csrc/kernels.h, model.h and capi.cpp."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

import torch
from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.recurrent_state import WINDOW, StatefulCache
from paceline.kernels.pack import Format, Packed

ABI_VERSION = 29  # must equal csrc/model.h's; raise both when a struct or a function changes
FORMATS: dict[Format, int] = {"int8": 0, "bf16": 1, "int4": 2}


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first element; None for None."""
    return None if tensor is None else tensor.data_ptr()


class CLinear(Structure):
    """csrc: Linear."""

    _fields_ = (
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("format", c_int32),
        ("group", c_int32),
    )

    @classmethod
    def of(cls, packed: Packed) -> CLinear:
        return cls(
            packed.weights.data_ptr(),
            address(packed.scales),
            address(packed.bias),
            packed.inputs,
            packed.outputs,
            FORMATS[packed.format],
            packed.group,
        )


class CRecurrent(Structure):
    """csrc: Recurrent."""

    _fields_ = (("gates", CLinear), *((name, c_void_p) for name in ("conv", "rate", "bias", "norm")))


class CRecurrentShape(Structure):
    """csrc: RecurrentShape."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "taps", "channels", "gates", "state")),
        *((name, c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
    )


class CRouter(Structure):
    """csrc: Router."""

    _fields_ = (("weights", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32))


class CExpertsNorms(Structure):
    """csrc: ExpertsNorms."""

    _fields_ = tuple((name, c_void_p) for name in ("router", "before", "after", "shared_after"))


class CExperts(Structure):
    """csrc: Experts."""

    _fields_ = (
        ("router", CRouter),
        ("gate_up", POINTER(CLinear)),
        ("down", POINTER(CLinear)),
        *((name, c_int32) for name in ("count", "used", "normalised")),
        ("factors", c_void_p),
        ("norms", POINTER(CExpertsNorms)),
    )


class CTokenInput(Structure):
    """csrc: TokenInput."""

    _fields_ = (("gate", CLinear), ("out", CLinear), ("norm", c_void_p))


class CTokenInputs(Structure):
    """csrc: TokenInputs."""

    _fields_ = (
        ("table", CLinear),
        ("project", CLinear),
        ("norm", c_void_p),
        ("width", c_int32),
        *((name, c_float) for name in ("table_scale", "project_scale", "sum_scale")),
    )


class CLowRank(Structure):
    """csrc: LowRank."""

    _fields_ = (("down", CRouter), ("up", CRouter))


CHANGED_LAYERS = ("qkv", "o", "gate_up", "down")  # csrc: Changed, by the names of ``models.description.weights``


class CLayer(Structure):
    """csrc: Layer."""

    _fields_ = (
        ("qkv", CLinear),
        ("attention_out", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
        *((name, c_void_p) for name in ("attention_out_norm", "mlp_out_norm", "cosine", "sine")),
        ("rotary_half", c_int32),
        ("scale", c_float),
        ("norm_all", c_int32),
        ("activation", c_int32),
        ("recurrent", POINTER(CRecurrent)),
        *((name, c_int32) for name in ("gated", "place", "table", "reads_only", "heads", "kv_heads", "dim")),
        ("v_norm", c_void_p),
        ("input", POINTER(CTokenInput)),
        ("scale_out", c_void_p),
        ("experts", POINTER(CExperts)),
        ("sinks", c_void_p),
        ("changes", POINTER(CLowRank) * len(CHANGED_LAYERS)),
    )


class CFusion(Structure):
    """csrc: Fusion."""

    _fields_ = (
        ("fuse", CLinear),
        *((name, c_void_p) for name in ("tap_norms", "joint_norm", "hidden_norm", "targets", "mask")),
        ("mask_token", c_int64),
        ("vocabulary", c_int64),
        *((name, c_int32) for name in ("tap_count", "target_width", "normed_residual", "normed_state")),
        ("embedding_norm", c_void_p),
    )


class CModel(Structure):
    """csrc: ModelSpec."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CLinear),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("positions", c_int64),
        ("layer_count", c_int32),
        ("width", c_int32),
        ("epsilon", c_float),
        ("embed_scale", c_float),
        ("tap_scale", c_float),
        ("fusion", POINTER(CFusion)),
        ("recurrent", CRecurrentShape),
        ("inputs", POINTER(CTokenInputs)),
        ("logits_cap", c_float),
        ("adapters", c_int32),
    )


class CKVTable(Structure):
    """csrc: KVTable."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "row_stride", "head_stride", "position_stride")),
        *((name, c_int64) for name in ("layers", "heads", "dim")),
    )

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> CKVTable:
        layers, _, heads, _, dim = keys.shape
        return cls(keys.data_ptr(), values.data_ptr(), *keys.stride()[:4], layers, heads, dim)


class CCache(Structure):
    """csrc: Cache."""

    _fields_ = (
        ("tables", POINTER(CKVTable)),
        ("table_count", c_int64),
        ("rows", c_int64),
        ("capacity", c_int64),
        ("bf16", c_int32),
        *((name, c_void_p) for name in ("state", "tail", "inputs", "base", "count")),
        ("window", c_int64),
        ("adapter_of", c_void_p),
    )

    @classmethod
    def of(cls, cache: KVCache) -> CCache:
        count = len(cache.shapes)
        tables = (CKVTable * count)(*(CKVTable.of(*cache.tables[2 * i : 2 * i + 2]) for i in range(count)))
        sizes = cache.rows, cache.positions, int(cache.keys.dtype == torch.bfloat16)
        if not isinstance(cache, StatefulCache):
            return cls(tables, count, *sizes, adapter_of=cache.adapter_of.data_ptr())
        states = cache.states
        places = [each.data_ptr() for each in (states.state, states.tail, states.inputs, states.base, states.count)]
        return cls(tables, count, *sizes, *places, WINDOW, cache.adapter_of.data_ptr())


class CEntries(Structure):
    """csrc: Entries."""

    _fields_ = (("starts", c_void_p), ("tokens", c_void_p), ("values", c_void_p))


class CDrawRows(Structure):
    """csrc: DrawRows."""

    _fields_ = (
        *((name, c_void_p) for name in ("temperature", "seeds", "length", "deepest", "top_k", "top_p")),
        *((name, c_void_p) for name in ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_n_sigma")),
        *((name, c_void_p) for name in ("presence", "frequency", "repetition", "text")),
        ("text_stride", c_int64),
        *((name, c_void_p) for name in ("prompt_length", "min_length")),
        ("bias", CEntries),
        ("stops", CEntries),
        ("slots", c_void_p),
    )


class CDraw(Structure):
    """csrc: DrawCall."""

    _fields_ = (
        ("by", CDrawRows),
        *((name, c_void_p) for name in ("logits", "instead", "draft_tokens", "counts", "parents")),
        *((name, c_int64) for name in ("rows", "block", "stride", "vocabulary", "draft_stride", "first")),
        ("packed", c_int32),
        ("purpose", c_uint32),
    )


class CLogprobs(Structure):
    """csrc: LogprobCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "tokens", "accepted", "wanted", "counts")),
        *((name, c_int64) for name in ("rows", "block", "stride", "vocabulary", "most")),
        ("packed", c_int32),
        *((name, c_void_p) for name in ("own", "ids", "values")),
    )


class CTextRows(Structure):
    """csrc: TextRows."""

    _fields_ = (
        *((name, c_void_p) for name in ("text", "length", "prompt_length", "limit", "stops")),
        ("stop_count", c_int64),
        ("text_stride", c_int64),
    )

    @classmethod
    def of(cls, text: Tensor, length: Tensor, prompt_length: Tensor, limit: Tensor, stops: Tensor) -> CTextRows:
        """The rows' text and limits, described by address. The tensors must keep their memory."""
        places = (tensor.data_ptr() for tensor in (text, length, prompt_length, limit, stops))
        return cls(*places, stops.shape[1], text.stride(0))


class CKept(Structure):
    """csrc: Kept."""

    _fields_ = (("states", c_void_p), ("capacity", c_int64), ("bf16", c_int32))


class CShortHead(Structure):
    """csrc: ShortHead."""

    _fields_ = (("head", CLinear), ("targets", c_void_p))


Callback = CFUNCTYPE(c_int32)


class CDraft(Structure):
    """csrc: DraftCall."""

    _fields_ = (
        ("by", CDrawRows),
        ("text", c_void_p),
        ("text_stride", c_int64),
        ("kept", CKept),
        ("rows", c_int64),
        *((name, c_void_p) for name in ("slots", "start", "stop", "counts")),
        ("draft_stride", c_int64),
        *((name, c_void_p) for name in ("draft_tokens", "drawn", "chances", "probabilities", "logits", "instead")),
        ("before_draw", Callback),
        ("continue_drafting", Callback),
        ("purpose", c_uint32),
        ("width", c_int64),
        ("parents", c_void_p),
        ("ranks", c_void_p),
        ("shortened", c_void_p),
    )


class CRound(Structure):
    """csrc: RoundCall."""

    _fields_ = (
        ("by", CDrawRows),
        ("text", CTextRows),
        *((name, c_void_p) for name in ("slots", "draft_tokens", "counts", "parents")),
        *((name, c_int64) for name in ("draft_stride", "rows", "block")),
        *((name, c_void_p) for name in ("tokens", "accepted", "gained", "path", "hidden", "logits")),
        ("room", c_int64),
        ("purpose", c_uint32),
        ("head", c_void_p),
        ("kept", CKept),
        ("taps", c_void_p),
        ("tap_count", c_int64),
        ("features", c_void_p),
        *((name, c_void_p) for name in ("draft", "drafter", "draft_cache", "draft_seconds")),
    )


class Problem(c_char_p):
    """A call's error message, or null; ``native`` reads it."""


class NewObject(c_void_p):
    """The address of an object that the library made; null if there was no memory for it."""


SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pl_abi_version": (c_int, ()),
    "pl_source_hash": (c_char_p, ()),
    "pl_kernels": (c_void_p, (c_char_p,)),
    "pl_obstacle": (c_char_p, (c_char_p,)),
    "pl_multiplies_correctly": (c_int, (c_void_p,)),
    "pl_pool_new": (c_void_p, (c_int,)),
    "pl_pool_free": (None, (c_void_p,)),
    "pl_arena_new": (c_void_p, (c_size_t,)),
    "pl_arena_free": (None, (c_void_p, c_size_t)),
    "pl_model_new": (NewObject, (c_void_p, c_void_p)),
    "pl_model_free": (None, (c_void_p,)),
    "pl_forward": (Problem, (*(c_void_p,) * 7, c_int, c_int, c_int, *(c_void_p,) * 3, c_int, *(c_void_p,) * 3)),
    "pl_experts_read": (c_int64, (c_void_p,)),
    "pl_logits": (Problem, (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
    "pl_copy_columns": (Problem, (*(c_void_p,) * 5, c_int64)),
    "pl_keep_fused": (Problem, (*(c_void_p,) * 6, c_int)),
    "pl_draft": (Problem, (c_void_p,) * 5),
    "pl_texts_new": (NewObject, ()),
    "pl_texts_free": (None, (c_void_p,)),
    "pl_texts_append": (Problem, (c_void_p, c_int64, c_void_p, c_int64)),
    "pl_lookup": (Problem, (*(c_void_p,) * 4, *(c_int64,) * 2, c_void_p, *(c_int64,) * 2, *(c_void_p,) * 4)),
    "pl_lookup_all": (Problem, (*(c_void_p,) * 4, *(c_int64,) * 2, c_void_p, *(c_int64,) * 3, *(c_void_p,) * 5)),
    "pl_draw": (Problem, (c_void_p,) * 4),
    "pl_accept": (Problem, (c_void_p,) * 8),
    "pl_probabilities": (Problem, (c_void_p,) * 4),
    "pl_round": (Problem, (c_void_p,) * 5),
    "pl_gain": (None, (*(c_void_p,) * 3, c_int64, c_void_p, c_int64, c_void_p)),
    "pl_likelihood": (Problem, (c_void_p,) * 5),
    "pl_logprobs": (Problem, (c_void_p,) * 3),
    "pl_linear": (Problem, (*(c_void_p,) * 4, c_int, c_int, c_void_p, c_size_t)),
    "pl_quantise": (Problem, (c_void_p,) * 6),
    "pl_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_void_p)),
    "pl_embed": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "pl_attend": (Problem, (c_void_p, c_void_p, c_void_p, c_int64, c_int)),
    "pl_read": (c_uint64, (c_void_p, c_void_p, c_size_t)),
}
