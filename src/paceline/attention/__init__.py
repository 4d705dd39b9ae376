"""Attention over ragged rows: one protocol, a dictionary of backends."""

from __future__ import annotations

from collections.abc import Callable

from paceline.attention.base import Attend, AttentionBackend, Plan
from paceline.attention.padded import PaddedAttention
from paceline.attention.split import SplitAttention


def _ragged() -> AttentionBackend:
    from paceline.attention.ragged import RaggedAttention  # needs triton

    return RaggedAttention()


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "padded": PaddedAttention,
    "split": SplitAttention,
    "ragged": _ragged,
}

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "Plan"]
