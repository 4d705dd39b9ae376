"""What an engine would take of a machine's memory: its admission's own numbers, for a model that is not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from paceline.config import EngineConfig
from paceline.config.limits import MAX_ROWS
from paceline.core.hardware import available_memory, resolve_device, resolve_dtype
from paceline.engine.memory import default_length, fit_memory, most_that_fit, plan_memory, row_bytes
from paceline.errors import CapacityError, ParameterError
from paceline.models.base import AnyModel, FlatModel
from paceline.models.files.boundary import Source
from paceline.models.load.planned import planned_model
from paceline.models.load.prepare import ModelOptions, would_run_natively

LENGTHS = (512, 4096, 16384, 65536)  # tokens of a row, as far as the model's own limit allows


@dataclass(frozen=True)
class CachePlan:
    """Memory of keys and values in one dtype.

    tokens: of each row. row_bytes: bytes of one row. rows_that_fit: rows of this length beside weights and workspace.
    """

    kv_cache_dtype: str
    tokens: int
    row_bytes: int
    rows_that_fit: int


@dataclass(frozen=True)
class EnginePlan:
    """Memory of an engine in bytes.

    memory: of the machine, as far as it is free, or as it was given. weights, states, workspace: see ``MemoryPlan``.
    rows, positions: what the engine would start with; 0 where not even one row fits. note: why it is less than by
    default, or what is missing. caches: by dtype and length.
    """

    model: str
    runs: str
    memory: int
    weights: int
    states: int
    workspace: int
    rows: int
    positions: int
    note: str
    caches: tuple[CachePlan, ...]


def plan_engine(source: Source, config: EngineConfig, memory: int | None = None) -> EnginePlan:
    """Plan an engine without a draft model, from the model's configuration and the headers of its files.

    memory: bytes of the device, which may be another machine's; None: those that are free on it now.
    Raises ParameterError, and the errors of ``planned_model``.
    """
    elsewhere = memory is not None and config.device == "cuda"
    device = torch.device("cuda") if elsewhere else resolve_device(config.device)
    model = planned_model(source, _options(source, config, device))
    config = config.resolved(draft_model=False)
    memory = available_memory(device) if memory is None else memory
    positions = config.max_model_len or default_length(model, None, config, model.max_positions)
    free = memory - model.weight_bytes()
    try:
        fitted = fit_memory(model, None, config, positions, free)
        rows, positions, note = fitted.rows, fitted.positions, fitted.note
    except CapacityError as error:
        rows, positions, note = 0, 0, str(error)
    plan = plan_memory(model, None, config, rows or 1, positions or LENGTHS[0])
    return EnginePlan(
        model=model.name,
        runs=_runs(model),
        memory=memory,
        weights=plan.weights,
        states=plan.states,
        workspace=plan.workspace,
        rows=rows,
        positions=positions,
        note=note,
        caches=tuple(_caches(model, config, free)),
    )


def _options(source: Source, config: EngineConfig, device: torch.device) -> ModelOptions:
    """Return how ``load`` would load the model."""
    if config.dtype == "auto" and (device.type == "cuda" or would_run_natively(source, device, config.attention)):
        dtype = torch.bfloat16
    else:
        dtype = resolve_dtype(config.dtype, device)
    return ModelOptions(dtype, device, config.attention, config.quantization, config.deterministic)


def _runs(model: AnyModel) -> str:
    precision = str(model.dtype).removeprefix("torch.")
    if isinstance(model, FlatModel):
        return f"{model.quantization or precision} on the CPU kernels"
    return f"{getattr(model, 'precision', precision)} in torch on {model.device.type}"


def _caches(model: AnyModel, config: EngineConfig, free: int) -> Iterator[CachePlan]:
    """Yield the plans of the dtype that was asked for, and of int8, where the model's backend has it."""
    lengths = sorted({*(length for length in LENGTHS if length < model.max_positions), model.max_positions})
    for name in dict.fromkeys((config.kv_cache_dtype, "int8")):
        of_dtype = replace(config, kv_cache_dtype=name)
        try:
            sizes = [row_bytes(model, None, of_dtype, length) for length in lengths]
        except ParameterError:
            if name == config.kv_cache_dtype:
                raise
            return
        for length, size in zip(lengths, sizes, strict=True):
            yield CachePlan(name, length, size, most_that_fit(model, of_dtype, length, free, MAX_ROWS))
