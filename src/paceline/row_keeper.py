"""Import path of ``paceline.core.row_keeper`` for plugins."""

from paceline.core.row_keeper import PerRow, RowKeeper, RowKeepers

__all__ = ["PerRow", "RowKeeper", "RowKeepers"]
