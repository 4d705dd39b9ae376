"""Rows that fit into the memory of a GPU, by model: the engine's own planner on models without weights.

``PYTHONPATH=src:. python -m benchmarks.gpu.cards`` prints the table of docs/own-gpu.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from paceline.config import EngineConfig
from paceline.engine.memory import GIB, FittedRows, fit_memory
from paceline.errors import CapacityError
from paceline.kernels.gpu.four_bit import Grid
from paceline.models.description.spec import DecoderSpec
from paceline.models.families import describe
from paceline.models.load.planned import PlannedTransformer, four_bit_layer
from paceline.models.torch.linear import LinearFactory, dense

CARDS = (16, 24, 80)  # GiB
TAKEN = 3 * GIB // 4  # bytes of a card for the driver, torch's libraries and a screen


@dataclass(frozen=True)
class Bits:
    """4-bit weights of a file's kind: group of inputs, and whether groups have lowest values of their own."""

    grid: Grid
    group: int
    shifted: bool


FOUR_BITS: Mapping[str, Bits] = {
    "int4: GGUF": Bits("int4", 32, True),  # Q4_K and Q4_1 as stored, the file's other types rounded
    "int4: AWQ": Bits("int4", 128, True),
    "int4: GPTQ": Bits("int4", 128, False),  # compressed-tensors W4A16, too; symmetric
    "int4: MXFP4": Bits("fp4", 32, False),
}
FORMATS = ("bf16", "int8", *FOUR_BITS)
"""Weights of the layers: the checkpoint's own in 16 bits, --quantization int8, and int4 with files of several kinds."""

_ROTARY = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": _ROTARY,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": _ROTARY,
    },
    "Qwen3.5-9B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": _QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
    },
}
"""The sizes in each model's config.json."""


def planned(name: str, to: str) -> PlannedTransformer:
    """Return a model by its name, in a format of ``FORMATS``."""
    fields = MODELS[name]
    spec = describe(AutoConfig.for_model(**fields))
    assert isinstance(spec, DecoderSpec)
    sizes = spec, str(fields["model_type"]), torch.bfloat16, torch.device("cuda")
    return PlannedTransformer(*sizes, *_factories(to))


def _factories(to: str) -> tuple[LinearFactory, LinearFactory | None]:
    """Return what makes the layers of a model in a format, and its head."""
    if to == "bf16":
        return dense, None
    from paceline.kernels.gpu.linear import Linears

    if to == "int8":
        return Linears("int8"), None
    bits = FOUR_BITS[to]
    return four_bit_layer(bits.grid, bits.group, shifted=bits.shifted), Linears("int8")


def fitted(model: PlannedTransformer, card: int, **options: Any) -> FittedRows | None:
    """Return the rows that an engine with these options starts with on a card of ``card`` GiB; None: none fit.

    By default it drafts by n-gram lookup, as an engine without a draft model does.
    """
    config = EngineConfig(**{"drafter": "ngram"} | options)
    positions = config.max_model_len or min(model.max_positions, EngineConfig.DEFAULT_MAX_MODEL_LEN)
    try:
        return fit_memory(model, None, config, positions, card * GIB - TAKEN - model.weight_bytes())
    except CapacityError:
        return None


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table: the rows that each card starts with."""
    yield "| model | weights | a row of 4096 tokens | " + " | ".join(f"{card} GB card" for card in CARDS) + " |"
    yield "| --- | ---: | ---: |" + " --- |" * len(CARDS)
    for name in MODELS:
        for to in FORMATS:
            if (to == "int4: MXFP4") != (name == "gpt-oss-20b") and to in FOUR_BITS:
                continue  # each is published in the others' files
            model = planned(name, to)
            one = fitted(model, 1000, max_batch_size=1)
            assert one is not None
            cells = [_words(fitted(model, card)) for card in CARDS]
            sizes = f"{model.weight_bytes() / 1e9:.1f} GB | {one.budget.limit / 1e9:.2f} GB"
            yield f"| {name}, {to} | {sizes} | {' | '.join(cells)} |"


def _words(found: FittedRows | None) -> str:
    if found is None:
        return "too large"
    whole = found.budget.max_rows(found.positions)
    return f"{found.rows} x {found.positions}" + (f" ({whole} whole)" if whole < found.rows else "")


if __name__ == "__main__":
    print("\n".join(table()))
