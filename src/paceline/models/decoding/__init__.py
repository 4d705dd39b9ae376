"""Models with a KV cache: forward passes over the rows of a batch, and a draft model's or head's drafts."""
