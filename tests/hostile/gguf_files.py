"""Damage of GGUF files: keys, tensors, types of matrices, splits."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf

import gemma4_support
import gguf_support
from hostile.cases import (
    ARRAYS,
    EVERY,
    TWO,
    Build,
    Case,
    Damage,
    GGUFEdit,
    array_set,
    in_bf16,
    in_bytes,
    in_gguf,
    no_number,
)
from hostile.stored import LARGE
from model_support import NATIVE, tiny
from models.test_families import _written
from models.test_lfm2_gguf import write as write_lfm2
from models.test_quantised import SHAPE
from models.test_qwen3_5_gguf import write as write_qwen35
from models.test_sinks_and_shared_experts import _gpt_oss
from models.test_sinks_and_shared_experts import _written as _write_gpt_oss
from recurrent_support import tiny_lfm2, tiny_qwen3_5

Kind = gguf.GGMLQuantizationType
FILE = "model.gguf"


def _of_family(name: str, **fields: Any) -> Build:
    kind, usual = NATIVE[name]
    kept = {key: value for key, value in usual.items() if key != "layer_types"}
    return lambda path: _written(path / FILE, tiny(kind, kept | fields))


def _write_qwen35(path: Path) -> None:
    theirs = tiny_qwen3_5(2)
    write_qwen35(path / FILE, theirs.state_dict(), theirs.config, 0)


_GEMMA4_EXPERTS = (
    "ffn_gate_up_exps.weight", "ffn_down_exps.scale", "ffn_gate_inp.scale", "pre_ffw_norm_2.weight",
    "post_ffw_norm_1.weight", "post_ffw_norm_2.weight",
)  # fmt: skip
_GGUF: dict[str, tuple[Build, tuple[str, ...], dict[str, tuple[Any, ...]]]] = {  # model: build, tensors, keys
    "gemma3 in GGUF": (
        _of_family("gemma3", query_pre_attn_scalar=8, num_hidden_layers=6), ("blk.1.attn_q.weight",), {},
    ),
    "gemma4's experts in GGUF": (
        lambda path: gemma4_support.write_gguf(
            path / FILE, gemma4_support.tiny_gemma4(**gemma4_support.SIZES["experts"])
        ),
        tuple(f"blk.1.{name}" for name in _GEMMA4_EXPERTS),
        {"expert_count": (3, 10**6, 2**31), "expert_used_count": (0, 6, 2**31),
         "expert_feed_forward_length": (0, 7, 2**31), "attention.sliding_window_pattern": (7, [1] * 9)},
    ),
    "gemma4 in GGUF": (
        lambda path: gemma4_support.write_gguf(path / FILE, gemma4_support.tiny_gemma4()), ("blk.1.attn_q.weight",),
        {"attention.shared_kv_layers": (10**6, -1), "embedding_length_per_layer_input": (7, 2**31)},
    ),
    "lfm2 in GGUF": (
        lambda path: write_lfm2(path / FILE, tiny_lfm2()), ("blk.0.shortconv.in_proj.weight",),
        {"shortconv.l_cache": (0, 10**6), "attention.head_count_kv": ([2], [2**30] * 9, 7, "x")},
    ),
    "qwen35 in GGUF": (
        _write_qwen35, ("blk.0.attn_qkv.weight",),
        {"ssm.group_count": (0, 7, 2**31), "ssm.time_step_rank": (0, 7, 2**31), "ssm.state_size": (0, 10**6),
         "ssm.inner_size": (0, 7, 2**31), "full_attention_interval": (0, 10**6, -1)},
    ),
    "gpt-oss in GGUF": (
        lambda path: _write_gpt_oss(path / FILE, _gpt_oss(), Kind.MXFP4), ("blk.1.attn_q.weight",),
        {"expert_count": (0, 3, 2**31), "attention.sliding_window": ("x",)},
    ),
    "experts in GGUF": (
        _of_family("qwen3_moe", tie_word_embeddings=False), ("blk.0.ffn_up_exps.weight",),
        {"expert_count": (0, 3, 10**6, 2**31), "expert_used_count": (0, 6, 2**31),
         "expert_feed_forward_length": (0, 7, 2**31)},
    ),
}  # fmt: skip

# What a changed key leads to, where the message cannot know the key
_CONSEQUENCES = (
    "has the shape|linear_num|num_kv_shared_layers|experts|misses the weights|no use for the weights|kinds of layers"
)


def _key_set(key: str, value: Any) -> GGUFEdit:
    kinds = {int: gguf.GGUFValueType.INT64, str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}

    def edit(writer: gguf.GGUFWriter) -> None:
        full = next(iter(writer.kv_data[0].values())).value + "." + key
        inner = gguf.GGUFValueType.INT64 if isinstance(value, list) else None
        writer.kv_data[0][full] = gguf.gguf_writer.GGUFValue(value, kinds[type(value)], inner)

    return edit


def _key_removed(key: str) -> GGUFEdit:
    return lambda writer: writer.kv_data[0].pop(next(name for name in writer.kv_data[0] if name.endswith("." + key)))


def keys_and_tensors() -> Iterator[Case]:
    for kind, (build, names, keys) in _GGUF.items():
        damages: dict[str, tuple[Damage, str]] = {}
        for name in names:
            tensor = rf"({re.escape(name)}|layers\.{name.split('.')[1]}\.)"
            damages[f"no {name}"] = in_gguf(lambda writer, name=name: writer.tensors[0].pop(name)), tensor
            for what in ("half", "words", "NaN") if "norm" in name or "scale" in name else ARRAYS:
                damages[f"{name}: {what}"] = in_gguf(array_set(name, ARRAYS[what])), tensor
        for key, values in keys.items():
            damages[f"no {key}"] = in_gguf(_key_removed(key)), f"({key}|{_CONSEQUENCES})"
            for value in values:
                damages[f"{key}={str(value)[:30]}"] = in_gguf(_key_set(key, value)), f"({key}|{_CONSEQUENCES})"
        for part in (2, 8, 50):
            damages[f"1/{part} of the file"] = in_bytes(partial(_cut, part=part), FILE), ""
        damages["a name twice"] = in_bytes(lambda content: content.replace(b"1.attn_norm", b"0.attn_norm"), FILE), ""
        for what, (damage, where) in damages.items():
            yield Case(kind, what, build, damage, TWO, rf"model\.gguf.*{where}")


def _cut(content: bytes, part: int) -> bytes:
    return content[: len(content) // part]


def large() -> Iterator[Case]:
    """Damage at the end of a file of 25 MB, in precisions that need no more: what was read must not pile up."""

    def build(path: Path) -> None:
        whole = _written(path / "whole", tiny("llama", NATIVE["llama"][1] | LARGE))
        gguf_support.copy(whole, path / FILE, lambda _: Kind.Q8_0)
        whole.unlink()

    damages = {
        "NaN": in_gguf(lambda writer: no_number(writer.tensors[0]["blk.35.ffn_up.weight"])),
        "cut": in_bytes(partial(_cut, part=2), FILE),
    }
    for what, damage in damages.items():
        pattern = r"model\.gguf.*(blk|layers)\."
        yield Case("a large GGUF file", f"{what} at the end", build, damage, EVERY[1:] or (in_bf16,), pattern)


_TYPES = {
    f"blk.0.{part}.weight": kind
    for part, kind in {
        "attn_q": Kind.Q4_K, "attn_k": Kind.Q6_K, "attn_v": Kind.Q8_0, "attn_output": Kind.Q4_0, "ffn_gate": Kind.Q4_1,
    }.items()
}  # fmt: skip


def _write_in_types(path: Path, tensors_per_part: int = 0) -> None:
    """Write a Llama with a matrix of a type in each place. tensors_per_part: split it; 0: one file."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    whole = _written(path / "whole", tiny("llama", NATIVE["llama"][1] | SHAPE | sizes))
    gguf_support.copy(whole, path / FILE, lambda name: _TYPES.get(name, Kind.Q5_0), tensors_per_part)
    whole.unlink()


def types() -> Iterator[Case]:
    """Damage of quantised matrices."""
    for name, kind in _TYPES.items():
        other = Kind.Q8_0 if kind != Kind.Q8_0 else Kind.Q4_0
        edits: dict[str, Callable[[Any], object]] = {
            "scales that are no numbers": no_number,
            "another type": lambda tensor, other=other: setattr(tensor, "dtype", other),
            "words": lambda tensor: setattr(tensor, "dtype", Kind.I32),
            "half": lambda tensor: setattr(tensor, "shape", (tensor.shape[0] // 2, *tensor.shape[1:])),
            "a huge row": lambda tensor: setattr(tensor, "shape", (tensor.shape[0], 2**40)),
        }
        for what, edit in edits.items():
            damage = in_gguf(lambda writer, name=name, edit=edit: edit(writer.tensors[0][name]))
            where = rf"model\.gguf.*({re.escape(name)}|layers\.0\.|overlap|ends|bytes)"
            yield Case("types in GGUF", f"{name}: {what}", _write_in_types, damage, EVERY, where)


def splits() -> Iterator[Case]:
    def part(path: Path, number: int) -> Path:
        return sorted(path.glob("model-*.gguf"))[number - 1]

    def another(path: Path) -> None:
        (path / "other").mkdir()
        _write_in_types(path / "other")
        shutil.copy(path / "other" / FILE, part(path, 2))
        shutil.rmtree(path / "other")

    damages: dict[str, tuple[Damage, str]] = {
        "one missing": (lambda path: part(path, 2).unlink(), "00002-of"),
        "one twice": (lambda path: shutil.copy(part(path, 1), part(path, 2)), "00002-of"),
        "the first cut": (in_bytes(lambda content: content[:-1000], "model-00001-of*"), "00001-of"),
        "the second cut": (in_bytes(lambda content: content[:-1000], "model-00002-of*"), "00002-of"),
        "one of another model": (another, "00002-of"),
        "scales that are no numbers": (
            in_bytes(lambda content: content[:-64] + b"\xff" * 64, "model-00002-of*"),
            r"gguf.*(layers\.0|blk\.0|norm|embed)",
        ),
    }
    for what, (damage, pattern) in damages.items():
        yield Case("a split GGUF", what, partial(_write_in_types, tensors_per_part=5), damage, EVERY, pattern)
