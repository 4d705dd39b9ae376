"""What a model's files say of it, read without its weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import LlamaFileType

from paceline.errors import PacelineError, RequestError
from paceline.models.description.weights import shapes
from paceline.models.files.boundary import ResolvedSource, is_loaded, name_of, reads_model
from paceline.models.files.fingerprint import hash_of_files
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.recommended import recommended_sampling
from paceline.models.files.safetensors import stored_tensors
from paceline.models.load.loading import describe_source, files, lacks_head, load_config, max_positions
from paceline.models.text.infill import InfillMarkers
from paceline.models.text.response_template import format_of
from paceline.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelFacts:
    """A model as its files describe it.

    path: of its directory or GGUF file. file_format: "gguf" or "safetensors". size: bytes of its files. family: its
    architecture. native: whether paceline's own code runs it. parameters: number of weights. precision: how most of
    them are stored. context: tokens of its longest sequence. width: of its hidden states. chat_template: None if it has
    none. abilities: those of "completion", "tools", "thinking", "insert" (filling gaps) and "embedding" that it has.
    modified: when its newest file was written, in seconds since the epoch. digest: hash of samples of its files.
    sampling: what its files recommend. license: as a GGUF file names it.
    """

    path: str
    file_format: str
    size: int
    family: str
    native: bool
    parameters: int
    precision: str
    context: int
    width: int
    chat_template: str | None
    abilities: tuple[str, ...]
    modified: float
    digest: str
    sampling: dict[str, Any] = field(default_factory=dict)
    license: str | None = None

    @property
    def parameter_size(self) -> str:
        """The number of weights as people read it: 135M, 1.5B."""
        for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.parameters >= size:
                return f"{self.parameters / size:.{1 if unit == 'B' else 0}f}{unit}"
        return str(self.parameters)


@reads_model
def model_facts(source: ResolvedSource) -> ModelFacts:
    """Describe a model. Raises the errors of ``load_model``, and RequestError for a loaded model: it has no files."""
    if is_loaded(source):
        raise RequestError(f"{name_of(source)} is loaded already: there are no files to describe")
    spec, config = describe_source(source), load_config(source)
    template, abilities = (None, ("embedding",)) if lacks_head(source) else _texts(source)
    stored, stats = _stored(source), [file.stat() for file in files(source)]
    native_sizes = None if spec is None else [tensor.numel() for tensor in shapes(spec).values()]
    return ModelFacts(
        path=str(source),
        file_format="gguf" if source.is_file() else "safetensors",
        size=sum(stat.st_size for stat in stats),
        family=str(config.model_type),
        native=spec is not None,
        parameters=sum(native_sizes or stored.values()),
        precision=_file_type(source) or max(stored, key=lambda kind: stored[kind]),
        context=max_positions(source),
        width=int(config.get_text_config().hidden_size) if spec is None else spec.width,
        chat_template=template,
        abilities=abilities,
        modified=max(stat.st_mtime for stat in stats),
        digest=hash_of_files(source),
        sampling=recommended_sampling(source),
        license=GGUFFile(source).metadata.get("general.license") if source.is_file() else None,
    )


def _stored(path: Path) -> Counter[str]:
    """Number of stored values by their type."""
    tensors: Iterable[tuple[str, tuple[int, ...]]]
    if path.is_file():
        tensors = ((tensor.kind.name, tensor.shape) for tensor in GGUFFile(path).tensors.values())
    else:
        tensors = ((tensor.dtype, tensor.shape) for tensor in stored_tensors(path).values())
    counts: Counter[str] = Counter()
    for kind, shape in tensors:
        counts[kind] += math.prod(shape)
    return counts


def _file_type(path: Path) -> str | None:
    """The type of a GGUF file as its metadata name it, such as Q4_K_M; None without such a name."""
    number = GGUFFile(path).metadata.get("general.file_type") if path.is_file() else None
    try:
        return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None


def _texts(path: Path) -> tuple[str | None, tuple[str, ...]]:
    """The chat template, and what the model can do with texts."""
    tokenizer = Tokenizer.load(path)
    try:
        template = tokenizer.chat_template(tools=True)
    except PacelineError:
        template = None
    form = None if template is None else format_of(template, None, tokenizer.response_template)
    abilities = {
        "completion": True,
        "tools": form is not None and (form.tools is not None or form.responses is not None),
        "thinking": form is not None and form.thinking is not None,
        "insert": _fills_gaps(tokenizer),
        "embedding": True,
    }
    return template, tuple(name for name, able in abilities.items() if able)


def _fills_gaps(tokenizer: Tokenizer) -> bool:
    try:
        InfillMarkers.of(tokenizer)
    except RequestError:
        return False
    return True
