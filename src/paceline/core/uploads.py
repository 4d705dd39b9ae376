"""Numbers of the host on a device, without waiting for what the device still runs.

``torch.tensor(..., device="cuda")`` and ``table[i] = x`` wait: a request that joins or leaves would end the overlap of
host and device. A copy that does not block reads ordinary memory before it returns, so the host may drop it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor [N] of the numbers on the device."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def store(table: Tensor, numbers: Sequence[float]) -> None:
    """Write the numbers to a tensor [N] of the same length, which may be a part of a larger one."""
    table.copy_(torch.tensor(numbers, dtype=table.dtype), non_blocking=True)
