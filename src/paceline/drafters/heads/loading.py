"""Loading of heads for a target, with checks that they fit it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Literal

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.drafters.heads.assistant_loading import is_assistant, load_assistant
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_decoder import TorchBlock
from paceline.drafters.heads.block_native import NativeBlock
from paceline.drafters.heads.checkpoint import is_head, lacks_ends, load_head, read_head_config
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.decoder import HeadModel, TorchHead
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.mtp import MtpHead, own_checkpoint, own_config
from paceline.drafters.heads.native import NativeHead, obstacle_of_head
from paceline.errors import ModelFormatError, ParameterError, VocabularyMismatchError
from paceline.models.base import AnyModel
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.families import FAMILIES
from paceline.models.families.gguf_config import is_head_alone
from paceline.models.files.boundary import Source, is_loaded, name_of
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.hub import resolve
from paceline.models.load.loading import head_tensors, load_config, load_embedding, load_output
from paceline.models.native.matrices import Outcome, unread_weights
from paceline.models.native.model import NativeModel
from paceline.models.torch.linear import Dense
from paceline.models.torch.transformer import Transformer

log = logging.getLogger("paceline")


def find_head(source: Source) -> Path | None:
    """Directory or GGUF file of the head ``source``; None if it is a model.

    Raises ModelNotFoundError or ModelFormatError.
    """
    if is_loaded(source):
        return None
    path = resolve(source)
    known = is_head(path) or is_assistant(path)
    return path if known or (path.is_file() and _is_head_alone(path, path.stat().st_mtime_ns)) else None


@lru_cache(maxsize=8)
def _is_head_alone(path: Path, _changed: int) -> bool:
    """See ``is_head_alone``; remembered, because a start asks twice, and reading a file's header takes 0.06 s."""
    return is_head_alone(GGUFFile(path))


def load_head_for(
    target: AnyModel,
    source: Source,
    path: Path,
    *,
    dtype: torch.dtype,
    quantization: QuantizationName | Literal["same"] | None = "same",
) -> HeadModel:
    """Load the head at ``path`` for the target that was loaded from ``source``, on the target's device.

    path: a directory, the GGUF file of a block drafter, or that of a head that belongs to the target's checkpoint
        (``load_own_head``).

    dtype: of weights that are not quantised.
    quantization: of the weights on the CPU kernels. "same": the target's, or ``dtype`` in torch if the CPU kernels do
        not run the target or cannot run the head.

    Raises VocabularyMismatchError or ModelFormatError if it was made for another target: other sizes, too few layers or
    another class. A different name is only logged, because a model may have several.
    """
    if path.is_file() and not is_head(path):
        return load_own_head(target, source, path, quantization=quantization)
    if is_assistant(path):
        if quantization not in ("same", None) and not isinstance(target, NativeModel):
            raise ParameterError("draft_quantization", quantization, "None with an assistant that runs in torch")
        return load_assistant(target, source, path, dtype, quantization)
    config = read_head_config(path, target.vocab_size)
    taps = _check_target(config, target, source, path)
    shares = _shares_packed_ends(config, path, target, dtype, quantization)
    ends = _TargetEnds(target, source, dtype, shared_width=config.width if shares else None)
    head = load_head(
        path,
        dtype=dtype,
        device=target.device,
        embedding=ends.embedding,
        output=ends.output,
        vocab_size=target.vocab_size,
    )
    return prepare_head(head, str(path), taps, target, quantization)


def _shares_packed_ends(
    config: HeadConfig,
    path: Path,
    target: AnyModel,
    dtype: torch.dtype,
    quantization: QuantizationName | Literal["same"] | None,
) -> bool:
    """Whether a block drafter runs on the CPU kernels with the packed embedding and output head of its target."""
    if config.block is None or not isinstance(target, NativeModel) or obstacle_of_head(config) is not None:
        return False
    wanted = target.quantization if quantization == "same" else quantization
    runs = wanted in ("int8", "int4") or (wanted is None and dtype == torch.bfloat16)
    whole = config.draft_vocab_size == target.vocab_size and config.width == target.width
    return runs and whole and lacks_ends(path)


class _TargetEnds:
    """Embedding and output head [V, H] of a target in ``dtype``: its own tensors where they are of it, else read.

    shared_width: width of both if the head uses the target's packed ones: then only their shapes are given (device
        "meta").
    """

    def __init__(
        self, target: AnyModel, source: Source, dtype: torch.dtype, *, shared_width: int | None = None
    ) -> None:
        self._tensors = self.of(target)
        if shared_width is not None:
            shape = torch.empty(target.vocab_size, shared_width, dtype=dtype, device="meta")
            self._tensors = shape, shape
        self._source, self._dtype, self._device = source, dtype, target.device

    @staticmethod
    def of(target: AnyModel) -> tuple[Tensor | None, Tensor | None]:
        """Embedding and output head as the target holds them; None where it does not as a plain tensor."""
        if not isinstance(target, Transformer):
            return None, None
        embedding, output, _ = target.ends()
        return embedding, output.weight if isinstance(output, Dense) else None

    def embedding(self) -> Tensor:
        own = self._tensors[0]
        if own is not None and own.dtype == self._dtype:
            return own
        return load_embedding(self._source, dtype=self._dtype, device=self._device)

    def output(self) -> Tensor:
        own = self._tensors[1]
        if own is not None and own.dtype == self._dtype:
            return own
        return load_output(self._source, dtype=self._dtype, device=self._device)


def runs_natively(path: Path, target: AnyModel) -> bool:
    """Whether the CPU kernels will run the head in the directory ``path`` if its dtype allows it."""
    if not isinstance(target, NativeModel) or not is_head(path):
        return False
    return obstacle_of_head(read_head_config(path, target.vocab_size)) is None


def has_own_head(source: Source) -> bool:
    """Whether the checkpoint of a model has a draft head of its own, which ``load_own_head`` reads."""
    return not is_loaded(source) and bool(head_tensors(resolve(source))[1])


def load_own_head(
    target: AnyModel,
    source: Source,
    path: Path | None = None,
    *,
    quantization: QuantizationName | Literal["same"] | None = "same",
) -> HeadModel:
    """Load the head in the checkpoint of ``target``, with the target's embedding and output head.

    path: a GGUF file with the head alone; None: the target's own files.
    quantization: as for ``load_head_for``. Raises ModelFormatError if its tensors are damaged or another model's, and
        ParameterError if the quantization is not possible.
    """
    config = load_config(source)
    family = FAMILIES.get(config.get_text_config().model_type)
    if family is None or family.head is None:
        raise ModelFormatError(f"{path} has a draft head, but {target.name} is of a family that has none")
    shape = own_config(config)
    names, stored = head_tensors(resolve(source) if path is None else path, shape.decoder)
    checkpoint = own_checkpoint(shape, names, stored, str(path or target.name))
    name = f"{target.name} (mtp)" if path is None else str(path)
    if isinstance(target, NativeModel):
        return _packed_head(shape, checkpoint, name, target, quantization)
    if quantization not in ("same", None):
        raise ParameterError("draft_quantization", quantization, "None with the target's own head in torch")
    ends = _ends_of(target, source)
    head = MtpHead(shape, checkpoint.tensors(ends[0].dtype, target.device), ends)
    return TorchHead(head, name, (target.layers,), target.max_positions)


def _packed_head(
    config: HeadConfig,
    checkpoint: Checkpoint,
    name: str,
    target: NativeModel,
    quantization: QuantizationName | Literal["same"] | None,
) -> NativeHead:
    """Pack a target's own head for the kernels, matrix by matrix as it is read."""
    wanted = target.quantization if quantization == "same" else quantization
    if wanted == "fp8":
        raise ParameterError("draft_quantization", quantization, "None, 'int8' or 'int4' on a CPU")
    end = torch.empty(target.vocab_size, target.width, dtype=torch.bfloat16, device="meta")
    weights, readers = unread_weights(checkpoint, torch.bfloat16, Outcome())
    return NativeHead(
        MtpHead(config, weights, (end, end)),
        name,
        (target.layers,),
        target.max_positions,
        quantization=wanted,
        target=target,
        readers=readers,
    )


def _ends_of(target: AnyModel, source: Source) -> tuple[Tensor, Tensor]:
    """Return the embedding and the output head [V, H] of a target in torch, in the type that it computes in."""
    assert isinstance(target, Transformer), "only families that it runs have such heads"
    embedding, output, _ = target.ends()
    if isinstance(output, Dense):
        return embedding, output.weight
    return embedding, load_output(source, dtype=target.dtype, device=target.device)


def prepare_head(
    head: Head,
    name: str,
    taps: Sequence[int],
    target: AnyModel,
    quantization: QuantizationName | Literal["same"] | None = "same",
) -> HeadModel:
    """Prepare a head for the CPU kernels if they run the target, otherwise for torch.

    name: for messages. taps: the target's layers whose input it reads. Raises ParameterError if the quantization is not
    possible.
    """
    given = name, taps, target.max_positions
    obstacle = "its target does not run on the CPU kernels"
    if isinstance(target, NativeModel):
        wanted = target.quantization if quantization == "same" else quantization
        if wanted is None and head.dtype != torch.bfloat16:
            return _in_torch(head, name, taps, target)
        try:
            if wanted == "fp8":
                raise ModelFormatError("fp8 weights need a CUDA device")
            if isinstance(head, BlockHead):
                shares = head.lm_head.weight.is_meta
                return NativeBlock(head, *given, quantization=wanted, target=target if shares else None)
            return NativeHead(head, *given, quantization=wanted)
        except ModelFormatError as error:
            obstacle = str(error)
    if quantization not in ("same", None):
        allowed = f"None with this trained head, whose weights stay in its draft_dtype: {obstacle}"
        raise ParameterError("draft_quantization", quantization, allowed)
    return _in_torch(head, name, taps, target)


def _in_torch(head: Head, name: str, taps: Sequence[int], target: AnyModel) -> TorchHead:
    if not isinstance(head, BlockHead):
        return TorchHead(head, name, taps, target.max_positions)
    own = {tensor.data_ptr() for tensor in _TargetEnds.of(target) if tensor is not None}
    ends = {tensor.data_ptr(): tensor.nbytes for tensor in (head.embed_tokens.weight, head.lm_head.weight)}
    shared = sum(size for place, size in ends.items() if place in own)
    return TorchBlock(head, name, taps, target.max_positions, shared)


def _check_target(config: HeadConfig, target: AnyModel, source: Source, path: Path) -> tuple[int, ...]:
    """Raise an error unless the head fits the target. Returns the target's layers whose input it reads."""
    said = load_config(source)
    width = said.get_text_config().hidden_size
    if config.target_width != width:
        raise ModelFormatError(
            f"the head {path} reads hidden states of width {config.target_width}, but the target {target.name} has "
            f"{width}: it was made for another model{_named(config)}"
        )
    if config.decoder.vocab_size != target.vocab_size:
        raise VocabularyMismatchError(
            f"the head {path} was made for {config.decoder.vocab_size} tokens, but the target {target.name} has "
            f"{target.vocab_size}: it was made for another model{_named(config)}"
        )
    classes = [type(source).__name__] if is_loaded(source) else said.architectures or []
    if config.architectures and classes and not set(config.architectures) & set(classes):
        raise ModelFormatError(
            f"the head {path} was made for a {', '.join(config.architectures)}{_named(config)}, the target "
            f"{target.name} is a {', '.join(classes)}"
        )
    _compare_names(config, source, path)
    return config.taps_of(target.layers)


def _named(config: HeadConfig) -> str:
    return f" ({config.verifier})" if config.verifier else ""


def _compare_names(config: HeadConfig, source: Source, path: Path) -> None:
    """Log a warning if the names differ. Endings may differ: -AWQ, -GGUF, .Q8_0.gguf."""
    given = name_of(source)
    ours, theirs = (PurePath(name).name.lower() for name in (given, config.verifier))
    if theirs and not (ours.startswith(theirs) or theirs.startswith(ours)):
        log.warning(
            "the head %s was made for %s, the target is %s: if they differ, few draft tokens will be accepted",
            path,
            config.verifier,
            given,
        )
