"""The algorithm as values and pure functions: drafts, the batch, sampling, acceptance rules and the KV cache."""
