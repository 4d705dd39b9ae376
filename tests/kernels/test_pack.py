"""The packed bytes themselves: files of packed weights depend on them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from paceline.kernels import native, pack
from paceline.kernels.abi import INPUT_MULTIPLE, PANEL
from paceline.kernels.pack import Format
from paceline.kernels.spec import LayerWeights, LinearWeights, NativeSpec, Rotary
from paceline.models.native.model import NativeModel

# A change of these bytes requires a new pack.LAYOUT_VERSION; otherwise old files would be misread.
VERSION = 3
MATRIX = {"int8": "1808ef7f74c25a91", "bf16": "6cea0e60810b8bc4", "int4": "fc91664da045bb74"}
DECODER = {"int8": "fa637038b64f1571", None: "5d7d0bd639f5cbd8", "int4": "dcc8b35ab1c69134"}
CHANGED = "packed bytes have changed: raise pack.LAYOUT_VERSION, then put the new ones here"
EVERY = (*native.available(), *native.emulated())


def some_weight(*shape: int) -> Tensor:
    """Multiples of 1/64 with 16 values: every format rounds them far from a tie, or not at all."""
    return ((torch.arange(torch.Size(shape).numel()) * 7919 % 16 - 6) / 64).view(shape)


def digest(*tensors: Tensor | None) -> str:
    there = (tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor is not None)
    return hashlib.sha256(b"".join(there)).hexdigest()[:16]


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_codes_stay_where_the_rows_of_a_weight_are_multiplied(to: Format) -> None:
    weight, factors = pack.quantise(some_weight(40, 128), to), torch.arange(1, 41) / 16
    found = pack.multiply_rows(weight, factors)
    assert found is not None
    assert not isinstance(found, pack.Bf16Weight | pack.Fp4Weight)
    assert not isinstance(weight, pack.Bf16Weight | pack.Fp4Weight)
    assert torch.equal(found.values.view(torch.uint8), weight.values.view(torch.uint8))
    wanted = pack.dequantise(weight, 128) * factors[:, None]
    torch.testing.assert_close(pack.dequantise(found, 128), wanted, rtol=2**-10, atol=2**-10)
    assert pack.multiply_rows(pack.quantise(some_weight(40, 128), "bf16"), factors) is None


@pytest.mark.parametrize("to", MATRIX)
def test_the_bytes_of_a_matrix_are_those_of_this_layout_version(to: Format) -> None:
    packed = pack.pack(pack.quantise(some_weight(40, 130), to), some_weight(40))
    found = digest(packed.weights, packed.scales, packed.bias)
    assert (pack.LAYOUT_VERSION, found) == (VERSION, MATRIX[to]), CHANGED


@pytest.mark.parametrize("to", MATRIX)
def test_a_matrix_is_packed_in_pieces_that_need_little_memory(to: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_AT_ONCE", 1)
    rounded: list[int] = []
    one_piece = pack._int4 if to == "int4" else pack._int8

    def noted(weight: Tensor, *group: int) -> pack.Weight:
        rounded.append(weight.shape[0])
        return one_piece(weight, *group)

    monkeypatch.setattr(pack, one_piece.__name__, noted)
    packed = pack.pack(pack.quantise(some_weight(40, 130), to), some_weight(40))
    assert digest(packed.weights, packed.scales, packed.bias) == MATRIX[to]
    assert rounded == ([] if to == "bf16" else [32, 8])


def some_decoder() -> NativeSpec:
    def linear(outputs: int, inputs: int) -> LinearWeights:
        return LinearWeights(some_weight(outputs, inputs), some_weight(outputs))

    norm, head_norm = some_weight(24), some_weight(16)
    layer = LayerWeights(
        linear(64, 24), linear(24, 32), linear(40, 24), linear(24, 20), norm, norm, head_norm, head_norm
    )
    return NativeSpec(
        width=24,
        heads=2,
        kv_heads=1,
        head_dim=16,
        vocab_size=37,
        max_positions=8,
        rotary=Rotary((1.0,) * 8),
        embedding=some_weight(37, 24),
        final_norm=norm,
        layers=[layer] * 2,
        head=linear(37, 24),
    )


@pytest.mark.parametrize("kernels", EVERY, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("quantization", DECODER)
def test_the_bytes_of_a_decoder_are_those_of_this_layout_version_on_every_instruction_set(
    quantization: str | None, kernels: native.Kernels
) -> None:
    model = NativeModel(some_decoder(), "some", quantization=quantization, threads=1, kernels=kernels)
    packed = model.packed()
    assert packed is not None
    assert packed.nbytes == model.weight_bytes()
    assert (pack.LAYOUT_VERSION, digest(packed)) == (VERSION, DECODER[quantization]), CHANGED


@pytest.mark.parametrize("to", MATRIX)
def test_a_transposed_weight_that_needs_no_padding_is_packed_like_its_copy(to: Format) -> None:
    """Latent attention absorbs the transpose of a part of its matrix."""
    across = some_weight(4 * INPUT_MULTIPLE, 2 * PANEL).T
    packed, copied = (pack.pack(pack.quantise(weight, to)) for weight in (across, across.contiguous()))
    assert digest(packed.weights, packed.scales) == digest(copied.weights, copied.scales)
