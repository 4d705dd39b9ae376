"""Head checkpoints in safetensors files, which are untrusted: reads two layouts, writes the one of speculators."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.config.files import write_text, written_whole
from paceline.drafters.heads.block_gguf import block_names, block_tensors, is_block_file, read_block_file
from paceline.drafters.heads.block_layouts import block_layout_of, read_block, written
from paceline.drafters.heads.config import HeadConfig, layout_of
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.kinds import make_head
from paceline.errors import ModelFormatError
from paceline.models.description.weights import check_finite
from paceline.models.files.boundary import ResolvedSource, brief, reading, reads_model
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.json_files import read_configuration, read_object
from paceline.models.files.safetensors import PICKLES, stored_tensors

_Names = Mapping[str, str]  # beginnings of tensors' names in a file, and what stands for them in the state dict

_HEAD_NAMES: _Names = {"midlayer.": "layers.0.", "model.midlayer.": "layers.0.", "model.": ""}
_BLOCK_NAMES: _Names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "logit_head.": ""}
_MASK_FILE = "mask_embedding.pt"  # a mask's embedding in place of the target's, which some drafters have
_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_VOCABULARY = ("d2t", "t2d")
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's tensors, stored for training: ignored
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def is_head(path: Path) -> bool:
    """Whether a directory or GGUF file holds a head of any kind rather than a model.

    A head of a target's own kind (``load_own_head``) is not meant. Raises ModelFormatError for unknown kinds.
    """
    if path.is_file():
        return is_block_file(path)
    fields = read_object(path / "config.json") if path.is_dir() else {}
    return block_layout_of(fields) is not None or layout_of(fields) is not None


@reads_model
def read_head_config(source: ResolvedSource, vocab_size: int | None = None) -> HeadConfig:
    """The configuration of the head at ``source``, a directory or a hub name. Raises as ``load_head``.

    vocab_size: the target's, which block drafters of transformers do not state.
    """
    return _read_config(_path(source), vocab_size)[0]


def _read_config(path: Path, vocab_size: int | None) -> tuple[HeadConfig, _Names]:
    """The configuration of a directory or file, and how its tensors are named."""
    if path.is_file():
        return read_block_file(GGUFFile(path), vocab_size), {}
    fields = read_configuration(path / "config.json")
    layout = block_layout_of(fields)
    if layout is not None:
        return read_block(fields, layout, vocab_size), _BLOCK_NAMES
    return HeadConfig.read(fields)[0], _HEAD_NAMES


@reads_model
def lacks_ends(source: ResolvedSource) -> bool:
    """Whether the head at ``source`` has neither an embedding nor an output head. Raises as ``load_head``."""
    path = _path(source)
    stored = block_names(GGUFFile(path)) if path.is_file() else stored_tensors(path)
    return not {_EMBEDDING, _OUTPUT} & set(stored)


@reads_model
def load_head(
    source: ResolvedSource,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    embedding: Tensor | Callable[[], Tensor] | None = None,
    output: Callable[[], Tensor] | None = None,
    vocab_size: int | None = None,
) -> Head:
    """Load the head at ``source``, a directory or a hub name.

    dtype: float32, bfloat16 or float16.
    embedding: the target's token embedding [V, H], or a function that loads it; used if the checkpoint has none. Its
        device may be "meta", and so may that of ``output``, if another model has the numbers.
    output: loads the target's output embedding [V, H]; used if the checkpoint has none, because it is the target's.
    vocab_size: see ``read_head_config``.

    Raises ModelNotFoundError, or ModelFormatError if the files are damaged or of an unsupported kind, or if a tensor is
    missing, unknown or of another shape.
    """
    path = _path(source)
    config, names = _read_config(path, vocab_size)
    tensors = _tensors(path, names)
    if _EMBEDDING not in tensors and embedding is not None:
        tensors[_EMBEDDING] = embedding if isinstance(embedding, Tensor) else embedding()
    with torch.device("meta"):
        head = make_head(config)
    wanted = head.state_dict()
    _complete(tensors, config, str(path))
    if _OUTPUT not in tensors and output is not None and "d2t" in tensors:
        tensors[_OUTPUT] = _output_rows(output(), tensors["d2t"], str(path))
    _compare(tensors, wanted, str(path))
    state = {
        name: tensors[name] if tensors[name].is_meta else tensors[name].to(device, _dtype_for(tensors[name], dtype))
        for name in wanted
    }
    head.load_state_dict(state, assign=True)
    _check_vocabulary(head, str(path))
    return head.requires_grad_(False).eval()


def save_head(head: Head, directory: Path, *, output: bool = True) -> None:
    """Write config.json and model.safetensors in the speculators layout, which vLLM reads. Each file appears complete.

    The token embedding is left out: readers take it from the target.
    output: whether to include the output embedding. Without it, a head that shares the target's is half as large, but
        other programs need it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    del state[_EMBEDDING]
    if not output:
        del state[_OUTPUT]
    # safetensors refuses two names for the same memory
    copies = {name: tensor.clone() for name, tensor in state.items()}
    with written_whole(directory / "model.safetensors") as part:
        save_file(copies, part, metadata={"format": "pt"})
    kind = str(head.dtype).removeprefix("torch.")
    fields = head.config.written() if head.config.block is None else written(head.config)
    fields |= {"torch_dtype": kind}
    write_text(directory / "config.json", json.dumps(fields, indent=2) + "\n")


def _path(source: ResolvedSource) -> Path:
    if not isinstance(source, Path) or not (source.is_dir() or is_head(source)):
        raise ModelFormatError(f"{source} is not a head: a directory with config.json and safetensors files")
    return source


def _tensors(path: Path, names: _Names) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by their names in the state dict."""
    if path.is_file():
        return block_tensors(GGUFFile(path))
    pickles = [file.name for pattern in PICKLES for file in path.glob(pattern)]
    if pickles and not any(path.glob("*.safetensors")):
        raise ModelFormatError(
            f"{path} has only pickled weights ({pickles[0]}), which can run any code and are not loaded. "
            "If you trust them, convert them: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
        )
    if (path / _MASK_FILE).exists():
        raise ModelFormatError(f"{path}: {_MASK_FILE}, a pickle with an embedding of the mask, is not supported")
    with reading(path):
        stored = stored_tensors(path)
        named = {name: _named(name, names) for name in stored}
        ignored = [name for name in stored if name in _COPIES or name.endswith("rotary_emb.inv_freq")]
        loaded = {named[name]: tensor.load() for name, tensor in stored.items() if name not in ignored}
    if strange := [name for name, tensor in loaded.items() if not _is_plain(name, tensor)]:
        kind = loaded[strange[0]].dtype
        raise ModelFormatError(f"{path}: the tensor {brief(strange[0])} has the unsupported type {kind}")
    return loaded


def _named(name: str, names: _Names) -> str:
    """A tensor's name in the state dict."""
    start = next((start for start in names if name.startswith(start)), "")
    return names.get(start, "") + name.removeprefix(start)


def _is_plain(name: str, tensor: Tensor) -> bool:
    if name in _VOCABULARY:
        return not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.dtype in _FLOATS


def _complete(tensors: dict[str, Tensor], config: HeadConfig, where: str) -> None:
    """Add vocabulary tables that a checkpoint may omit: both for a full vocabulary, t2d if there is d2t."""
    size, draft = config.decoder.vocab_size, config.draft_vocab_size
    if "d2t" not in tensors and "t2d" not in tensors and draft == size:
        tensors["d2t"], tensors["t2d"] = torch.zeros(draft, dtype=torch.int64), torch.ones(size, dtype=torch.bool)
    if "t2d" not in tensors and "d2t" in tensors and tensors["d2t"].shape == (draft,):
        targets = torch.arange(draft) + tensors["d2t"]
        _check_targets(targets, size, where)
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, targets, True)


def _output_rows(rows: Tensor, d2t: Tensor, where: str) -> Tensor:
    """Rows of the target's output embedding [V, H] for the head's vocabulary: [Vd, H]. d2t: [Vd].

    A head of the whole vocabulary shares the target's memory.
    """
    if d2t.shape == rows.shape[:1] and not bool(d2t.any()):
        return rows
    targets = torch.arange(d2t.numel()) + d2t.flatten()
    _check_targets(targets, rows.shape[0], where)
    return rows[targets.to(rows.device)]


def _compare(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        hint = "; it is the target's, pass it to the loader" if set(missing) <= {_EMBEDDING, _OUTPUT} else ""
        raise ModelFormatError(f"{where}: the head lacks {_listed(missing)}{hint}")
    if unknown:
        raise ModelFormatError(f"{where}: a head of this configuration has no {_listed(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, but config.json implies {list(wanted[name].shape)}"
            raise ModelFormatError(f"{where}: {name} has the shape {shapes}")
        if not tensor.is_meta:
            check_finite(tensor, f"{where}: {name}")


def _dtype_for(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype if tensor.dtype == torch.bool else torch.int64


def _check_vocabulary(head: Head, where: str) -> None:
    """Raise ModelFormatError unless d2t and t2d name the same tokens, each once."""
    head.t2d = head.t2d.bool()
    _check_targets(head.targets, head.t2d.shape[0], where)
    if int(head.t2d.sum()) != head.d2t.shape[0] or not bool(head.t2d[head.targets].all()):
        raise ModelFormatError(f"{where}: d2t and t2d name different tokens")


def _check_targets(targets: Tensor, size: int, where: str) -> None:
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < size:
        raise ModelFormatError(f"{where}: d2t names tokens outside of the target's {size}")
    if len(set(targets.tolist())) != len(targets):
        raise ModelFormatError(f"{where}: d2t names a token twice")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(map(brief, names[:4]))}{more}"
