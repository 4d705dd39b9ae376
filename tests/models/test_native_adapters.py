"""LoRA adapters on the CPU kernels: torch's logits, bits of a token alone, and speculation that changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from adapter_support import EVERY_LINEAR, write_adapter
from gemma4_support import SIZES, tiny_gemma4
from kernels.tools import ragged
from model_support import NATIVE, VOCABULARY, Runner, packed, random_tokens, tiny
from paceline import LLM, SamplingParams
from paceline.core.batch import Batch
from paceline.core.cache import KVCache
from paceline.core.draft import Draft, Verdict
from paceline.core.nodes import Nodes
from paceline.core.row_tables import GROWS
from paceline.engine import slot_memory
from paceline.engine.slot_memory import SlotMemory
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.lengths.calibration import Calibration, Grid
from paceline.models.load.adapters import AdaptedLinear, attach
from paceline.models.load.loading import describe_source, load_model
from paceline.models.native.model import NativeModel
from paceline.models.torch.transformer import Transformer
from toy import answers, make_engine, run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}"),
]
Quantization = Literal["int8", "int4"] | None
FORMATS: list[Quantization] = [None, "int8", "int4"]
BOUNDS = {None: 0.03, "int8": 0.07, "int4": 0.4}  # relative errors of the model itself
WIDE = {"hidden_size": 64, "intermediate_size": 72, "head_dim": 16, "num_hidden_layers": 2}
# Tokens that use every expert: with fewer, rounding may choose others, so of such models only the bits are compared.
ALL_SIZES = SIZES | {"every expert": SIZES["experts"] | {"top_k_experts": SIZES["experts"]["num_experts"]}}
FAMILIES = [
    *("llama with biases", "qwen3", "gemma3", "olmo2", "phi3", "ernie4_5", "jais2", "cohere"),
    *("gemma4", "gemma4 with keys as values", "gemma4 with every expert"),
]
LENGTH = 20


def model_of(family: str) -> PreTrainedModel:
    if family.startswith("gemma4"):
        sizes = ALL_SIZES[family.removeprefix("gemma4 with ") if " " in family else "all kinds"]
        return tiny_gemma4(**dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY) | sizes)
    kind, fields = NATIVE[family]
    kinds = {"layer_types": fields["layer_types"][:2]} if "layer_types" in fields else {}
    return tiny(kind, fields | WIDE | kinds | {"tie_word_embeddings": False})


def adapters_of(path: Path, theirs: PreTrainedModel, family: str = "llama") -> dict[str, Path]:
    """Write two adapters: one of every layer, and one of some, of another rank."""
    fused = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    plain = tuple(name for name in EVERY_LINEAR if name != "gate_proj")
    every = {"phi3": fused, "jais2": plain}.get(family, EVERY_LINEAR)
    write_adapter(path / "red", theirs, seed=1, rank=4, modules=every)
    write_adapter(path / "blue", theirs, seed=2, rank=19, modules=every[1::2], lora_alpha=2)
    return {"red": path / "red", "blue": path / "blue"}


def on_kernels(theirs: PreTrainedModel, adapters: dict[str, Path], quantization: Quantization) -> NativeModel:
    model = packed(theirs, quantization)
    if adapters:
        attach(model, adapters, describe_source(theirs))
    return model


def in_torch(theirs: PreTrainedModel, adapters: dict[str, Path], number: int) -> Tensor:
    ours = load_model(theirs, dtype=torch.float32)
    attach(ours, adapters, describe_source(theirs))
    assert isinstance(ours, Transformer)
    assert ours.adapters is not None
    ours.adapters.use(torch.tensor([number]))
    return Runner(ours, 1)(random_tokens(1, LENGTH), torch.arange(LENGTH)[None])[0]


def cache_of(model: NativeModel, adapter_of: Sequence[int]) -> KVCache:
    cache = KVCache(model.kv_layers, len(adapter_of), 64, dtype=torch.bfloat16)
    cache.adapter_of[:] = torch.tensor(adapter_of)
    return cache


def logits_of(model: NativeModel, adapter: int, at_once: int = 100) -> Tensor:
    """Logits of one row alone, of which ``at_once`` tokens are run in a pass."""
    cache = cache_of(model, [0, adapter])
    tokens, (rows, positions) = random_tokens(1, LENGTH)[0], ragged({1: LENGTH})
    parts = [
        model.forward(Nodes(*(t[first : first + at_once] for t in (tokens, rows, positions))), cache).hidden
        for first in range(0, LENGTH, at_once)
    ]
    return model.logits(torch.cat(parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_adapters_in_torch(family: str, tmp_path: Path) -> None:
    theirs = model_of(family)
    adapters = adapters_of(tmp_path, theirs, family)
    exact = [in_torch(theirs, adapters, number) for number in (0, 1, 2)]
    changed = [float((each - exact[0]).norm() / exact[0].norm()) for each in exact]
    assert min(changed[1:]) > 0.2, "the adapters change too little to be seen"
    for quantization in FORMATS:
        model = on_kernels(theirs, adapters, quantization)
        errors = [float((logits_of(model, n) - each).norm() / each.norm()) for n, each in enumerate(exact)]
        assert errors[0] < BOUNDS[quantization]
        assert max(errors[1:]) < 2 * errors[0], (quantization, errors)


def test_adapters_are_counted_with_the_weights_and_calibrated_in_turn(tmp_path: Path) -> None:
    theirs = model_of("llama with biases")
    adapters = adapters_of(tmp_path, theirs)
    ours = load_model(theirs, dtype=torch.float32)
    bare = ours.weight_bytes(), on_kernels(theirs, {}, "int8").weight_bytes()
    attach(ours, adapters, describe_source(theirs))
    stored = sum(t.nbytes for path in adapters.values() for t in load_file(path / "adapter_model.safetensors").values())
    native_model = on_kernels(theirs, adapters, "int8")
    assert isinstance(ours, Transformer)
    adapted = [linear for linear in ours.linears() if isinstance(linear, AdaptedLinear)]
    changes = sum(tensor.nbytes for linear in adapted for tensor in linear.tensors()[-2:])
    assert ours.weight_bytes() - bare[0] == changes > stored, "filled up to one rank"
    assert native_model.weight_bytes() - bare[1] > stored, "padded"
    parts = make_engine(native_model, drafter="ngram", max_batch_size=4, max_model_len=48).parts
    seen: set[tuple[int, ...]] = set()
    accept = parts.accept

    def noted(draft: Draft, found: Tensor, batch: Batch) -> Verdict:
        seen.add(tuple(parts.target.cache.adapter_of[: batch.rows].tolist()))
        return accept(draft, found, batch)

    Calibration(parts.target, parts.drafter, noted, Grid((1, 4), (0, 1), seconds=0.0)).run()
    assert seen == {(1,), (1, 2, 1, 2)}
    assert not parts.target.cache.adapter_of.any()


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("family", ["llama with biases", "gemma3", "gemma4", "gemma4 with experts", "qwen3_moe"])
def test_bits_depend_on_no_other_row_and_no_division_into_passes(
    family: str, quantization: Quantization, tmp_path: Path
) -> None:
    theirs = model_of(family)
    model = on_kernels(theirs, adapters_of(tmp_path, theirs), quantization)
    alone = [logits_of(model, number) for number in (0, 1, 2)]
    assert torch.equal(alone[0], logits_of(on_kernels(theirs, {}, quantization), 0)), "rows without an adapter"
    for number, expected in enumerate(alone):
        assert torch.equal(logits_of(model, number, at_once=3), expected)
    adapter_of = [1, 0, 2, 2, 1]
    cache, tokens = cache_of(model, adapter_of), random_tokens(1, LENGTH)[0]
    rows, positions = ragged(dict.fromkeys(range(5), LENGTH))
    together = model.logits(model.forward(Nodes(tokens.repeat(5), rows, positions), cache).hidden)
    for row, number in enumerate(adapter_of):
        assert torch.equal(together[row * LENGTH : (row + 1) * LENGTH], alone[number]), row
    with native.kernel_threads(3):
        assert torch.equal(logits_of(model, 1), alone[1])


@pytest.mark.skipif(not GROWS, reason="rows do not grow here")
def test_preempted_rows_go_on_with_their_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows that become three pages long, in memory for four pages."""
    monkeypatch.setattr(slot_memory, "STRETCH", 1)
    monkeypatch.setattr(SlotMemory, "growth", lambda *_: 0)  # rows begin that cannot grow beside others
    kind, fields = NATIVE["llama"]
    theirs = tiny(kind, fields | WIDE | {"tie_word_embeddings": False, "max_position_embeddings": 200})
    model, prompts = on_kernels(theirs, adapters_of(tmp_path, theirs), "int8"), [[7, 8, 9, 7, 8]] * 4
    params = [SamplingParams(temperature=0, max_tokens=120, adapter=name) for name in ("red", None, "blue", "red")]
    engine = make_engine(model, drafter="ngram", max_model_len=200)
    roomy = answers(run(engine, prompts, params))
    assert len({str(answer) for answer in roomy}) == 3, "adapters change nothing"
    engine.slots.memory.room = replace(engine.room, limit=engine.room.bytes_for(200))
    engine.slots.forget()  # it sets the slots' sizes
    tight = run(engine, prompts, params)
    assert answers(tight) == roomy
    assert [output.outputs[0].metrics.preempted > 0 for output in tight] == [False, True, True, True]


def test_a_tree_has_the_bits_of_its_chains(tmp_path: Path) -> None:
    theirs = model_of("llama")
    model = on_kernels(theirs, adapters_of(tmp_path, theirs), "int8")
    cache, text = cache_of(model, [1]), random_tokens(1, 6)[0]
    model.forward(Nodes(text, torch.zeros(6, dtype=torch.int64), torch.arange(6)), cache)
    tree = [[7, 8, 9, 10], [0] * 4, [6, 7, 7, 8], [6, 7, 8, 9], [-1, 0, 0, 2]]  # 7 -> 8, and 7 -> 9 -> 10
    found = model.forward(Nodes(*torch.tensor(tree)), cache).hidden
    for chain, nodes in (([7, 8], [0, 1]), ([7, 9, 10], [0, 2, 3])):
        tokens = torch.cat([text, torch.tensor(chain)])
        where = torch.zeros(len(tokens), dtype=torch.int64), torch.arange(len(tokens))
        expected = model.forward(Nodes(tokens, *where), cache_of(model, [1])).hidden[6:]
        assert torch.equal(found[nodes], expected)


def test_a_row_with_an_adapter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    theirs = model_of("llama")
    model = on_kernels(theirs, adapters_of(tmp_path, theirs), "int8")
    for number in (3, -1):
        with pytest.raises(ParameterError, match="a row's adapter does not exist"):
            logits_of(model, number)


# Engines

PROMPTS = [[1, 2, 3, 1, 2], [7, 8, 9, 10, 7, 8], [5, 4, 5, 4, 5], [20, 21, 22, 20, 21]]
NAMES = ["red", None, "blue", "red"]


def counted_answers(llm: LLM, chosen: Sequence[int], **fields: Any) -> list[tuple[list[int], int]]:
    """Tokens and accepted draft tokens of some of the prompts, in one batch."""
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=index, adapter=NAMES[index], **fields) for index in chosen
    ]
    made = llm.generate([PROMPTS[index] for index in chosen], params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].metrics.accepted) for output in made]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("drafter", ["ngram", "model", "hybrid"])
def test_speculation_changes_no_token(drafter: str, quantization: Quantization, tmp_path: Path) -> None:
    theirs = model_of("llama")
    options: dict[str, Any] = {"quantization": quantization, "max_batch_size": 4, "max_model_len": 48}
    options |= {"adapters": adapters_of(tmp_path, theirs), "use_tqdm": False, "dtype": "bfloat16"}
    plain = LLM(theirs, drafter=None, num_speculative_tokens=0, **options)
    draft = None if drafter == "ngram" else theirs  # drafts for the model itself
    llm = LLM(theirs, drafter=drafter, draft_model=draft, num_speculative_tokens=3, **{**options, "max_batch_size": 2})
    assert isinstance(llm.engine.parts.target.model, NativeModel)
    for fields in ({"temperature": 0.0}, {"temperature": 0.7}):
        alone = [counted_answers(plain, [index], **fields)[0][0] for index in range(4)]
        found = counted_answers(llm, range(4), **fields)
        assert [tokens for tokens, _ in found] == alone
        assert [tokens for tokens, _ in counted_answers(plain, range(4), **fields)] == alone
        assert sum(accepted for _, accepted in found) > 0
    assert llm.engine.slots.free.counts.reused == len(PROMPTS) or not GROWS
    without = LLM(theirs, drafter=None, num_speculative_tokens=0, **{**options, "adapters": None})
    bare = without.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    same = [
        output.outputs[0].token_ids == counted_answers(plain, [index], temperature=0.0)[0][0]
        for index, output in enumerate(bare)
    ]
    assert same == [False, True, False, False]
    for each in (plain, llm, without):
        each.close()
