"""What a model's files recommend: how to sample, and how to pool hidden states to embeddings.

Directories have ``generation_config.json`` and sentence-transformers' ``1_Pooling/config.json``, GGUF files
``general.sampling.*`` and ``ARCHITECTURE.pooling_type``.
"""

from __future__ import annotations

from typing import Any

from paceline.config import RECOMMENDED_FIELDS
from paceline.models.files.boundary import ResolvedSource, is_loaded, reads_model
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.hub import POOLING_FILE
from paceline.models.files.json_files import read_object

# llama.cpp's repetition penalty looks at the last tokens only, so it is none of ours.
_GGUF_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
# llama.cpp's numbers of poolings, and sentence-transformers' names of those that are supported here.
_GGUF_POOLINGS = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}
_SENTENCE_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last"}
_EACH_MODE = "pooling_mode_"  # with the name of a pooling: true or false; other files have one "pooling_mode"


@reads_model
def recommended_pooling(source: ResolvedSource) -> str | None:
    """Return how the model's files pool a text's hidden states, "mean" and "last" by these names; None if not at all.

    Several poolings whose vectors are joined are one name with plus signs.
    """
    if is_loaded(source):
        return None
    if source.is_file():
        metadata = GGUFFile(source).metadata
        kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
        return _GGUF_POOLINGS.get(str(kind), str(kind)) if kind else None
    found = read_object(source / POOLING_FILE)
    chosen = [name.removeprefix(_EACH_MODE) for name, value in found.items() if value is True and _EACH_MODE in name]
    modes = [str(found["pooling_mode"])] if found.get("pooling_mode") else chosen
    return "+".join(_SENTENCE_POOLINGS.get(mode, mode) for mode in modes) or None


@reads_model
def recommended_sampling(source: ResolvedSource) -> dict[str, Any]:
    """Return the recommended values by the names of ``SamplingParams``, as they stand in the files, unchecked.

    do_sample is not read, as in vLLM: without a temperature it is 1.
    """
    if is_loaded(source):
        generation = getattr(source, "generation_config", None)  # none in a class without an output head
        found = generation.to_diff_dict() if generation else {}
    elif source.is_file():
        metadata = GGUFFile(source).metadata
        found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_NAMES.items()}
    else:
        found = read_object(source / "generation_config.json")
    return {name: found[name] for name in RECOMMENDED_FIELDS if found.get(name) is not None}
