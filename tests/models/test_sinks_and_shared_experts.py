"""gpt-oss and Qwen3.5 with experts: text and logits of transformers in float32, and the same model on the kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from gguf_support import begun, finish
from kernels.reference_model import ReferenceModel
from model_support import VOCABULARY, best_tokens, packed, packed_at_once, random_tokens, tiny
from paceline import SamplingParams
from paceline.core.nodes import Nodes
from paceline.kernels import native
from paceline.models.base import FlatModel, cache_of
from paceline.models.load.loading import open_checkpoint
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of
from quantised_support import mxfp4_blocks
from recurrent_support import in_torch, reference_of, tiny_qwen3_5_moe
from toy import answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def _gpt_oss(**rotary: object) -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, **rotary}
    fields = {"num_local_experts": 5, "intermediate_size": 32, "sliding_window": 4, "rope_parameters": rope}
    model = tiny("gpt_oss", _SHAPE | fields)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                weight.mul_(30)  # beyond the limits of the gate
    return model


_qwen3_5_moe = functools.partial(tiny_qwen3_5_moe, kinds="df", vocab_size=VOCABULARY)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {"gpt_oss": _gpt_oss, "qwen3_5_moe": _qwen3_5_moe}


def _logits(model: FlatModel, tokens: Tensor, at_once: int = 100) -> Tensor:
    cache, count = cache_of(model, 1, 64), len(tokens)
    nodes = tokens, torch.zeros(count, dtype=torch.int64), torch.arange(count)
    parts = [model.forward(Nodes(*(t[i : i + at_once] for t in nodes)), cache).hidden for i in range(0, count, at_once)]
    return model.logits(torch.cat(parts))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    theirs, tokens = MODELS[name](), random_tokens(1, 20)
    with torch.no_grad():
        wanted = theirs(tokens).logits[0]
    assert (_logits(reference_of(theirs), tokens[0]) - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers_with_and_without_speculation(name: str) -> None:
    theirs, prompts = MODELS[name](), [random_tokens(1, 3 + row, seed=row)[0].tolist() for row in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    model = in_torch(theirs)
    for drafter, rows in ((None, 1), ("ngram", 4)):
        options: dict[str, Any] = {} if drafter is None else {"num_speculative_tokens": 2}
        engine = make_engine(model, drafter=drafter, max_batch_size=rows, max_model_len=48, **options)
        found = answers(run(engine, prompts[:rows], [params] * rows))
        for prompt, (text,) in zip(prompts[:rows], found, strict=True):
            assert len(text) == 10
            assert text == best_tokens(theirs, prompt, text), drafter


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_run_the_model_with_bits_that_do_not_depend_on_the_call(
    name: str, quantization: Quantization | None
) -> None:
    """Compared with the reference implementation of the same rounding: another rounding may choose other experts."""
    checkpoint, tokens = open_checkpoint(MODELS[name]()), random_tokens(1, 20)[0]
    assert checkpoint is not None
    spec = spec_of(checkpoint.spec, checkpoint.tensors(torch.float32, torch.device("cpu")))
    model = NativeModel(spec, name, quantization=quantization)
    slow = ReferenceModel(spec, name, quantization=quantization)
    exact, found = _logits(slow, tokens), _logits(model, tokens)
    assert float((found - exact).norm() / exact.norm()) < 0.01
    assert torch.equal(found, _logits(model, tokens, at_once=3))


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_read_by_expert_gives_the_weights_of_one_read_at_once(
    name: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    assert torch.equal(_memory(packed(tmp_path, quantization)), _memory(packed_at_once(tmp_path, quantization)))


def _memory(model: NativeModel) -> Tensor:
    """The packed weights; a view of memory that the model owns is copied."""
    memory = model.packed()
    assert memory is not None
    return memory.clone()


@needs_kernels
def test_experts_of_four_bits_are_read_one_by_one_and_bfloat16_holds_them(tmp_path: Path) -> None:
    theirs = _gpt_oss()
    write_mxfp4(tmp_path, theirs)
    assert any(name.endswith("_blocks") for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(_memory(packed(tmp_path)), _memory(packed_at_once(theirs)))


def write_mxfp4(path: Path, theirs: PreTrainedModel) -> None:
    """Write experts as MXFP4 blocks of [experts, outputs, inputs], as gpt-oss is published, and round the model's."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            codes, exponents, exact = mxfp4_blocks(tensor.mT.contiguous())
            tensors |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": exponents}
            tensor.copy_(exact.mT)
        else:
            tensors[name] = tensor
    theirs.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    modules = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (path / "config.json").write_text(json.dumps(config | modules))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


# GGUF files

_PUBLISHED = {"rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def _written(path: Path, theirs: PreTrainedModel, experts: gguf.GGMLQuantizationType) -> Path:
    """Write gpt-oss like llama.cpp's converter: gates and ups of experts apart, matrices [out, in]."""
    config, rope = theirs.config, theirs.config.rope_parameters
    writer = begun(path, "gpt-oss", config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    for name, tensor in theirs.state_dict().items():
        stored = tensor.mT if tensor.dim() == 3 else tensor
        halves = {name: stored}
        if "gate_up_proj" in name:
            out = -1 if name.endswith("_bias") else -2
            both = stored.unflatten(out, (-1, 2)).unbind(out)
            halves = {
                name.replace("gate_up_proj", f"{part}_proj"): half
                for part, half in zip(("gate", "up"), both, strict=True)
            }
        for half, values in halves.items():
            suffix = ".bias" if half.endswith(("bias", "_bias")) else ".weight"
            called = names.get_name(half.removesuffix("_bias").removesuffix(".bias").removesuffix(".weight"))
            assert called is not None, half
            kind = experts if tensor.dim() == 3 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(called + suffix, gguf.quantize(values.contiguous().numpy(), kind), raw_dtype=kind)
    finish(writer)
    return path


def test_a_gguf_file_of_gpt_oss_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    theirs, tokens = _gpt_oss(**_PUBLISHED), random_tokens(1, 40)
    model = reference_of(_written(tmp_path / "tiny.gguf", theirs, gguf.GGMLQuantizationType.F32))
    with torch.no_grad():
        wanted = theirs(tokens).logits[0]
    assert (_logits(model, tokens[0]) - wanted).abs().max() < 1e-3 * wanted.abs().max()


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_experts_in_mxfp4_of_a_gguf_file_are_packed_like_their_numbers(
    quantization: Quantization | None, tmp_path: Path
) -> None:
    path = _written(tmp_path / "tiny.gguf", _gpt_oss(**_PUBLISHED), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(_memory(packed(path, quantization)), _memory(packed_at_once(path, quantization)))
