"""Rounds: the algorithm, the places that run it, the choice of a place, and the loop of launched and read rounds."""
