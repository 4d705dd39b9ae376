"""Beside transformers: its ``generate``, for batches and with an assistant, decoded by paceline."""

from paceline.transformers.generate import generate as generate

__all__ = ["generate"]
