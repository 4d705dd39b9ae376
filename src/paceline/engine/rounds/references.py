"""The references of the live rows' requests, on the device, where captured rounds search them for n-gram drafts."""

from __future__ import annotations

import torch

from paceline.core.batch import Batch, ParallelSample, RequestGroup
from paceline.core.uploads import store
from paceline.kernels.gpu.graphs import Upload
from paceline.kernels.gpu.lookup import SEPARATOR


class References:
    """Reference texts by slot, in tensors that never move.

    table: [R, P] int64, the texts of each slot's request one after the other, with ``SEPARATOR`` between them; what
        exceeds P tokens is left out. size: [R] int64, tokens in each slot's line.
    """

    def __init__(self, batch: Batch) -> None:
        self.table = torch.zeros((batch.capacity, batch.positions), dtype=torch.int64, device=batch.device)
        self._sizes = [0] * batch.capacity
        self._upload = Upload(batch.device, self._sizes)
        self.size = self._upload.device
        self._groups: list[RequestGroup | None] = [None] * batch.capacity  # whose references the table holds

    def follow(self, batch: Batch) -> bool:
        """Store the references of rows that have joined. Returns whether a live row has any."""
        groups = [_with_references(sample) for sample in batch.samples]
        for slot, group in zip(batch.slots, groups, strict=True):
            if group is not self._groups[slot]:
                self._store(slot, group)
        self._upload.set(self._sizes)
        return any(groups)

    def _store(self, slot: int, group: RequestGroup | None) -> None:
        texts = () if group is None else group.references
        tokens = [token for text in texts for token in (*text, SEPARATOR)][: self.table.shape[1]]
        store(self.table[slot, : len(tokens)], tokens)
        self._sizes[slot], self._groups[slot] = len(tokens), group


def _with_references(sample: ParallelSample | None) -> RequestGroup | None:
    return sample.group if sample is not None and sample.group.references else None
