"""The disk cache of a GPU's rounded matrices: the second load has the first one's bits, and detects every change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from model_support import NATIVE, tiny
from models.test_sinks_and_shared_experts import MODELS as SHARED
from models.test_sinks_and_shared_experts import write_mxfp4
from paceline.errors import ModelFormatError
from paceline.kernels.gpu import launch
from paceline.models.files.cached import packed_source
from paceline.models.load import packed_copy, packed_matrices, prepare
from paceline.models.load.kept_matrices import KeptMatrix
from paceline.models.load.loading import open_checkpoint
from paceline.models.load.prepare import ModelOptions
from paceline.models.torch.transformer import Transformer
from quantised_support import CONVERTERS, write

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of packed weights, in an empty cache that is turned on."""
    monkeypatch.setenv(packed_copy.VARIABLE, "on")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    return tmp_path / "cache" / "packed"


def tiny_with(name: str) -> Callable[[Path], object]:
    return lambda path: tiny(*NATIVE[name]).save_pretrained(path)


def with_codes(name: str) -> Callable[[Path], object]:
    """The quantised files of ``CONVERTERS``."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    return lambda path: write(path, tiny("llama", NATIVE["llama"][1] | shape | {"head_dim": 16}), CONVERTERS[name])


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "llama": tiny_with("llama"),
    "experts": tiny_with("qwen3_moe"),
    "GPTQ by activation order": with_codes("GPTQ by activation order"),
    "float8": with_codes("float8 in blocks"),
    "MXFP4": lambda path: write_mxfp4(path, SHARED["gpt_oss"]()),
}


def load(path: Path, to: Any = "int8", shares: list[float] | None = None) -> Transformer:
    options = ModelOptions(torch.float32, CPU, quantization=to)
    tell = None if shares is None else shares.append
    return prepare._in_triton(
        open_checkpoint(path), path.name, options, tell, packed_matrices.packed_matrices(path, to)
    )


def tensors(model: Transformer) -> list[torch.Tensor]:
    """All weights, byte by byte."""
    found = [*model._kept, *(tensor for linear in model.linears() for tensor in linear.tensors())]
    return [tensor.contiguous().view(torch.uint8) for tensor in found]


def same(one: Transformer, other: Transformer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, to) for name in ("llama", "experts") for to in ("int8", "fp8", "int4")),
        ("GPTQ by activation order", "int4"),
        ("float8", "fp8"),
        ("MXFP4", "int4"),
    ],
)
def test_the_second_load_has_the_same_weights_and_rounds_none(
    name: str, to: Any, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    CHECKPOINTS[name](tmp_path / "model")
    first, counts = load(tmp_path / "model", to), [line for line in caplog.messages if "weights of" in line]
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    assert packed_source(next(folder.iterdir())) == tmp_path / "model"
    monkeypatch.setattr(KeptMatrix, "__call__", lambda *_: pytest.fail("a matrix was rounded again"))
    shares: list[float] = []
    second = load(tmp_path / "model", to, shares)
    assert same(first, second)
    assert (second.precision, second.weight_bytes()) == (first.precision, first.weight_bytes())
    assert [line for line in caplog.messages if "weights of" in line] == 2 * counts
    assert bool(counts) == (name not in ("llama", "experts"))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def touched(path: Path) -> None:
    os.utime(path / "model.safetensors", ns=(0, 0))


def damaged(at: Callable[[int], int], change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change a copy's bytes from ``at`` on, of its size."""

    def damage(path: Path) -> None:
        file = next((path.parent / "cache" / "packed").iterdir())
        content = file.read_bytes()
        place = at(len(content))
        file.write_bytes(content[:place] + change(content[place:]))

    return damage


def other_byte(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


CHANGES: dict[str, Callable[[Path], None]] = {
    "another checkpoint": touched,
    "the last bit": damaged(lambda size: size - 17, other_byte),
    "one byte less": damaged(lambda size: size - 1, lambda _: b""),
    "half": damaged(lambda size: size // 2, lambda _: b""),
    "no matrices": damaged(lambda _: 0, lambda content: content.replace(b"layers.0", b"layers.7")),
    "no kind of weights": damaged(lambda _: 0, lambda content: content.replace(b"Int8Weight", b"Int9Weight")),
    "header broken": damaged(lambda _: 0, lambda content: content.replace(b'"kept"', b'"knot"')),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_changed_is_read_from_the_checkpoint_and_written_again(
    how: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    tiny_with("llama")(path)
    first = load(path)
    file = next(folder.iterdir())
    CHANGES[how](path)
    assert same(load(path), first)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert file.name in caplog.text
    load(path)  # a copy whose damage is found late is deleted, and the next load writes one
    assert list(folder.iterdir()) == [file]
    monkeypatch.setattr(KeptMatrix, "__call__", lambda *_: pytest.fail("a matrix was rounded again"))
    assert same(load(path), first)
    assert len(caplog.records) == 1


class FullDisk(BufferedWriter):
    """A file on a disk that has no room for the second matrix."""

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "w"))
        self.writes = 0

    def write(self, content: Any) -> int:
        self.writes += 1
        if self.writes > 1:
            raise OSError(28, "No space left on device")
        return super().write(content)


@pytest.mark.parametrize("when", ["no folder", "no room", "while writing"])
def test_a_copy_that_cannot_be_written_gives_one_warning(
    when: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_with("llama")(tmp_path / "model")
    expected = load(tmp_path / "model")
    shutil.rmtree(tmp_path / "cache")
    if when == "no folder":
        (tmp_path / "cache").write_text("a file where the folder should be")
    elif when == "no room":
        usage = shutil.disk_usage("/")._replace(free=10)
        monkeypatch.setattr(packed_copy.shutil, "disk_usage", lambda _: usage)  # type: ignore[attr-defined]
    else:
        opened = Path.open
        monkeypatch.setattr(
            Path, "open", lambda path, *way, **more: FullDisk(path) if way == ("wb",) else opened(path, *way, **more)
        )
    assert same(load(tmp_path / "model"), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be cached in" in caplog.text
    assert when == "no folder" or list(folder.iterdir()) == []


def test_a_load_that_fails_leaves_no_copy(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ModelFormatError("layers.1.down.weight has values that are not finite")

    tiny_with("llama")(tmp_path / "model")
    monkeypatch.setattr(KeptMatrix, "__call__", fail)
    with pytest.raises(ModelFormatError, match="not finite"):
        load(tmp_path / "model")
    assert list(folder.iterdir()) == []


def test_gpus_have_copies_of_files_in_8_and_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a loaded model, and not if the cache is off."""
    copies: list[Any] = []
    monkeypatch.setattr(prepare, "_in_triton", lambda *arguments: copies.append(arguments[4]))
    model = tiny(*NATIVE["llama"])
    model.save_pretrained(tmp_path / "model")
    for source in (tmp_path / "model", model):
        for options in ({"quantization": "int8"}, {"quantization": "int4"}, {"deterministic": True}):
            prepare.load(source, ModelOptions(torch.bfloat16, torch.device("cuda"), **options))  # type: ignore[arg-type]
    assert [copy is None for copy in copies] == [False, False, True, True, True, True]
    assert len({copy.path for copy in copies[:2]}) == 2
    monkeypatch.setenv(packed_copy.VARIABLE, "off")
    assert packed_matrices.packed_matrices(tmp_path / "model", "int8") is None
