"""A model divided among ranks on the CPU kernels, in bfloat16 or quantised: the bits are one process's.

The ranks exchange activations within a forward pass through memory that all of them map (csrc/ranks.h).
Instructions and hidden states come from rank 0 as in ``leading``.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import RankError
from paceline.kernels import native
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import DecoderSpec
from paceline.models.native.division import division_of, part_of
from paceline.models.native.matrices import Outcome, unread_spec
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import check_reference
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.leading import CacheShape, Leading, MirroredCache, RankProcesses
from paceline.models.parallel.plan import Op, Step

_MEMORY = Path("/dev/shm")  # Linux's file system in memory
_END = 0  # byte of the exchange that ends it


def new_exchange(spec: DecoderSpec, ranks: int) -> Path:
    """Make the file in which the ranks of a model exchange activations. Raises RankError without memory for it."""
    division = division_of(spec, ModelShard(0, ranks))
    nbytes = native.exchange_bytes(native.required(), division)
    descriptor, name = tempfile.mkstemp(prefix="paceline-ranks-", dir=_MEMORY if _MEMORY.is_dir() else None)
    try:
        if hasattr(os, "posix_fallocate"):  # memory that is missing later would end the process
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.truncate(descriptor, nbytes)
    except OSError as error:
        Path(name).unlink()
        raise RankError(f"no memory for {nbytes} bytes that {ranks} ranks exchange ({error}); free some") from error
    finally:
        os.close(descriptor)
    return Path(name)


def open_exchange(path: Path) -> Tensor:
    """Map the file that rank 0 made, uint8."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


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
        division = replace(division_of(whole.spec, shard), memory=memory)
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

    def _check_exchange(self) -> None:
        if self.packed_decoder.decoder.ranks_ended:
            raise RankError("another rank ended in a pass, or did not answer for a minute")
