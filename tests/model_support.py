"""Tiny random models of every family, and a runner that joins model, cache and attention like a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from paceline.core.slots import Slots
from paceline.kernels.attention.base import PLAIN, AttentionTerms
from paceline.kernels.attention.cached import CachedAttend
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import HiddenStates, Model, cache_of
from paceline.models.files.boundary import ResolvedSource, Source, reads_model
from paceline.models.load.loading import open_checkpoint
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of

VOCABULARY = 61

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "ffn_dim": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3_ROPE = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN_ROPE = rope("yarn", factor=4.0, original_max_position_embeddings=16)
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

# name -> (Hugging Face's model_type, its configuration)
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama with biases": ("llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads and one key head": ("llama", _LLAMA | {"head_dim": 10, "num_key_value_heads": 1}),
    "llama with tied embeddings": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "llama with llama3 rope": ("llama", _LLAMA | LLAMA3_ROPE),
    "llama with yarn rope": ("llama", _LLAMA | YARN_ROPE),
    "llama with linear rope": ("llama", _LLAMA | rope("linear", factor=3.0)),
    "llama with dynamic rope": ("llama", _LLAMA | rope("dynamic", factor=3.0)),
    "mistral": ("mistral", _LLAMA | {"sliding_window": None}),
    "mistral with a window": ("mistral", _LLAMA | {"sliding_window": 4}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen2 with windows in some layers": ("qwen2", _LLAMA | WINDOWED),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 8}),
    "qwen3 with biases": ("qwen3", _LLAMA | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "opt": ("opt", _OPT),
    "opt with norms after": ("opt", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt without a last norm": ("opt", _OPT | {"_remove_final_layer_norm": True}),
    "opt without biases or norm weights": (
        "opt",
        _OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2 with scales by layer": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40}),
    "gpt2 without scale": ("gpt2", _GPT2 | {"scale_attn_weights": False, "tie_word_embeddings": False}),
}

_BOTH_ROPES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
                           "original_max_position_embeddings": 32},
    }
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA3 = _LLAMA | {
    "head_dim": 8, "sliding_window": 4, "layer_types": _MIXED, "query_pre_attn_scalar": 10,
}  # fmt: skip
_GEMMA4 = _LLAMA | {
    "num_hidden_layers": 5, "head_dim": 8, "global_head_dim": 12, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 6,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
}  # fmt: skip
YARN_MSCALE = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7)
YARN_TWICE = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)
_LATENT = _LLAMA | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16,
    "v_head_dim": 10,
}  # fmt: skip
_LATENT_ROUTED = _LATENT | {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
}  # fmt: skip
YARN_GROWING = rope(
    "yarn", factor=4.0, original_max_position_embeddings=48, max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
    beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.1, partial_rotary_factor=16 / 28,
)  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
NATIVE |= {
    "gemma3": ("gemma3_text", _GEMMA3),
    "gemma3 with capped logits": ("gemma3_text", _GEMMA3 | {"final_logit_softcapping": 0.5}),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4 with keys as values": (
        "gemma4_text",
        _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    ),
    "phi3": ("phi3", _LLAMA | {"sliding_window": 4}),
    "phi3 with a partial rotation": ("phi3", _LLAMA | {"head_dim": 8} | rope("default", partial_rotary_factor=0.5)),
    "granite": ("granite", _LLAMA | _GRANITE),
    "olmo2": ("olmo2", _LLAMA),
    "olmo3": ("olmo3", _LLAMA | _BOTH_ROPES | {"sliding_window": 4, "layer_types": _MIXED}),
    "smollm3": ("smollm3", _LLAMA | {"no_rope_layer_interval": 2}),
    "ministral3": ("ministral3", _LLAMA | {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", _LLAMA | _EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "olmoe": ("olmoe", _LLAMA | _EXPERTS),
    "granitemoe": ("granitemoe", _LLAMA | _GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "minicpm3": ("minicpm3", _LATENT | {"scale_depth": 1.4, "dim_model_base": 8}),
    "youtu": ("youtu", _LATENT | YARN_MSCALE),
    "youtu with biases": ("youtu", _LATENT | YARN_TWICE | {"rope_interleave": False, "attention_bias": True}),
    "youtu without a query vector": ("youtu", _LATENT | {"q_lora_rank": None}),
    "deepseek_v2": ("deepseek_v2", _LATENT_ROUTED | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}),
    "deepseek_v2 with groups": (
        "deepseek_v2",
        _LATENT_ROUTED | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "q_lora_rank": None},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT_ROUTED | YARN_MSCALE | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT_ROUTED | {"n_group": 1, "topk_group": 1}),
    "mistral4": (
        "mistral4",
        _LATENT_ROUTED | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1} | YARN_GROWING,
    ),
    "exaone4": ("exaone4", _LLAMA | {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4 with windows": ("exaone4", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED}),
}

_ROUTED = {
    "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 2, "norm_topk_prob": True,
}  # fmt: skip
_NAMED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_shared_experts": 1}
_MIMO: dict[str, Any] = {
    "head_dim": 8,
    "v_head_dim": 6,
    "sliding_window": 4,
    "n_group": 3,
    "topk_group": 2,
    "n_routed_experts": 6,
}
_MIMO |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_attention_heads": 8}
_MIMO |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
NATIVE |= {
    "mixtral": ("mixtral", _LLAMA | _LOCAL),
    "ministral": ("ministral", _LLAMA | {"head_dim": 6, "sliding_window": 4, "layer_types": _MIXED}),
    "cwm": ("cwm", _LLAMA | {"sliding_window": 4, "layer_types": _MIXED} | rope("default")),
    "exaone": ("exaone", _LLAMA),
    "gemma": ("gemma", _LLAMA | {"head_dim": 8}),
    "gemma2": ("gemma2", _LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
                                   "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "vaultgemma": ("vaultgemma", _LLAMA | {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "glm": ("glm", _LLAMA | {"head_dim": 8}),
    "glm4": ("glm4", _LLAMA | {"head_dim": 8}),
    "glm4_moe": ("glm4_moe", _LLAMA | _ROUTED | {"head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "sarvam_moe": ("sarvam_moe", _LLAMA | _ROUTED | {"head_dim": 8}),
    "solar_open": ("solar_open", _LLAMA | _ROUTED | {"head_dim": 8}),
    "dots1": ("dots1", _LLAMA | _ROUTED | {"head_dim": 8, "sliding_window": None}),
    "exaone_moe": ("exaone_moe", _LLAMA | _NAMED | {"sliding_window": 4, "n_group": 1}),
    "hy_v3": ("hy_v3", _LLAMA | _NAMED | {"head_dim": 8}),
    "mimo_v2_flash": ("mimo_v2_flash", _LLAMA | _MIMO),
    "minimax_m2": ("minimax_m2", _LLAMA | _LOCAL | {"head_dim": 8} | rope("default", partial_rotary_factor=0.5)),
    "afmoe": ("afmoe", _LLAMA | _NAMED | {"head_dim": 8, "sliding_window": 4, "route_scale": 1.5, "mup_enabled": True}),
    "cohere": ("cohere", _LLAMA | {"logit_scale": 0.2}),
    "cohere2": ("cohere2", _LLAMA | {"logit_scale": 0.2, "sliding_window": 4, "layer_types": _MIXED}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _LLAMA | {"head_dim": 8} | rope("dynamic", alpha=4.0, factor=1.0)),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _LLAMA | {"head_dim": 8, "num_experts": 5, "moe_topk": 2}),
    "ernie4_5": ("ernie4_5", _LLAMA | {"head_dim": 8, "use_bias": True}),
    "ernie4_5_moe": ("ernie4_5_moe", _LLAMA | {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12}),
    "seed_oss": ("seed_oss", _LLAMA | {"head_dim": 8}),
    "helium": ("helium", _LLAMA | {"head_dim": 6}),
    "mellum": ("mellum", _LLAMA | _EXPERTS | _BOTH_ROPES | {"head_dim": 8, "sliding_window": 4, "layer_types": _MIXED}),
    "qwen3_moe with dense layers": ("qwen3_moe", _LLAMA | _EXPERTS | {"head_dim": 8, "mlp_only_layers": [1]}),
    "qwen2_moe": ("qwen2_moe", _LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 20}),
    "flex_olmo": ("flex_olmo", _LLAMA | {"num_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe_swa": ("granitemoe_swa", _LLAMA | _GRANITE | _LOCAL | {"shared_intermediate_size": 20,
                                                                      "sliding_window": 4}),
    "granite_swa": ("granite_swa", _LLAMA | _GRANITE | {"sliding_window": 4, "layer_rope_theta": [1e4, 0, 1e2]}),
    "starcoder2": ("starcoder2", _LLAMA),
    "phi": ("phi", _LLAMA | {"hidden_size": 32}),
    "arcee": ("arcee", _LLAMA),
    "apertus": ("apertus", _LLAMA | rope("default")),
    "jais2": ("jais2", _LLAMA | {"head_dim": 8}),
    "nemotron": ("nemotron", _LLAMA | {"hidden_size": 32}),
    "stablelm": ("stablelm", _LLAMA | {"hidden_size": 64, "use_qkv_bias": True}),
    "stablelm in parallel": ("stablelm", _LLAMA | {"hidden_size": 64, "use_parallel_residual": True}),
    "olmo": ("olmo", _LLAMA),
    "nanochat": ("nanochat", _LLAMA),
    "gpt_neox": ("gpt_neox", _LLAMA | {"num_key_value_heads": 4, "hidden_size": 32} | rope("default",
                                                                                        partial_rotary_factor=0.5)),
    "gptj": ("gptj", _GPT2 | {"n_embd": 32, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "phimoe": ("phimoe", _LLAMA | _LOCAL | {"router_jitter_noise": 0.3, "lm_head_bias": True}),
    "hyperclovax": ("hyperclovax", _LLAMA | _GRANITE | {"residual_multiplier": 1.0}),
    "aria_text": ("aria_text", _LLAMA | {"moe_num_experts": 5, "moe_topk": 2, "moe_num_shared_experts": 2}),
    "cohere2_moe": ("cohere2_moe", _LLAMA | {"num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 1,
                                             "logit_scale": 0.2, "sliding_window": 4, "layer_types": _MIXED}),
}  # fmt: skip
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": (  # with an activation that no family knows
        "gpt_neox",
        {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {"hidden_act": "quick_gelu"},
    ),
    "cohere with norms of queries and keys": ("cohere", _LLAMA | {"logit_scale": 0.2, "use_qk_norm": True}),
    "modernbert-decoder": (
        "modernbert-decoder",
        {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {"local_attention": 8},
    ),
    "jetmoe": ("jetmoe", _LLAMA | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "axk1": (  # keys and values of different widths
        "axk1",
        _LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1},
    ),
}


def tiny(kind: str, fields: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Random model in which every weight matters: biases and norms are random, too."""
    config = AutoConfig.for_model(kind, **fields, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    writes_alone = type(config) in AutoModelForCausalLM._model_mapping
    auto = AutoModelForCausalLM if writes_alone else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        stored = model.state_dict(keep_vars=True).values()  # buffers, too, which Gemma 4 has
        for parameter in [*model.parameters(), *(weight for weight in stored if not weight.requires_grad)]:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.2)
    return model.to(dtype)


def assert_same_model(file: Source, original: Source) -> None:
    """Both have one description and the same weights, to the bit."""
    found, wanted = open_checkpoint(file), open_checkpoint(original)
    assert found is not None
    assert wanted is not None
    assert found.spec == wanted.spec
    ours, theirs = (each.tensors(torch.float32, torch.device("cpu")) for each in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=0, msg=name)


@reads_model
def packed(
    source: ResolvedSource,
    quantization: Quantization | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
) -> NativeModel:
    """The model on the CPU kernels, packed while its checkpoint is read. dtype: of what is not packed."""
    checkpoint = open_checkpoint(source)
    assert checkpoint is not None
    return NativeModel.of(checkpoint, dtype, quantization=quantization, threads=threads)


def packed_at_once(source: Source, quantization: Quantization | None = None) -> NativeModel:
    """The same, packed from weights that were all read in float32 before."""
    checkpoint = open_checkpoint(source)
    assert checkpoint is not None
    weights = checkpoint.tensors(torch.float32, torch.device("cpu"))
    return NativeModel(spec_of(checkpoint.spec, weights), checkpoint.name, quantization=quantization)


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


class Runner:
    """A model with its own cache on the reference attention."""

    def __init__(self, model: Model, rows: int, positions: int = 48) -> None:
        self.model = model
        self.cache = cache_of(model, rows, positions)
        self.calls: list[int] = []

    def __call__(self, tokens: Tensor, positions: Tensor, first_row: int = 0) -> Tensor:
        """tokens, positions [B, L] -> logits [B, L, V]."""
        return self.model.logits(self.hidden_states(tokens, positions, first_row).hidden)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, first_row: int = 0, taps: Sequence[int] = ()
    ) -> HiddenStates:
        backend = ReferenceAttention()
        longest = min(int(positions.max()) + 1, self.cache.positions)
        plan = backend.plan(positions, longest)

        class Noted(CachedAttend):
            def again(noted, layer: int, q: Tensor, terms: AttentionTerms = PLAIN) -> Tensor:  # noqa: N805
                self.calls.append(layer)
                return super().again(layer, q, terms)

        attend = Noted(
            self.cache, backend, plan, Slots.listed(range(first_row, first_row + len(tokens)), tokens.device)
        )
        return self.model.hidden_states(tokens, positions, attend, taps)


def best_tokens(theirs: PreTrainedModel, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """transformers' best token in place of each token of a text, from one pass over a prompt and the text.

    A text that equals them is the greedy one: its first token is the best one, and so is each after those before it.
    """
    with torch.inference_mode():
        logits = theirs(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()  # type: ignore[no-any-return]


def ragged_error(model: Model, expected: Callable[[Tensor], Tensor]) -> float:
    """Largest error of the logits of three rows of different lengths, decoded a few tokens at a time.

    expected: maps tokens [1, L] to reference logits [1, L, V].
    """
    tokens, lengths = random_tokens(3, 14, seed=3), torch.tensor([5, 9, 2])
    runner, error = Runner(model, 3), 0.0
    wanted = torch.cat([expected(row[None]) for row in tokens])
    prompt = torch.arange(9).expand(3, -1)  # rows 0 and 2 carry padding at their tail
    padded = torch.where(prompt < lengths[:, None], tokens[:, :9], 0)
    starts = [(prompt, padded, lengths)]
    for step, width in ((0, 1), (1, 3), (4, 1)):
        where = lengths[:, None] + step + torch.arange(width)
        starts.append((where, tokens.gather(1, where), torch.full((3,), width)))
    for positions, new, real in starts:
        logits = runner(new, positions)
        for row in range(3):
            seen = positions[row, : real[row]]
            error = max(error, float((logits[row, : real[row]] - wanted[row, seen]).abs().max()))
    return error
