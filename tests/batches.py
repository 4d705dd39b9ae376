"""Batches as an engine makes them: with the compiled kernels' operations if they are available."""

import torch

from paceline.core.batch import Batch
from paceline.kernels.cpu import cpu_ops


def new_batch(capacity: int, positions: int, vocab_size: int, device: torch.device | str = "cpu") -> Batch:
    return Batch(capacity, positions, vocab_size, device, cpu_ops(torch.device(device)))
