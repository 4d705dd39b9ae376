"""Weights and forward passes: files, loading, tokenizers, decoders, models that several processes share."""
