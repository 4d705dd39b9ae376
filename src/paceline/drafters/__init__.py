"""Drafters, which propose draft tokens: n-gram lookup, draft models, heads (``config.registry.DRAFTERS``)."""

from paceline.config.registry import DRAFTERS
from paceline.drafters.base import Drafter, Equipment, Wrapper, make_drafter
from paceline.drafters.feature import FeatureDrafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.plain import NoDrafter

__all__ = [
    "DRAFTERS",
    "Drafter",
    "Equipment",
    "FeatureDrafter",
    "HybridDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Wrapper",
    "make_drafter",
]
