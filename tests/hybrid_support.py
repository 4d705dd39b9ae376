"""Tiny random models of transformers with recurrent layers of other kinds than Qwen3.5's."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, Lfm2Config, Lfm2ForCausalLM

from paceline.models.loading import load_model
from paceline.models.recurrent import RecurrentModel
from recurrent_support import randomise
from toy import POSITIONS, VOCAB

LFM2_SIZES: dict[str, dict[str, Any]] = {"usual": {}, "other": {"taps": 4, "kinds": "fcfcc", "tied": False}}
GRANITE_SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "grouped": {"heads": 6, "head_dim": 16, "groups": 2, "state_dim": 24, "taps": 3, "kinds": "fmmf", "tied": True},
    "rotated": {"positions": "rope", "conv_bias": False},
}


def tiny_lfm2(seed: int = 0, taps: int = 3, kinds: str = "ccf", *, tied: bool = True) -> Lfm2ForCausalLM:
    """A random LFM2 with a layer for each letter of ``kinds``: c is a short convolution, f attention."""
    config = Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=100,
        block_multiple_of=16,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=taps,
        layer_types=["conv" if kind == "c" else "full_attention" for kind in kinds],
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return _randomised(Lfm2ForCausalLM, config, seed)


def tiny_granite_hybrid(
    seed: int = 0,
    heads: int = 4,
    head_dim: int = 24,
    groups: int = 1,
    state_dim: int = 16,
    taps: int = 4,
    kinds: str = "mmf",
    positions: str | None = None,
    *,
    conv_bias: bool = True,
    tied: bool = False,
) -> GraniteMoeHybridForCausalLM:
    """A random Granite 4 without experts; m is a Mamba-2 layer, f attention. heads, head_dim: of the Mamba-2 layers."""
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        shared_intermediate_size=80,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["linear_attention" if kind == "m" else "full_attention" for kind in kinds],
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=groups,
        mamba_d_state=state_dim,
        mamba_d_conv=taps,
        mamba_expand=heads * head_dim // 48,
        mamba_conv_bias=conv_bias,
        position_embedding_type=positions,
        num_local_experts=0,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=0.5,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return _randomised(GraniteMoeHybridForCausalLM, config, seed)


def _randomised(model: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        made = model(config).eval()
        for name, weight in made.named_parameters():
            randomise(name, weight)
    return made


def ours(theirs: Any) -> RecurrentModel:
    """The same model, unrounded in torch."""
    loaded = load_model(theirs, dtype=torch.float32)
    assert isinstance(loaded, RecurrentModel)
    return loaded
