"""The cost of an engine's rounds: from a profile, an earlier engine, or the disk; else measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from paceline.core.cache_budget import KVCacheBudget
from paceline.engine.description import EngineDescription
from paceline.engine.rounds.kernels import NativeRound
from paceline.errors import ParameterError
from paceline.lengths.calibration import Calibration, Grid, ProgressBar
from paceline.lengths.cost import CostTable
from paceline.lengths.kept_costs import KeptCosts, kept_or_measured
from paceline.lengths.profile import Profile
from paceline.models.files.fingerprint import is_from_files


class RoundCosts:
    """Costs of the rounds of one engine.

    engine: what it runs. room: memory of its caches. own_threads: sets the threads that a round has.

    Raises ParameterError if the configuration names a profile of another engine.
    """

    def __init__(
        self, engine: EngineDescription, room: KVCacheBudget, own_threads: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._engine, self._room, self._own_threads = engine, room, own_threads
        self._profile = self._load_profile()

    def profile(self) -> Profile:
        """Return the profile. Raises ParameterError if there is none."""
        if self._profile is None:
            raise ParameterError("profile", None, "the file of a profile; make one with: paceline profile")
        return self._profile

    def table(self) -> CostTable:
        """Return costs from the profile, an earlier engine on these models, or the disk; else measure them."""
        if self._profile is not None:
            return self._profile.costs
        config, known = self._engine.config, self._engine.models.costs
        sizes = config.rows, self._longest_measured, self._engine.threads
        key = (
            config.drafter,
            self._engine.parts.drafter.width,
            config.draft_vocab_size,
            config.attention,
            config.kv_cache_dtype,
            config.acceptance,
            self._engine.device_round is None,
            *sizes,
        )
        if key not in known:
            with self._own_threads():
                grid = Grid.coarse(config.rows, on_gpu=self._engine.models.target.device.type == "cuda")
                calibration = self._calibration(grid)
                known[key] = kept_or_measured(calibration, self._stored_costs())
        return known[key]

    def measure(self, grid: Grid, progress: ProgressBar) -> CostTable:
        """Measure the cost of the rounds of a grid. It overwrites caches."""
        with self._own_threads():
            return self._calibration(grid).run(progress)

    def _calibration(self, grid: Grid) -> Calibration:
        parts = self._engine.parts
        natively = partial(NativeRound.of, parts.target, rule=parts.accept, threads=self._engine.threads)
        return Calibration(
            parts.target, parts.drafter, parts.accept, grid, self._engine.device_round, natively, self._room
        )

    def _stored_costs(self) -> KeptCosts | None:
        """Return where costs are stored between processes; None if a model was not loaded from files."""
        draft = self._engine.models.draft if self._engine.config.asks_draft_model else None
        if not all(is_from_files(model) for model in (self._engine.models.target, draft) if model is not None):
            return None
        return KeptCosts(self._engine.identity(), self._engine.config.rows, self._longest_measured)

    @property
    def _longest_measured(self) -> int:
        """The longest sequence as far as costs depend on it: no longer contexts are measured."""
        return min(self._engine.fitted.positions, self._engine.config.DEFAULT_MAX_MODEL_LEN)

    def _load_profile(self) -> Profile | None:
        if self._engine.config.profile is None:
            return None
        profile = Profile.load(Path(self._engine.config.profile))
        profile.check(self._engine.identity())
        return profile
