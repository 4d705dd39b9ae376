"""Trained heads: small networks that read a target's inner streams and guess its next tokens."""
