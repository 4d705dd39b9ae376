"""A model divided among ranks on the CPU kernels, in bfloat16 or quantised: the bits are one process's.

The ranks exchange activations within a forward pass through memory that all of them map (csrc/ranks.h).
Instructions and hidden states come from rank 0 as in ``leading``.
"""

from __future__ import annotations

import mmap
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_int64
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

import torch
from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import RankError
from paceline.kernels import native
from paceline.kernels.abi import CRoundCall
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import DecoderSpec
from paceline.models.native.division import division_of, part_of
from paceline.models.native.matrices import Outcome, unread_spec
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import check_reference
from paceline.models.parallel.group import PATIENCE, Ranks
from paceline.models.parallel.leading import CacheShape, Leading, MirroredCache, RankProcesses
from paceline.models.parallel.plan import Op, Step

_MEMORY = Path("/dev/shm")  # Linux's file system in memory
_END = 0  # byte of the exchange that ends it


@contextmanager
def new_exchange(spec: DecoderSpec, ranks: int) -> Iterator[str]:
    """Make the memory in which the ranks of a model exchange activations -> the name by which they open it.

    They must map it inside the context. On Linux and Windows it is no file with a name, so nothing is left if this
    process is killed. Raises RankError without memory for it.
    """
    nbytes = exchange_bytes(spec, ranks)
    with ExitStack() as stack:
        try:
            name = _named_memory(nbytes, stack)
        except OSError as error:
            what = f"{ranks} ranks exchange activations in {nbytes / 2**20:.1f} MiB of shared memory, which are missing"
            advice = f"free some, or enlarge {_MEMORY} (docker run --shm-size=1g)" if _MEMORY.is_dir() else "free some"
            raise RankError(f"{what} ({error}): {advice}") from error
        yield name


def exchange_bytes(spec: DecoderSpec, ranks: int) -> int:
    """Bytes in which the ranks of a model exchange activations."""
    return native.exchange_bytes(native.required(), division_of(spec, ModelShard(0, ranks)))


def _named_memory(nbytes: int, stack: ExitStack) -> str:
    """Make memory that lives until the stack ends or the last process that has mapped it does -> its name."""
    if sys.platform == "win32":
        name = f"paceline-{uuid.uuid4()}"
        stack.enter_context(mmap.mmap(-1, nbytes, tagname=name))
        return name
    file: IO[bytes]
    if _MEMORY.is_dir():
        file = stack.enter_context(TemporaryFile(dir=_MEMORY))  # noqa: SIM115 (the stack closes it)
        name = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        file = stack.enter_context(NamedTemporaryFile())  # noqa: SIM115
        name = file.name
    if hasattr(os, "posix_fallocate"):  # memory that is missing later would end the process
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:
        file.truncate(nbytes)
    return name


def open_exchange(name: str, nbytes: int) -> Tensor:
    """Map the memory that rank 0 made, uint8."""
    if sys.platform == "win32":
        return torch.frombuffer(mmap.mmap(-1, nbytes, tagname=name), dtype=torch.uint8)
    with Path(name).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


class NativePart(NativeModel):
    """A rank's part: its forward pass gives the whole model's result, if all ranks run it together.

    whole: the model's checkpoint, of which this part is packed. memory: what the ranks exchange activations in.
    Raises the errors of ``division_of``, and those of ``NativeModel.of``.
    """

    def __init__(
        self,
        whole: Checkpoint,
        shard: ModelShard,
        memory: Tensor,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
    ) -> None:
        check_reference(whole.spec)
        self.shard, self._memory = shard, memory
        patience = PATIENCE.total_seconds()
        division = replace(division_of(whole.spec, shard), memory=memory, patience=patience)
        part = part_of(unread_spec(whole, dtype, Outcome()), whole.spec, shard, division)
        super().__init__(part, whole.name, quantization=quantization)

    def cache_shape(self, rows: int, positions: int) -> CacheShape:
        """``KVCache``'s arguments, for the heads of this part."""
        return self.kv_layers, rows, positions, self.dtype, self.device


class LeadingNative(NativePart, Leading):
    """Rank 0's part."""

    def follow(self, ranks: Ranks, processes: RankProcesses) -> None:
        """Begin to lead the ranks, which wait for instructions."""
        self.ranks = ranks
        self.lead(processes)

    def on_rank_ended(self) -> None:
        self._memory[_END] = 1  # a pass that waits for the rank ends
        super().on_rank_ended()

    def _forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int], hidden: Tensor | None) -> Tensor | None:
        assert isinstance(cache, MirroredCache)
        numbers = cache.number, int(hidden is not None), nodes.read, nodes.text, *taps
        tokens = torch.stack([tensor for tensor in nodes[:5] if isinstance(tensor, Tensor)])
        with self.on_all_ranks(Step(Op.FORWARD, numbers, tokens)):
            features = super()._forward(nodes, cache, taps, hidden)
            self._check_exchange()
        return features

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, self.width).float().contiguous()
        with self.on_all_ranks(Step(Op.HEAD, (len(flat),))):
            self.ranks.send(flat)
            logits = super().logits(flat)
            self._check_exchange()
        return logits.view(*hidden.shape[:-1], -1)

    def run_round(self, call: CRoundCall, cache: KVCache, threads: int | None = None) -> None:
        assert isinstance(cache, MirroredCache)
        tokens, lengths = _tokens_of(call)
        with self.on_all_ranks(Step(Op.ROUND, (cache.number,), tokens)):
            super().run_round(call, cache, threads)
            self._check_exchange()
        if call.parents:
            paths = zip(_table(call.path, call.rows, call.draft_stride), _line(call.accepted, call.rows), strict=True)
            kept = [[*path[:accepted], *range(accepted, len(path))] for path, accepted in paths]
            moves = torch.tensor(
                [[*row, *path] for *row, path in zip(_line(call.slots, call.rows), lengths, kept, strict=True)]
            )
            self._pending.append(Step(Op.KEEP, (cache.number,), moves))

    def _check_exchange(self) -> None:
        if self.packed_decoder.decoder.ranks_ended:
            raise RankError(f"another rank ended in a pass, or did not answer for {PATIENCE.total_seconds():g} seconds")


def _tokens_of(call: CRoundCall) -> tuple[Tensor, list[int]]:
    """Tokens, rows and positions [3, N] of a round, of trees also slots and parents [5, N]; and the rows' lengths."""
    nodes: list[tuple[int, ...]] = []
    lengths = []
    stride, rows = call.draft_stride, call.rows
    parents = _table(call.parents, rows, stride) if call.parents else [list(range(-1, stride - 1))] * rows
    drafts = zip(_table(call.draft_tokens, rows, stride), parents, _line(call.counts, rows), strict=True)
    for slot, (drafted, parent_of, count) in zip(_line(call.slots, rows), drafts, strict=True):
        length, root = _number(call.text.length, slot), len(nodes)
        last = _number(call.text.text, slot * call.text.text_stride + length - 1)
        nodes.append((last, slot, length - 1, length - 1, -1))
        for draft in range(count):
            parent = root + 1 + parent_of[draft]
            nodes.append((drafted[draft], slot, nodes[parent][2] + 1, length + draft, parent))
        lengths.append(length)
    return torch.tensor(nodes).T[: 5 if call.parents else 3].contiguous(), lengths


def _number(address: int, place: int) -> int:
    return c_int64.from_address(address + 8 * place).value


def _line(address: int, count: int) -> list[int]:
    return list((c_int64 * count).from_address(address))


def _table(address: int, rows: int, columns: int) -> list[list[int]]:
    flat = _line(address, rows * columns) if columns else []  # without draft tokens there may be no address
    return [flat[row * columns : (row + 1) * columns] for row in range(rows)]
