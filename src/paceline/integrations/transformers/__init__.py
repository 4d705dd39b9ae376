"""A replacement of transformers' ``generate``: batches and assisted decoding, run by paceline."""

from paceline.integrations.transformers.generate import generate as generate

__all__ = ["generate"]
