"""Write a random checkpoint with the text part's shape of Gemma 4 E2B, 9 GB, for ``benchmarks.kernels``.

    PYTHONPATH=src:. python -m benchmarks.random_gemma4 DIRECTORY
    PYTHONPATH=src:. python -m benchmarks.kernels --shapes --checkpoints DIRECTORY

The text that such a model writes has no meaning. The shape is what is published, to our knowledge.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.random_qwen3_5 import write_model
from transformers import Gemma4ForCausalLM, Gemma4TextConfig


def configuration() -> Gemma4TextConfig:
    """Return the configuration: every fifth layer has no window, the last 20 read the keys of earlier ones."""
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
        max_position_embeddings=4096,
        eos_token_id=None,
    )


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    write_model(parser.parse_args().directory, Gemma4ForCausalLM, configuration())


if __name__ == "__main__":
    main()
