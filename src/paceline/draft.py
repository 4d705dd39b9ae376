"""The name that plugins know ``paceline.core.draft`` by."""

from paceline.core.draft import Draft, Verdict

__all__ = ["Draft", "Verdict"]
