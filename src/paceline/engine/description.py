"""What runs in an engine, in words: for people, and as the mark of what was measured with it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.hardware import machine_name
from paceline.drafters.heads.native import NativeHead
from paceline.engine.assembly import Models
from paceline.engine.device_round import DeviceRound
from paceline.engine.memory import GIB
from paceline.engine.native_round import plays_rounds, why_host
from paceline.engine.pipeline import why_not_device
from paceline.engine.round import Speculation
from paceline.lengths.profile import Identity
from paceline.models.base import AnyModel, FlatModel
from paceline.models.fingerprint import model_hash
from paceline.models.prepare import why_not_native


@dataclass(frozen=True)
class Running:
    """What an engine runs, and on how many CPU threads; ``runner`` plays the device's rounds, where it plays any."""

    models: Models
    config: EngineConfig
    parts: Speculation
    runner: DeviceRound | None
    threads: int
    max_model_len: int
    room: KVCacheBudget

    def identity(self) -> Identity:
        """What a profile of this engine is measured for."""
        target, draft = self.models.target, self.models.draft if self.config.asks_draft_model else None
        return Identity(
            machine=machine_name(target.device),
            device=target.device.type,
            threads=self.threads,
            target=model_hash(target),
            drafter=_drafter_identity(self.config, draft) + self._describe_width(),
            precision=_precision(target) if draft is None else f"{_precision(target)}, draft {_precision(draft)}",
            attention=self._played_with(target),
            acceptance=self.config.acceptance,
        )

    def _played_with(self, target: AnyModel) -> str:
        """Attention, and who plays rounds: both decide what a round takes."""
        attention = "native" if isinstance(target, FlatModel) else self.parts.target.backend.name
        return attention if self.runner is None else f"{attention}, rounds by the device"

    def describe(self) -> str:
        """What runs and why, in one line."""
        config, drafter = self.config, self.parts.drafter
        draft_tokens = "no speculation"
        draft = self.models.draft if drafter.decoders else None
        if who := drafter.describe(None if draft is None else _describe_model(draft)):
            length = self.parts.policy.describe() + self._describe_width()
            draft_tokens = f"drafter {who}, length {length}, acceptance {config.acceptance}"
            if config.synthetic_acceptance is not None:
                draft_tokens += " (a benchmark: guesses are kept by chance, the text means nothing)"
        return (
            f"target {_describe_model(self.models.target)}, {self.threads} threads; {draft_tokens}; "
            f"attention {self._describe_attention()}; {self._describe_rounds()}"
            f"{config.max_batch_size} rows of {self.max_model_len} tokens{self._describe_room()}"
            f"{', prompts read anew (prefix_cache=False)' if not config.prefix_cache else ', prefixes reused'}"
        )

    def _describe_width(self) -> str:
        """Nothing to say of chains."""
        width = self.parts.drafter.width
        return "" if width == 1 else f", width {width}"

    def _describe_room(self) -> str:
        """What they may take; where they may have to wait for memory, too."""
        room = self.room
        full = f"they grow: {room.max_rows(room.positions)} of that length at once, " if room.is_short else ""
        return f" ({full}{room.limit / GIB:.2f} GiB)"

    def _describe_attention(self) -> str:
        if isinstance(self.models.target, FlatModel):
            return "native (ragged, batch-invariant)"
        why = why_not_native(self.models.target, self.config.attention)
        kind = " (deterministic)" if self.config.deterministic else ""
        return self.parts.target.backend.name + kind + (f" (not native: {why})" if why else "")

    def _describe_rounds(self) -> str:
        """Nothing to say where a CPU's host plays them. Those that need the host (``suits``) it plays everywhere."""
        why = why_not_device(self.parts)
        if self.runner is not None and why is None:
            how = "CUDA graphs" if self.runner.graphs.captures else "uncaptured"
            return f"rounds by the device ({how}, {self.runner.ops.name} kernels); "
        if plays_rounds(self.models.target):
            return f"{self._describe_kernels_rounds()}; "
        if self.models.target.device.type != "cuda":
            return ""
        shared = self.config.tensor_parallel > 1 and self.config.rounds == "auto"
        why = why or ("ranks share the target" if shared else "rounds='host'")
        return f"rounds by the host ({why}); "

    def _describe_kernels_rounds(self) -> str:
        if why := why_host(self.parts.target, self.parts.accept):
            return f"rounds by the host ({why})"
        left = " (part by part: guesses drawn by a law of their own)" if self.parts.drafter.has_probabilities else ""
        return f"rounds by the kernels{left}"


def _drafter_identity(config: EngineConfig, draft: AnyModel | None) -> str:
    name = "None" if config.drafter_kind is None else config.drafter_kind.name
    return name if draft is None else f"{name} {model_hash(draft)}"


def _describe_model(model: AnyModel) -> str:
    where = "" if isinstance(model, FlatModel | NativeHead) else f" on {model.device}"
    return f"{model.name} ({_precision(model)}{where})"


def _precision(model: AnyModel) -> str:
    precision = str(model.dtype).removeprefix("torch.")
    if isinstance(model, FlatModel):
        return f"{model.quantization or precision} on the CPU kernels {model.kernels}"
    return str(getattr(model, "precision", precision))
