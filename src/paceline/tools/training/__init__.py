"""Training of drafters (heads and distilled draft models) on texts that the target wrote itself."""
