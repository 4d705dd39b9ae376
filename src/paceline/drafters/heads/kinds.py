"""The module class for each kind of head."""

from __future__ import annotations

from collections.abc import Callable

from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_spec import BLOCK_KINDS
from paceline.drafters.heads.chimera import ChimeraHead
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.transfer import TransferHead

_CLASSES: dict[str, Callable[[HeadConfig], Head]] = {
    "hidden_transfer": TransferHead,
    "chimera": ChimeraHead,
    **dict.fromkeys(BLOCK_KINDS, BlockHead),
}


def make_head(config: HeadConfig) -> Head:
    """A head with this configuration. Its weights are not set."""
    return _CLASSES.get(config.kind, FeatureHead)(config)
