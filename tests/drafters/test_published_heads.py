"""EAGLE-3 heads as labs publish them: tiny files of their layouts, tensor for tensor, load and draft natively."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gemma4_support import tiny_gemma4
from head_support import HEADS, KV_HEADS, MLP, random_head, write
from model_support import NATIVE, tiny
from paceline import LLM
from paceline.config import SamplingParams
from paceline.drafters.heads.native import NativeHead
from paceline.errors import ModelFormatError
from paceline.kernels import native

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_requests"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]

DIM = 16  # of the heads' attention; like Qwen3-0.6B's, wider than width / heads


def tiny_qwen3() -> PreTrainedModel:
    return tiny("qwen3", NATIVE["qwen3"][1] | {"hidden_size": 32, "head_dim": DIM, "num_hidden_layers": 7})


def tiny_gpt_oss() -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    shape = {"hidden_size": 64, "intermediate_size": 32, "head_dim": DIM, "num_hidden_layers": 7, "sliding_window": 4}
    return tiny("gpt_oss", NATIVE["llama"][1] | shape | experts | {"rope_parameters": rope})


def flat(target: PreTrainedModel, **fields: Any) -> dict[str, Any]:
    """The configuration of SafeAILab, SpecForge and AngelSlim."""
    text = target.config.get_text_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layers(text.hidden_size, text.vocab_size),
        "draft_vocab_size": 17,
        "tie_word_embeddings": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **fields,
    }


def speculators(target: PreTrainedModel, **fields: Any) -> dict[str, Any]:
    """The configuration of vllm-project/speculators."""
    text, layer = target.config.get_text_config(), fields.pop("layer", {})
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    rope = {"model_type": "llama", "rope_theta": 1000000.0, "rope_scaling": None, "attention_bias": False}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "", "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **_layers(text.hidden_size, text.vocab_size),
            **rope,
            **layer,
        },
        "draft_vocab_size": 17,
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        **fields,
    }


def _layers(width: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "head_dim": DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 64,
    }


MIDLAYER = {"layers.0.": "midlayer."}


@dataclass(frozen=True)
class Published:
    """A head's layout. count: its tensors. taps: layers of the target whose inputs it reads.

    switches, tap_count, drafted: of ``random_head``. names: beginnings of its names, where they differ. dropped:
    tensors that it lacks.
    """

    target: Callable[[], PreTrainedModel]
    config: Callable[[PreTrainedModel], Mapping[str, Any]]
    count: int
    taps: tuple[int, ...]
    switches: Sequence[str] = ()
    tap_count: int = 3
    names: Mapping[str, str] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    whole: bool = False


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
EVERY_SWITCH = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "fc_norm": False}
WINDOW = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 6}
IDS = "eagle_aux_hidden_state_layer_ids"

PUBLISHED = {
    "AngelSlim/Qwen3-1.7B_eagle3, converted": Published(
        tiny_qwen3,
        lambda target: flat(target, tie_word_embeddings=True, torch_dtype="float16"),
        15,
        (2, 3, 4),
        names=MIDLAYER,
        dropped=["embed_tokens.weight"],
    ),
    "SpecForge, Qwen3-0.6B": Published(
        tiny_qwen3,
        lambda target: flat(target, eagle_config={IDS: [1, 2, 4], "use_aux_hidden_state": True}, pretraining_tp=1),
        16,
        (2, 3, 5),
        names=MIDLAYER,
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": Published(
        tiny_qwen3,
        lambda target: speculators(target, norm_before_residual=True),
        16,
        (2, 3, 4),
        ["norm_before_residual"],
    ),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": Published(
        tiny_gpt_oss,
        lambda target: speculators(
            target, architectures=["Eagle3DraftModel"], norm_before_fc=True, norm_before_residual=True
        ),
        17,
        (2, 3, 4),
        ["norm_before_fc", "norm_before_residual"],
    ),
    "nebius/EAGLE3-gpt-oss-20b": Published(
        tiny_gpt_oss,
        lambda target: flat(
            target,
            architectures=["LlamaForCausalLM"],
            truncated_vocab_size=17,
            rope_scaling={**YARN, "original_max_position_embeddings": 16},
        ),
        15,
        (2, 3, 4),
        names=MIDLAYER,
        dropped=["embed_tokens.weight"],
    ),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": Published(
        lambda: tiny_gemma4(kinds="sfsf", shared=0),
        lambda target: speculators(target, norm_before_residual=True, **{IDS: [0, 1, 3]}),
        16,
        (0, 1, 3),
        ["norm_before_residual"],
    ),
    "speculators 0.8, EAGLE-3.1": Published(
        tiny_qwen3,
        lambda target: speculators(
            target,
            architectures=["Eagle3DraftModel"],
            layer=WINDOW,
            embed_requires_grad=False,
            **EVERY_SWITCH,
            **{IDS: [2, 3, 5, 6]},
        ),
        16,
        (2, 3, 5, 6),
        ["norm_before_fc", "norm_before_residual", "norm_output"],
        tap_count=4,
        dropped=["embed_tokens.weight"],
    ),
    "EAGLE-3.1 with a norm for each layer": Published(
        tiny_qwen3,
        lambda target: flat(target, fc_norm=True, norm_output=True, **{IDS: [2, 3, 4]}),
        19,
        (2, 3, 4),
        ["fc_norm", "norm_output"],
        names={**MIDLAYER, "fc_norm.": "model.fc_norm."},
    ),
    "vLLM's name, a whole vocabulary": Published(
        tiny_qwen3,
        lambda target: flat(
            target,
            architectures=["Eagle3LlamaForCausalLM"],
            draft_vocab_size=61,
            norm_before_fc=True,
            num_aux_hidden_states=3,
            target_hidden_size=32,
            eagle_config={"norm_before_fc": True, IDS: [2, 3, 5]},
            **{IDS: [2, 3, 5]},
        ),
        15,
        (2, 3, 5),
        ["norm_before_fc"],
        names={"layers.0.": "model.layers.0.", "norm.": "model.norm."},
        dropped=["d2t", "t2d"],
        whole=True,
    ),
}


def files_of(published: Published, target: PreTrainedModel, directory: Path) -> Path:
    text = target.config.get_text_config()
    config = published.config(target)
    tensors = random_head(
        width=text.hidden_size,
        target_width=text.hidden_size,
        tap_count=published.tap_count,
        vocabulary=text.vocab_size,
        drafted=text.vocab_size if published.whole else 17,
        switches=published.switches,
        dim=DIM,
    )
    kept = {name: tensor for name, tensor in tensors.items() if name not in published.dropped}
    dtype = getattr(torch, config["torch_dtype"])
    named = {_named(name, published.names): _as(tensor, dtype) for name, tensor in kept.items()}
    assert len(named) == published.count
    return write(directory, config, named)


def _named(name: str, names: Mapping[str, str]) -> str:
    start = next((start for start in names if name.startswith(start)), "")
    return names.get(start, "") + name.removeprefix(start)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layout_drafts_natively(tmp_path: Path, name: str) -> None:
    published = PUBLISHED[name]
    target = published.target()
    path = files_of(published, target, tmp_path)
    options = {"tokenizer": None, "device": "cpu", "max_model_len": 48, "use_tqdm": False, "quantization": "int8"}
    llm = LLM(target, path, drafter="feature", num_speculative_tokens=3, **options)
    head = llm.engine.models.draft
    assert isinstance(head, NativeHead)
    assert head.taps == published.taps
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3, n=2)
    (ours,), (plain,) = (each.generate([1, 2, 3, 4], params, use_tqdm=False) for each in (llm, llm.plain()))
    assert [answer.token_ids for answer in ours.outputs] == [answer.token_ids for answer in plain.outputs]
    assert sum(answer.metrics.drafted for answer in ours.outputs) > 0


def test_a_pickled_head_says_how_to_convert_it(tmp_path: Path) -> None:
    """AngelSlim's heads are published as pytorch_model.bin alone."""
    target = tiny_qwen3()
    path = files_of(PUBLISHED["AngelSlim/Qwen3-1.7B_eagle3, converted"], target, tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match=r"only pickled weights .* convert them: safetensors"):
        LLM(target, path, tokenizer=None, device="cpu", use_tqdm=False)


def test_a_head_with_latent_attention_is_refused_by_its_class(tmp_path: Path) -> None:
    target = tiny_qwen3()
    path = write(tmp_path, flat(target, architectures=["Eagle3DeepseekV2ForCausalLM"]), {"fc.weight": torch.zeros(1)})
    with pytest.raises(ModelFormatError, match="'Eagle3DeepseekV2ForCausalLM' is not supported"):
        LLM(target, path, tokenizer=None, device="cpu", use_tqdm=False)
