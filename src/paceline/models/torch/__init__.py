"""Forward passes in torch: one decoder for all descriptions, and transformers' own models."""
