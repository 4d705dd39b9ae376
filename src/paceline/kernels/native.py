"""The extension, loaded with ctypes.

``PACELINE_KERNELS`` chooses the instruction set: ``auto`` (the default: the best that this CPU has), one of ``SETS``,
    ``avx512`` (the best with AVX-512), or ``off`` (models run in torch). An unavailable choice is an error, never
    replaced. The sets of ``EMULATED`` run the kernels for AMX with tiles in memory, and those for AVX-VNNI with
    AVX-512's instruction: for tests where the CPU lacks them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.cpus import Node
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import abi, build, pack
from paceline.kernels.abi import (
    INTERFACE,
    SIGNATURES,
    STRUCTS,
    CCache,
    CDraftCall,
    CKept,
    CLinear,
    CModelSpec,
    CRoundCall,
    NewObject,
    Problem,
)
from paceline.kernels.spec import Division
from paceline.kernels.structs import address

_log = logging.getLogger("paceline.kernels")

VARIABLE = "PACELINE_KERNELS"
# Instruction sets, best first: of 64-bit x86, then of Arm.
SETS = (
    *("amx", "avx512-vnni-bf16", "avx512-vnni", "avx-vnni", "avx512-bw", "avx2"),
    *("neon-i8mm-bf16", "neon-dotprod"),
)
EMULATED = ("amx-emulated", "avx-vnni-emulated")
# The user's choices -> instruction sets that the library may pick from, best first.
CHOICES: dict[str, tuple[str, ...]] = {
    "auto": SETS,
    "avx512": tuple(name for name in SETS if name.startswith("avx512")),
    **{name: (name,) for name in (*SETS, *EMULATED)},
    "off": (),
}
PHASES = ("embed", "norm and quantise", "matrix products", "rotary and cache write", "attention")


@dataclass(frozen=True)
class Kernels:
    """One instruction set of the loaded library."""

    library: ctypes.CDLL
    name: str
    handle: int


def library_path() -> Path:
    """Path of the extension."""
    return build.directory() / build.LIBRARY


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none; a library that exists but cannot be used is logged as a warning."""
    path = library_path()
    if not path.exists():
        return f"the C++ extension is not built ({build.how_to_build()})"
    loaded = _open(path)
    if isinstance(loaded, str):
        _log.warning("%s; models run in torch, many times slower", loaded)
    return loaded


def _open(path: Path) -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the C++ extension cannot be loaded: {error}"
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            return _STALE
        function.restype, function.argtypes = result, arguments
        if result in _READERS:
            function.errcheck = _READERS[result]
    here = build.source_hash()
    built_from = library.pl_source_hash().decode()
    if library.pl_interface().decode() != INTERFACE or (here and here != built_from):
        return _STALE
    if field := _misplaced(library.pl_layout()):
        return f"the C++ extension has {field} elsewhere than kernels/abi.py ({build.how_to_build()})"
    return library


def _misplaced(layout: int) -> str | None:
    """The first struct or field whose size or offset differs from those at ``layout``, which the compiler noted."""
    expected: dict[str, int] = {}
    for struct in STRUCTS:
        expected[struct.__name__] = ctypes.sizeof(struct)
        names = sorted(field[0] for field in struct._fields_)
        expected |= {f"{struct.__name__}.{name}": getattr(struct, name).offset for name in names}
    compiled = (ctypes.c_int32 * len(expected)).from_address(layout)
    return next((name for name, here in zip(expected, compiled, strict=True) if expected[name] != here), None)


def _problem(returned: Problem, *_: object) -> str | None:
    """The error message about a call's input, or None. Raises MemoryError if the call found no memory."""
    if returned.value == _OUT_OF_MEMORY:
        raise MemoryError(_NO_MEMORY)
    return None if returned.value is None else returned.value.decode()


def _address(returned: NewObject, *_: object) -> int:
    """The address of a new object. Raises MemoryError if there was no memory for it."""
    if returned.value is None:
        raise MemoryError(_NO_MEMORY)
    return returned.value


_OUT_OF_MEMORY = b"out of memory"  # csrc: kOutOfMemory
_NO_MEMORY = "no memory for the CPU kernels: free some, or lower max_batch_size or max_model_len"
_READERS: dict[type | None, Callable[..., Any]] = {Problem: _problem, NewObject: _address}
_STALE = f"the C++ extension was built from other sources ({build.how_to_build()})"


@cache
def available() -> tuple[Kernels, ...]:
    """The instruction sets that this machine can run, best first; empty without the extension."""
    return _named(CHOICES["auto"])


def _named(names: Sequence[str]) -> tuple[Kernels, ...]:
    """The named instruction sets that can run here."""
    library = _load()
    if isinstance(library, str):
        return ()
    handles = ((name, library.pl_kernels(name.encode())) for name in names)
    return tuple(Kernels(library, name, handle) for name, handle in handles if handle)


@cache
def emulated() -> tuple[Kernels, ...]:
    """The emulated sets, where there is the AVX-512 that they need: for tests."""
    return _named(EMULATED)


def select(choice: str | None = None) -> Kernels | None:
    """The kernels for ``choice`` (default: PACELINE_KERNELS); None: models run in torch.

    Raises ParameterError if the choice is unknown or not available here.
    """
    choice = choice or os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ParameterError(VARIABLE, choice, f"one of {', '.join(CHOICES)}")
    for kernels in emulated() if choice in EMULATED else available():
        if kernels.name in CHOICES[choice]:
            return kernels
    if choice in ("auto", "off"):
        return None
    raise ParameterError(VARIABLE, choice, f"not available here; available: {_describe_available()}")


def required() -> Kernels:
    """The kernels that PACELINE_KERNELS selects. Raises ModelFormatError if there are none."""
    kernels = select()
    if kernels is None:
        raise ModelFormatError(f"the CPU kernels are not available: {why_off()}")
    return kernels


def why_not(name: str) -> str:
    """Why the instruction set cannot run here; empty if it can, or there is no extension."""
    library = _load()
    return "" if isinstance(library, str) else str(library.pl_obstacle(name.encode()).decode())


def faster_obstacle(running: str) -> str:
    """A faster instruction set than the ``running`` one and why it does not run; empty without one.

    A set that the processor has is named before those that it lacks, and of those the next faster one.
    running: any other name than those of ``SETS`` is slower than all of them.
    """
    faster = SETS[: SETS.index(running)] if running in SETS else SETS
    reasons = [f"not {name}: {reason}" for name in faster if (reason := why_not(name)) not in ("", _NO_KERNELS)]
    return next((reason for reason in reasons if not reason.endswith(_LACKING)), reasons[-1] if reasons else "")


_LACKING = "the processor has none"
_NO_KERNELS = "this library has no kernels of this name"


def why_none() -> str:
    """Why ``select("auto")`` found nothing, or an empty string."""
    library = _load()
    if isinstance(library, str):
        return library
    return "" if available() else f"this CPU has none of {', '.join(SETS)}"


def why_off() -> str:
    """Why ``select()`` returns None."""
    return why_none() or f"{VARIABLE} is off"


def _describe_available() -> str:
    names = [kernels.name for kernels in available()]
    obstacle = faster_obstacle(names[0] if names else "")
    return (", ".join(names) or f"nothing: {why_none()}") + (f" ({obstacle})" if obstacle else "")


class Pool:
    """A pool of threads, shared by target and draft model.

    nodes: NUMA nodes between which the threads are divided; empty: the system places them.
    Raises ParameterError if the system refuses a thread.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, nodes: Sequence[Node] = ()) -> None:
        self.threads, self.nodes, self._library = threads, tuple(nodes), library
        cpus = [cpu for node in nodes for cpu in node.cpus]
        numbers, counts = [node.number for node in nodes], [len(node.cpus) for node in nodes]
        lists = [(ctypes.c_int32 * len(values))(*values) for values in (numbers, counts, cpus)]
        self.handle = library.pl_pool_new(threads, len(nodes), *map(ctypes.addressof, lists))
        if not self.handle:
            raise ParameterError("threads", threads, "fewer: the system refuses to start so many")

    def end(self) -> None:
        """End the threads; the pool must not be used any more."""
        self._library.pl_pool_free(self.handle)

    def place(self, packed: pack.Packed) -> None:
        """Bind a layer's pages, which nobody has written yet, to the nodes whose threads read them.

        Raises OSError if the system refuses.
        """
        panels = -(-packed.outputs // abi.PANEL)
        size = packed.weights.nbytes // panels
        if error := self._library.pl_place(self.handle, packed.weights.data_ptr(), panels, size):
            raise OSError(error, os.strerror(error))


_pools: dict[tuple[int, tuple[Node, ...]], Pool] = {}
# A forked child has none of its parent's threads and must make its own. A model whose call ran during the fork stays
# locked in the child.
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_pools.clear)


def pool(kernels: Kernels, threads: int, nodes: tuple[Node, ...] = ()) -> Pool:
    """The process's pool with this number of threads on these NUMA nodes.

    Raises ParameterError below 1, or if they cannot be started.
    """
    if threads < 1:
        raise ParameterError("threads", threads, "at least 1")
    if (threads, nodes) not in _pools:
        _pools[threads, nodes] = Pool(kernels.library, threads, nodes)
    return _pools[threads, nodes]


_wanted: ContextVar[tuple[int, tuple[Node, ...]] | None] = ContextVar("threads of the kernels", default=None)


@contextmanager
def kernel_threads(threads: int, nodes: tuple[Node, ...] = ()) -> Iterator[None]:
    """Run the kernels with this number of threads inside the context, for this thread's calls only.

    nodes: NUMA nodes between which the threads are divided, and the weights that are packed or read in the context.
    """
    before = _wanted.set((threads, nodes))
    try:
        yield
    finally:
        _wanted.reset(before)


def current_pool(kernels: Kernels, threads: int | None = None) -> Pool:
    """Return the pool of ``kernel_threads``, or one with ``threads`` threads (default: torch's number)."""
    return pool(kernels, *(_wanted.get() or (threads or torch.get_num_threads(), ())))


def node_pool(kernels: Kernels) -> Pool | None:
    """Return the pool of ``kernel_threads`` if it is divided between NUMA nodes."""
    wanted = _wanted.get()
    return pool(kernels, *wanted) if wanted is not None and wanted[1] else None


class Arena:
    """Memory in huge pages for all weights of a model, handed out in the order in which they are read.

    Raises MemoryError if it cannot be allocated.
    """

    def __init__(self, library: ctypes.CDLL, nbytes: int) -> None:
        self._library, self._nbytes, self._used = library, nbytes, 0
        self._address = library.pl_arena_new(max(nbytes, 1))
        if not self._address:
            what_to_do = "free some, or choose a smaller model or quantization"
            raise MemoryError(f"no memory for {nbytes} bytes of weights: {what_to_do}")
        self._memory = torch.frombuffer(
            (ctypes.c_uint8 * max(nbytes, 1)).from_address(self._address), dtype=torch.uint8
        )

    def take(self, nbytes: int) -> Tensor:
        """The next ``nbytes`` as uint8, aligned to a cache line. Raises MemoryError if the arena is full."""
        start = -(-self._used // 64) * 64
        self._used = start + nbytes
        if self._used > self._nbytes:
            raise MemoryError(f"the arena of {self._nbytes} bytes is too small")
        return self._memory[start : self._used]

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self._library.pl_arena_free(self._address, max(self._nbytes, 1))


def _layers(taps: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(taps))(*taps)


_NO_TAPS = _layers(()), None


def exchange_bytes(kernels: Kernels, division: Division) -> int:
    """Bytes of the memory in which the ranks of a divided model exchange activations."""
    return int(kernels.library.pl_exchange_bytes(division.ranks, division.numbers_at_once))


def multiply(kernels: Kernels, linear: CLinear, x: Tensor, out: Tensor) -> None:
    """Fill out [N, outputs] with the products of a packed layer and x [N, padded inputs], both float32."""
    place = current_pool(kernels).handle, ctypes.addressof(linear), x.data_ptr(), x.shape[0]
    kernels.library.pl_linear(kernels.handle, *place, 0, out.data_ptr(), out.shape[1])


class NativeDecoder:
    """A decoder in the library; keeps the tensors alive that the library points to.

    Every method that runs the library raises MemoryError if that finds no memory; the decoder can be used again.
    """

    def __init__(self, kernels: Kernels, model: CModelSpec, keep: object, threads: int) -> None:
        self.kernels, self._model, self._keep = kernels, model, keep
        self._library, self._threads = kernels.library, threads
        self._handle = kernels.library.pl_model_new(ctypes.addressof(model), kernels.handle)

    @property
    def _pool(self) -> int:
        return int(current_pool(self.kernels, self._threads).handle)

    def forward(
        self,
        nodes: Nodes,
        cache: CCache,
        hidden: Tensor | None,
        tapped: tuple[Sequence[int], Tensor] | None,
        seconds: Tensor | None,
        entering: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> str | None:
        """Fill hidden [N - read - text, width]; returns an error message about the input, or None.

        hidden: None if only keys, values and features are wanted.
        tapped: layer indices, and features [N - read, taps, width] to fill with the hidden states that enter those
            layers.
        seconds: adds the seconds of each of PHASES.
        entering: input of the first layer [N, width], float32, in place of the tokens' embeddings.
        ends: last position [N] int64 that each token sees in layers that look ahead; None: its own. A row's tokens up
            to there are among the nodes.
        """
        place, laps = ctypes.addressof(cache), address(seconds)
        tree = (None, None) if nodes.parents is None else (address(nodes.slots), nodes.parents.data_ptr())
        where = nodes.rows.data_ptr(), nodes.positions.data_ptr()
        flat = nodes.tokens.data_ptr(), *where, *tree, nodes.tokens.shape[0], nodes.read, nodes.text
        taps, features = _NO_TAPS if tapped is None else (_layers(tapped[0]), tapped[1].data_ptr())
        out = address(hidden), taps, len(taps), features
        given = *flat, place, *out, laps, address(entering), address(ends)
        problem: str | None = self._library.pl_forward(self._handle, self._pool, *given)
        return problem

    def round(self, call: CRoundCall, cache: CCache, seconds: Tensor | None, threads: int | None) -> str | None:
        """Verify, accept, commit; returns an error message about the input, or None."""
        given = ctypes.addressof(call), ctypes.addressof(cache), address(seconds)
        pool = current_pool(self.kernels, threads or self._threads).handle
        problem: str | None = self._library.pl_round(self._handle, pool, *given)
        return problem

    @property
    def handle(self) -> int:
        """Address of the decoder, for calls on another decoder. This object must be kept alive."""
        return int(self._handle)

    def keep_fused(self, kept: CKept, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        """For a head: fuse features [N, taps, target width] and keep them at rows, slots [N] int64."""
        where = rows.data_ptr(), slots.data_ptr(), features.data_ptr(), rows.shape[0]
        self._library.pl_keep_fused(self._handle, self._pool, ctypes.addressof(kept), *where)

    def inject(self, kept: CKept, cache: CCache, rows: Tensor, positions: Tensor) -> str | None:
        """For a block drafter: store keys and values of tokens whose fused states were kept.

        rows, positions: [N] int64. Returns an error message about the input, or None.
        """
        where = rows.data_ptr(), positions.data_ptr(), rows.shape[0]
        given = ctypes.addressof(kept), ctypes.addressof(cache), *where
        problem: str | None = self._library.pl_inject(self._handle, self._pool, *given)
        return problem

    def draft(self, call: CDraftCall, cache: CCache) -> str | None:
        """For a head: read the tokens it has not computed, then draft; returns an error message about the input, or
        None.
        """
        given = ctypes.addressof(call), ctypes.addressof(cache), None
        problem: str | None = self._library.pl_draft(self._handle, self._pool, *given)
        return problem

    @property
    def ranks_ended(self) -> bool:
        """Whether the exchange with other ranks has ended: what passes then give is of no use."""
        return bool(self._library.pl_ranks_ended(self._handle))

    def experts_read(self) -> int:
        """Number of experts whose weights were read so far, all layers and passes together."""
        return int(self._library.pl_experts_read(self._handle))

    def logits(self, hidden: Tensor, out: Tensor, head: CLinear | None = None) -> None:
        """Hidden [M, width] -> out [M, outputs of the head]. head: an output head; None: the model's own."""
        other = None if head is None else ctypes.addressof(head)
        self._library.pl_logits(self._handle, self._pool, hidden.data_ptr(), hidden.shape[0], out.data_ptr(), other)

    def copy_columns(self, source: CLinear, columns: Tensor, destination: CLinear, places: Tensor) -> None:
        """Copy packed columns [N] int64 of a layer to places [N] int64 of another. Raises ParameterError."""
        read = ctypes.addressof(source), columns.data_ptr()
        write = ctypes.addressof(destination), places.data_ptr()
        problem = self._library.pl_copy_columns(self._pool, *read, *write, len(columns))
        if problem is not None:
            raise ParameterError("columns", f"[{len(columns)}]", problem)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.pl_model_free(self._handle)
