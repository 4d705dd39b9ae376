"""Trained heads: small networks that read a target's inner streams and guess its next tokens."""

from paceline.heads.checkpoint import is_head, load_head, read_head_config, save_head
from paceline.heads.config import HeadConfig
from paceline.heads.decoder import HeadDecoder, HeadModel
from paceline.heads.feature import FeatureHead, Step, Unrolled
from paceline.heads.loading import find_head, load_head_for

__all__ = [
    "FeatureHead",
    "HeadConfig",
    "HeadDecoder",
    "HeadModel",
    "Step",
    "Unrolled",
    "find_head",
    "is_head",
    "load_head",
    "load_head_for",
    "read_head_config",
    "save_head",
]
