"""Write a random Qwen3.5 checkpoint with a draft head, a byte tokenizer and a chat template, for benchmarks.

    python benchmarks/random_qwen3_5.py DIRECTORY --shape tiny
    python benchmarks/bits.py DIRECTORY --drafter mtp --widths 1,3
    python benchmarks/random_qwen3_5.py DIRECTORY --shape 2b
    paceline bench DIRECTORY --quantization int8

The text that such a model writes has no meaning. The shapes are those that are published, to our knowledge.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

# width, inner width, layers, heads, key heads, head width; key heads, value heads and width of states; vocabulary
SHAPES = {
    "tiny": (128, 192, 8, 4, 2, 32, 2, 4, 32, 320),
    "0.8b": (1024, 3584, 24, 8, 2, 256, 16, 16, 128, 248320),
    "2b": (2048, 6144, 24, 8, 2, 256, 16, 16, 128, 248320),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def configuration(shape: str) -> Qwen3_5TextConfig:
    """Return the configuration of a shape."""
    width, inner, layers, heads, kv_heads, dim, keys, values, state, vocabulary = SHAPES[shape]
    return Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=state,
        linear_value_head_dim=state,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        mtp_num_hidden_layers=1,
        eos_token_id=None,
    )


def head_tensors(config: Qwen3_5TextConfig) -> dict[str, Tensor]:
    """Return a random draft head, named as in published checkpoints."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = {
        "self_attn.q_proj": (2 * queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes = {"mtp.fc": (width, 2 * width)} | {f"mtp.layers.0.{name}": size for name, size in layer.items()}
    norms = dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"), width)
    norms |= dict.fromkeys(("mtp.layers.0.input_layernorm", "mtp.layers.0.post_attention_layernorm"), width)
    norms |= dict.fromkeys(("mtp.layers.0.self_attn.q_norm", "mtp.layers.0.self_attn.k_norm"), dim)
    found = {f"{name}.weight": torch.randn(size) * size[1] ** -0.5 for name, size in shapes.items()}
    found |= {f"{name}.weight": torch.zeros(size) for name, size in norms.items()}
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def write(directory: Path, shape: str) -> None:
    """Write the checkpoint."""
    config = configuration(shape)
    write_model(directory, Qwen3_5ForCausalLM, config)
    file = directory / "model.safetensors"
    save_file(load_file(file) | head_tensors(config), file, metadata={"format": "pt"})


def write_model(directory: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Write a random model in bfloat16, scaled so that its texts do not repeat one token, and a byte tokenizer."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = kind(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)
    made.save_pretrained(directory)


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    arguments = parser.parse_args()
    write(arguments.directory, arguments.shape)


if __name__ == "__main__":
    main()
