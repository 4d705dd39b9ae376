"""The extension, loaded with ctypes.

``PACELINE_KERNELS`` chooses the instruction set: ``auto`` (the default: the best that this CPU has), ``amx``,
``avx512``, ``avx2``, or ``off`` (the plain torch twin). One that is not available here is an error, never replaced.
``amx-emulated`` runs the kernels for AMX with tiles in memory: slow, for tests where there is no AMX.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import (
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.cache import KVCache
from paceline.errors import ParameterError
from paceline.kernels import build
from paceline.kernels.pack import Packed

ABI_VERSION = 4
VARIABLE = "PACELINE_KERNELS"
EMULATED = "amx-emulated"
# What the user says: what the library may choose from, best first.
CHOICES: dict[str, tuple[str, ...]] = {
    "auto": ("amx", "avx512-vnni-bf16", "avx512-vnni", "avx2"),
    "amx": ("amx",),
    "avx512": ("avx512-vnni-bf16", "avx512-vnni"),
    "avx2": ("avx2",),
    EMULATED: (EMULATED,),
    "off": (),
}
PHASES = ("embed", "norm and quantise", "matrix products", "rotary and cache write", "attention")
_FORMATS = {"int8": 0, "bf16": 1, "int4": 2}


# The structs mirror csrc/kernels.h and csrc/model.h.
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
            _FORMATS[packed.format],
            packed.group,
        )


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
    )


class CModel(Structure):
    """csrc: ModelSpec."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CLinear),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("positions", c_int64),
        ("layer_count", c_int32),
        ("width", c_int32),
        ("ffn", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("rotary_half", c_int32),
        ("epsilon", c_float),
        ("attention_scale", c_float),
    )


class CCache(Structure):
    """csrc: Cache."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
        ("position_stride", c_int64),
        ("rows", c_int64),
        ("capacity", c_int64),
        ("bf16", c_int32),
    )

    @classmethod
    def of(cls, cache: KVCache) -> CCache:
        strides = cache.keys.stride()[:4]
        bf16 = cache.keys.dtype == torch.bfloat16
        return cls(cache.keys.data_ptr(), cache.values.data_ptr(), *strides, cache.rows, cache.positions, int(bf16))


class CDraw(Structure):
    """csrc: DrawCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperature", "seeds", "first")),
        *((name, c_int64) for name in ("rows", "block", "stride", "vocabulary", "offset")),
        ("purpose", c_uint32),
    )


class CDocuments(Structure):
    """csrc: Documents."""

    _fields_ = (("text", c_void_p), ("places", c_void_p), ("tokens", c_void_p), ("count", c_int64))


class CAccept(Structure):
    """csrc: AcceptCall."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "guesses", "counts", "temperature", "seeds", "first")),
        *((name, c_int64) for name in ("rows", "most", "vocabulary")),
        ("packed", c_int32),
        ("purpose", c_uint32),
    )


class CRotary(Structure):
    """csrc: Rotary."""

    _fields_ = (("cosine", c_void_p), ("sine", c_void_p), ("half", c_int), ("positions", c_int64))


class CAttention(Structure):
    """csrc: Attention."""

    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_size_t),
        ("out", c_void_p),
        ("out_stride", c_size_t),
        ("positions", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("row_stride", c_size_t),
        ("head_stride", c_size_t),
        ("position_stride", c_size_t),
        ("bf16", ctypes.c_bool),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("dim", c_int),
        ("capacity", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("epsilon", c_float),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "pl_abi_version": (c_int, ()),
    "pl_source_hash": (c_char_p, ()),
    "pl_kernels": (c_void_p, (c_char_p,)),
    "pl_amx_obstacle": (c_char_p, ()),
    "pl_multiplies_correctly": (c_int, (c_void_p,)),
    "pl_pool_new": (c_void_p, (c_int,)),
    "pl_pool_free": (None, (c_void_p,)),
    "pl_arena_new": (c_void_p, (c_size_t,)),
    "pl_arena_free": (None, (c_void_p, c_size_t)),
    "pl_use_huge_pages": (None, (c_void_p, c_size_t)),
    "pl_model_new": (c_void_p, (c_void_p, c_void_p)),
    "pl_model_free": (None, (c_void_p,)),
    "pl_forward": (c_char_p, (*(c_void_p,) * 5, c_int, *(c_void_p,) * 3)),
    "pl_logits": (None, (c_void_p, c_void_p, c_void_p, c_int, c_void_p)),
    "pl_argmax": (None, (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p)),
    "pl_lookup": (c_int64, (*(c_void_p,) * 2, *(c_int64,) * 2, c_void_p, *(c_int64,) * 2, *(c_void_p,) * 3)),
    "pl_draw": (None, (c_void_p,) * 4),
    "pl_accept": (None, (c_void_p,) * 5),
    "pl_linear": (None, (*(c_void_p,) * 4, c_int, c_int, c_void_p, c_size_t)),
    "pl_quantise": (None, (c_void_p,) * 6),
    "pl_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_void_p)),
    "pl_embed": (None, (c_void_p, c_void_p, c_int64, c_void_p)),
    "pl_attend": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_int)),
    "pl_read": (c_uint64, (c_void_p, c_void_p, c_size_t)),
}


@dataclass(frozen=True)
class Kernels:
    """One instruction set of the loaded library."""

    library: ctypes.CDLL
    name: str
    handle: int


def library_path() -> Path:
    """Where the extension lies; PACELINE_BUILD_DIR names another directory (a sanitised build)."""
    return Path(os.environ.get("PACELINE_BUILD_DIR", build.PACKAGE)) / build.LIBRARY


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = library_path()
    if not path.exists():
        return "the C++ extension is not built (python -m paceline.kernels.build needs g++)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the C++ extension cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            return _STALE
        function.restype, function.argtypes = result, arguments
    here = build.source_hash()
    built_from = library.pl_source_hash().decode()
    if library.pl_abi_version() != ABI_VERSION or (here and here != built_from):
        return _STALE
    return library


_STALE = "the C++ extension was built from other sources (python -m paceline.kernels.build builds it anew)"


@cache
def available() -> tuple[Kernels, ...]:
    """What this machine can run, best first; empty without the extension."""
    return _named(CHOICES["auto"])


def _named(names: Sequence[str]) -> tuple[Kernels, ...]:
    """Those of the kernels that can run here."""
    library = _load()
    if isinstance(library, str):
        return ()
    handles = ((name, library.pl_kernels(name.encode())) for name in names)
    return tuple(Kernels(library, name, handle) for name, handle in handles if handle)


@cache
def emulated() -> tuple[Kernels, ...]:
    """The kernels for AMX with tiles in memory, where there is AVX-512 with bf16: for tests."""
    return _named(CHOICES[EMULATED])


def select(choice: str | None = None) -> Kernels | None:
    """The kernels for ``choice`` (default: what PACELINE_KERNELS says); None: run on the twin.

    Raises ParameterError if the choice is unknown or not available here.
    """
    choice = choice or os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ParameterError(VARIABLE, choice, f"one of {', '.join(CHOICES)}")
    for kernels in emulated() if choice == EMULATED else available():
        if kernels.name in CHOICES[choice]:
            return kernels
    if choice in ("auto", "off"):
        return None
    raise ParameterError(VARIABLE, choice, f"not available here; there is {_describe_available()}")


def amx_obstacle() -> str:
    """Why a CPU that has AMX does not use it; empty if it does, has none, or there is no extension."""
    library = _load()
    return "" if isinstance(library, str) else str(library.pl_amx_obstacle().decode())


def why_none() -> str:
    """Why ``select("auto")`` found nothing, or an empty string."""
    library = _load()
    if isinstance(library, str):
        return library
    return "" if available() else "this CPU has neither AVX-512 with VNNI nor AVX2"


def _describe_available() -> str:
    names = ", ".join(kernels.name for kernels in available()) or f"nothing: {why_none()}"
    return f"{names} ({amx_obstacle()})" if amx_obstacle() else names


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie."""
    return None if tensor is None else tensor.data_ptr()


def use_huge_pages(kernels: Kernels, tensor: Tensor) -> None:
    """Ask for huge pages under a large tensor that is read in short pieces: the cache."""
    kernels.library.pl_use_huge_pages(tensor.data_ptr(), tensor.nbytes)


class Pool:
    """Threads that stay. One for each number of threads in the process: target and draft model share it."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self.handle = library.pl_pool_new(threads)


_pools: dict[int, Pool] = {}
# A forked child has none of its parent's threads: it must make its own.
os.register_at_fork(after_in_child=_pools.clear)


def pool(kernels: Kernels, threads: int) -> Pool:
    """The process's pool of so many threads."""
    if threads < 1:
        raise ParameterError("threads", threads, "at least 1")
    if threads not in _pools:
        _pools[threads] = Pool(kernels.library, threads)
    return _pools[threads]


def widest_pool(kernels: Kernels) -> Pool:
    """The pool with the most threads that models made; without one, the caller's thread alone."""
    return max(_pools.values(), key=lambda pool: pool.threads, default=None) or pool(kernels, 1)


class Arena:
    """Memory in huge pages for all weights of a model, handed out in the order in which they are read."""

    def __init__(self, library: ctypes.CDLL, nbytes: int) -> None:
        self._library, self._nbytes, self._used = library, nbytes, 0
        self._address = library.pl_arena_new(max(nbytes, 1))
        if not self._address:
            raise MemoryError(f"no memory for {nbytes} bytes of weights")
        self._memory = torch.frombuffer(
            (ctypes.c_uint8 * max(nbytes, 1)).from_address(self._address), dtype=torch.uint8
        )

    def take(self, nbytes: int) -> Tensor:
        """The next ``nbytes``, aligned to a cache line."""
        start = -(-self._used // 64) * 64
        self._used = start + nbytes
        if self._used > self._nbytes:
            raise MemoryError(f"the arena of {self._nbytes} bytes is too small")
        return self._memory[start : self._used]

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self._library.pl_arena_free(self._address, max(self._nbytes, 1))


class NativeDecoder:
    """A decoder in the library. Keeps alive what the library points to."""

    def __init__(self, kernels: Kernels, model: CModel, keep: object, threads: int) -> None:
        self.kernels, self._model, self._keep = kernels, model, keep
        self._library, self._threads = kernels.library, threads
        self._handle = kernels.library.pl_model_new(ctypes.addressof(model), kernels.handle)

    @property
    def _pool(self) -> int:
        return int(pool(self.kernels, self._threads).handle)

    def forward(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, cache: CCache, hidden: Tensor, seconds: Tensor | None
    ) -> str | None:
        """Fill hidden [N, width]; returns what is wrong with the input, or None. seconds: adds up time by PHASES."""
        place, laps = ctypes.addressof(cache), address(seconds)
        flat = tokens.data_ptr(), rows.data_ptr(), positions.data_ptr(), tokens.shape[0]
        problem = self._library.pl_forward(self._handle, self._pool, *flat, place, hidden.data_ptr(), laps)
        return None if problem is None else str(problem.decode())

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        """Hidden [M, width] -> out [M, vocab]."""
        self._library.pl_logits(self._handle, self._pool, hidden.data_ptr(), hidden.shape[0], out.data_ptr())

    def argmax(self, hidden: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Hidden [M, width] -> the largest logit's token and value, [M] each."""
        place = hidden.data_ptr(), hidden.shape[0], tokens.data_ptr(), values.data_ptr()
        self._library.pl_argmax(self._handle, self._pool, *place)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.pl_model_free(self._handle)


__all__ = [
    "Arena",
    "CAccept",
    "CAttention",
    "CCache",
    "CDocuments",
    "CDraw",
    "CLayer",
    "CLinear",
    "CModel",
    "CRotary",
    "Kernels",
    "NativeDecoder",
    "Pool",
]
__all__ += [
    "EMULATED",
    "PHASES",
    "VARIABLE",
    "address",
    "amx_obstacle",
    "available",
    "emulated",
    "library_path",
    "pool",
    "select",
    "use_huge_pages",
    "why_none",
    "widest_pool",
]
