"""Damage of draft heads and of adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gemma4_support
import head_support
from adapter_support import write_adapter
from hostile.cases import (
    ARRAYS,
    CHANGES,
    Build,
    Case,
    Load,
    array_set,
    dropped,
    first_number,
    in_bytes,
    in_gguf,
    in_json,
    in_tensors,
    replaced,
)
from hostile.stored import Q, as_bytes
from model_support import NATIVE, tiny
from models.test_qwen3_5_gguf import write_apart
from paceline.drafters.heads.checkpoint import load_head
from paceline.drafters.heads.loading import load_head_for, load_own_head
from paceline.models.load.adapters import attach
from paceline.models.load.loading import describe_source, load_model
from recurrent_support import save_with_head


def load_apart(path: Path) -> None:
    model = path / "model.gguf"
    load_head_for(load_model(model, dtype=torch.float32), model, path / "mtp-model.gguf", dtype=torch.float32)


def apart() -> Iterator[Case]:
    """Damage of a head in a GGUF file of its own."""
    head, matrix = "mtp-model.gguf", "blk.3.attn_q.weight"
    damages = {
        f"no {matrix}": (in_gguf(lambda writer: writer.tensors[0].pop(matrix), head), rf"{head}.*layers\.0\.q"),
        "cut": (in_bytes(lambda content: content[:-1000], head), head),
    }
    for name, ours in (("blk.3.nextn.eh_proj.weight", "mtp.fc"), (matrix, "q_proj")):
        for what in ("half", "NaN"):
            damages[f"{name}: {what}"] = in_gguf(array_set(name, ARRAYS[what]), head), f"{head}.*({name}|{ours})"
    for what, (damage, pattern) in damages.items():
        yield Case("a head apart", what, partial(write_apart, seed=4), damage, (load_apart,), pattern)


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


_LAYER = "layers.0.self_attn.q_proj.weight"
_STORED: dict[str, tuple[Build, Load, str, tuple[str, ...]]] = {
    "a head of EAGLE's kind": (_build_eagle, load_eagle, "head/", ("fc.weight", "norm.weight", _LAYER, "d2t")),
    "a head in the checkpoint": (partial(save_with_head, seed=4), load_mtp, "", ("mtp.fc.weight", f"mtp.{_LAYER}")),
    "an assistant": (
        _build_assistant, load_assistant, "head/",
        ("pre_projection.weight", "masked_embedding.centroids.weight", "masked_embedding.token_ordering",
         f"model.{_LAYER}"),
    ),
}  # fmt: skip


def stored() -> Iterator[Case]:
    """Damage of heads in safetensors."""
    for kind, (build, load, folder, names) in _STORED.items():
        file = f"{folder}model.safetensors"
        for name in names:
            integers = name in ("d2t", "masked_embedding.token_ordering")
            changes = {what: CHANGES[what] for what in ("half", "empty", "twice", "another type")}
            changes |= {"outside": first_number(10**6)} if integers else {"NaN": first_number(torch.nan)}
            place = rf"{re.escape(name.removesuffix('.weight'))}|{re.escape(name.removeprefix('model.'))}"
            for what, change in changes.items():
                yield Case(kind, f"{name}: {what}", build, replaced(name, change, file), (load,), place)
            if name != "d2t":  # which the other table of the vocabulary implies
                yield Case(kind, f"no {name}", build, dropped(name, file), (load,), rf"{place}|layers\.0\.")
        yield from as_bytes(kind, build, file, (load,))


def _build_adapter(path: Path) -> None:
    write_adapter(path / "red", tiny(*NATIVE["llama"]), seed=1)


def load_adapter(path: Path) -> None:
    model = tiny(*NATIVE["llama"])
    attach(load_model(model, dtype=torch.float32), {"red": path / "red"}, describe_source(model))


_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LOHA", 3, None), "lora_alpha": ("8", True, 1e300, None, [8]), "use_dora": (True,),
    "bias": ("all",), "modules_to_save": (["lm_head"],),
}  # fmt: skip


def adapters() -> Iterator[Case]:
    side, file, config = f"base_model.model.{Q}.lora_A.weight", "red/adapter_model.safetensors", "adapter_config.json"
    changes = CHANGES | {"NaN": first_number(torch.nan), "infinite": first_number(torch.inf)}
    damages = {f"lora_A: {what}": (replaced(side, change, file), f"{file}.*{Q}") for what, change in changes.items()}
    for key, values in _SETTINGS.items():
        for value in values:
            damages[f"{key}={value}"] = in_json(f"red/{config}", **{key: value}), f"config.json.*{key}"
    renamed = in_tensors(lambda tensors: tensors.update({f"{side}x": tensors.pop(side)}), file)
    damages["another name"] = renamed, f"{file}.*{Q}"
    for what, (damage, pattern) in damages.items():
        yield Case("an adapter", what, _build_adapter, damage, (load_adapter,), pattern)
    yield from as_bytes("an adapter", _build_adapter, file, (load_adapter,))
