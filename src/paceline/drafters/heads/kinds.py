"""The module class for each kind of head."""

from __future__ import annotations

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.transfer import TransferHead


def make_head(config: HeadConfig) -> Head:
    """A head with this configuration. Its weights are not set."""
    return TransferHead(config) if config.kind == "hidden_transfer" else FeatureHead(config)
