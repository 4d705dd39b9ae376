"""Damage of safetensors files, quantised or not, of shards, and of configurations."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gemma4_support
from hostile.cases import (
    CHANGES,
    EVERY,
    TWO,
    Build,
    Case,
    Damage,
    dropped,
    first_number,
    in_bf16,
    in_bytes,
    in_json,
    in_tensors,
    replaced,
)
from model_support import NATIVE, tiny
from models.test_quantised import SHAPE
from models.test_sinks_and_shared_experts import _gpt_oss
from quantised_support import CONVERTERS, write
from recurrent_support import tiny_lfm2, tiny_qwen3_5

Q = "model.layers.0.self_attn.q_proj"


def _build(path: Path, **options: Any) -> None:
    dtype = options.pop("dtype", torch.float32)
    tiny("llama", NATIVE["llama"][1] | SHAPE).to(dtype).save_pretrained(path, **options)


def quantised() -> Iterator[Case]:
    for kind, converter in CONVERTERS.items():
        built, _ = converter.convert(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))

        def build(path: Path, converter: Any = converter) -> None:
            write(path, tiny("llama", NATIVE["llama"][1] | SHAPE), converter)

        damages: dict[str, Damage] = {}
        for suffix, tensor in built.items():
            if suffix in ("activation_scale", "input_scale", "k_scale"):  # which are not read
                continue
            key = f"{Q}.{suffix}"
            if suffix != "g_idx" or "order" in kind:
                damages[f"no {suffix}"] = dropped(key)
            for what, change in CHANGES.items():
                if what == "one dimension less" and tensor.shape[-1:] == (1,):
                    continue  # scales of rows may be stored so
                if what != "another type" and tensor.dim() == 0:
                    continue
                damages[f"{suffix}: {what}"] = replaced(key, change)
            numbers: tuple[float, ...] = {"g_idx": (-1, 2**31 - 1), "weight_shape": (-1, 0, 2**62)}.get(suffix, ())
            if tensor.is_floating_point():
                numbers = (torch.nan,) if tensor.dtype == torch.float8_e4m3fn else (torch.nan, torch.inf)
            damages |= {f"{suffix}: {value}": replaced(key, first_number(value)) for value in numbers}
        if "MXFP4" in kind:
            damages["a scale that is no number"] = replaced(f"{Q}.weight_scale", first_number(255))
        if "weight" not in built:
            both = in_tensors(lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(128, 128)}))
            damages["stored twice"] = both
        for what, damage in damages.items():
            yield Case(kind, what, build, damage, EVERY, re.escape(Q))
        if kind == "GPTQ":
            yield from as_bytes(kind, build, "model.safetensors", EVERY)


def as_bytes(kind: str, build: Build, file: str, loads: tuple[Any, ...]) -> Iterator[Case]:
    """Damage of a safetensors file as bytes."""

    def second_name(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        first, second, *_ = (name for name in json.loads(content[8:end]) if name != "__metadata__")
        header = content[8:end].replace(f'"{second}"'.encode(), f'"{first}"'.encode())
        return len(header).to_bytes(8, "little") + header + content[end:]

    changes: dict[str, Callable[[bytes], bytes]] = {
        "without its last byte": lambda content: content[:-1],
        "half a file": lambda content: content[: len(content) // 2],
        "an empty file": lambda content: b"",
        "a huge header": lambda content: (2**62).to_bytes(8, "little") + content[8:],
        "a tensor twice": second_name,
        "bytes behind the last tensor": lambda content: content + bytes(64),
    }
    for what, change in changes.items():
        yield Case(kind, what, build, in_bytes(change, file), loads, re.escape(file))


def shards() -> Iterator[Case]:
    def shard(path: Path, number: int) -> Path:
        return sorted(path.glob("model-*.safetensors"))[number]

    def another(path: Path) -> None:
        model = tiny("llama", NATIVE["llama"][1] | SHAPE | {"hidden_size": 64})
        model.save_pretrained(path / "other", max_shard_size="100KB")
        shutil.copy(sorted((path / "other").glob("model-*"))[0], shard(path, 0))
        shutil.rmtree(path / "other")

    damages: dict[str, tuple[Damage, str]] = {
        "one of them twice": (lambda path: shutil.copy(shard(path, 0), shard(path, 1)), "model-00002-of"),
        "one missing": (lambda path: shard(path, 1).unlink(), "model-00002-of"),
        "one of another model": (another, "model."),
        "one cut": (in_bytes(lambda content: content[:-1], "model-00002-of*"), "model-00002-of"),
        "no index": (lambda path: (path / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    }
    for what, (damage, word) in damages.items():
        yield Case("shards", what, partial(_build, max_shard_size="300KB"), damage, TWO, word)


def plain() -> Iterator[Case]:
    norm, every = "model.norm.weight", (f"{Q}.weight", "model.norm.weight", "model.embed_tokens.weight")
    for what, kind in {"weights of words": torch.int32, "weights of truths": torch.bool}.items():
        damage = replaced(norm, lambda t, kind=kind: t.to(kind))
        yield Case("plain", what, _build, damage, TWO, rf"model\.safetensors.*{re.escape(norm)}")
    for kind, build, keys, loads in (
        ("plain", _build, every, TWO),
        ("bfloat16", partial(_build, dtype=torch.bfloat16), every[:2], EVERY),
    ):
        for key in keys:
            for what, change in {"NaN in": first_number(torch.nan), "half of": CHANGES["half"]}.items():
                yield Case(kind, f"{what} {key}", build, replaced(key, change), loads, re.escape(key))
    experts = "experts.gate_up_proj", "experts.down_proj"
    others = "router.proj.weight", "router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2.weight"
    for key in (f"model.layers.1.{name}" for name in (*experts, *others)):
        damages = {"no": dropped(key), "NaN in": replaced(key, first_number(torch.nan))}
        damages |= {f"{what} of": replaced(key, CHANGES[what]) for what in ("half", "twice", "another type")}
        for what, damage in damages.items():
            pattern = re.escape(key) + r"|layers\.1\."
            yield Case("gemma4's experts", f"{what} {key}", _gemma4_experts, damage, TWO, pattern)


# Files that are large beside the interpreter

LARGE = SHAPE | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 36}
_LAST = "model.layers.35.mlp.up_proj.weight"


def large() -> Iterator[Case]:
    """Damage at the end of a file of 50 MB, in precisions that need no more: what was read must not pile up."""

    def build(path: Path) -> None:
        tiny("llama", NATIVE["llama"][1] | LARGE).bfloat16().save_pretrained(path)

    damages = {
        "NaN": replaced(_LAST, first_number(torch.nan)),
        "half": replaced(_LAST, CHANGES["half"]),
        "cut": in_bytes(lambda content: content[:-1], "model.safetensors"),
    }
    for what, damage in damages.items():
        pattern = rf"{re.escape(_LAST)}|safetensors"
        yield Case("a large file", f"{what} at the end", build, damage, (in_bf16, *EVERY[1:]), pattern)


# Configurations

_LAYER_TYPES: tuple[Any, ...] = (
    ["full_attention"], ["full_attention"] * 50, ["x"] * 3, [3, 3, 3], "full_attention", {}, [[]] * 3,
)  # fmt: skip
_COUNTS: tuple[Any, ...] = (0, -1, 7, 10**5, 2**62, 1.5, "8", [2])
_CHOSEN: tuple[Any, ...] = (0, -1, 6, 10**5, 2**62, "8", [2])  # experts per token


def _of_family(name: str) -> Build:
    return lambda path: tiny(*NATIVE[name]).save_pretrained(path)


def _gemma4_experts(path: Path) -> None:
    gemma4_support.tiny_gemma4(**gemma4_support.SIZES["experts"]).save_pretrained(path)


_CONFIGURATIONS: dict[str, tuple[Build, dict[str, tuple[Any, ...]]]] = {
    "qwen3_moe": (
        _of_family("qwen3_moe"),
        {"num_local_experts": _COUNTS, "num_experts_per_tok": _CHOSEN, "moe_intermediate_size": _COUNTS},
    ),
    "olmoe": (_of_family("olmoe"), {"num_experts": _COUNTS, "num_experts_per_tok": _CHOSEN}),
    "granitemoe": (_of_family("granitemoe"), {"num_local_experts": _COUNTS}),
    "gpt_oss": (
        lambda path: _gpt_oss().save_pretrained(path),
        {"num_local_experts": _COUNTS, "num_experts_per_tok": (0, -1, 6, 10**5), "layer_types": _LAYER_TYPES},
    ),
    "gemma3": (_of_family("gemma3"), {"layer_types": _LAYER_TYPES, "head_dim": _COUNTS}),
    "gemma4": (
        _of_family("gemma4"),
        {
            "layer_types": _LAYER_TYPES,
            "num_kv_shared_layers": (-1, 5, 7, 10**5, 2**62, "x", [2]),
            "hidden_size_per_layer_input": _COUNTS[1:],
        },
    ),
    "gemma4's experts": (
        _gemma4_experts,
        {"num_experts": _COUNTS, "top_k_experts": _CHOSEN, "moe_intermediate_size": _COUNTS},
    ),
    "lfm2": (
        lambda path: tiny_lfm2().save_pretrained(path),
        {"layer_types": _LAYER_TYPES, "conv_L_cache": (0, -1, 7, 10**5, 2**62, "x", [2])},
    ),
    "qwen3_5": (
        lambda path: tiny_qwen3_5().save_pretrained(path),
        {
            "layer_types": _LAYER_TYPES, "linear_num_key_heads": _COUNTS, "linear_num_value_heads": _COUNTS,
            "linear_key_head_dim": _COUNTS, "linear_value_head_dim": _COUNTS,
            "linear_conv_kernel_dim": (0, -1, 7, 2**62),
        },
    ),
}  # fmt: skip


def configurations() -> Iterator[Case]:
    for kind, (build, keys) in _CONFIGURATIONS.items():
        for key, values in keys.items():
            pattern = f"{key}|experts|weights? .*layers|has the shape"
            for value in values:
                what = f"{key}={json.dumps(value)[:40]}"
                yield Case(kind, what, build, in_json("config.json", **{key: value}), TWO, pattern)
