"""Autotuning of the Triton tiles for 8-bit and 4-bit products: timed while a model is loaded, and cached on disk.

A choice depends on the shape of the matrix, the number of rows, the weight format and the GPU, but not on the model.
Files of other versions and other GPUs have other names and are never read. Shapes that one load has no time for are
timed by the next load. ``PACELINE_TILE_CACHE=off`` disables the cache.
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
from paceline.kernels.gpu.linear import (
    CANDIDATES,
    FOUR_BIT_CANDIDATES,
    Format,
    Linears,
    LinearTile,
    Shape,
    SmallRowLinear,
    Timer,
    is_right,
)
from paceline.models.files.kept import CachedDocument
from paceline.version import __version__

log = logging.getLogger("paceline")

VARIABLE = "PACELINE_TILE_CACHE"
SECONDS = 60.0  # time limit of one load's tuning; compiling a kernel takes about one second
Tiles: TypeAlias = dict[Shape, LinearTile | None]
METHOD = 5  # version of the kernels: raise it when a kernel changes, which discards older choices


def kernel_seconds(function: Callable[[], object]) -> float:
    """Least seconds of some calls on CUDA, each with a cold L2 cache, as in a forward pass.

    The least, because a host that launches late only adds time: medians of one kernel were 13 to 51 µs.
    """
    from triton.testing import do_bench

    return float(do_bench(function, warmup=2, rep=8, return_mode="min")) / 1e3


@dataclass(frozen=True)
class CachedTiles:
    """The cached tile choices for one GPU, weight format and activation dtype."""

    machine: str
    to: Format
    dtype: str

    @property
    def document(self) -> CachedDocument[Tiles]:
        versions = (
            METHOD,
            __version__,
            torch.__version__,
            triton.__version__,
            [asdict(tile) for tile in (*CANDIDATES, *FOUR_BIT_CANDIDATES)],
        )
        return CachedDocument("tiles", VARIABLE, [asdict(self), versions], _read)

    def load(self) -> Tiles:
        """Read the choices; empty if there is no usable file."""
        return self.document.load() or {}

    def save(self, tiles: Tiles) -> None:
        """Write the choices; warns if that is not possible."""
        self.document.save([(*shape, None if tile is None else asdict(tile)) for shape, tile in sorted(tiles.items())])


def _read(lines: Any) -> Tiles:
    return {(kind, n, k, m): None if tile is None else LinearTile(**tile) for kind, n, k, m, tile in lines}


def tune(
    layers: Sequence[SmallRowLinear],
    linears: Linears,
    dtype: torch.dtype,
    *,
    timer: Timer = kernel_seconds,
    seconds: float = SECONDS,
) -> None:
    """Fill ``linears.tiles`` with the fastest tile for each layer shape and number of rows, from disk or timed now.

    Small numbers of rows come first, because decoding uses those. Shapes that are not timed within ``seconds`` use
    the first right candidate, which is found at their first use. Deterministic products use it from the start, because
    they have the same tiles on every machine: ParameterError if there is none.

    No tile is used whose product is not torch's but for rounding, whether it was timed or kept.
    """
    device = layers[0].weight.tensors()[0].device
    if linears.deterministic:
        for layer in layers:
            linears.tile(layer, torch.empty(1, layer.weight.inputs, dtype=dtype, device=device))
        return
    kept = CachedTiles(machine_name(device), linears.to, str(dtype))
    found, timed, began = kept.load(), 0, time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    wanted = {linears.shape(layer, rows): (layer, rows) for rows in linears.row_tiles for layer in layers}
    for shape, (layer, rows) in wanted.items():
        x = torch.randn(rows, layer.weight.inputs, dtype=dtype, device=device, generator=generator)
        tile = found.get(shape)
        # Only known candidates are run: a tile from a damaged file could write out of bounds.
        known = shape in found and tile in linears.candidates(layer, x)
        if known and (tile is None or is_right(layer, x, tile, layer.run(x, None))):
            linears.tiles[shape] = tile
        elif time.perf_counter() - began < seconds:
            linears.tiles[shape], timed = linears.fastest(layer, x, timer), timed + 1
    if timed:
        kept.save(found | linears.tiles)
        missing, took = len(wanted.keys() - linears.tiles.keys()), time.perf_counter() - began
        log.info("timed the tiles of %d matrix products in %.1f s; %d are left for the next load", timed, took, missing)
