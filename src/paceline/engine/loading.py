"""Load the target, the draft model or head, and the tokenizer that an engine needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from rich.progress import TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from paceline.config import EngineConfig
from paceline.config.ranges import FileName
from paceline.core.hardware import resolve_device, resolve_dtype, threads_per_rank
from paceline.drafters.heads.assistant_loading import is_assistant
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.loading import load_head_for, runs_natively
from paceline.engine.threads import nodes_of_rank
from paceline.errors import ModelFormatError, ParameterError
from paceline.models.base import AnyModel
from paceline.models.description.shards import ModelShard
from paceline.models.files.boundary import Source, is_loaded, name_of
from paceline.models.load.adapters import attach
from paceline.models.load.loading import describe_source, lacks_head
from paceline.models.load.prepare import ModelOptions, load, why_not_native, would_run_natively
from paceline.models.text.tokenizer import Tokenizer
from paceline.progress import Line

log = logging.getLogger("paceline")
stages_log = logging.getLogger("paceline.loading")
TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase


class LoadingStages:
    """The stages of loading: on a terminal one line that changes, elsewhere a log line for each. line: the former."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def begin(self, stage: str) -> None:
        """Begin a stage, described in a few words."""
        self._line.change(what=stage, note="")
        if not self._line.is_shown:
            stages_log.info("%s", stage)

    def tell(self, share: float) -> None:
        """Show on the terminal how far the stage is."""
        self._line.change(note=f"{share:.0%}")


@contextmanager
def loading_stages(shown: bool) -> Iterator[LoadingStages]:
    """Context of loading a model. shown: whether a terminal shows the stages; else they are logged."""
    columns = TimeElapsedColumn(), TextColumn("{task.description} {task.fields[note]}", markup=False)
    with Line("", columns, shown=shown) as line:
        yield LoadingStages(line)


def load_dtype(
    config: EngineConfig, on_kernels: Callable[[], bool] = lambda: False, *, of_draft: bool = False
) -> torch.dtype:
    """Dtype in which the target is loaded or, with ``of_draft``, the draft model or head. Raises ParameterError.

    on_kernels: whether the CPU kernels will run it; asked where it matters. Then "auto" is bfloat16: without
        instructions for it they multiply in float32, but read half of the bytes.
    """
    device = resolve_device(config.device)
    own = of_draft and config.draft_dtype != "same"
    name, field = (config.draft_dtype, "draft_dtype") if own else (config.dtype, "dtype")
    dtype = resolve_dtype(name, device, field)
    return torch.bfloat16 if name == "auto" and dtype == torch.float32 and on_kernels() else dtype


def load_target(
    source: Source, config: EngineConfig, stages: LoadingStages, adapters: Mapping[str, Path] | None = None
) -> AnyModel:
    """Load the target or, with tensor parallelism, start the other ranks and load the part of rank 0.

    adapters: directories of LoRA adapters by name.
    """
    if adapters:
        return _load_adapted(source, config, stages, adapters)
    if config.tensor_parallel == 1:
        return _load(source, config, stages)
    from paceline.models.parallel.launch import lead, ranks_here

    device, share = resolve_device(config.device), ModelShard(0, config.tensor_parallel)
    here = ranks_here(share.ranks)
    threads = config.threads or threads_per_rank(here)
    one_machine = here == share.ranks
    dtype = load_dtype(config, lambda: one_machine and would_run_natively(source, device, config.attention))
    options = ModelOptions(dtype, device, config.attention, config.quantization)
    nodes = [nodes_of_rank(config, rank) for rank in range(share.ranks)]
    stages.begin(f"reading {name_of(source)} in {share.ranks} processes")
    return lead(source, share, options, threads, nodes)


def _load_adapted(
    source: Source, config: EngineConfig, stages: LoadingStages, adapters: Mapping[str, Path]
) -> AnyModel:
    """Load the target with adapters. Raises ParameterError for options that adapters do not go with."""
    for name, free in {"tensor_parallel": 1, "deterministic": False}.items():
        if getattr(config, name) != free:
            raise ParameterError(name, getattr(config, name), f"{free!r} with adapters")
    model = _load(source, config, stages)
    stages.begin(f"reading {len(adapters)} adapters")
    attach(model, adapters, describe_source(source))
    if reason := why_not_native(model, config.attention):
        log.info("%s with adapters runs through torch: %s", model.name, reason)
    return model


def load_draft(source: Source, config: EngineConfig, stages: LoadingStages) -> AnyModel:
    """Load the draft model in its own dtype and quantization. Raises ModelFormatError if it has no output head."""
    if lacks_head(source):
        raise ModelFormatError(f"{name_of(source)} has no output head (lm_head), so it cannot draft tokens")
    return _load(source, config, stages, of_draft=True)


def load_head(path: Path, source: Source, target: AnyModel, config: EngineConfig) -> HeadModel:
    """Load a trained draft head from a directory. source: where the target was loaded from."""
    if is_assistant(path) and config.draft_dtype in ("same", "auto"):
        dtype = target.dtype  # an assistant reads its target's cache, whose dtype the CPU kernels choose
    else:
        dtype = load_dtype(config, lambda: runs_natively(path, target), of_draft=True)
    return load_head_for(target, source, path, dtype=dtype, quantization=config.draft_quantization)


def _load(source: Source, config: EngineConfig, stages: LoadingStages, *, of_draft: bool = False) -> AnyModel:
    """Load a model for what runs it with these options."""
    device = resolve_device(config.device)
    dtype = load_dtype(config, lambda: would_run_natively(source, device, config.attention), of_draft=of_draft)
    quantization = config.quantization
    if of_draft and config.draft_quantization != "same":
        quantization = config.draft_quantization
    options = ModelOptions(dtype, device, config.attention, quantization, config.deterministic)
    return load(source, options, stages.begin, stages.tell)


def load_tokenizer(source: Source, tokenizer: TokenizerSource | None) -> Tokenizer | None:
    """Load ``tokenizer`` or, if it is None, the model's own. Returns None for a loaded model without a tokenizer.

    Raises ParameterError, ModelNotFoundError, ModelFormatError.
    """
    if tokenizer is None:
        return Tokenizer.load(source) if isinstance(source, (str, os.PathLike)) else None
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        FileName("a loaded PreTrainedTokenizerBase, or a directory, a file or a name").take("tokenizer", tokenizer)
    return Tokenizer.load(tokenizer)


def check_model_source(name: str, source: object) -> None:
    """Raise ParameterError for parameter ``name`` unless ``source`` is a loaded model or the name of one."""
    if not is_loaded(source):
        FileName("a model's name, directory or file, or a loaded PreTrainedModel").take(name, source)


def serve_other_rank(ranks: int) -> None:
    """Serve rank 0 if torchrun started this process as another rank. In that case the function does not return."""
    if ranks > 1:
        from paceline.models.parallel.launch import serve_if_launched

        serve_if_launched(ranks)
