"""Import path of ``paceline.core.batch`` for plugins."""

from paceline.core.batch import Batch, SpeculationPlan

__all__ = ["Batch", "SpeculationPlan"]
