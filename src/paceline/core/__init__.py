"""The algorithm as values and pure functions: nodes, drafts, batch, sampling, acceptance rules, the KV cache."""
