"""The plot: requests per second, time to first token and between tokens, by clients."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl

PANELS = (
    ("requests_per_s", None, "requests per second"),
    ("ttft_ms_p50", "ttft_ms_p99", "time to first token, ms"),
    ("itl_ms_p50", "itl_ms_p99", "time between tokens, ms"),
)
MARKERS = "osD^vPX"  # in turn


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Plot medians over the repeats; solid: p50, dashed: p99. Failed contenders are listed with their error."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 4.4), layout="constrained")
    for axis, (solid, dashed, title) in zip(axes, PANELS, strict=True):
        for contender, marker in zip(document["contenders"], cycle(MARKERS), strict=False):
            _line(axis, contender, marker, solid, dashed)
        axis.set(title=title, xlabel="clients", xscale="log", yscale="log")
        axis.set_xticks(document["settings"]["clients"], labels=list(map(str, document["settings"]["clients"])))
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{document['model']}, {document['dtype']}, {document['machine']['cpu']}; solid: p50, dashed: p99")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _line(axis: Any, contender: Mapping[str, Any], marker: str, solid: str, dashed: str | None) -> None:
    loads, name = contender["loads"], contender["name"]
    if contender["status"] == "failed":
        name += f" (failed: {contender['error'][:40]})"
    clients = [load["clients"] for load in loads]
    (line,) = axis.plot(clients, [load[solid] for load in loads], marker=marker, label=name)
    if dashed is not None:
        axis.plot(clients, [load[dashed] for load in loads], "--", marker=marker, color=line.get_color(), alpha=0.6)
