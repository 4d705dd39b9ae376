"""Options of ``LLM`` under the names that other engines have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from paceline.config import EngineConfig, EngineOptions
from paceline.config.familiar import speculation_of, translated
from paceline.config.ranges import Number, names_of
from paceline.core.hardware import available_memory, resolve_device, total_memory
from paceline.errors import ParameterError

T = TypeVar("T")
_KNOWN = frozenset({*names_of(EngineConfig), "draft_model"})


def familiar_options(given: Mapping[str, Any], draft_model: T | None = None) -> tuple[EngineOptions, T | str | None]:
    """The engine's own options and the draft model that the options of a call mean.

    ``speculative_config`` is vLLM's. ``gpu_memory_utilization`` becomes the memory limit: this share of the device's
    memory, at most what is free.
    Raises ParameterError for options that contradict each other.
    """
    options = translated(given, _KNOWN)
    model: T | str | None = draft_model
    if "draft_model" in options:
        model = _only("draft_model", options.pop("draft_model"), draft_model)
    if (config := options.pop("speculative_config", None)) is not None:
        wanted = speculation_of(config, EngineConfig.num_speculative_tokens)
        for name in ("drafter", "num_speculative_tokens"):
            if name in options:
                raise ParameterError("speculative_config", config, f"given alone, without {name}")
            options[name] = getattr(wanted, name)
        if wanted.draft_model is not None:
            model = _only("speculative_config", wanted.draft_model, model)
    if (share := options.pop("gpu_memory_utilization", None)) is not None:
        Number(0.01, 1).take("gpu_memory_utilization", share)
        if options.get("memory_limit") is not None:
            raise ParameterError("gpu_memory_utilization", share, "left out beside memory_limit, in bytes")
        device = resolve_device(options.get("device", EngineConfig.device))
        options["memory_limit"] = min(int(share * total_memory(device)), available_memory(device))
    return cast(EngineOptions, options), model


def _only(name: str, value: str, draft_model: object) -> str:
    if draft_model is not None:
        raise ParameterError(name, value, "left out beside draft_model, which names one already")
    return value
