"""Drafters: one protocol; the engine builds them."""

from paceline.drafters.base import Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.plain import NoDrafter

__all__ = ["Drafter", "HybridDrafter", "ModelDrafter", "NgramDrafter", "NoDrafter"]
