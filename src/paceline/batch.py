"""The name that plugins know ``paceline.core.batch`` by."""

from paceline.core.batch import Batch, Wish

__all__ = ["Batch", "Wish"]
