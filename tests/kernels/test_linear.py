import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from covering import in_pairs
from kernels import reference
from kernels.tools import embed, quantise_row, rms_norm, run_linear, same_bits
from paceline.kernels import native, pack
from paceline.kernels.abi import Epilogue
from paceline.kernels.pack import Bf16Weight, Format, Int4Weight, Int8Weight

FORMATS: tuple[Format, ...] = ("int8", "bf16", "int4")
EVERY = (*native.available(), *native.emulated())
on_every_isa = pytest.mark.parametrize("kernels", EVERY, ids=lambda kernels: kernels.name)
in_every_format = pytest.mark.parametrize("to", FORMATS)
NOT_FINITE = (torch.nan, torch.inf, -torch.inf)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(y, expected, x, weight):
    """Within float32 rounding of sums as large as these."""
    dense = pack.dequantise(weight, x.shape[1]).abs()
    size = x.abs() @ dense.T + expected.abs()
    return bool(((y - expected).abs() <= 3e-6 * size + 1e-30).all())


@on_every_isa
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 100),
    to=st.sampled_from(FORMATS),
    bias=st.booleans(),
    loud=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 1000),
)
def test_a_linear_layer_of_any_shape_equals_the_reference(kernels, rows, inputs, outputs, to, bias, loud, seed):
    x = normal(rows, inputs, seed=seed) * loud
    weight = pack.quantise(normal(outputs, inputs, seed=seed + 1), to)
    b = normal(outputs, seed=seed + 2) if bias else None
    assert close(run_linear(kernels, x, weight, b), reference.linear(x, weight, b), x, weight)


@on_every_isa
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 30) | st.sampled_from([70, 130]),
    groups=st.integers(1, 20),
    outputs=st.integers(1, 70),
    group=st.sampled_from([32, 64]),
    extreme=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_integer_sums_are_exact(kernels, rows, groups, outputs, group, extreme, seed):
    random = torch.Generator().manual_seed(seed)
    inputs = groups * 64
    low = -127 if not extreme else 127
    x = torch.randint(low, 128, (rows, inputs), generator=random)
    x[:, ::64] = 127  # every group's amplitude is 127, so that its scale is exactly 1
    values = torch.randint(-127, 128, (outputs, inputs), generator=random)
    if extreme:
        values = values.sign() * 127
    int8 = Int8Weight(values.to(torch.int8), torch.ones(outputs))
    assert torch.equal(run_linear(kernels, x.float(), int8), (x @ values.T).float())
    nibbles = torch.randint(0, 16, (outputs, inputs), generator=random)
    zeros = torch.randint(0, 16, (outputs, inputs // group), generator=random)
    int4 = Int4Weight(nibbles.byte(), torch.ones(outputs, inputs // group).half(), -zeros.half(), group)
    exact = x @ (nibbles - zeros.repeat_interleave(group, dim=1)).T
    assert torch.equal(run_linear(kernels, x.float(), int4), exact.float())


@on_every_isa
@in_every_format
def test_silent_and_single_inputs(kernels, to):
    weight = pack.quantise(normal(40, 130), to)
    x = torch.zeros(5, 130)
    assert not run_linear(kernels, x, weight).any()
    x[2, 129] = 3.0
    assert close(run_linear(kernels, x, weight), reference.linear(x, weight), x, weight)
    assert run_linear(kernels, x[:0], weight).shape == (0, 40)


@on_every_isa
@settings(max_examples=30, deadline=None)
@given(inputs=st.integers(1, 400), scale=st.sampled_from([0.0, 1e-38, 1e-25, 1.0, 1e30]), seed=st.integers(0, 1000))
def test_quantised_rows_equal_the_references_exactly(kernels, inputs, scale, seed):
    x = normal(inputs, seed=seed) * scale
    expected, scales = reference.quantise_rows(x[None])
    for to, factor in (("int8", -128), ("int4", 1)):
        weight = pack.quantise(normal(8, inputs), to)
        values, got, sums = quantise_row(kernels, x, weight)
        assert torch.equal(values, expected.flatten())
        assert torch.equal(got, scales[0])
        assert torch.equal(sums.long(), factor * expected.flatten().view(len(sums), -1).long().sum(dim=1))


@in_pairs(kernels=EVERY, to=FORMATS, value=NOT_FINITE, places=[(0,), (69,), (64, 127), (3, 17, 35, 129)])
def test_inputs_that_are_not_finite_give_no_finite_output_and_change_no_other_row(kernels, to, value, places):
    x, weight = normal(5, 130), pack.quantise(normal(40, 130, seed=1), to)
    clean = run_linear(kernels, x, weight)
    x[2, list(places)] = value
    y, expected = run_linear(kernels, x, weight), reference.linear(x, weight)
    assert not y[2].isfinite().any()
    assert torch.equal(y[2].isnan(), expected[2].isnan())
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@on_every_isa
def test_a_quantised_group_that_is_not_finite_equals_the_references(kernels):
    weights = {(to, factor): pack.quantise(normal(8, 192), to) for to, factor in (("int8", -128), ("int4", 1))}
    for value, place, ((_, factor), weight) in itertools.product(NOT_FINITE, range(0, 192, 13), weights.items()):
        x = normal(192)
        x[place] = value
        expected, scales = reference.quantise_rows(x[None])
        assert scales[0].isnan().tolist() == [group == place // 64 for group in range(3)]
        values, got, sums = quantise_row(kernels, x, weight)
        assert torch.equal(values, expected.flatten())
        torch.testing.assert_close(got, scales[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(sums.long(), factor * expected.flatten().view(len(sums), -1).long().sum(dim=1))


@in_pairs(kernels=EVERY, inputs=[64, 1100], rows=[1, 5, 33])
def test_inputs_in_an_order_are_those_of_rows_in_that_order_to_the_bit(kernels, inputs, rows):
    """GPTQ's activation order: the product gathers its inputs."""
    x, weight = normal(rows, inputs), pack.quantise(normal(77, inputs, seed=1), "int4")
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    found = run_linear(kernels, x, replace(weight, order=order))
    assert torch.equal(found, run_linear(kernels, x[:, order].contiguous(), weight))
    assert close(found, reference.linear(x, replace(weight, order=order)), x, replace(weight, order=order))
    assert not torch.equal(found, run_linear(kernels, x, weight))


@in_pairs(kernels=EVERY, to=FORMATS, inputs=[64, 576, 1100])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(kernels, to, inputs):
    x = normal(200, inputs)
    weight, bias = pack.quantise(normal(77, inputs, seed=1), to), normal(77)
    together = run_linear(kernels, x, weight, bias)
    assert torch.equal(together[:1], run_linear(kernels, x[:1], weight, bias))
    for rows in (2, 5, 7, 8, 12, 13, 33, 100):
        assert torch.equal(together[50 : 50 + rows], run_linear(kernels, x[50 : 50 + rows], weight, bias))


@on_every_isa
@in_every_format
def test_bits_do_not_depend_on_the_number_of_threads(kernels, to):
    x, weight = normal(9, 200), pack.quantise(normal(150, 200, seed=1), to)
    assert same_bits([run_linear(kernels, x, weight, threads=threads) for threads in (1, 2, 3, 7, 64)])


@pytest.mark.skipif(len(EVERY) < 2, reason="needs two instruction sets")
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_all_instruction_sets_give_the_same_bits_for_integer_weights(to):
    x, weight = normal(45, 300), pack.quantise(normal(70, 300, seed=1), to)
    assert same_bits([run_linear(kernels, x, weight) for kernels in EVERY])


@in_pairs(kernels=EVERY, to=FORMATS, ffn=[16, 88, 200])
def test_swiglu_in_the_epilogue(kernels, to, ffn):
    x, gate_up, bias = normal(13, 100), normal(2 * ffn, 100, seed=1), normal(2 * ffn, seed=2)
    weight = pack.quantise(pack.interleave_gate_up(gate_up), to)
    y = run_linear(kernels, x, weight, pack.interleave_gate_up(bias), epilogue=Epilogue.SWIGLU)[:, :ffn]
    gate, up = reference.linear(x, pack.quantise(gate_up, to), bias).chunk(2, dim=1)
    torch.testing.assert_close(y, functional.silu(gate) * up, rtol=1e-5, atol=1e-4)


@on_every_isa
@in_every_format
def test_adding_to_the_residual_in_the_epilogue(kernels, to):
    x, weight, residual = normal(13, 100), pack.quantise(normal(45, 100, seed=1), to), normal(13, 45, seed=2)
    y = run_linear(kernels, x, weight, epilogue=Epilogue.ADD, out=residual)
    assert torch.equal(y, residual + run_linear(kernels, x, weight))


@on_every_isa
@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 300), scale=st.sampled_from([0.0, 1e-15, 1.0, 1e15]), seed=st.integers(0, 1000))
def test_rms_norm_equals_the_reference(kernels, width, scale, seed):
    x, weight = normal(width, seed=seed) * scale, normal(width, seed=seed + 1)
    torch.testing.assert_close(
        rms_norm(kernels, x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=2e-6, atol=1e-30
    )


@on_every_isa
@pytest.mark.parametrize("to", ["int8", "bf16"])
def test_the_embedding_is_read_from_the_packed_head(kernels, to):
    weight = pack.quantise(normal(77, 100), to)
    for token in (0, 31, 32, 76):
        assert torch.equal(embed(kernels, weight, token)[:100], pack.dequantise(weight, 100)[token])


@in_every_format
def test_quantised_weights_stay_near_the_originals(to):
    weight = normal(50, 130)
    back = pack.dequantise(pack.quantise(weight, to), 130)
    assert (back - weight).norm() / weight.norm() < {"int8": 0.01, "bf16": 0.003, "int4": 0.12}[to]


@in_every_format
def test_packed_bytes_are_known_before_packing(to):
    packed = pack.pack(pack.quantise(normal(77, 130), to))
    assert packed.weights.nbytes == pack.packed_bytes(77, 130, to)


def test_bf16_weights_round_as_torch_does():
    weight = normal(8, 64)
    quantised = pack.quantise(weight, "bf16")
    assert isinstance(quantised, Bf16Weight)
    assert torch.equal(quantised.values, weight.bfloat16())


def test_four_bit_groups_of_a_file_are_kept_unchanged():
    """Weights that already lie on a 4-bit grid with lows (GGUF's Q4_1) get the same codes again."""
    codes = torch.randint(0, 16, (48, 6, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    scales = torch.rand(48, 6).half() * 0.01 + 0.001
    lows = (-scales * (6 + 3 * torch.rand(48, 6))).half()
    weight = (codes * scales.float()[:, :, None] + lows.float()[:, :, None]).flatten(1)
    again = pack.quantise(weight.bfloat16().float(), "int4")  # as in a model loaded in bfloat16
    assert torch.equal(again.values, codes.flatten(1).byte())
    assert (pack.dequantise(again, 192) - weight).norm() / weight.norm() < 0.003  # bfloat16's own rounding


def test_the_best_number_of_steps_is_found():
    codes = torch.randint(0, 12, (16, 4, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 11  # a grid of which only twelve codes occur
    weight = (codes * 0.01 - 0.05).flatten(1)
    again = pack.quantise(weight, "int4")
    assert (pack.dequantise(again, 128) - weight).norm() / weight.norm() < 0.001
