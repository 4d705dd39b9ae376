"""Cost tables kept on disk, because a measurement takes a second or more, which short jobs notice.

Tables are kept (``models.files.kept``) for models loaded from files. A table from another machine, other weights or
another version is never read. ``PACELINE_COST_CACHE=off`` disables the cache.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass

import torch

from paceline.core.hardware import cpu_signature
from paceline.lengths.calibration import MAX_SPREAD, Calibration
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Identity
from paceline.models.files.kept import CachedDocument
from paceline.version import __version__

log = logging.getLogger("paceline")

VARIABLE = "PACELINE_COST_CACHE"
METHOD = 9  # version of ``Calibration``: increase it when the measurement changes, so that older tables are ignored


@dataclass(frozen=True)
class KeptCosts:
    """Place on disk for the cost table of one engine: its models, sizes and machine. It may be empty.

    identity: as in a profile. max_batch_size, max_model_len: the engine's, in rows and tokens; they decide which sizes
    are measured.
    """

    identity: Identity
    max_batch_size: int
    max_model_len: int

    @property
    def table(self) -> CachedDocument[CostTable]:
        versions = METHOD, __version__, torch.__version__, cpu_signature()
        return CachedDocument("costs", VARIABLE, [asdict(self), versions], CostTable.from_json)

    def agrees(self, table: CostTable, plain_ms: float) -> bool:
        """Whether the table is still plausible. plain_ms: a plain round of one row, measured now.

        A table with a much slower plain round was measured on a busy machine. A faster one is no reason to measure
        again: the machine is busy now, and the policy corrects the table from real rounds.
        """
        kept_ms = table.verify_ms(1, 0)
        if plain_ms * MAX_SPREAD >= kept_ms:
            return True
        log.info("the kept costs are discarded: a plain round took %.2f ms then, %.2f ms now", kept_ms, plain_ms)
        return False


def kept_or_measured(calibration: Calibration, keep: KeptCosts | None) -> CostTable:
    """The cost table kept by an earlier process if it is plausible, otherwise a new measurement, which is then kept.

    keep: place on disk; None: always measure, and keep nothing.
    """
    kept = None if keep is None else keep.table.load()
    if keep is not None and kept is not None and keep.agrees(kept, calibration.plain_ms()):
        return kept
    started = time.perf_counter()
    costs = calibration.run()
    log.info(
        "measured the cost of rounds in %.1f s: a plain round takes %.2f ms with 1 row, %.2f ms with %d rows",
        time.perf_counter() - started,
        costs.round_ms(1, 0),
        costs.round_ms(costs.batch_sizes[-1], 0),
        costs.batch_sizes[-1],
    )
    if keep is not None:
        keep.table.save(costs.as_json())
    return costs
