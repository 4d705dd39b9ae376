"""Trains drafters: a head that reads its target's streams, on texts that the target wrote itself."""
