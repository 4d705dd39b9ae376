"""Gemma 4 against transformers' own code: files, the cache's layers, the CPU kernels, and speculation."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from covering import in_turn
from gemma4_support import SIZES, gemma4_fields, tiny_gemma4, tiny_gemma4_torch, tiny_native_gemma4, write_gguf
from kernels.reference_model import ReferenceModel
from model_support import Runner, packed, packed_at_once
from paceline.config import EngineConfig, SamplingParams
from paceline.core.cache import KVHeads
from paceline.core.nodes import Nodes
from paceline.engine.memory import row_bytes
from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.models.base import AnyModel, FlatModel, cache_of
from paceline.models.families import describe
from paceline.models.load.loading import load_model, open_checkpoint
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of
from toy import SHAPES, VOCAB, answers, make_engine, run, script_drafts, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

_NATIVE = pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
MODELS: dict[str, Callable[[], AnyModel]] = {
    "torch": tiny_gemma4_torch,
    "bf16": lambda: tiny_native_gemma4(quantization=None),
    "int8": tiny_native_gemma4,
    "int4": lambda: tiny_native_gemma4(quantization="int4", **SIZES["keys as values"]),
}
_rng = random.Random(2)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(size)] for size in (1, 5, 40, 2, 19, 7)]
PARAMS = [SamplingParams(temperature=0, max_tokens=18, seed=seed) for seed in range(len(PROMPTS))]


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_equal_those_of_transformers(sizes: str) -> None:
    for seed in range(2):
        theirs = tiny_gemma4(seed, **SIZES[sizes])
        tokens = torch.arange(60)[None] * 7 % VOCAB
        with torch.inference_mode():
            wanted = theirs(tokens).logits
        found = Runner(tiny_gemma4_torch(seed, **SIZES[sizes]), 1, 64)(tokens, torch.arange(60)[None])
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path: Path) -> None:
    """Published files also have keys of layers that read another layer's, and the parts for images and sounds."""
    model = tiny_gemma4()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {f"model.language_{name}": tensor for name, tensor in tensors.items() if name.startswith("model.")}
    whole |= {
        name.replace("model.", "model.language_model.", 1): whole.pop(f"model.language_{name}") for name in tensors
    }
    whole["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.zeros(64, 40)
    whole["model.language_model.layers.4.self_attn.k_norm.weight"] = torch.zeros(32)
    whole |= {f"model.{part}.x.weight": torch.zeros(3) for part in ("vision_tower", "audio_tower", "embed_audio")}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.for_model("gemma4", text_config=model.config.to_dict()).save_pretrained(tmp_path)
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        wanted = model(tokens).logits
    found = Runner(load_model(tmp_path, dtype=torch.float32), 1)(tokens, torch.arange(12)[None])  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", ["all kinds", "keys as values", "experts", "experts and vectors"])
def test_a_gguf_file_gives_the_logits_of_its_safetensors(sizes: str, tmp_path: Path) -> None:
    theirs, tokens = tiny_gemma4(**SIZES[sizes]), torch.arange(40)[None] * 7 % VOCAB
    ours = load_model(write_gguf(tmp_path / "tiny.gguf", theirs), dtype=torch.float32)
    with torch.inference_mode():
        wanted = theirs(tokens).logits
    found = Runner(ours, 1)(tokens, torch.arange(40)[None])  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_attention_in_both_directions_runs_through_transformers() -> None:
    assert describe({"model_type": "gemma4_text", **gemma4_fields(use_bidirectional_attention="all")}) is None


@pytest.mark.parametrize("kind", ["torch", "int8"])
def test_the_cache_holds_only_layers_with_keys_of_their_own(kind: str) -> None:
    """Three of five layers: two with windows and narrower heads, and one without."""
    model = MODELS[kind]()
    assert model.kv_layers == (KVHeads(2, 16), KVHeads(2, 32), KVHeads(2, 16))  # type: ignore[attr-defined]
    cache = cache_of(model, 3, 50)
    tables = [cache.storage.by_row(table) for table in cache.tables]
    assert [table.shape[:3] + table.shape[4:] for table in tables] == 2 * [(2, 3, 2, 16)] + 2 * [(1, 3, 2, 32)]
    assert cache.places == ((0, 0), (1, 0), (0, 1))
    config = EngineConfig(drafter=None, max_batch_size=1, max_model_len=50)
    storage = type(cache.storage)
    narrow, wide = (2 * storage.row_bytes((count, 2, dim), 50, model.dtype) for count, dim in ((2, 16), (1, 32)))
    assert row_bytes(model, None, config, 50) == narrow + wide


@_NATIVE
@pytest.mark.parametrize(("sizes", "quantization"), in_turn(SIZES, [None, "int8", "int4"]))
def test_kernels_agree_with_their_reference_and_bits_do_not_depend_on_the_pass(
    sizes: str, quantization: Quantization | None
) -> None:
    checkpoint, tokens = open_checkpoint(tiny_gemma4(**SIZES[sizes])), [5 * place % VOCAB for place in range(40)]
    assert checkpoint is not None
    spec = spec_of(checkpoint.spec, checkpoint.tensors(torch.float32, torch.device("cpu")))
    wanted = in_pieces(ReferenceModel(spec, "tiny", quantization=quantization), tokens, [40])
    for kernels in native.available():
        fast = NativeModel(spec, "tiny", quantization=quantization, threads=2, kernels=kernels)
        found = in_pieces(fast, tokens, [40])
        assert float((found - wanted).norm() / wanted.norm()) < 0.02  # one input rounded otherwise gives 0.007 to 0.02
        for pieces in ([1] * 40, [3, 20, 1, 16]):
            torch.testing.assert_close(in_pieces(fast, tokens, pieces), found, rtol=0, atol=0)


def in_pieces(model: FlatModel, tokens: list[int], sizes: list[int]) -> Tensor:
    """Logits of a text that is fed in pieces; every second piece is first filled in as text."""
    cache, start, found = cache_of(model, 1, 64), 0, []
    for number, size in enumerate(sizes):
        place = torch.arange(start, start + size)
        nodes = Nodes(torch.tensor(tokens[start : start + size]), torch.zeros_like(place), place)
        if number % 2:
            model.fill(nodes, cache)
        found.append(model.forward(nodes, cache).hidden)
        start += size
    return model.logits(torch.cat(found))


@_NATIVE
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_checkpoint_read_while_it_is_packed_gives_the_weights_of_one_read_at_once(
    quantization: Quantization | None, tmp_path: Path
) -> None:
    for sizes in SIZES.values():
        tiny_gemma4(**sizes).to(torch.bfloat16).save_pretrained(tmp_path)
        models = packed(tmp_path, quantization), packed_at_once(tmp_path, quantization)
        straight, at_once = (model.packed() for model in models)  # the models' memory
        assert straight is not None
        assert at_once is not None
        assert torch.equal(straight, at_once)


def test_vectors_that_the_kernels_cannot_take_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="vectors by token whose width is a multiple of 16; not 24"):
        tiny_native_gemma4(hidden_size_per_layer_input=24)


@functools.cache
def plain_answers(kind: str) -> list[list[list[int]]]:
    """Answers of plain decoding, one prompt at a time."""
    return answers(run(make_engine(MODELS[kind](), max_batch_size=1), PROMPTS, PARAMS))


def test_greedy_answers_equal_those_of_transformers() -> None:
    theirs = tiny_gemma4()
    for prompt, (answer,) in zip(PROMPTS, plain_answers("torch"), strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize(("shape", "kind"), in_turn(["caps", *SHAPES], MODELS))
def test_rejected_draft_tokens_and_other_branches_leave_no_trace(kind: str, shape: str) -> None:
    plain = plain_answers(kind)
    engine = make_engine(MODELS[kind](), drafter="ngram", max_batch_size=4, prefill_chunk=5)
    if native.select() is not None:
        assert (engine.rounds.choice.kernels is not None) == (kind != "torch"), "the kernels run whole rounds"
    script_drafts(engine, truth_of(PROMPTS, PARAMS, plain), shape)
    outputs = run(engine, PROMPTS, PARAMS)
    assert answers(outputs) == plain
    assert sum(output.outputs[0].metrics.accepted for output in outputs) > 10


@pytest.mark.parametrize("kind", ["torch", "int8"])
def test_a_draft_model_of_the_family_and_shared_prefixes_change_no_answer(kind: str) -> None:
    document = PROMPTS[2]
    prompts = [document, *([*document, *prompt] for prompt in PROMPTS)]
    params = [SamplingParams(temperature=0, max_tokens=8, seed=seed) for seed in range(len(prompts))]
    alone = answers(run(make_engine(MODELS[kind](), max_batch_size=1, prefix_cache=False), prompts, params))
    draft = (tiny_gemma4_torch if kind == "torch" else tiny_native_gemma4)(seed=3)
    engine = make_engine(MODELS[kind](), draft, drafter="model", max_batch_size=2, prefill_chunk=16)
    outputs = [run(engine, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert answers(outputs) == alone
    assert all(output.outputs[0].metrics.cached_tokens >= len(document) - 1 for output in outputs[1:])


def test_a_loaded_model_shares_its_weights() -> None:
    config = AutoConfig.for_model("gemma4_text", **gemma4_fields())
    theirs = AutoModelForCausalLM.from_config(config)
    ours = load_model(theirs, dtype=torch.float32)
    assert ours.weight_bytes() == sum(tensor.nbytes for tensor in _different(theirs.state_dict().values()))


def _different(tensors: object) -> list[Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())  # type: ignore[attr-defined]
