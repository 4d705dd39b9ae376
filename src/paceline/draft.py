"""Import path of ``paceline.core.draft`` for plugins."""

from paceline.core.draft import Draft, Verdict

__all__ = ["Draft", "Verdict"]
