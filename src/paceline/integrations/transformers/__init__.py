"""Beside transformers: its ``generate``, for batches and with an assistant, decoded by paceline."""

from paceline.integrations.transformers.generate import generate as generate

__all__ = ["generate"]
