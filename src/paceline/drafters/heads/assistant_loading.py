"""Load an assistant for its target: a small decoder that reads its target's keys and values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from paceline.config import QuantizationName
from paceline.drafters.heads.assistant import Assistant, Centroids
from paceline.errors import ModelFormatError, ParameterError, VocabularyMismatchError
from paceline.models.base import AnyModel
from paceline.models.description import weights
from paceline.models.description.spec import DecoderSpec
from paceline.models.families import describe
from paceline.models.families.gemma4 import ASSISTANT, ASSISTANT_NAMES, describe_assistant
from paceline.models.files.boundary import Source, is_loaded
from paceline.models.files.hub import resolve
from paceline.models.files.json_files import read_object
from paceline.models.files.safetensors import FileTensor, stored_tensors
from paceline.models.load.loading import description_of, load_config, load_embedding
from paceline.models.native.layers import NativeLayers
from paceline.models.native.model import NativeModel
from paceline.models.torch.transformer import Transformer

log = logging.getLogger("paceline")

_ORDER = "masked_embedding.token_ordering"  # the tokens, group by group


def is_assistant(path: Path) -> bool:
    """Whether the directory holds an assistant."""
    return path.is_dir() and read_object(path / "config.json").get("model_type") == ASSISTANT


def load_assistant(
    target: AnyModel,
    source: Source,
    path: Path,
    dtype: torch.dtype,
    quantization: QuantizationName | Literal["same"] | None = "same",
) -> Assistant:
    """Load the assistant at ``path`` for a target that was loaded from ``source``.

    quantization: of its layers if the CPU kernels run the target; "same": the target's.

    Raises ParameterError if ``dtype`` is not that of the target's cache, and ModelFormatError or
    VocabularyMismatchError if it was made for another target.
    """
    if dtype != target.dtype:
        allowed = f"'same': an assistant reads the keys of {target.name}, which are {target.dtype}"
        raise ParameterError("draft_dtype", dtype, allowed)
    config = load_config(path)
    spec, whole = describe_assistant(config), _target_description(source)
    if spec is None:
        raise ModelFormatError(f"{path}: an assistant with this kind of layers is not supported")
    _check(spec, whole, config.backbone_hidden_size, target, path)
    stored = stored_tensors(path)
    own = {name: _read(stored, name, shape, path).to(target.device) for name, shape in _shapes(config, spec).items()}
    parts = {name: tensor for name, tensor in stored.items() if name not in own}
    tensors = weights.assemble(weights.place(spec, ASSISTANT_NAMES, parts, str(path)), dtype, target.device)
    places = cache_places(spec, whole)
    decoder = Transformer(spec, tensors, str(path), places=places)
    layers = _on_kernels(spec, tensors, places, target, quantization, path)
    if layers is not None:
        decoder.drop_layers()
    embedding = load_embedding(source, dtype=dtype, device=target.device) * whole.embed_scale
    before, after, *head = own.values()
    ends = before.to(dtype), after.to(dtype), _centroids(config, head, dtype, path)
    return Assistant(decoder, target, embedding, *ends, layers)


def _on_kernels(
    spec: DecoderSpec,
    tensors: Mapping[str, Tensor],
    places: Sequence[int],
    target: AnyModel,
    quantization: QuantizationName | Literal["same"] | None,
    path: Path,
) -> NativeLayers | None:
    """Pack the layers for the CPU kernels; None, with a line in the log, if the target or they run in torch."""
    if not isinstance(target, NativeModel):
        return None
    wanted = target.quantization if quantization == "same" else quantization
    if wanted == "fp8":
        raise ParameterError("draft_quantization", quantization, "None, 'int8' or 'int4' on a CPU")
    try:
        return NativeLayers(spec, tensors, places, target, wanted)
    except ModelFormatError as error:
        log.info("the assistant %s runs in torch: %s", path, error)
        return None


def _shapes(config: PretrainedConfig, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors beside the decoder's."""
    outer = config.backbone_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (spec.width, 2 * outer),
        "post_projection.weight": (outer, spec.width),
    }
    if config.use_ordered_embeddings:
        shapes["masked_embedding.centroids.weight"] = config.num_centroids, spec.width
        shapes[_ORDER] = (spec.vocab_size,)
    return shapes


def _read(stored: Mapping[str, FileTensor], name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    if name not in stored or stored[name].shape != shape:
        problem = f"has the shape {stored[name].shape}" if name in stored else "is missing"
        raise ModelFormatError(f"{path}: {name} {problem}, the configuration asks for {shape}")
    tensor = stored[name].load()
    if tensor.is_floating_point() == (name == _ORDER):
        raise ModelFormatError(f"{path}: {name} has the unsupported type {tensor.dtype}")
    weights.check_finite(tensor, f"{path}: {name}")
    return tensor


def _centroids(config: PretrainedConfig, head: Sequence[Tensor], dtype: torch.dtype, path: Path) -> Centroids | None:
    if not head:
        return None
    centroids, order = head
    vocabulary, opened = len(order), config.centroid_intermediate_top_k
    if vocabulary % len(centroids) or not 0 < opened <= len(centroids):
        asked = f"centroid_intermediate_top_k={opened} of num_centroids={len(centroids)} groups of {vocabulary} tokens"
        raise ModelFormatError(f"{path}: {asked} cannot be opened")
    if not bool(((order >= 0) & (order < vocabulary)).all()):
        raise ModelFormatError(f"{path}: {_ORDER} has a token outside of the vocabulary")
    return Centroids(centroids.to(dtype), order.long().view(len(centroids), -1), opened)


def _target_description(source: Source) -> DecoderSpec:
    spec = describe(source.config) if is_loaded(source) else description_of(resolve(source))
    if spec is None:
        raise ModelFormatError("an assistant's target must be of a family that paceline runs itself")
    return spec


def cache_places(spec: DecoderSpec, target: DecoderSpec) -> list[int]:
    """Return the layer of the target's cache that each layer reads: the last of its kind, with or without a window."""
    cached = [attention for attention in target.attentions if attention.reads_layer is None]
    last = {attention.window is None: place for place, attention in enumerate(cached)}
    return [last[attention.window is None] for attention in spec.attentions]


def _check(spec: DecoderSpec, target: DecoderSpec, width: int, model: AnyModel, path: Path) -> None:
    """Raise an error unless an assistant fits its target."""
    if spec.vocab_size != model.vocab_size:
        raise VocabularyMismatchError(
            f"the assistant {path} was made for {spec.vocab_size} tokens, but the target {model.name} has "
            f"{model.vocab_size}: it was made for another model"
        )
    keys = {(a.window is None, a.kv_heads, a.head_dim) for a in target.attentions}
    wanted = {(a.window is None, a.kv_heads, a.head_dim) for a in spec.attentions}
    if width != target.width or not wanted <= keys:
        raise ModelFormatError(
            f"the assistant {path} reads hidden states of width {width} and keys that the target {model.name} does not "
            "have: it was made for another model"
        )
