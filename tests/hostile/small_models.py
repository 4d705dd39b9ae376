"""Whole models of a few kilobytes, with tokenizers, in every layout that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import gguf_support
from hostile.cases import Build
from model_support import FOREIGN, NATIVE, tiny
from quantised_support import Converter, awq, compressed, fp8_blocks, gptq
from quantised_support import write as write_quantised

VOCABULARY = 258
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SHAPE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "head_dim": 16}  # supported by the kernels
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # whole groups of inputs


def alphabet() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "th"]


def _directory(path: Path, kind: str, fields: dict[str, Any], **options: Any) -> None:
    tiny(kind, fields | SHAPE).save_pretrained(path, **options)
    backend = Backend(models.BPE(vocab={token: n for n, token in enumerate(alphabet())}, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    ).save_pretrained(path)


def write_gguf(path: Path, edit: Callable[[gguf.GGUFWriter], None] = lambda _: None) -> None:
    path.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 2),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, alphabet()),
        (writer.add_token_types, [1] * 256 + [3, 1]),
        (writer.add_token_merges, ["t h"]),
        (writer.add_eos_token_id, 256),
        (writer.add_chat_template, TEMPLATE),
    ):
        add(value)
    shapes = {"token_embd.weight": (VOCABULARY, 32), "output_norm.weight": (32,), "rope_freqs.weight": (4,)}
    for layer in range(2):
        parts = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        parts |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = numbers.standard_normal(shape).astype(np.float32) * 0.1 + (len(shape) == 1)
        to = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, to), raw_dtype=to)
    edit(writer)
    gguf_support.finish(writer)


def _split(path: Path) -> None:
    write_gguf(path / "whole")
    whole = path / "whole" / "model.gguf"
    gguf_support.copy(whole, path / "model.gguf", lambda _: gguf.GGMLQuantizationType.Q4_0, tensors_per_part=8)
    whole.unlink()
    whole.parent.rmdir()


def _quantised(converter: Converter) -> Build:
    def build(path: Path) -> None:
        kind, fields = NATIVE["llama"]
        _directory(path, kind, fields)
        write_quantised(path, tiny(kind, fields | SHAPE | WIDE), converter)

    return build


def _packed(path: Path) -> None:
    _directory(path, *NATIVE["llama"])
    (path / "cache").mkdir()  # of packed weights, which the first load fills


QUANTISED = {
    "gptq": gptq(4, 32, symmetric=False, ordered=True),
    "awq": awq(32),
    "compressed": compressed(4, 32, symmetric=False),
    "float8": fp8_blocks(32, 32),
}
MODELS: dict[str, Build] = {
    "gguf": write_gguf,
    "split": _split,
    "native": lambda path: _directory(path, *NATIVE["llama"]),
    "foreign": lambda path: _directory(path, *FOREIGN["gpt_neox"]),
    "shards": lambda path: _directory(path, *NATIVE["llama"], max_shard_size="20KB"),
    "packed": _packed,
    **{name: _quantised(converter) for name, converter in QUANTISED.items()},
}
