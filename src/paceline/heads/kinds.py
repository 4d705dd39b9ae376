"""Which module a head's configuration is of."""

from __future__ import annotations

from paceline.heads.config import HeadConfig
from paceline.heads.feature import FeatureHead
from paceline.heads.head import Head
from paceline.heads.transfer import TransferHead


def make_head(config: HeadConfig) -> Head:
    """Its weights are not set."""
    return TransferHead(config) if config.kind == "hidden_transfer" else FeatureHead(config)
