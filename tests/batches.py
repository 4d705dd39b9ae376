"""Batches as an engine makes them: with the compiled kernels' operations if they are available."""

from collections.abc import Sequence

import torch

from paceline.core.batch import Batch, RowStart
from paceline.kernels.cpu import cpu_ops


def new_batch(capacity: int, positions: int, vocab_size: int, device: torch.device | str = "cpu") -> Batch:
    return Batch(capacity, positions, vocab_size, device, cpu_ops(torch.device(device)))


def filled(starts: Sequence[RowStart], positions: int, vocab_size: int, free: int = 0) -> Batch:
    """A batch whose rows all decode, row i in slot i. free: slots behind them."""
    batch = new_batch(len(starts) + free, positions, vocab_size)
    for slot, start in enumerate(starts):
        batch.set_row(slot, start)
    batch.set_live(range(len(starts)))
    return batch
