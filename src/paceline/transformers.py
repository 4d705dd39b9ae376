"""``transformers``' own generate, for batches and with an assistant, decoded by paceline."""

from paceline.integrations.transformers import generate

__all__ = ["generate"]
