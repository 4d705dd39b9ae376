"""The name that plugins know ``paceline.core.row_keeper`` by."""

from paceline.core.row_keeper import PerRow, RowKeeper, RowKeepers

__all__ = ["PerRow", "RowKeeper", "RowKeepers"]
