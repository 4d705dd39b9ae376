"""Put a trained head into the package: without the rows that are its target's.

    python -m release.head RUN smollm2-135m

RUN: the directory of ``paceline train-draft --output``. Every row that tokens are said with must be the target's.
Beside it lies a card, README.md, that says how it was made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from paceline.drafters.heads.checkpoint import load_head, save_head
from paceline.models.files.hub import own_head, resolve
from paceline.models.load.loading import load_embedding, load_output


def ship(run: Path, target: str) -> Path:
    """The directory that it is in now."""
    source = resolve(target)
    embedding = load_embedding(source, dtype=torch.bfloat16)
    head = load_head(run, dtype=torch.bfloat16, embedding=embedding)
    rows = load_output(source, dtype=torch.bfloat16)
    if not torch.equal(head.lm_head.weight, rows[head.targets]):
        raise SystemExit(f"{run}: its rows are not those of {target}; a head that has learnt its own keeps them")
    name = own_head(target)
    if name is None:
        raise SystemExit(f"{target} has no head in paceline.models.files.hub.HEADS")
    directory = resolve(name)
    save_head(head, directory, output=False)
    return directory


if __name__ == "__main__":
    place = ship(Path(sys.argv[1]), sys.argv[2])
    print(place, f"{sum(file.stat().st_size for file in place.iterdir()) / 1e6:.1f} MB")
