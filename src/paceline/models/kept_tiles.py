"""Which tiles multiply a model's 8-bit matrices fastest on this GPU: timed while it is loaded, and kept on disk.

A choice is one for a matrix' shape, a number of rows, a format and a GPU, whatever model it is of. What was timed by
another version or on another GPU has another name and is never read. What a load has no time for the next one times.
``PACELINE_TILE_CACHE=off`` keeps nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
import triton

from paceline.core.hardware import machine_name
from paceline.kernels.gpu.linear import CANDIDATES, ROW_TILES, Format, Linears, LinearTile, Shape, SmallRowLinear, Timer
from paceline.models.kept import Kept
from paceline.version import __version__

log = logging.getLogger("paceline")

VARIABLE = "PACELINE_TILE_CACHE"
SECONDS = 60.0  # most that a load takes for this; kernels are compiled for it, a second each
Tiles: TypeAlias = dict[Shape, LinearTile | None]
METHOD = 2  # one more whenever a kernel changes: choices of another one are not read


def kernel_seconds(function: Callable[[], object]) -> float:
    """The median of some calls on CUDA, each with a cold second-level cache, as weights find it in a forward pass."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=2, rep=8, return_mode="median")) / 1e3


@dataclass(frozen=True)
class KeptTiles:
    """The choices for one GPU, format of weights and type of activations, on disk (perhaps not yet)."""

    machine: str
    to: Format
    dtype: str

    @property
    def document(self) -> Kept[Tiles]:
        versions = METHOD, __version__, torch.__version__, triton.__version__, [asdict(tile) for tile in CANDIDATES]
        return Kept("tiles", VARIABLE, [asdict(self), versions], _read)

    def load(self) -> Tiles:
        """What is known; nothing if it cannot be read."""
        return self.document.load() or {}

    def save(self, tiles: Tiles) -> None:
        """Keep the choices; warns if that is not possible."""
        self.document.save([(*shape, None if tile is None else asdict(tile)) for shape, tile in sorted(tiles.items())])


def _read(lines: Any) -> Tiles:
    return {(n, k, m): None if tile is None else LinearTile(**tile) for n, k, m, tile in lines}


def tune(
    layers: Sequence[SmallRowLinear],
    linears: Linears,
    dtype: torch.dtype,
    *,
    timer: Timer = kernel_seconds,
    seconds: float = SECONDS,
) -> None:
    """Let ``linears`` know the fastest tile of each layer's shape and each number of rows: from disk, or timed now.

    The fewest rows come first: those of decoding. What ``seconds`` do not suffice for takes the first candidate.
    """
    device = layers[0].weight.values.device
    kept = KeptTiles(machine_name(device), linears.to, str(dtype))
    found, timed, began = kept.load(), 0, time.perf_counter()
    wanted = {linears.shape(layer, rows): (layer, rows) for rows in ROW_TILES for layer in layers}
    for shape, (layer, rows) in wanted.items():
        x = torch.zeros(rows, shape[1], dtype=dtype, device=device)
        if shape in found and found[shape] in linears.candidates(layer, x):  # others could write anywhere
            linears.tiles[shape] = found[shape]
        elif time.perf_counter() - began < seconds:
            linears.tiles[shape], timed = linears.fastest(layer, x, timer), timed + 1
    if timed:
        kept.save(found | linears.tiles)
        left = len(wanted.keys() - linears.tiles.keys())
        log.info("timed the tiles of %d products in %.1f s; %d are left", timed, time.perf_counter() - began, left)
