"""The name that plugins know ``paceline.core.batch`` by; ``Wish`` is the earlier name of ``SpeculationPlan``."""

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.batch import SpeculationPlan as Wish

__all__ = ["Batch", "SpeculationPlan", "Wish"]
