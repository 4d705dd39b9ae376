"""The sampling that a model's files recommend: ``generation_config.json``, or ``general.sampling.*`` in GGUF."""

from __future__ import annotations

from typing import Any

from paceline.config import RECOMMENDED_FIELDS
from paceline.models.boundary import ResolvedSource, is_loaded, reads_model
from paceline.models.gguf import GGUFFile
from paceline.models.json_files import read_object

# llama.cpp's repetition penalty looks at the last tokens only, so it is none of ours.
_GGUF_NAMES = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


@reads_model
def recommended_sampling(source: ResolvedSource) -> dict[str, Any]:
    """Return the recommended values by the names of ``SamplingParams``, as they stand in the files, unchecked.

    do_sample is not read, as in vLLM: without a temperature it is 1.
    """
    if is_loaded(source):
        found = source.generation_config.to_diff_dict() if source.generation_config else {}
    elif source.is_file():
        metadata = GGUFFile(source).metadata
        found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF_NAMES.items()}
    else:
        found = read_object(source / "generation_config.json")
    return {name: found[name] for name in RECOMMENDED_FIELDS if found.get(name) is not None}
