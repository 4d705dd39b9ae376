"""Costs that were measured once are kept on disk: measuring them takes a second or more, which a short job feels.

They are kept (``models.kept``) for models that come from files. What was measured on another machine, for other weights
or by another version is never read. ``PACELINE_COST_CACHE=off`` keeps nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass

import torch

from paceline.core.hardware import cpu_signature
from paceline.lengths.calibration import FASTER, Calibration
from paceline.lengths.cost import CostTable
from paceline.lengths.profile import Identity
from paceline.models.kept import CachedDocument
from paceline.version import __version__

log = logging.getLogger("paceline")

VARIABLE = "PACELINE_COST_CACHE"
METHOD = 4  # one more whenever ``Calibration`` measures something else: costs of another one are not read


@dataclass(frozen=True)
class KeptCosts:
    """The cost table of one engine's models, sizes and machine, on disk (perhaps not yet).

    identity: as of a profile. max_batch_size, max_model_len: the engine's, which decide what was measured.
    """

    identity: Identity
    max_batch_size: int
    max_model_len: int

    @property
    def table(self) -> CachedDocument[CostTable]:
        versions = METHOD, __version__, torch.__version__, cpu_signature()
        return CachedDocument("costs", VARIABLE, [asdict(self), versions], CostTable.from_json)

    def agrees(self, table: CostTable, plain_ms: float) -> bool:
        """Whether a round without draft tokens for one row, timed now, is not much faster than the table says.

        Slower rounds are no reason to measure: the machine is busy now, and the policy corrects the table as it plays.
        """
        told = table.verify_ms(1, 0)
        if plain_ms * FASTER >= told:
            return True
        log.info("the costs kept were measured on a busy machine (%.2f ms, now %.2f)", told, plain_ms)
        return False


def kept_or_measured(calibration: Calibration, keep: KeptCosts | None) -> CostTable:
    """What an earlier process kept, unless the machine was busy then; else measured now, and kept.

    keep: where; None: nowhere.
    """
    kept = None if keep is None else keep.table.load()
    if keep is not None and kept is not None and keep.agrees(kept, calibration.plain_ms()):
        return kept
    started = time.perf_counter()
    costs = calibration.run()
    log.info(
        "measured the cost of rounds in %.1f s: a plain one takes %.2f ms with 1 row, %.2f ms with %d",
        time.perf_counter() - started,
        costs.round_ms(1, 0),
        costs.round_ms(costs.batch_sizes[-1], 0),
        costs.batch_sizes[-1],
    )
    if keep is not None:
        keep.table.save(costs.as_json())
    return costs
