"""Damaged model files, kind by kind and damage by damage, and a process that loads each and measures its memory.

``python hostile_files.py FOLDER PART`` prints one JSON line per case. Unlike ``damaged_files``, whose damage is random,
every case here must be refused, and says what the message must have.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gemma4_support
import gguf_support
import head_support
from adapter_support import write_adapter
from model_support import NATIVE, packed, tiny
from models.test_families import _written
from models.test_lfm2_gguf import write as write_lfm2
from models.test_quantised import SHAPE
from models.test_qwen3_5_gguf import write as write_qwen35
from models.test_qwen3_5_gguf import write_apart
from models.test_sinks_and_shared_experts import _gpt_oss
from models.test_sinks_and_shared_experts import _written as _write_gpt_oss
from paceline.drafters.heads.checkpoint import load_head
from paceline.drafters.heads.loading import load_head_for, load_own_head
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.models.load.adapters import attach
from paceline.models.load.loading import describe_source, load_model
from paceline.models.native.model import Quantization
from paceline.models.native.spec import obstacle_of
from quantised_support import CONVERTERS, write
from recurrent_support import save_with_head, tiny_lfm2, tiny_qwen3_5

SECONDS = 20  # limit of one load
Q = "model.layers.0.self_attn.q_proj"
Load = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One damage. build: writes the whole model into a folder; cached by ``kind``. damage: changes it.

    load: must raise ModelFormatError, whose message has the folder's name and matches ``pattern``.
    """

    kind: str
    what: str
    build: Callable[[Path], object]
    damage: Callable[[Path], object]
    load: tuple[Load, ...]
    pattern: str


def in_torch(path: Path) -> None:
    load_model(_only(path), dtype=torch.float32)


def in_int8(path: Path) -> None:
    _packed_or_in_torch(path, "int8")


def in_int4(path: Path) -> None:
    _packed_or_in_torch(path, "int4")


def _packed_or_in_torch(path: Path, quantization: Quantization) -> None:
    spec = describe_source(_only(path))
    if spec is None or obstacle_of(spec) is not None:
        in_torch(path)
    else:
        packed(_only(path), quantization, dtype=torch.bfloat16)


def _only(path: Path) -> Path:
    """Return the folder, or the (first) GGUF file in it."""
    return next(iter(sorted(path.glob("*.gguf"))), path)


EVERY: tuple[Load, ...] = (in_torch, in_int8, in_int4) if native.select() is not None else (in_torch,)
TWO = EVERY[:2]


# Safetensors, quantised


def edit_tensors(
    change: Callable[[dict[str, Tensor]], object], name: str = "model.safetensors"
) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(path / name).items()}
        change(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name, {"format": "pt"})

    return damage


def replaced(key: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({key: make(tensors[key])}))


def dropped(key: str) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.pop(key))


def _first(value: float) -> Callable[[Tensor], Tensor]:
    def make(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return make


def _other_type(tensor: Tensor) -> Tensor:
    return tensor.float().to(torch.int64) if tensor.is_floating_point() else tensor.float()


_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda t: t[: len(t) // 2],
    "empty": lambda t: t[:0],
    "twice": lambda t: torch.cat([t, t]),
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t.flatten() if t.dim() > 1 else t.new_zeros(()),
    "another type": _other_type,
}


def quantised_cases() -> Iterator[Case]:
    for kind, converter in CONVERTERS.items():
        built, _ = converter.convert(torch.randn(128, 128, generator=torch.Generator().manual_seed(0)))

        def build(path: Path, converter: Any = converter) -> None:
            write(path, tiny("llama", NATIVE["llama"][1] | SHAPE), converter)

        for suffix, tensor in built.items():
            key, names = f"{Q}.{suffix}", re.escape(Q)
            if suffix != "g_idx" or "order" in kind:
                yield Case(kind, f"no {suffix}", build, dropped(key), EVERY, names)
            for what, change in _CHANGES.items():
                if what == "one dimension less" and tensor.shape[-1] == 1:
                    continue  # scales of rows may be stored so
                yield Case(kind, f"{suffix}: {what}", build, replaced(key, change), EVERY, names)
            if tensor.is_floating_point():
                for value in (torch.nan, torch.inf) if tensor.dtype != torch.float8_e4m3fn else (torch.nan,):
                    yield Case(kind, f"{suffix}: {value}", build, replaced(key, _first(value)), EVERY, names)
            if suffix == "g_idx":
                for value in (-1, 2**31 - 1):
                    yield Case(kind, f"{suffix}: {value}", build, replaced(key, _first(value)), EVERY, names)
            if suffix == "weight_shape":
                for value in (-1, 0, 2**62):
                    yield Case(kind, f"{suffix}: {value}", build, replaced(key, _first(value)), EVERY, names)
        if "MXFP4" in kind:
            names = re.escape(Q)
            damage = replaced(f"{Q}.weight_scale", _first(255))
            yield Case(kind, "a scale that is no number", build, damage, EVERY, names)
        if f"{Q}.weight" not in {f"{Q}.{suffix}" for suffix in built}:
            both = edit_tensors(lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(128, 128)}))
            yield Case(kind, "stored twice", build, both, EVERY, re.escape(f"{Q}.weight"))
        if kind == "GPTQ":
            yield from file_cases(kind, build, "model.safetensors")


def file_cases(kind: str, build: Callable[[Path], object], file: str) -> Iterator[Case]:
    """Damage of a safetensors file as bytes."""

    def bytes_changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        return lambda path: (path / file).write_bytes(change((path / file).read_bytes()))  # type: ignore[return-value]

    def header(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
        def changed(content: bytes) -> bytes:
            end = 8 + int.from_bytes(content[:8], "little")
            text = change(content[8:end].decode()).encode()
            return len(text).to_bytes(8, "little") + text + content[end:]

        return changed

    def second_name(text: str) -> str:
        first, second, *_ = (name for name in json.loads(text) if name != "__metadata__")
        return text.replace(f'"{second}"', f'"{first}"')

    changes: dict[str, Callable[[bytes], bytes]] = {
        "without its last byte": lambda content: content[:-1],
        "half a file": lambda content: content[: len(content) // 2],
        "an empty file": lambda content: b"",
        "a huge header": lambda content: (2**62).to_bytes(8, "little") + content[8:],
        "a tensor twice": header(second_name),
        "bytes behind the last tensor": lambda content: content + bytes(64),
    }
    for what, change in changes.items():
        yield Case(kind, what, build, bytes_changed(change), EVERY, re.escape(file))


# Shards


def build_shards(path: Path) -> None:
    tiny("llama", NATIVE["llama"][1] | SHAPE).save_pretrained(path, max_shard_size="300KB")


def shard_cases() -> Iterator[Case]:
    def shards(path: Path) -> list[Path]:
        return sorted(path.glob("model-*.safetensors"))

    def another(path: Path) -> None:
        model = tiny("llama", NATIVE["llama"][1] | SHAPE | {"hidden_size": 64})
        model.save_pretrained(path / "other", max_shard_size="100KB")
        shutil.copy(sorted((path / "other").glob("model-*"))[0], shards(path)[0])
        shutil.rmtree(path / "other")

    cases: dict[str, tuple[Callable[[Path], object], str]] = {
        "one of them twice": (lambda path: shutil.copy(shards(path)[0], shards(path)[1]), "model-00002-of"),
        "one missing": (lambda path: shards(path)[1].unlink(), "model-00002-of"),
        "one of another model": (another, "model."),
        "one cut": (lambda path: shards(path)[1].write_bytes(shards(path)[1].read_bytes()[:-1]), "model-00002-of"),
        "no index": (lambda path: (path / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    }
    for what, (damage, word) in cases.items():
        yield Case("shards", what, build_shards, damage, TWO, word)
    for what, value in {"weights of words": torch.int32, "weights of truths": torch.bool}.items():
        damage = replaced("model.norm.weight", lambda t, value=value: t.to(value))
        yield Case("plain", what, build_plain, damage, TWO, r"model\.safetensors.*model\.norm\.weight")
    for key in (f"{Q}.weight", "model.norm.weight", "model.embed_tokens.weight"):
        yield Case("plain", f"NaN in {key}", build_plain, replaced(key, _first(torch.nan)), TWO, re.escape(key))
        yield Case("plain", f"half of {key}", build_plain, replaced(key, _CHANGES["half"]), TWO, re.escape(key))

    for key in (f"{Q}.weight", "model.norm.weight"):
        yield Case("bfloat16", f"NaN in {key}", build_bf16, replaced(key, _first(torch.nan)), EVERY, re.escape(key))
        yield Case("bfloat16", f"half of {key}", build_bf16, replaced(key, _CHANGES["half"]), EVERY, re.escape(key))
    experts = "model.layers.1.experts.gate_up_proj", "model.layers.1.experts.down_proj"
    others = "router.proj.weight", "router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2.weight"
    build = CONFIGURATIONS["gemma4's experts"][0]
    for key in (*experts, *(f"model.layers.1.{name}" for name in others)):
        damages = {"no": dropped(key), "NaN in": replaced(key, _first(torch.nan))}
        damages |= {f"{what} of": replaced(key, _CHANGES[what]) for what in ("half", "twice", "another type")}
        for what, damage in damages.items():
            yield Case("gemma4's experts", f"{what} {key}", build, damage, TWO, re.escape(key) + r"|layers\.1\.")


def build_plain(path: Path) -> None:
    tiny("llama", NATIVE["llama"][1] | SHAPE).save_pretrained(path)


def build_bf16(path: Path) -> None:
    tiny("llama", NATIVE["llama"][1] | SHAPE).bfloat16().save_pretrained(path)


# Files that are large beside the interpreter

LARGE = SHAPE | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 36}
LAST = "model.layers.35.mlp.up_proj.weight"


def in_bf16(path: Path) -> None:
    load_model(_only(path), dtype=torch.bfloat16)


def build_large(path: Path) -> None:
    tiny("llama", NATIVE["llama"][1] | LARGE).bfloat16().save_pretrained(path)


def build_large_gguf(path: Path) -> None:
    whole = _written(path / "whole", tiny("llama", NATIVE["llama"][1] | LARGE))
    gguf_support.copy(whole, path / "model.gguf", lambda _: Kind.Q8_0)
    whole.unlink()


def large_cases() -> Iterator[Case]:
    """Damage at the end of files of 25 and 50 MB, in precisions that need no more: what was read must not pile up."""
    loads = (in_bf16, *EVERY[1:])
    name = "blk.35.ffn_up.weight"
    damages = {
        "NaN": replaced(LAST, _first(torch.nan)),
        "half": replaced(LAST, _CHANGES["half"]),
        "cut": lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
    }
    for what, damage in damages.items():
        yield Case("a large file", f"{what} at the end", build_large, damage, loads, rf"{re.escape(LAST)}|safetensors")

    def no_number(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0][name].tensor.reshape(-1)[:] = 255

    gguf_damages = {"NaN": rewritten(no_number), "cut": partial(_cut, part=2)}
    for what, damage in gguf_damages.items():
        pattern = r"model\.gguf.*(blk|layers)\."
        yield Case("a large GGUF file", f"{what} at the end", build_large_gguf, damage, EVERY[1:] or loads, pattern)


# Configurations

_LAYER_TYPES: tuple[Any, ...] = (
    ["full_attention"], ["full_attention"] * 50, ["x"] * 3, [3, 3, 3], "full_attention", {}, [[]] * 3,
)  # fmt: skip
_COUNTS: tuple[Any, ...] = (0, -1, 7, 10**5, 2**62, 1.5, "8", [2])
CONFIGURATIONS: dict[str, tuple[Callable[[Path], object], dict[str, tuple[Any, ...]]]] = {}


def of_family(name: str) -> Callable[[Path], object]:
    return lambda path: tiny(*NATIVE[name]).save_pretrained(path)


for _name in ("qwen3_moe", "olmoe"):
    CONFIGURATIONS[_name] = (
        of_family(_name),
        {
            "num_local_experts" if _name == "qwen3_moe" else "num_experts": _COUNTS,
            "num_experts_per_tok": (0, -1, 6, 10**5, 2**62, "8", [2]),
        },
    )
CONFIGURATIONS["qwen3_moe"][1]["moe_intermediate_size"] = _COUNTS
CONFIGURATIONS["granitemoe"] = of_family("granitemoe"), {"num_local_experts": _COUNTS}
CONFIGURATIONS["gpt_oss"] = (
    lambda path: _gpt_oss().save_pretrained(path),
    {"num_local_experts": _COUNTS, "num_experts_per_tok": (0, -1, 6, 10**5), "layer_types": _LAYER_TYPES},
)
CONFIGURATIONS["gemma3"] = of_family("gemma3"), {"layer_types": _LAYER_TYPES, "head_dim": _COUNTS}
CONFIGURATIONS["gemma4"] = (
    of_family("gemma4"),
    {
        "layer_types": _LAYER_TYPES, "num_kv_shared_layers": (-1, 5, 7, 10**5, 2**62, "x", [2]),
        "hidden_size_per_layer_input": _COUNTS[1:],
    },
)  # fmt: skip
CONFIGURATIONS["gemma4's experts"] = (
    lambda path: gemma4_support.tiny_gemma4(**gemma4_support.SIZES["experts"]).save_pretrained(path),
    {"num_experts": _COUNTS, "top_k_experts": (0, -1, 6, 10**5, 2**62, "8", [2]), "moe_intermediate_size": _COUNTS},
)
CONFIGURATIONS["lfm2"] = (
    lambda path: tiny_lfm2().save_pretrained(path),
    {"layer_types": _LAYER_TYPES, "conv_L_cache": (0, -1, 7, 10**5, 2**62, "x", [2])},
)
CONFIGURATIONS["qwen3_5"] = (
    lambda path: tiny_qwen3_5().save_pretrained(path),
    {
        "layer_types": _LAYER_TYPES, "linear_num_key_heads": _COUNTS, "linear_num_value_heads": _COUNTS,
        "linear_key_head_dim": _COUNTS, "linear_value_head_dim": _COUNTS, "linear_conv_kernel_dim": (0, -1, 7, 2**62),
    },
)  # fmt: skip


def configuration_cases() -> Iterator[Case]:
    def changed(key: str, value: Any) -> Callable[[Path], None]:
        def damage(path: Path) -> None:
            file = path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

        return damage

    for kind, (build, keys) in CONFIGURATIONS.items():
        for key, values in keys.items():
            for value in values:
                text = json.dumps(value)
                yield Case(
                    kind,
                    f"{key}={text[:40]}",
                    build,
                    changed(key, value),
                    TWO,
                    f"{key}|experts|weights? .*layers|has the shape",
                )


# GGUF

Edit = Callable[[gguf.GGUFWriter], object]


def rewritten(edit: Edit) -> Callable[[Path], None]:
    """Copy the only GGUF file with a change of the writer's metadata and tensors."""

    def damage(path: Path) -> None:
        source = _only(path)
        reader = gguf.GGUFReader(source)
        writer = gguf.GGUFWriter(source.with_suffix(".new"), reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kind, *inner = field.types
                writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        edit(writer)
        gguf_support.finish(writer)
        source.with_suffix(".new").replace(source)

    return damage


def _write_gemma3(path: Path) -> None:
    kind, fields = NATIVE["gemma3"]
    fields = {key: value for key, value in fields.items() if key != "layer_types"}
    _written(path / "model.gguf", tiny(kind, fields | {"query_pre_attn_scalar": 8, "num_hidden_layers": 6}))


def _write_experts(path: Path) -> None:
    kind, fields = NATIVE["qwen3_moe"]
    _written(path / "model.gguf", tiny(kind, fields | {"tie_word_embeddings": False}))


def _write_qwen35(path: Path) -> None:
    theirs = tiny_qwen3_5(2)
    write_qwen35(path / "model.gguf", theirs.state_dict(), theirs.config, 0)


def _write_gemma4_experts(path: Path) -> None:
    gemma4_support.write_gguf(path / "model.gguf", gemma4_support.tiny_gemma4(**gemma4_support.SIZES["experts"]))


def _write_in_types(path: Path, tensors_per_part: int = 0) -> None:
    """Write a Llama with a matrix of a type in each place. tensors_per_part: split it; 0: one file."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    whole = _written(path / "whole", tiny("llama", NATIVE["llama"][1] | SHAPE | sizes))
    gguf_support.copy(whole, path / "model.gguf", lambda name: TYPES.get(name, Kind.Q5_0), tensors_per_part)
    whole.unlink()


Kind = gguf.GGMLQuantizationType
TYPES = {
    f"blk.0.{part}.weight": kind
    for part, kind in {
        "attn_q": Kind.Q4_K, "attn_k": Kind.Q6_K, "attn_v": Kind.Q8_0, "attn_output": Kind.Q4_0, "ffn_gate": Kind.Q4_1,
    }.items()
}  # fmt: skip

GGUF: dict[str, tuple[Callable[[Path], object], str, dict[str, tuple[Any, ...]]]] = {
    "gemma3 in GGUF": (_write_gemma3, "blk.1.attn_q.weight", {}),
    "gemma4's experts in GGUF": (
        _write_gemma4_experts,
        " ".join(
            f"blk.1.{name}"
            for name in (
                *("ffn_gate_up_exps.weight", "ffn_down_exps.scale", "ffn_gate_inp.scale"),
                *("pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight"),
            )
        ),
        {"expert_count": (3, 10**6, 2**31), "expert_used_count": (0, 6, 2**31),
         "expert_feed_forward_length": (0, 7, 2**31), "attention.sliding_window_pattern": (7, [1] * 9)},
    ),
    "gemma4 in GGUF": (
        lambda path: gemma4_support.write_gguf(path / "model.gguf", gemma4_support.tiny_gemma4()),
        "blk.1.attn_q.weight",
        {"attention.shared_kv_layers": (10**6, -1), "embedding_length_per_layer_input": (7, 2**31)},
    ),
    "lfm2 in GGUF": (
        lambda path: write_lfm2(path / "model.gguf", tiny_lfm2()), "blk.0.shortconv.in_proj.weight",
        {"shortconv.l_cache": (0, 10**6), "attention.head_count_kv": ([2], [2**30] * 9, 7, "x")},
    ),
    "qwen35 in GGUF": (
        _write_qwen35, "blk.0.attn_qkv.weight",
        {"ssm.group_count": (0, 7, 2**31), "ssm.time_step_rank": (0, 7, 2**31), "ssm.state_size": (0, 10**6),
         "ssm.inner_size": (0, 7, 2**31), "full_attention_interval": (0, 10**6, -1)},
    ),
    "gpt-oss in GGUF": (
        lambda path: _write_gpt_oss(path / "model.gguf", _gpt_oss(), gguf.GGMLQuantizationType.MXFP4),
        "blk.1.attn_q.weight",
        {"expert_count": (0, 3, 2**31), "attention.sliding_window": ("x",)},
    ),
    "experts in GGUF": (
        _write_experts, "blk.0.ffn_up_exps.weight",
        {"expert_count": (0, 3, 10**6, 2**31), "expert_used_count": (0, 6, 2**31),
         "expert_feed_forward_length": (0, 7, 2**31)},
    ),
}  # fmt: skip


# What a changed key leads to, where the message cannot know the key
_CONSEQUENCES = (
    "has the shape|linear_num|num_kv_shared_layers|experts|misses the weights|no use for the weights|kinds of layers"
)


def gguf_cases() -> Iterator[Case]:
    def key_set(key: str, value: Any) -> Edit:
        kinds = {int: gguf.GGUFValueType.INT64, str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY}

        def edit(writer: gguf.GGUFWriter) -> None:
            full = next(iter(writer.kv_data[0].values())).value + "." + key
            inner = gguf.GGUFValueType.INT64 if isinstance(value, list) else None
            writer.kv_data[0][full] = gguf.gguf_writer.GGUFValue(value, kinds[type(value)], inner)

        return edit

    def key_removed(key: str) -> Edit:
        return lambda writer: writer.kv_data[0].pop(
            next(name for name in writer.kv_data[0] if name.endswith("." + key))
        )

    def tensor_set(name: str, make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Edit:
        def edit(writer: gguf.GGUFWriter) -> None:
            values = np.ascontiguousarray(make(writer.tensors[0].pop(name).tensor))
            kind = gguf.GGMLQuantizationType.I32 if values.dtype == np.int32 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, values, raw_dtype=kind)

        return edit

    def with_nan(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values.reshape(-1)[0] = np.nan
        return values

    arrays: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
        "half": lambda t: t[: len(t) // 2],
        "turned": lambda t: np.swapaxes(t, -1, -2)[..., :-1],
        "one dimension less": lambda t: t.reshape(-1),
        "words": lambda t: t.astype(np.int32),
        "NaN": with_nan,
    }
    of_vectors = {what: arrays[what] for what in ("half", "words", "NaN")}
    for kind, (build, names, keys) in GGUF.items():
        file = r"model\.gguf.*"
        for name in names.split():
            tensor = rf"({re.escape(name)}|layers\.{name.split('.')[1]}\.)"
            yield Case(
                kind, f"no {name}", build, rewritten(lambda w, name=name: w.tensors[0].pop(name)), TWO, file + tensor
            )
            for what, make in (of_vectors if "norm" in name or "scale" in name else arrays).items():
                yield Case(kind, f"{name}: {what}", build, rewritten(tensor_set(name, make)), TWO, file + tensor)
        for key, values in keys.items():
            yield Case(kind, f"no {key}", build, rewritten(key_removed(key)), TWO, file + rf"({key}|{_CONSEQUENCES})")
            for value in values:
                yield Case(
                    kind,
                    f"{key}={str(value)[:30]}",
                    build,
                    rewritten(key_set(key, value)),
                    TWO,
                    file + rf"({key}|{_CONSEQUENCES})",
                )
        for part in (2, 8, 50):
            yield Case(kind, f"1/{part} of the file", build, partial(_cut, part=part), TWO, file)
        yield Case(kind, "a name twice", build, _second_name, TWO, file)


def type_cases() -> Iterator[Case]:
    """Damage of quantised matrices in a GGUF file."""

    def edited(name: str, edit: Callable[[Any], object]) -> Callable[[Path], None]:
        return rewritten(lambda writer: edit(writer.tensors[0][name]))

    def no_number(info: Any) -> None:
        info.tensor.reshape(-1)[:] = 255

    for name, kind in TYPES.items():
        other = Kind.Q8_0 if kind != Kind.Q8_0 else Kind.Q4_0
        edits: dict[str, Callable[[Any], object]] = {
            "scales that are no numbers": no_number,
            "another type": lambda info, other=other: setattr(info, "dtype", other),
            "words": lambda info: setattr(info, "dtype", Kind.I32),
            "half": lambda info: setattr(info, "shape", (info.shape[0] // 2, *info.shape[1:])),
            "a huge row": lambda info: setattr(info, "shape", (info.shape[0], 2**40)),
        }
        for what, edit in edits.items():
            where = rf"model\.gguf.*({re.escape(name)}|layers\.0\.|overlap|ends|bytes)"
            yield Case("types in GGUF", f"{name}: {what}", _write_in_types, edited(name, edit), EVERY, where)


def split_cases() -> Iterator[Case]:
    def part(path: Path, number: int) -> Path:
        return sorted(path.glob("model-*.gguf"))[number - 1]

    def cut(path: Path, number: int) -> None:
        part(path, number).write_bytes(part(path, number).read_bytes()[:-1000])

    def another(path: Path) -> None:
        (path / "other").mkdir()
        _write_in_types(path / "other")
        shutil.copy(path / "other" / "model.gguf", part(path, 2))
        shutil.rmtree(path / "other")

    def no_number(path: Path) -> None:
        content = bytearray(part(path, 2).read_bytes())
        content[-64:] = b"\xff" * 64
        part(path, 2).write_bytes(content)

    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "one missing": (lambda path: part(path, 2).unlink(), "00002-of"),
        "one twice": (lambda path: shutil.copy(part(path, 1), part(path, 2)), "00002-of"),
        "the first cut": (partial(cut, number=1), "00001-of"),
        "the second cut": (partial(cut, number=2), "00002-of"),
        "one of another model": (another, "00002-of"),
        "scales that are no numbers": (no_number, r"gguf.*(layers\.0|blk\.0|norm|embed)"),
    }
    for what, (damage, pattern) in damages.items():
        yield Case("a split GGUF", what, partial(_write_in_types, tensors_per_part=5), damage, EVERY, pattern)


def _cut(path: Path, part: int) -> None:
    content = _only(path).read_bytes()
    _only(path).write_bytes(content[: len(content) // part])


def _second_name(path: Path) -> None:
    content = _only(path).read_bytes()
    _only(path).write_bytes(content.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))


# Draft heads and adapters


def _build_apart(path: Path) -> None:
    write_apart(path, seed=4)


def load_apart(path: Path) -> None:
    model = path / "model.gguf"
    load_head_for(load_model(model, dtype=torch.float32), model, path / "mtp-model.gguf", dtype=torch.float32)


def head_cases() -> Iterator[Case]:
    head = "mtp-model.gguf"

    def edited(edit: Edit) -> Callable[[Path], None]:
        def damage(path: Path) -> None:
            (path / "head").mkdir()
            (path / head).rename(path / "head" / head)
            rewritten(edit)(path / "head")
            (path / "head" / head).rename(path / head)

        return damage

    def resized(name: str) -> Edit:
        def edit(writer: gguf.GGUFWriter) -> None:
            values = writer.tensors[0].pop(name).tensor
            writer.add_tensor(name, values[: len(values) // 2], raw_dtype=gguf.GGMLQuantizationType.F32)

        return edit

    def with_nan(name: str) -> Edit:
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.tensors[0][name].tensor.reshape(-1)[0] = np.nan

        return edit

    for name, ours in (("blk.3.nextn.eh_proj.weight", "mtp.fc"), ("blk.3.attn_q.weight", "q_proj")):
        for what, edit in {"half": resized(name), "NaN": with_nan(name)}.items():
            yield Case(
                "a head apart", f"{name}: {what}", _build_apart, edited(edit), (load_apart,), f"{head}.*({name}|{ours})"
            )
    drop = "blk.3.attn_q.weight"
    damage = edited(lambda writer: writer.tensors[0].pop(drop))
    yield Case("a head apart", f"no {drop}", _build_apart, damage, (load_apart,), f"{head}.*q_proj")
    cut = lambda path: (path / head).write_bytes((path / head).read_bytes()[:-1000])  # noqa: E731
    yield Case("a head apart", "cut", _build_apart, cut, (load_apart,), head)


def _build_eagle(path: Path) -> None:
    head_support.write(path / "head", head_support.flat_config(head_support.layers()), head_support.random_head())


def load_eagle(path: Path) -> None:
    load_head(path / "head", dtype=torch.float32)


def load_mtp(path: Path) -> None:
    load_own_head(load_model(path, dtype=torch.float32), path)


def _build_assistant(path: Path) -> None:
    gemma4_support.tiny_gemma4().save_pretrained(path)
    gemma4_support.save_assistant(path / "head", **gemma4_support.GROUPS)


def load_assistant(path: Path) -> None:
    load_head_for(load_model(path, dtype=torch.float32), path, path / "head", dtype=torch.float32)


def stored_head_cases() -> Iterator[Case]:
    """Damage of heads in safetensors."""
    layer = "layers.0.self_attn.q_proj.weight"
    kinds: dict[str, tuple[Callable[[Path], object], Load, str, tuple[str, ...]]] = {
        "a head of EAGLE's kind": (_build_eagle, load_eagle, "head", ("fc.weight", "norm.weight", layer, "d2t")),
        "a head in the checkpoint": (partial(save_with_head, seed=4), load_mtp, ".", ("mtp.fc.weight", f"mtp.{layer}")),
        "an assistant": (
            _build_assistant, load_assistant, "head",
            ("pre_projection.weight", "masked_embedding.centroids.weight", "masked_embedding.token_ordering",
             f"model.{layer}"),
        ),
    }  # fmt: skip
    for kind, (build, load, folder, names) in kinds.items():
        file = f"{folder}/model.safetensors"
        for name in names:
            integers = name in ("d2t", "masked_embedding.token_ordering")
            own = {"outside": _first(10**6)} if integers else {"NaN": _first(torch.nan)}
            changes = {what: _CHANGES[what] for what in ("half", "empty", "twice", "another type")} | own
            place = rf"{re.escape(name.removesuffix('.weight'))}|{re.escape(name.removeprefix('model.'))}"
            for what, change in changes.items():
                damage = edit_tensors(lambda t, name=name, change=change: t.update({name: change(t[name])}), file)
                yield Case(kind, f"{name}: {what}", build, damage, (load,), place)
            gone = edit_tensors(lambda t, name=name: t.pop(name), file)
            if name != "d2t":  # which the other table of the vocabulary implies
                yield Case(kind, f"no {name}", build, gone, (load,), rf"{place}|layers\.0\.")
        for case in file_cases(kind, build, file):
            yield Case(case.kind, case.what, case.build, case.damage, (load,), "safetensors")


def _build_adapter(path: Path) -> None:
    write_adapter(path / "red", tiny(*NATIVE["llama"]), seed=1)


def load_adapter(path: Path) -> None:
    model = tiny(*NATIVE["llama"])
    attach(load_model(model, dtype=torch.float32), {"red": path / "red"}, describe_source(model))


def adapter_cases() -> Iterator[Case]:
    side, file = f"base_model.model.{Q}.lora_A.weight", "red/adapter_model.safetensors"
    makes: dict[str, Callable[[Tensor], Tensor]] = {
        **_CHANGES, "NaN": _first(torch.nan), "infinite": _first(torch.inf),
    }  # fmt: skip
    for what, make in makes.items():
        damage = edit_tensors(lambda tensors, make=make: tensors.update({side: make(tensors[side])}), file)
        yield Case("an adapter", f"lora_A: {what}", _build_adapter, damage, (load_adapter,), f"{file}.*{Q}")
    settings = {
        "peft_type": ("LOHA", 3, None), "lora_alpha": ("8", True, 1e300, None, [8]), "use_dora": (True,),
        "bias": ("all",), "modules_to_save": (["lm_head"],),
    }  # fmt: skip
    for key, values in settings.items():
        for value in values:

            def changed(path: Path, key: str = key, value: object = value) -> None:
                config = path / "red" / "adapter_config.json"
                config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))

            yield Case("an adapter", f"{key}={value}", _build_adapter, changed, (load_adapter,), f"config.json.*{key}")
    other = edit_tensors(lambda tensors: tensors.update({f"{side}x": tensors.pop(side)}), file)
    yield Case("an adapter", "another name", _build_adapter, other, (load_adapter,), f"{file}.*{Q}")
    for case in file_cases("an adapter", _build_adapter, file):
        yield Case(case.kind, case.what, case.build, case.damage, (load_adapter,), case.pattern)


PARTS: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {  # the first is what `make test` runs
    "heads and adapters": (head_cases, stored_head_cases, adapter_cases),
    "quantised safetensors": (quantised_cases,),
    "safetensors and configurations": (shard_cases, configuration_cases, large_cases),
    "GGUF": (gguf_cases, type_cases, split_cases),
}


def cases(part: str) -> Iterator[Case]:
    for some in PARTS[part]:
        yield from some()


# One process


def _peak_kib(reset: bool = False) -> int:
    """Return the process's resident memory, or its peak since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmRSS" if reset else "VmHWM"
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if field in line).split()[1])


def outcome(load: Load, path: Path) -> dict[str, Any]:
    before = _peak_kib(reset=True)
    signal.alarm(SECONDS)
    try:
        load(path)
        found = {"end": "loaded"}
    except ModelFormatError as error:
        found = {"end": "refused", "message": str(error)}
    except BaseException as error:  # noqa: BLE001  (any other exception is what the test looks for)
        found = {"end": type(error).__name__, "message": str(error)[:500]}
    signal.alarm(0)
    return {**found, "kib": _peak_kib() - before}


def _hung(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(folder: Path, part: str, only: str = "") -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _hung)
    for case in cases(part):
        if only not in f"{case.kind}: {case.what}":
            continue
        whole, place = folder / "whole" / case.kind, folder / "damaged" / case.kind
        if not whole.is_dir():
            whole.mkdir(parents=True)
            case.build(whole)
            for load in case.load:
                load(whole)  # also warms up the allocator
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(whole, place)
        case.damage(place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        for load in case.load:
            found = outcome(load, place)
            told = {
                "case": f"{case.kind}: {case.what}",
                "by": load.__name__,
                "pattern": case.pattern,
                "place": str(place),
                "bytes": size,
            }
            print(json.dumps(told | found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
