"""Trained heads: small networks that predict the next tokens from a target's hidden states."""
