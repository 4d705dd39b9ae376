"""Attention over ragged rows: one protocol, a dictionary of backends."""

from __future__ import annotations

from collections.abc import Callable

from paceline.attention.base import Attend, AttentionBackend, Plan
from paceline.attention.padded import PaddedAttention
from paceline.attention.split import SplitAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"padded": PaddedAttention, "split": SplitAttention}

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "Plan"]
