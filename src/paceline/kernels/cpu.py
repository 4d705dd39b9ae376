"""The C++ implementation of ``core.ops.HostOps``: tokens from logits in one or two passes per row.

Each operation is tested against the plain torch code of ``core.sampling``, ``core.acceptance`` and ``core.rows``.
Shapes: B rows, L places, V vocabulary, k draft tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.core.values import (
    Accepted,
    DrawInputs,
    DrawRows,
    Entries,
    Gained,
    LogprobTensors,
    TextRows,
    evenly_spaced,
)
from paceline.kernels import abi, native
from paceline.kernels.structs import address, text_rows


@cache
def chosen() -> native.Kernels | None:
    """The kernels that PACELINE_KERNELS selects, read once: reading it each round would cost 20 us."""
    return native.select()


def cpu_ops(device: torch.device) -> CpuOps | None:
    """Operations of the compiled kernels for a batch on this device; None: plain torch runs instead."""
    kernels = chosen() if device.type == "cpu" else None
    return None if kernels is None else CpuOps(kernels)


class CpuOps:
    """``HostOps`` by one set of the compiled kernels; runs on the thread pool that is current at each call."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._library, self._handle, self._kernels = kernels.library, kernels.handle, kernels

    @property
    def _pool(self) -> int:
        return int(native.current_pool(self._kernels).handle)

    def draw(self, places: DrawInputs, purpose: int) -> Tensor:
        tokens = torch.empty(places.rows, places.block, dtype=torch.int64)
        call, _alive = _call(places, purpose)
        self._library.pl_draw(self._handle, self._pool, ctypes.addressof(call), tokens.data_ptr())
        return tokens

    def probabilities(self, places: DrawInputs) -> Tensor:
        found = torch.empty(places.rows, places.block, places.vocabulary, dtype=torch.float32)
        call, _alive = _call(places)
        self._library.pl_probabilities(self._handle, self._pool, ctypes.addressof(call), found.data_ptr())
        return found

    def likelihood(self, places: DrawInputs, tokens: Tensor) -> Tensor:
        tokens, found = tokens.contiguous(), torch.empty(places.rows, places.block, dtype=torch.float32)
        call, _alive = _call(places)
        given = ctypes.addressof(call), tokens.data_ptr(), found.data_ptr()
        self._library.pl_likelihood(self._handle, self._pool, *given)
        return found

    def accept(self, places: DrawInputs, purpose: int, scored: Tensor | None = None) -> Accepted:
        tokens = torch.zeros(places.rows, places.block, dtype=torch.int64)
        accepted = torch.zeros(places.rows, dtype=torch.int64)
        path = places.identity_path()
        own = None if scored is None else torch.zeros(places.rows, places.block, dtype=torch.float32)
        call, _alive = _call(places, purpose)
        given = ctypes.addressof(call), tokens.data_ptr(), accepted.data_ptr()
        optional = (address(tensor) for tensor in (path, scored, own))
        self._library.pl_accept(self._handle, self._pool, *given, *optional)
        return Accepted(tokens, accepted, path, None if own is None else LogprobTensors.alone(own))

    def logprobs(self, logits: Tensor, gained: Gained, wanted: Sequence[int]) -> LogprobTensors:
        logits = evenly_spaced(logits)
        rows, block = gained.tokens.shape
        vocabulary = logits.shape[-1]
        most = min(max(wanted), vocabulary)
        own, values = (torch.zeros(shape, dtype=torch.float32) for shape in ((rows, block), (rows, block, most)))
        ids = torch.zeros(rows, block, most, dtype=torch.int64)
        counts = torch.tensor([min(count, vocabulary) for count in wanted])
        inputs = {"tokens": gained.tokens, "accepted": gained.accepted, "wanted": counts, "counts": gained.counts}
        inputs = {name: tensor.contiguous() for name, tensor in inputs.items()}
        call = abi.CLogprobCall(
            logits=logits.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in inputs.items()},
            rows=rows,
            block=block,
            stride=logits.stride(-2),
            vocabulary=vocabulary,
            most=most,
            packed=logits.dim() == 2,
            own=own.data_ptr(),
            ids=ids.data_ptr(),
            values=values.data_ptr(),
        )
        self._library.pl_logprobs(self._handle, self._pool, ctypes.addressof(call))
        return LogprobTensors(own, ids, values)

    def commit(self, rows: TextRows, slots: Tensor, tokens: Tensor, accepted: Tensor) -> list[int]:
        tokens, accepted, gained = tokens.contiguous(), accepted.contiguous(), torch.empty_like(accepted)
        count, block = tokens.shape
        text = text_rows(*rows)
        given = tokens.data_ptr(), block, accepted.data_ptr(), count, gained.data_ptr()
        self._library.pl_gain(ctypes.addressof(text), slots.data_ptr(), *given)
        numbers: list[int] = gained.tolist()
        return numbers


def _call(places: DrawInputs, purpose: int = 0) -> tuple[abi.CDrawCall, Tensor | None]:
    """The C arguments for these places, and a tensor that must outlive the call."""
    instead = places.masked_logits
    addresses = None if instead is None else torch.tensor([0 if t is None else t.data_ptr() for t in instead])
    call = abi.CDrawCall(
        by=described(places.draw_rows),
        logits=places.logits.data_ptr(),
        instead=address(addresses),
        draft_tokens=address(places.draft),
        counts=address(places.counts),
        parents=address(places.parents),
        rows=places.rows,
        block=places.block,
        stride=places.logits.stride(-2),
        vocabulary=places.vocabulary,
        draft_stride=0 if places.draft is None else places.draft.shape[1],
        first=places.first,
        packed=places.packed,
        purpose=purpose,
    )
    return call, addresses


_DESCRIBED: WeakKeyDictionary[DrawRows, tuple[abi.CDrawRows, Tensor | None]] = WeakKeyDictionary()


def described(rows: DrawRows) -> abi.CDrawRows:
    """The C description of the rows, by address; made once for each ``rows``, because it takes time."""
    found = _DESCRIBED.get(rows)
    if found is None:
        found = _DESCRIBED[rows] = _describe(rows)
    return found[0]


def _describe(rows: DrawRows) -> tuple[abi.CDrawRows, Tensor | None]:
    """The C description, and a tensor that must live as long."""
    made = abi.CDrawRows(
        temperature=rows.temperature.data_ptr(), seeds=rows.seeds.data_ptr(), length=rows.positions.data_ptr()
    )
    deepest = None if rows.cuts is None else -rows.cuts.floor
    if rows.cuts is not None:
        made.deepest, made.top_k, made.top_p = (address(t) for t in (deepest, rows.cuts.top_k, rows.cuts.top_p))
    if rows.truncation is not None:
        for name, cutoffs in rows.truncation._asdict().items():
            setattr(made, name, cutoffs.data_ptr())
    if rows.penalties is not None:
        made.presence, made.frequency, made.repetition, made.text, made.prompt_length = (
            tensor.data_ptr() for tensor in rows.penalties
        )
        made.text_stride = rows.penalties.text.stride(0)
    if rows.minimum is not None:
        made.min_length, made.stops = rows.minimum.length.data_ptr(), _entries(rows.minimum.stops)
    if rows.bias is not None:
        made.bias = _entries(rows.bias)
    made.slots = address(rows.slots)
    return made, deepest


def _entries(entries: Entries) -> abi.CEntries:
    return abi.CEntries(**{name: tensor.data_ptr() for name, tensor in entries._asdict().items()})
