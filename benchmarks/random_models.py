"""Write a random checkpoint of a published shape, with a byte tokenizer and a chat template, for benchmarks.

    PYTHONPATH=src:. python -m benchmarks.random_models DIRECTORY --shape qwen3.5-tiny
    PYTHONPATH=src:. python -m benchmarks.bits DIRECTORY --drafter mtp --widths 1,3
    PYTHONPATH=src:. python -m benchmarks.random_models DIRECTORY --shape qwen3-30b-a3b --layers 6
    PYTHONPATH=src:. python -m benchmarks.kernels --shapes --checkpoints DIRECTORY

The text that such a model writes has no meaning. The shapes are those that are published, to our knowledge.
Qwen3.5's have a draft head.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

POSITIONS = 4096
# width, inner width, layers, heads, key heads, head width; key heads, value heads and width of states; vocabulary
_QWEN3_5 = {
    "qwen3.5-tiny": (128, 192, 8, 4, 2, 32, 2, 4, 32, 320),
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, 256, 16, 16, 128, 248320),
    "qwen3.5-2b": (2048, 6144, 24, 8, 2, 256, 16, 16, 128, 248320),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def qwen3_5(shape: str) -> Qwen3_5TextConfig:
    """Three gated delta nets to one layer of attention."""
    width, inner, layers, heads, kv_heads, dim, keys, values, state, vocabulary = _QWEN3_5[shape]
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
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        mtp_num_hidden_layers=1,
        eos_token_id=None,
    )


def gemma4_e2b() -> Gemma4TextConfig:
    """Every fifth layer has no window, the last 20 read the keys of earlier ones."""
    kinds = ["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(35)]
    return Gemma4TextConfig(
        hidden_size=1536,
        intermediate_size=6144,
        use_double_wide_mlp=True,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_kv_shared_layers=20,
        hidden_size_per_layer_input=256,
        final_logit_softcapping=30.0,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
    )


def qwen3_30b_a3b() -> Qwen3MoeConfig:
    """A mixture of 128 experts, eight of which a token runs through."""
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
    )


def gpt_oss_20b() -> GptOssConfig:
    """A mixture of 32 experts, four of which a token runs through; every other layer has a window."""
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32, eos_token_id=None)


def qwen3_5_35b_a3b() -> Qwen3_5MoeTextConfig:
    """Three gated delta nets to one layer of attention; 256 experts, eight of which a token runs through."""
    return Qwen3_5MoeTextConfig(
        vocab_size=248320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        mtp_num_hidden_layers=1,
        eos_token_id=None,
    )


def glm_4_7_flash() -> Glm4MoeLiteConfig:
    """Latent attention, and 64 experts of which a token uses four, behind one dense layer."""
    return Glm4MoeLiteConfig(max_position_embeddings=POSITIONS, eos_token_id=None)


def granite_4_h(*, tiny: bool) -> GraniteMoeHybridConfig:
    """36 Mamba-2 layers and four of attention; H Tiny has 64 experts, six of which a token runs through."""
    experts = {
        "num_local_experts": 64 if tiny else 0,
        "num_experts_per_tok": 6 if tiny else 0,
        "intermediate_size": 512,
    }
    return GraniteMoeHybridConfig(
        **experts,
        vocab_size=100352,
        hidden_size=1536 if tiny else 2048,
        shared_intermediate_size=1024 if tiny else 8192,
        num_hidden_layers=40,
        layer_types=["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],
        num_attention_heads=12 if tiny else 32,
        num_key_value_heads=4 if tiny else 8,
        mamba_n_heads=48 if tiny else 64,
        mamba_d_state=128,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
    )


SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    **{shape: functools.partial(qwen3_5, shape) for shape in _QWEN3_5},
    "gemma4-e2b": gemma4_e2b,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "gpt-oss-20b": gpt_oss_20b,
    "qwen3.5-35b-a3b": qwen3_5_35b_a3b,
    "glm-4.7-flash": glm_4_7_flash,
    "granite-4-h-micro": functools.partial(granite_4_h, tiny=False),
    "granite-4-h-tiny": functools.partial(granite_4_h, tiny=True),
}


def mlp_shapes(config: Qwen3_5TextConfig | Qwen3_5MoeTextConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's MLP or mixture, by their names behind ``mlp.``."""
    width = config.hidden_size
    if isinstance(config, Qwen3_5TextConfig):
        inner = config.intermediate_size
        parts = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        return {f"{name}.weight": shape for name, shape in parts.items()}
    count, inner, shared = config.num_experts, config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "gate.weight": (count, width),
        "experts.gate_up_proj": (count, 2 * inner, width),
        "experts.down_proj": (count, width, inner),
        "shared_expert.gate_proj.weight": (shared, width),
        "shared_expert.up_proj.weight": (shared, width),
        "shared_expert.down_proj.weight": (width, shared),
        "shared_expert_gate.weight": (1, width),
    }


def head_tensors(config: Qwen3_5TextConfig | Qwen3_5MoeTextConfig) -> dict[str, Tensor]:
    """Return a random draft head, named as in published checkpoints."""
    width, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = {
        "self_attn.q_proj.weight": (2 * queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        **{f"mlp.{name}": shape for name, shape in mlp_shapes(config).items()},
    }
    shapes = {"mtp.fc.weight": (width, 2 * width)} | {f"mtp.layers.0.{name}": size for name, size in layer.items()}
    norms = dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"), width)
    norms |= dict.fromkeys(("mtp.layers.0.input_layernorm", "mtp.layers.0.post_attention_layernorm"), width)
    norms |= dict.fromkeys(("mtp.layers.0.self_attn.q_norm", "mtp.layers.0.self_attn.k_norm"), dim)
    found = {name: torch.randn(size) * size[-1] ** -0.5 for name, size in shapes.items()}
    found |= {f"{name}.weight": torch.zeros(size) for name, size in norms.items()}
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def write(directory: Path, shape: str, layers: int | None = None) -> None:
    """Write the checkpoint. layers: how many of them, from the first on; None: all."""
    config = SHAPES[shape]()
    if layers is not None:
        config.num_hidden_layers = layers
        for field in ("layer_types", "mlp_layer_types"):
            if (kinds := getattr(config, field, None)) is not None:
                setattr(config, field, kinds[:layers])
    write_model(directory, config)
    if isinstance(config, Qwen3_5TextConfig | Qwen3_5MoeTextConfig):
        file = directory / "model.safetensors"
        save_file(load_file(file) | head_tensors(config), file, metadata={"format": "pt"})


def write_model(directory: Path, config: PreTrainedConfig) -> None:
    """Write a random model in bfloat16, scaled so that its texts do not repeat one token, and a byte tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
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
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-tiny")
    parser.add_argument("--layers", type=int, help="keep only the first layers, as many as fit into memory")
    arguments = parser.parse_args()
    write(arguments.directory, arguments.shape, arguments.layers)


if __name__ == "__main__":
    main()
