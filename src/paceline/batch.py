"""Import path of ``paceline.core.batch`` for plugins. ``Wish`` is the former name of ``SpeculationPlan``."""

from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.batch import SpeculationPlan as Wish

__all__ = ["Batch", "SpeculationPlan", "Wish"]
