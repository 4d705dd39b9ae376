"""The directories in which an engine keeps prefixes and answers between its runs."""

from __future__ import annotations

from pathlib import Path

from paceline.config.engine import LOOKS_UP_ANSWERS
from paceline.core.cache_budget import KVCacheBudget
from paceline.engine.answer_file import AnswerFile
from paceline.engine.description import EngineDescription
from paceline.engine.prefix_files import PrefixFiles
from paceline.errors import ParameterError
from paceline.models.base import FlatModel
from paceline.models.files.fingerprint import hash_of_files, is_from_files, model_hash

_UNNAMED = "left out with models that were not loaded from files, by which its files are told apart"


def open_prefixes(engine: EngineDescription, room: KVCacheBudget) -> PrefixFiles | None:
    """Return the directory of prefixes; None without one. Raises ParameterError where it cannot be used."""
    config, parts = engine.config, engine.parts
    if config.prefix_dir is None:
        return None
    draft = engine.models.draft if config.asks_draft_model else None
    models = [model for model in (engine.models.target, draft) if model is not None]
    if (
        not config.prefix_cache
        or not all(decoder.grows for decoder in parts.decoders)
        or not isinstance(engine.models.target, FlatModel)
    ):
        allowed = "left out here: it needs prefix_cache, and the CPU kernels on Linux"
        raise ParameterError("prefix_dir", config.prefix_dir, allowed)
    if not all(is_from_files(model) for model in models):
        raise ParameterError("prefix_dir", config.prefix_dir, _UNNAMED)
    identity = engine.identity()
    drafts = model_hash(draft) if draft is not None and parts.drafter.decoders else "no draft model"
    kind = f"{identity.target} {drafts} {identity.precision} {identity.attention}"
    largest = 2 * room.bytes_for(room.positions) + parts.target.largest_states
    return PrefixFiles(Path(config.prefix_dir), config.prefix_dir_size, kind, largest)


def open_answers(engine: EngineDescription) -> AnswerFile | None:
    """Read the answers in ``lookup_dir``; None without one. Raises ParameterError where it cannot be used."""
    config, target, answers = engine.config, engine.models.target, engine.parts.drafter.answers
    if config.lookup_dir is None:
        return None
    if answers is None or not config.shares_answers:
        raise ParameterError("lookup_dir", config.lookup_dir, f"left out here; it needs {LOOKS_UP_ANSWERS}")
    if not is_from_files(target):
        raise ParameterError("lookup_dir", config.lookup_dir, _UNNAMED)
    tokenizer = engine.models.tokenizer
    vocabulary = "no tokenizer" if tokenizer is None else tokenizer.fingerprint()
    fingerprint = f"{hash_of_files(Path(target.name))} {vocabulary}"
    return AnswerFile(Path(config.lookup_dir), fingerprint, answers, target.vocab_size)
