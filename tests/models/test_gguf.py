"""GGUF files: every type, split models, codes that int4 holds, and damaged headers.

With the package xllamacpp, ``python -m pytest -m slow tests/models/test_gguf.py`` compares the types with llama.cpp.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import shutil
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from gguf_support import copy, encode, finish, random_blocks
from hostile import small_models
from model_support import packed, packed_at_once
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.kernels.pack import Format, Int4Weight, dequantise, quantise
from paceline.llm import LLM
from paceline.models.files import gguf as module
from paceline.models.files.gguf_tensors import READABLE, UNREADABLE, PackedTensor, precision_loss
from paceline.models.load.loading import load_model

Kind = GGMLQuantizationType
CODED = [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K]


def named(value: object) -> str | None:
    return value.name if isinstance(value, GGMLQuantizationType) else None


# Types


def stored(kind: GGMLQuantizationType, rows: int = 6, blocks: int = 4) -> PackedTensor:
    block, size = GGML_QUANT_SIZES[kind]
    if block == 1:
        values = np.random.default_rng(0).standard_normal((rows, 64))
        dtype = {Kind.F64: np.float64, Kind.F32: np.float32, Kind.F16: np.float16}.get(kind)
        raw = gguf.quantize(values.astype(np.float32), kind) if dtype is None else values.astype(dtype)
        return PackedTensor(kind, (rows, 64), raw.view(np.uint8).reshape(rows, -1))
    blocks = max(blocks, 128 // block)
    return PackedTensor(kind, (rows, blocks * block), random_blocks(kind, rows, blocks).reshape(rows, blocks * size))


def numbers(tensor: PackedTensor) -> Tensor:
    found = torch.full(tensor.shape, torch.nan)
    tensor.unpack_into(found)
    return found


@pytest.mark.parametrize("kind", READABLE, ids=named)
def test_every_type_gives_the_numbers_of_the_gguf_package(kind: GGMLQuantizationType) -> None:
    tensor = stored(kind)
    if kind in (Kind.F64, Kind.F32, Kind.F16):
        raw = tensor.rows.view({Kind.F64: np.float64, Kind.F32: np.float32, Kind.F16: np.float16}[kind])
        expected = raw.astype(np.float32)
    else:
        expected = gguf.dequantize(tensor.rows, kind)
    assert torch.equal(numbers(tensor), torch.from_numpy(expected))


class TypeTraits(ctypes.Structure):
    """What llama.cpp's library tells of a type (ggml.h: the first fields of ggml_type_traits)."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("quantised", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def llama_cpp() -> ctypes.CDLL:
    package = importlib.util.find_spec("xllamacpp")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("the package xllamacpp, which has llama.cpp's library, is not installed: pip install xllamacpp")
    (library,) = Path(package.submodule_search_locations[0]).glob("xllamacpp*.so")
    return ctypes.CDLL(str(library))


@pytest.mark.slow
def test_a_file_with_every_type_gives_the_numbers_of_llama_cpp(tmp_path: Path) -> None:
    """To the bit. It has no function for F32 and F64, whose numbers are stored as they are."""
    traits_of = llama_cpp().ggml_get_type_traits
    traits_of.restype = ctypes.POINTER(TypeTraits)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    for kind in READABLE:
        tensor = stored(kind)
        rows = tensor.rows.view({Kind.F64: np.float64, Kind.F32: np.float32}.get(kind, np.uint8))
        writer.add_tensor(kind.name, rows, raw_dtype=kind)
    finish(writer)
    file = module.GGUFFile(tmp_path / "types.gguf")
    assert list(file.tensors) == [kind.name for kind in READABLE]
    compared = []
    for kind in READABLE:
        tensor, traits = file.tensors[kind.name], traits_of(int(kind)).contents
        assert (traits.name.decode().upper(), traits.block, traits.size) == (kind.name, *GGML_QUANT_SIZES[kind])
        if traits.to_float:
            rows, expected = np.ascontiguousarray(tensor.rows), np.empty(tensor.shape, np.float32)
            traits.to_float(rows.ctypes.data, expected.ctypes.data, expected.size)
            assert torch.equal(numbers(tensor).view(torch.int32), torch.from_numpy(expected).view(torch.int32)), kind
            compared.append(kind)
    assert {*READABLE} - {*compared} == {Kind.F32, Kind.F64}


def test_a_start_parses_a_header_once_and_keeps_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = Counter[Path](), module._parsed
    monkeypatch.setattr(module, "_parsed", lambda path: (parsed.update([path]), parse(path))[1])
    for starts in (1, 2):
        LLM(str(tiny), drafter="ngram", num_speculative_tokens=4, max_batch_size=2).close()
        assert parsed == {tiny: starts}
    for reads in (3, 4):
        module.GGUFFile(tiny)
        assert parsed == {tiny: reads}, "outside of a start the file may have changed"


@pytest.mark.parametrize("kind", sorted(UNREADABLE), ids=named)
def test_types_without_weights_are_refused_by_name(kind: GGMLQuantizationType) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    tensor = PackedTensor(kind, (1, block), np.zeros((1, size), np.uint8))
    with pytest.raises(ModelFormatError, match=f"type {kind.name} cannot be read"):
        numbers(tensor)


@pytest.mark.parametrize("to", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", READABLE, ids=named)
def test_the_table_of_types_says_what_becomes_of_the_numbers(kind: GGMLQuantizationType, to: Format) -> None:
    tensor = stored(kind)
    exact = numbers(tensor)
    codes = tensor.codes(to)
    found = dequantise(quantise(exact, to) if codes is None else codes, exact.shape[1])
    same = torch.equal(found, exact)
    assert same == (precision_loss(kind, to) == "as stored")
    assert (codes is not None) == (to == "int4" and kind in CODED)
    if precision_loss(kind, to) == "scales rounded":
        assert isinstance(codes, Int4Weight)
        span = (codes.scales.float().abs() * 15 + codes.lows.float().abs()).repeat_interleave(32, 1)
        assert ((found - exact).abs() <= span * 2**-11).all()


def test_a_gpu_keeps_the_codes_of_mxfp4() -> None:
    """And no other type's as such; exponents of numbers beyond float32 are left to those who read numbers."""
    tensor = stored(Kind.MXFP4)
    codes = tensor.codes("fp4")
    assert codes is not None
    assert torch.equal(dequantise(codes, tensor.shape[1]), numbers(tensor))
    rows = tensor.rows.copy()
    rows[0, 0] = 253
    assert PackedTensor(Kind.MXFP4, tensor.shape, rows).codes("fp4") is None
    assert [kind for kind in READABLE if stored(kind).codes("fp4") is not None] == [Kind.MXFP4]


def test_a_scale_beyond_float16_is_rounded_like_any_other_number() -> None:
    tensor = stored(Kind.Q4_0)
    rows = tensor.rows.copy()
    rows[0, :2] = np.array([30000.0], np.float16).view(np.uint8)
    assert PackedTensor(Kind.Q4_0, tensor.shape, rows).codes("int4") is None


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K], ids=named)
def test_our_encoders_are_close_to_the_numbers(kind: GGMLQuantizationType) -> None:
    values = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
    error = gguf.dequantize(encode(values, kind), kind) - values
    assert np.sqrt((error**2).mean()) < {Kind.Q4_K: 0.08, Kind.Q6_K: 0.02}[kind]


# Codes in the kernels' int4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 16, which the kernels need."""

    def with_two_heads(writer: gguf.GGUFWriter) -> None:
        for key, value in (("head_count", 2), ("head_count_kv", 1)):
            writer.kv_data[0][f"llama.attention.{key}"].value = value
        del writer.tensors[0]["rope_freqs.weight"]

    folder = tmp_path_factory.mktemp("tiny")
    small_models.write_gguf(folder, with_two_heads)
    return folder / "model.gguf"


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=named)
def test_int4_runs_on_the_codes_of_the_file(
    kind: GGMLQuantizationType, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    copy(tiny, path, lambda name: Kind.Q8_0 if "attn_v" in name else kind)
    caplog.set_level(logging.INFO, "paceline")
    ours = packed(path, "int4", dtype=torch.bfloat16)
    assert f"model.gguf in int4: 12 {kind.name} as stored, 2 Q8_0 rounded" in caplog.text
    theirs = packed_at_once(path, "int4")
    assert ours.weight_bytes() == theirs.weight_bytes()
    groups = [block for block in (ours.packed(), theirs.packed()) if block is not None]
    assert not torch.equal(*groups), "the search for a grid found the file's own: the test shows nothing"


def test_rows_of_fused_matrices_keep_their_order(tiny: Path) -> None:
    ours, theirs = packed(tiny, "int8"), packed_at_once(tiny, "int8")
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.logits(hidden), theirs.logits(hidden))


# Split models


@pytest.fixture(scope="module")
def split(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    copy(tiny, folder / "model.gguf", lambda _: Kind.Q8_0, tensors_per_part=8)
    assert len(list(folder.iterdir())) == 3
    return folder


def part(number: int, of: int = 3) -> str:
    return f"model-{number:05}-of-{of:05}.gguf"


@pytest.mark.parametrize("name", ["", part(1), part(2), part(3)])
def test_any_part_or_the_directory_is_the_whole_model(name: str, split: Path, tiny: Path) -> None:
    ours, theirs = (load_model(path, dtype=torch.float32) for path in (split / name, tiny))
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.logits(hidden), theirs.logits(hidden))
    assert ours.weight_bytes() == theirs.weight_bytes()
    assert ours.name == str(split / part(1))


@pytest.fixture
def damaged(split: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(split, tmp_path / "damaged"))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load_model(path, dtype=torch.float32)


def test_swapped_parts_are_refused(damaged: Path) -> None:
    second, third = damaged / part(2), damaged / part(3)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    third.write_bytes(content)
    refused(damaged, rf"{part(2)}: by its name part 2 of 3, by its metadata split.no=2 of split.count=3")


def test_a_part_of_another_split_is_refused(damaged: Path, tiny: Path) -> None:
    shutil.copy(tiny, damaged / part(2))
    refused(damaged, rf"{part(2)}: by its name part 2 of 3, by its metadata split.no=None")


def test_parts_that_repeat_a_tensor_are_refused(damaged: Path) -> None:
    content = bytearray((damaged / part(2)).read_bytes())
    second, third = (module._read(damaged / part(n))[1] for n in (2, 3))
    same = next((a, b) for a in second for b in third if len(a) == len(b))
    at = content.index(same[0].encode())
    content[at : at + len(same[0])] = same[1].encode()
    (damaged / part(2)).write_bytes(bytes(content))
    refused(damaged, rf"{part(3)}: the tensor {same[1]} is also in another part")


def test_parts_with_too_few_tensors_are_refused(damaged: Path, tiny: Path) -> None:
    content = (damaged / part(1)).read_bytes()
    key = b"split.tensors.count"
    at = content.index(key) + len(key) + 4
    (damaged / part(1)).write_bytes(content[:at] + b"\x63" + content[at + 1 :])
    refused(damaged, r"its parts have 20 tensors, the first announces 99")


def test_one_part_under_another_name_is_refused(split: Path, tmp_path: Path) -> None:
    shutil.copy(split / part(1), tmp_path / "alone.gguf")
    refused(tmp_path / "alone.gguf", r"alone\.gguf is a part of a split model.*keep the names")


@pytest.mark.parametrize("number", [0, 4])
def test_a_name_with_an_impossible_number_is_refused(number: int, split: Path, tmp_path: Path) -> None:
    shutil.copy(split / part(1), tmp_path / part(number))
    refused(tmp_path / part(number), f"part {number} of 3 is impossible")


def test_a_truncated_part_is_named_with_its_tensor(damaged: Path) -> None:
    path = damaged / part(3)
    path.write_bytes(path.read_bytes()[:-100])
    refused(damaged, rf"{part(3)}: broken or truncated GGUF file \(tensor blk\.1\..* runs beyond the end")


# Hostile headers


def test_overlapping_tensors_are_refused(tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    name = b"blk.0.attn_k.weight"
    at = content.index(name) + len(name) + 4 + 16 + 4
    content[at : at + 8] = bytes(8)
    (tmp_path / "model.gguf").write_bytes(bytes(content))
    refused(tmp_path / "model.gguf", r"tensor .* overlaps")


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "keys")])
def test_huge_counts_are_refused_before_anything_is_read(at: int, what: str, tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    content[at : at + 8] = (2**60).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(bytes(content))
    refused(tmp_path / "model.gguf", rf"announces .*{2**60} {what}")


def test_a_tensor_that_is_no_whole_number_of_blocks_is_refused(tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    name = b"blk.0.attn_k.weight"
    at = content.index(name) + len(name) + 4
    content[at : at + 8] = (33).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(bytes(content))
    refused(tmp_path / "model.gguf", r"blk\.0\.attn_k\.weight of the shape \(16, 33\) has no whole number of Q8_0")


def test_a_tensor_of_five_dimensions_is_refused(tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    name = b"blk.0.attn_k.weight"
    content[content.index(name) + len(name)] = 5
    (tmp_path / "model.gguf").write_bytes(bytes(content))
    refused(tmp_path / "model.gguf", r"tensor blk\.0\.attn_k\.weight has 5 dimensions")
