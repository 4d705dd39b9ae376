"""Models small enough for every test: random weights, every byte a token, saved as any other model is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"


def byte_tokenizer(special: Sequence[str] = (), words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """special: spellings of further special tokens. words: further tokens that no text becomes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, *words])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name) for name in ("<eos>", *special)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=TEMPLATE)


def save_llama(path: Path, tokenizer: PreTrainedTokenizerFast, seed: int, **fields: Any) -> str:
    """Save a model with a tokenizer; returns the path. fields: of its configuration."""
    usual = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,  # far from uniform, so that greedy decoding has no near-ties
    }
    ends = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**usual | ends | fields)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
