"""Quantised safetensors: the logits of the numbers they stand for, codes kept where a format holds them, and damage."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import real_models
from model_support import NATIVE, Runner, packed, random_tokens, tiny
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.kernels.pack import Format, dequantise
from paceline.kernels.spec import LinearWeights
from paceline.models.files.quantised_tensors import MXFP4Tensor, Parts
from paceline.models.load.kept_matrices import unread_matrices
from paceline.models.load.loading import load_model, open_checkpoint
from paceline.models.load.packed_file import PackedFile
from paceline.models.native.matrices import Outcome, StoredMatrix
from paceline.models.native.model import NativeModel
from quantised_support import CONVERTERS, Converter, awq, compressed, fp8_blocks, gptq, mxfp4_blocks, nvfp4, write

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Q = "model.layers.0.self_attn.q_proj"


def original() -> PreTrainedModel:
    return tiny("llama", NATIVE["llama"][1] | SHAPE)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """A checkpoint of every kind, and the model of the numbers that it stands for."""
    made = {}
    for number, (name, converter) in enumerate(CONVERTERS.items()):
        path = tmp_path_factory.mktemp(f"checkpoint{number}")
        made[name] = path, write(path, original(), converter)
    return made


@pytest.mark.parametrize("name", CONVERTERS)
def test_the_logits_are_those_of_the_dequantised_model(name: str, checkpoints: dict) -> None:
    path, theirs = checkpoints[name]
    tokens = random_tokens(2, 12)
    positions = torch.arange(12).expand(2, 12)
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = Runner(load_model(path, dtype=torch.float32), 2)(tokens, positions)
    assert (found - expected).abs().max() < 1e-4
    plain = original()
    with torch.no_grad():
        assert (plain(tokens).logits - expected).abs().max() > 1e-3, "rounding changed nothing: the test shows nothing"


def matrix_of(path: Path, to: Format, name: str = "layers.1.down.weight") -> tuple[Tensor, Outcome]:
    """The numbers of a matrix as the kernels get it, in float32."""
    checkpoint, outcome = open_checkpoint(path), Outcome()
    assert checkpoint is not None
    (part,) = (placement for placement in checkpoint.placements if placement.slot.target == name)
    weight = StoredMatrix([part], outcome)(to)
    return dequantise(weight, part.slot.shape[1]), outcome


EXACT: dict[str, Format] = {  # what a format holds without any rounding
    "compressed-tensors W4A16": "int4",
    "compressed-tensors W8A16 by row": "int8",
    "compressed-tensors W8A8": "int8",
    "compressed-tensors MXFP4": "bf16",
    "compressed-tensors W4A16 by activation order": "int4",
    "GPTQ": "int4",
    "GPTQ by activation order": "int4",
    "AutoRound": "int4",
}
LOWS_ROUNDED = {  # codes and scales are kept, the lowest value of a group is rounded to float16
    "compressed-tensors W4A16 with zero points",
    "GPTQ with zero points",
    "GPTQ version 2",
    "AWQ",
    "AutoRound in AWQ's layout",
}


@pytest.mark.parametrize("to", ["int4", "int8", "bf16"])
@pytest.mark.parametrize("name", CONVERTERS)
def test_codes_are_kept_where_the_format_holds_them(name: str, to: Format, checkpoints: dict) -> None:
    path, theirs = checkpoints[name]
    found, outcome = matrix_of(path, to)
    exact = theirs.model.layers[1].mlp.down_proj.weight.detach().float()
    kept = outcome.kept.total() == 1
    if EXACT.get(name) == to:
        assert torch.equal(found, exact)
        assert kept or to == "bf16"
    elif name in LOWS_ROUNDED and to == "int4":
        assert kept
        assert 0 < (found - exact).abs().max() < 2**-11 * 16 * exact.abs().max()
    else:
        assert not kept
        assert not torch.equal(found, exact)


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_gpu_multiplies_with_the_codes_of_4_bits(name: str, checkpoints: dict) -> None:
    """Those of MXFP4 and of GPTQ's activation order, too; also where several stored matrices are one."""
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu.linear import Linears

    path, theirs = checkpoints[name]
    checkpoint, outcome, mlp = open_checkpoint(path), Outcome(), theirs.model.layers[1].mlp
    assert checkpoint is not None
    shapes, readers = unread_matrices(checkpoint, torch.float32, torch.device("cpu"), outcome)
    both, linears = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), Linears("int4")
    for part, exact in (("layers.1.down", mlp.down_proj.weight), ("layers.1.gate_up", both)):
        weights = LinearWeights(shapes[f"{part}.weight"], None, readers[f"{part}.weight"])
        x = torch.randn(3, exact.shape[1], generator=torch.Generator().manual_seed(0))
        expected = x @ exact.detach().T
        error = (linears(weights)(x) - expected).norm() / expected.norm()
        if EXACT.get(name) == "int4" or name == "compressed-tensors MXFP4":
            assert error < 1e-6
        else:
            assert (error < 2e-3) == (name in LOWS_ROUNDED)
    counts = outcome.kept.total(), outcome.rounded.total()
    assert counts == ((3, 0) if error < 2e-3 else (0, 3))


@pytest.mark.parametrize("name", [name for name in CONVERTERS if "float8" in name])
def test_a_gpu_multiplies_with_float8_and_its_own_scales(name: str, checkpoints: dict) -> None:
    """By row, by matrix, and by blocks of 128 inputs; smaller blocks are rounded."""
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu.linear import Linears

    path, theirs = checkpoints[name]
    checkpoint, outcome = open_checkpoint(path), Outcome()
    assert checkpoint is not None
    shapes, readers = unread_matrices(checkpoint, torch.float32, torch.device("cpu"), outcome)
    matrix, exact = "layers.1.down.weight", theirs.model.layers[1].mlp.down_proj.weight.detach()
    x = torch.randn(3, exact.shape[1], generator=torch.Generator().manual_seed(0))
    found = Linears("fp8")(LinearWeights(shapes[matrix], None, readers[matrix]))(x)
    is_kept = name not in ("float8 in small blocks", "modelopt NVFP4 and float8")  # this matrix is NVFP4
    assert ((found - x @ exact.T).norm() < 1e-6 * found.norm()) == is_kept
    assert (outcome.kept.total(), outcome.rounded.total()) == (int(is_kept), int(not is_kept))


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize(
    ("name", "to"),
    [("GPTQ", "int4"), ("GPTQ by activation order", "int4"), ("compressed-tensors W8A8", "int8")],
)
def test_the_kernels_run_on_the_codes(name: str, to: str, checkpoints: dict, caplog: pytest.LogCaptureFixture) -> None:
    """They round activations alone. A model read from the disk cache has the same bits."""
    caplog.set_level("INFO", "paceline")
    path, theirs = checkpoints[name]
    model = packed(path, to, dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert any(re.search(rf"in {to}: 14 (GPTQ|int8) as stored$", message) for message in caplog.messages)
    tokens = random_tokens(2, 12)

    def logits(model: NativeModel) -> Tensor:
        nodes = Nodes(tokens.flatten(), torch.arange(2).repeat_interleave(12), torch.arange(12).repeat(2))
        return model.logits(model.forward(nodes, KVCache(model.kv_layers, 2, 64, dtype=torch.bfloat16)).hidden)

    found = logits(model)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
    assert (found - expected).norm() < 0.05 * expected.norm()
    file = PackedFile(path, torch.bfloat16, to)  # type: ignore[arg-type]
    file.save(model)
    again = file.load()
    assert again is not None
    assert torch.equal(logits(again), found)


def test_experts_in_mxfp4_are_transformers_own() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    packed, exponents, exact = mxfp4_blocks(weight)
    blocks = packed.unflatten(-1, (-1, 16))
    tensors = {"_blocks": InMemory(blocks, "U8"), "_scales": InMemory(exponents, "U8")}
    stored = MXFP4Tensor(Parts("file: experts", tensors), "_blocks", "_scales")
    found = torch.empty(stored.shape)
    stored.unpack_into(found)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32))
    assert torch.equal(found, exact.transpose(1, 2))


class InMemory:
    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.tensor, self.dtype, self.shape = tensor, dtype, tuple(tensor.shape)

    def load(self) -> Tensor:
        return self.tensor

    def matrix(self, index: int) -> InMemory:
        return InMemory(self.tensor[index], self.dtype)


def test_what_changes_nothing_is_read(tmp_path: Path, checkpoints: dict) -> None:
    """Older checkpoints name their settings otherwise, call dense matrices a sparsity, and have biases of zeros."""
    name = next(name for name in CONVERTERS if name.startswith("compressed"))
    shutil.copytree(checkpoints[name][0], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    said = config.pop("quantization_config") | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    file.write_text(json.dumps(config | {"compression_config": said}))
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(weights)
    save_file(tensors | {f"{Q}.bias": torch.zeros(128)}, weights)
    tokens, positions = random_tokens(1, 8), torch.arange(8)[None]
    logits = [
        Runner(load_model(path, dtype=torch.float32), 1)(tokens, positions)
        for path in (tmp_path / "model", checkpoints[name][0])
    ]
    assert torch.equal(*logits)
    save_file(tensors | {f"{Q}.bias": torch.ones(128)}, weights)
    with pytest.raises(ModelFormatError, match=r"has no use for.*q_proj\.bias"):
        load_model(tmp_path / "model", dtype=torch.float32)


# What is refused


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by 'bitsandbytes', which is not read: use"),
        ({"quant_method": "exl3"}, "'exl3', which is not read: use the model's original weights"),
        ({"group_size": 64, "bits": 4}, "quantised by 'mlx'"),
        ({"quant_method": "modelopt"}, "modelopt with quant_algo='None' is not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}},
            },
            "quant_algo='W4A8_AWQ'",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8 with blocks of"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits=3 is not read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "the layout 'gemv'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:x"}, "the packing 'auto_round:x'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "no config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 3}, "sparsity_config": {"format": "2of4"}},
            "sparsity_config",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "a group of config_groups without weights"),
        ([], "config.json cannot be used"),
    ],
)
def test_what_is_not_read_is_refused_by_name(said: object, message: str, tmp_path: Path) -> None:
    original().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(ModelFormatError, match=message):
        load_model(tmp_path, dtype=torch.float32)


def test_an_mlx_model_is_refused_by_name(tmp_path: Path) -> None:
    original().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(ModelFormatError, match="quantised by 'mlx'"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_quantised_model_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    from model_support import FOREIGN

    kind, fields = FOREIGN["gpt_neox"]
    model = tiny(kind, fields)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq(8).config}))
    tensors = load_file(tmp_path / "model.safetensors") | {"x.qweight": torch.zeros(8, 1, dtype=torch.int32)}
    tensors |= {"x.qzeros": torch.zeros(1, 1, dtype=torch.int32), "x.scales": torch.zeros(1, 8)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"quantised model \(AWQ\) of the type 'gpt_neox'"):
        load_model(tmp_path, dtype=torch.float32)


def test_an_older_modelopt_tells_its_scheme_in_a_file_of_its_own(tmp_path: Path) -> None:
    theirs = write(tmp_path, original(), nvfp4(by_modelopt=True))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    tokens = random_tokens(1, 8)
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = Runner(load_model(tmp_path, dtype=torch.float32), 1)(tokens, torch.arange(8)[None])
    assert (found - expected).abs().max() < 1e-4


def test_a_configuration_without_the_tensors_is_refused(tmp_path: Path) -> None:
    original().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": awq(128).config}))
    with pytest.raises(ModelFormatError, match=r"no tensor ends in \.qweight, although the configuration says AWQ"):
        load_model(tmp_path, dtype=torch.float32)


# Damaged tensors

Change = Callable[[dict[str, Tensor]], object]


def without(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{Q}.{suffix}")


def replaced(suffix: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{Q}.{suffix}": make(tensors[f"{Q}.{suffix}"])})


DAMAGE: dict[str, tuple[Converter, Change, str]] = {
    "no scales": (gptq(4, 32, symmetric=True), without("scales"), "has no scales"),
    "short scales": (gptq(4, 32, symmetric=True), replaced("scales", lambda t: t[:3]), r"scales is F16 of .*\(3,"),
    "no groups": (gptq(4, 32, symmetric=True), replaced("scales", lambda t: t[:0]), r"scales is F16"),
    "scales of words": (gptq(4, 32, symmetric=True), replaced("scales", torch.Tensor.int), "scales is I32"),
    "long zeros": (gptq(4, 32, symmetric=True), replaced("qzeros", lambda t: t.repeat(2, 1)), "qzeros is I32"),
    "a group that does not exist": (
        gptq(4, 32, symmetric=True),
        replaced("g_idx", lambda t: t + 1),
        r"g_idx names groups that do not exist \(4 do\)",
    ),
    "a negative group": (gptq(4, 32, symmetric=True), replaced("g_idx", lambda t: t - 1), "g_idx names groups"),
    "short g_idx": (gptq(4, 32, symmetric=True), replaced("g_idx", lambda t: t[:5]), "g_idx is I32"),
    "three dimensions": (awq(32), replaced("qweight", lambda t: t[None]), "qweight is I32 of the shape"),
    "floats as words": (awq(32), replaced("qweight", torch.Tensor.float), "qweight is F32"),
    "half of the zeros": (awq(32), replaced("qzeros", lambda t: t[:, :4]), "qzeros is I32"),
    "a huge shape": (
        compressed(4, 32, symmetric=True),
        replaced("weight_shape", lambda t: t * 2**40),
        "weight_packed is I32",
    ),
    "a negative shape": (
        compressed(4, 32, symmetric=True),
        replaced("weight_shape", torch.neg),
        "weight_packed is I32",
    ),
    "three sizes": (compressed(4, 32, symmetric=True), replaced("weight_shape", lambda t: t.repeat(2)), "two numbers"),
    "zero points as floats": (
        compressed(4, 32, symmetric=False),
        replaced("weight_zero_point", torch.Tensor.float),
        "weight_zero_point is F32",
    ),
    "too many blocks": (
        fp8_blocks(64, 64),
        replaced("weight_scale_inv", lambda t: t.repeat(2, 1)),
        "weight_scale_inv is",
    ),
    "blocks of another size": (
        nvfp4(by_modelopt=True),
        replaced("weight_scale", lambda t: t.view(torch.uint8).repeat(1, 2).view(t.dtype)),
        "weight is U8 of the shape",
    ),
    "no scale of the matrix": (nvfp4(by_modelopt=False), without("weight_global_scale"), "has no weight_global_scale"),
    "no block scales": (fp8_blocks(64, 64), without("weight_scale_inv"), "has no weight_scale_inv"),
    "another float8": (
        fp8_blocks(64, 64),
        replaced("weight", lambda t: t.float().to(torch.float8_e5m2)),
        "weight is F8_E5M2",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_with_file_and_tensor(how: str, tmp_path: Path) -> None:
    converter, change, message = DAMAGE[how]
    write(tmp_path, original(), converter)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(ModelFormatError, match=message) as caught:
        load_model(tmp_path, dtype=torch.float32)
    assert "model.safetensors: model.layers.0.self_attn.q_proj" in str(caught.value)


def test_numbers_that_are_not_finite_are_refused_before_they_are_rounded(tmp_path: Path) -> None:
    write(tmp_path, original(), fp8_blocks(64, 64))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.weight_scale_inv"][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"self_attn\.q_proj\.weight has values that are not finite"):
        packed(tmp_path, "int8", dtype=torch.bfloat16)


# Real weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed-tensors W4A16", "AWQ", "GPTQ", "float8 in blocks"])
def test_a_real_model_in_the_usual_layouts(name: str, tmp_path: Path) -> None:
    theirs = real_models.load_in_transformers(real_models.find("qwen-coder-0.5b"))
    before = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    try:
        write(tmp_path, theirs, CONVERTERS[name])
        tokens = torch.arange(1000, 1024)[None]
        with torch.no_grad():
            expected = theirs(tokens).logits
        found = Runner(load_model(tmp_path, dtype=torch.float32), 1)(tokens, torch.arange(24)[None])
        assert (found - expected).abs().max() < 1e-3
    finally:
        theirs.load_state_dict(before)
