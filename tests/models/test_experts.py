"""Mixtures of experts in files: read one expert at a time into the kernels' formats, and kept packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model_support import NATIVE, packed, packed_at_once, tiny
from models.test_families import _written
from paceline.kernels import native
from paceline.kernels.experts import Routing, route
from paceline.kernels.pack import Format, Weight
from paceline.models.load.packed_copy import VARIABLE
from paceline.models.load.packed_file import packed_file
from paceline.models.native.matrices import StoredMatrix
from paceline.models.native.model import NativeModel, Quantization

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
# The kernels' narrowest heads, and inner widths of whole panels: padding has no scale or the smallest one
HEADS = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
FAMILIES = ["qwen3_moe", "olmoe", "granitemoe"]


def _checkpoint(path: Path, name: str) -> Path:
    kind, fields = NATIVE[name]
    tiny(kind, fields | HEADS).save_pretrained(path)
    return path


def _bytes_of(model: NativeModel | None) -> Tensor:
    """A copy of the packed weights, which are freed with their model."""
    assert model is not None
    packed = model.packed()
    assert packed is not None
    return packed.clone()


def _at_once(path: Path, quantization: Quantization | None) -> Tensor:
    """The packed weights of a checkpoint that is loaded whole before it is packed."""
    return _bytes_of(packed_at_once(path, quantization))


def _straight(path: Path, quantization: Quantization | None) -> Tensor:
    return _bytes_of(packed(path, quantization))


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_read_by_expert_gives_the_weights_of_one_read_at_once(
    name: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    path = _checkpoint(tmp_path, name)
    assert torch.equal(_straight(path, quantization), _at_once(path, quantization))


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_a_gguf_file_gives_the_packed_weights_of_its_safetensors(name: str, tmp_path: Path) -> None:
    kind, fields = NATIVE[name]
    theirs = tiny(kind, fields | HEADS)
    theirs.save_pretrained(tmp_path / "safetensors")
    stacked = _straight(_written(tmp_path / "tiny.gguf", theirs), "int8")
    assert torch.equal(stacked, _straight(tmp_path / "safetensors", "int8"))


@needs_kernels
def test_one_expert_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix of all experts is ever in memory beside the packed ones, stacked in the file or not."""
    kind, fields = NATIVE["qwen3_moe"]
    theirs = tiny(kind, fields | HEADS)
    read = StoredMatrix.__call__
    for path in (_checkpoint(tmp_path / "apart", "qwen3_moe"), _written(tmp_path / "tiny.gguf", theirs)):
        sizes: list[tuple[str, int]] = []

        def counted(matrix: StoredMatrix, to: Format, sizes: list[tuple[str, int]] = sizes) -> Weight:
            weight = read(matrix, to)
            sizes.append((matrix.parts[0].slot.target.rpartition(".")[0], weight.values.numel()))
            return weight

        monkeypatch.setattr(StoredMatrix, "__call__", counted)
        packed(path, "int8")
        of_experts = [size for name, size in sizes if "experts_" in name]
        width, inner, count = theirs.config.hidden_size, theirs.config.moe_intermediate_size, theirs.config.num_experts
        assert len(of_experts) == 2 * count * theirs.config.num_hidden_layers
        assert set(of_experts) == {2 * inner * width, inner * width}


@needs_kernels
def test_packed_weights_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = _checkpoint(tmp_path / "model", "qwen3_moe")
    first, kept = packed(path, "int4", dtype=torch.bfloat16), packed_file(path, torch.bfloat16, "int4")
    assert kept is not None
    kept.save(first)
    assert torch.equal(_bytes_of(kept.load()), _bytes_of(first))


@needs_kernels
def test_stacked_experts_of_safetensors_are_read(tmp_path: Path) -> None:
    """Loaded models of transformers have the experts of a layer side by side, and a file may have them so, too."""
    kind, fields = NATIVE["qwen3_moe"]
    theirs = tiny(kind, fields | HEADS)
    theirs.save_pretrained(tmp_path)
    apart = _straight(tmp_path, "int8")
    save_file(
        {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}, tmp_path / "model.safetensors"
    )
    assert torch.equal(_straight(tmp_path, "int8"), apart)


@pytest.mark.parametrize("normalised", [True, False])
def test_routing_takes_the_first_of_equal_scores(normalised: bool) -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    weights, chosen = route(scores, Routing(2, normalised))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    whole = scores.softmax(1).gather(1, chosen)
    assert torch.allclose(weights, whole / whole.sum(1, keepdim=True) if normalised else whole)
