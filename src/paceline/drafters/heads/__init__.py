"""Trained heads: small networks that read a target's inner streams and draft token its next tokens."""
