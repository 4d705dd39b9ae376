"""How the generative model types of transformers run, from ``benchmarks/results/model-survey.json``."""

from __future__ import annotations

import json
from pathlib import Path

RUN = Path(__file__).parents[1] / "results" / "model-survey.json"
STATES = {
    "kernels": "natively, on the CPU kernels",
    "torch": "natively, in torch",
    "transformers": "through transformers' code",
    "whole texts": "likewise, but every pass computes whole texts",
    "refused": "refused, with the reason",
    "wrong": "another text than transformers'",
    "untried": "not tried: no text alone, or transformers does not run the small model",
}


def states() -> list[tuple[str, ...]]:
    """The rows: state, number of model types, and their names where paceline runs them itself."""
    types = json.loads(RUN.read_text())["types"]
    rows: list[tuple[str, ...]] = []
    for state, meaning in STATES.items():
        names = sorted(name for name, result in types.items() if result["state"] == state)
        listed = "" if state in ("refused", "wrong", "untried") else ", ".join(f"`{name}`" for name in names)
        rows.append((meaning, str(len(names)), listed))
    return rows
