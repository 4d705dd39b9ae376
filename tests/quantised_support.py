"""Quantised safetensors checkpoints for tests: small converters in the layouts of several tools.

Each rounds to nearest. The numbers that a checkpoint stands for are computed here, without paceline's reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Converted = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the numbers [O, I] that they stand for
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Converter:
    """config: the model's quantization_config. convert: a matrix [O, I] -> its tensors and its numbers."""

    config: dict[str, Any]
    convert: Callable[[Tensor], Converted]


def grid(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round in groups of inputs: codes [O, I] int64, scales float16 [O, G], zeros int64 [O, G]."""
    groups = weight.float().view(len(weight), -1, group or weight.shape[1])
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    span = 2 * torch.maximum(high, -low) if symmetric else high - low
    scales = (span / top).clamp(min=1e-4).half()
    zeros = torch.full_like(low, middle) if symmetric else (-low / scales.float()).round().clamp(0, top)
    codes = (groups / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    return codes.flatten(1).long(), scales, zeros.long()


def numbers(codes: Tensor, scales: Tensor, zeros: Tensor, of_input: Tensor | None = None) -> Tensor:
    if of_input is None:
        of_input = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return (codes - zeros[:, of_input]).float() * scales.float()[:, of_input]


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] -> int32 [N, K * bits / 32], the lowest bits first; K is padded to whole words."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    shifted = codes.view(len(codes), -1, per_word) << (torch.arange(per_word) * bits)
    return shifted.sum(2).to(torch.uint32).view(torch.int32)


def compressed(bits: int, group: int, *, symmetric: bool, ordered: bool = False) -> Converter:
    """ordered: groups by activation order (actorder "group"), which weight_g_idx tells."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    weights |= {"actorder": "group"} if ordered else {}

    def convert(weight: Tensor) -> Converted:
        order, of_input = _orders(weight.shape[1], group, ordered=ordered)
        codes, scales, zeros = grid(weight[:, order], bits, group, symmetric=symmetric)
        codes = codes[:, order.argsort()]
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.t().contiguous(), bits).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = of_input.int()
        return tensors, numbers(codes, scales, zeros, of_input)

    return Converter(_compressed_config("pack-quantized", weights), convert)


def _compressed_config(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _orders(inputs: int, group: int, *, ordered: bool) -> tuple[Tensor, Tensor]:
    """The inputs in the order of their groups, and the group of each input."""
    random = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=random) if ordered else torch.arange(inputs)
    return order, (torch.arange(inputs) // (group or inputs))[order.argsort()]


def gptq(bits: int, group: int, *, symmetric: bool, ordered: bool = False, version: int = 1) -> Converter:
    """ordered: groups by activation order (desc_act), so that g_idx is a permutation."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def convert(weight: Tensor) -> Converted:
        order, of_input = _orders(weight.shape[1], group, ordered=ordered)
        codes, scales, zeros = grid(weight[:, order], bits, group, symmetric=symmetric)
        unordered = codes[:, order.argsort()]
        stored = (zeros - int(version == 1)) & ((1 << bits) - 1)
        tensors = {
            "qweight": words(unordered, bits).t().contiguous(),
            "qzeros": words(stored.t().contiguous(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": of_input.int(),
        }
        return tensors, numbers(unordered, scales, zeros, of_input)

    return Converter(config, convert)


def awq(group: int) -> Converter:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def swapped(codes: Tensor) -> Tensor:
        return words(codes.view(len(codes), -1, 8)[..., list(_AWQ_ORDER)].flatten(1), 4)

    def convert(weight: Tensor) -> Converted:
        codes, scales, zeros = grid(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": swapped(codes.t().contiguous()),
            "qzeros": swapped(zeros.t().contiguous()),
            "scales": scales.t().contiguous(),
        }
        return tensors, numbers(codes, scales, zeros)

    return Converter(config, convert)


def auto_round(packing: str, group: int) -> Converter:
    by = awq(group) if packing == "auto_awq" else gptq(4, group, symmetric=True)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": True}
    return Converter(config | {"packing_format": f"auto_round:{packing}"}, by.convert)


def w8a8() -> Converter:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}

    def convert(weight: Tensor) -> Converted:
        codes, scales, _ = grid(weight, 8, 0, symmetric=True)
        values = (codes - 128).to(torch.int8)
        return {"weight": values, "weight_scale": scales.bfloat16()}, values.float() * scales.bfloat16().float()

    return Converter(_compressed_config("int-quantized", weights), convert)


def fp8_rows() -> Converter:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}

    def convert(weight: Tensor) -> Converted:
        scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        values = (weight / scales.float()).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scales}, values.float() * scales.float()

    return Converter(_compressed_config("float-quantized", weights), convert)


def fp8_blocks(height: int, width: int) -> Converter:
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [height, width],
    }

    def convert(weight: Tensor) -> Converted:
        rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scales = torch.empty(rows, columns)
        spread = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scales[i, j] = weight[block].abs().max() / 448
                spread[block] = scales[i, j]
        values = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scales}, values.float() * spread

    return Converter(config, convert)


def fp8_matrix() -> Converter:
    """As Ministral 3 is published: one scale for a matrix, and one for its inputs, which is not used here."""

    def convert(weight: Tensor) -> Converted:
        scale = (weight.abs().max() / 448).bfloat16()
        values = (weight / scale.float()).to(torch.float8_e4m3fn)
        stored = {"weight": values, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.01).bfloat16()}
        return stored, values.float() * scale.float()

    return Converter({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, convert)


def mxfp4() -> Converter:
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}

    def convert(weight: Tensor) -> Converted:
        packed, exponents, exact = mxfp4_blocks(weight)
        return {"weight_packed": packed, "weight_scale": exponents}, exact

    return Converter(_compressed_config("mxfp4-pack-quantized", weights), convert)


def mxfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., I] -> packed uint8 [..., I / 2], exponents uint8 [..., I / 32], numbers [..., I]."""
    groups = weight.float().view(*weight.shape[:-1], -1, 32)
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    exact = FP4[codes] * scaled.sign() * exponents.exp2()[..., None]
    nibbles = (codes + 8 * (scaled < 0)).flatten(-2).view(*weight.shape[:-1], -1, 2)
    packed = (nibbles[..., 0] | (nibbles[..., 1] << 4)).to(torch.uint8)
    return packed, (exponents + 127).to(torch.uint8), exact.flatten(-2)


def nvfp4(*, by_modelopt: bool) -> Converter:
    """In blocks of 16. compressed-tensors divides by the scale of the whole matrix, modelopt multiplies with it."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    config = _compressed_config("nvfp4-pack-quantized", weights)

    def convert(weight: Tensor) -> Converted:
        groups = weight.float().view(len(weight), -1, 16)
        whole = weight.abs().max() / (448 * 6)
        scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        divisor = 1 / whole
        factors = scales.float() * whole if by_modelopt else scales.float() / divisor
        scaled = groups / factors[..., None].clamp(min=1e-30)
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
        exact = (FP4[codes] * scaled.sign() * factors[..., None]).flatten(1)
        nibbles = (codes + 8 * (scaled < 0)).view(len(weight), -1, 2)
        packed = (nibbles[..., 0] | (nibbles[..., 1] << 4)).to(torch.uint8)
        if by_modelopt:
            return {
                "weight": packed,
                "weight_scale": scales,
                "weight_scale_2": whole,
                "input_scale": whole.clone(),
            }, exact
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divisor[None]}, exact

    return Converter({"quant_method": "modelopt", "quant_algo": "NVFP4"} if by_modelopt else config, convert)


def modelopt_mixed() -> Converter:
    """Narrow matrices in float8 with one scale, wide ones in NVFP4."""
    fp4 = nvfp4(by_modelopt=True)

    def convert(weight: Tensor) -> Converted:
        if weight.shape[1] > 128:
            return fp4.convert(weight)
        scale = weight.abs().max() / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        stored = {"weight": values, "weight_scale": scale, "k_scale": scale.clone(), "input_scale": scale.clone()}
        return stored, values.float() * scale

    layers = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4"}, "model.layers.0.q": {"quant_algo": "FP8"}}
    return Converter({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, convert)


CONVERTERS: dict[str, Converter] = {
    "compressed-tensors W4A16": compressed(4, 128, symmetric=True),
    "compressed-tensors W4A16 with zero points": compressed(4, 32, symmetric=False),
    "compressed-tensors W4A16 by activation order": compressed(4, 32, symmetric=True, ordered=True),
    "compressed-tensors W8A16 by row": compressed(8, 0, symmetric=True),
    "compressed-tensors W8A8": w8a8(),
    "compressed-tensors float8": fp8_rows(),
    "compressed-tensors MXFP4": mxfp4(),
    "GPTQ": gptq(4, 128, symmetric=True),
    "GPTQ with zero points": gptq(4, 64, symmetric=False),
    "GPTQ by activation order": gptq(4, 32, symmetric=True, ordered=True),
    "GPTQ version 2": gptq(4, 128, symmetric=False, version=2),
    "GPTQ of 8 bits": gptq(8, 128, symmetric=True),
    "AWQ": awq(128),
    "AutoRound": auto_round("auto_gptq", 128),
    "AutoRound in AWQ's layout": auto_round("auto_awq", 128),
    "float8 in blocks": fp8_blocks(128, 128),
    "float8 in small blocks": fp8_blocks(48, 80),
    "float8 by matrix": fp8_matrix(),
    "compressed-tensors NVFP4": nvfp4(by_modelopt=False),
    "modelopt NVFP4": nvfp4(by_modelopt=True),
    "modelopt NVFP4 and float8": modelopt_mixed(),
}


def write(path: Path, model: PreTrainedModel, converter: Converter, **options: Any) -> PreTrainedModel:
    """Save a model with its layers' matrices quantised. The model gets the numbers that the files stand for."""
    model.save_pretrained(path, **options)
    model.load_state_dict(convert_files(path, converter), strict=False)
    return model


def convert_files(path: Path, converter: Converter) -> dict[str, Tensor]:
    """Quantise the layers' matrices in a saved checkpoint. Return the numbers [O, I] that they stand for, by name."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": converter.config}))
    tensors: dict[str, Tensor] = {}
    numbers_of: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if re.search(r"layers\.\d+\..*_proj(_qkvz)?\.weight$", name):
            found, numbers_of[name] = converter.convert(tensor.float())
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in found.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return numbers_of
