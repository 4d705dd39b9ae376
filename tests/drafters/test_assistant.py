"""Gemma 4's assistant against transformers' own code, and rounds that it drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM

from covering import in_pairs
from gemma4_support import (
    GROUPS,
    assistant_tensors,
    assistants_may_be_made,
    gemma4_fields,
    save_assistant,
    tiny_assistant,
    tiny_gemma4,
    tiny_gemma4_torch,
    tiny_native_gemma4,
)
from kernels.tools import ragged
from paceline import LLM, SamplingParams
from paceline.core.nodes import Nodes
from paceline.core.slots import Slots
from paceline.drafters.heads.assistant import AssistantDecoder
from paceline.drafters.heads.assistant_loading import cache_places
from paceline.drafters.heads.loading import find_head, load_head_for
from paceline.errors import ModelFormatError, ParameterError, VocabularyMismatchError
from paceline.kernels import native, structs
from paceline.kernels.attention.base import AttentionTerms
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import cache_of
from paceline.models.families import describe
from paceline.models.load.loading import load_model
from paceline.models.native.layers import NativeLayers
from paceline.models.native.model import Quantization
from toy import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def all_layers_may_share() -> Iterator[None]:
    with assistants_may_be_made():
        yield


@torch.inference_mode()
def theirs_drafts(
    target: torch.nn.Module, assistant: Gemma4AssistantForCausalLM, tokens: list[int], count: int
) -> tuple[list[int], Tensor]:
    """Greedy draft tokens after ``tokens``, and the logits of each: transformers' loop for one row."""
    read = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    token, state = torch.tensor([tokens[-1:]]), read.hidden_states[-1][:, -1:]
    drafts, logits = [], []
    for _ in range(count):
        inputs = torch.cat([target.get_input_embeddings()(token), state], dim=-1)
        out = assistant(
            inputs_embeds=inputs, position_ids=torch.tensor([[len(tokens) - 1]]), shared_kv_states=read.shared_kv_states
        )
        token, state = out.logits.argmax(-1), out.last_hidden_state
        drafts.append(int(token))
        logits.append(out.logits[0, 0])
    return drafts, torch.stack(logits)


@pytest.mark.parametrize("head", [{}, GROUPS], ids=["whole head", "groups"])
def test_draft_tokens_are_those_of_transformers(head: dict[str, Any], tmp_path: Path) -> None:
    """For texts shorter and longer than the window, in rows of different lengths."""
    target, theirs = tiny_gemma4(), save_assistant(tmp_path, **head)
    llm = LLM(target, draft_model=tmp_path, drafter="feature", num_speculative_tokens=3, dtype="float32",
              tokenizer=None, max_batch_size=3, max_model_len=64)  # fmt: skip
    engine, found = llm.engine, {}
    propose = engine.parts.drafter.propose

    def noted(batch: Any, plan: Any) -> Any:
        draft = propose(batch, plan)
        for row, tokens in enumerate(draft.draft_tokens):
            text = batch.text[batch.slots[row], : batch.lengths[row]].tolist()
            found[tuple(text)] = tokens
        return draft

    engine.parts.drafter.propose = noted  # type: ignore[method-assign]
    prompts = [[5, 9, 2], list(range(1, 20)), [7, 7, 1, 3, 11, 20]]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert len(found) > 10
    for text, tokens in found.items():
        wanted, logits = theirs_drafts(target, theirs, list(text), 3)
        best = logits.topk(2, dim=-1).values
        sure = bool((best[:, 0] - best[:, 1] > 1e-4).all())
        assert not sure or tokens == wanted[: len(tokens)]


@in_pairs(kernels=[False, True], width=[1, 3], drafter=["feature", "hybrid"])
def test_answers_are_plain_decodings(drafter: str, width: int, kernels: bool, tmp_path: Path) -> None:
    if kernels and native.select() is None:
        pytest.skip(f"no native kernels: {native.why_none()}")
    save_assistant(tmp_path, **GROUPS)
    quantization = "int8" if kernels else None
    llm = LLM(
        tiny_gemma4(), draft_model=tmp_path, drafter=drafter, num_speculative_tokens=3, speculation_width=width,
        tokenizer=None, max_batch_size=3, max_model_len=64, prefill_chunk=7, dtype="float32", quantization=quantization,
    )  # fmt: skip
    assert "assistant" in llm.engine.describe()
    (decoder,) = (each for each in llm.engine.parts.drafter.decoders if isinstance(each, AssistantDecoder))
    assert (decoder.model.native_layers is not None) == kernels
    prompts = [[5, 9, 2], list(range(1, 20)), [7], [4] * 9, list(range(20, 1, -1)), [1, 2]]
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=16, ignore_eos=True)
        for seed, t in enumerate((0, 0.8, 0, 1, 0, 0.7))
    ]
    spoken = llm.generate(prompts, params, use_tqdm=False)
    plain = llm.plain().generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in spoken] == [one.outputs[0].token_ids for one in plain]
    assert sum(one.outputs[0].metrics.drafted for one in spoken) > 30


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize(("quantization", "bound"), [(None, 0.01), ("int8", 0.04), ("int4", 0.3)])
def test_layers_on_the_kernels_are_those_in_torch(quantization: Quantization | None, bound: float) -> None:
    """For several tokens of a row at one position, in rows beyond the window and rows of two tokens."""
    target, slow = tiny_native_gemma4(quantization="int8"), tiny_assistant(tiny_gemma4_torch())
    cache, counts = cache_of(target, 4, 64), {0: 5, 1: 30, 3: 2}
    rows, positions = ragged(counts)
    target.forward(Nodes((7 * positions + rows) % VOCAB, rows, positions), cache)
    spec, whole = slow.decoder.spec, describe({"model_type": "gemma4_text", **gemma4_fields()})
    assert whole is not None
    places = cache_places(spec, whole)
    tensors = assistant_tensors(spec, torch.float32, torch.Generator().manual_seed(0))  # those of ``slow``
    layers = NativeLayers(spec, tensors, places, target, quantization)
    x = torch.randn(3, 2, spec.width, generator=torch.Generator().manual_seed(0))
    slots, lengths = Slots.listed(list(counts), torch.device("cpu")), torch.tensor(list(counts.values()))
    last = lengths[:, None].expand(-1, 2)  # behind the last key
    backend = ReferenceAttention()
    plan = backend.plan(last - 1, 31)
    plan.cache_rows = slots

    class Keys:
        def again(self, layer: int, q: Tensor, terms: AttentionTerms) -> Tensor:
            keys, values = cache.layer(layer)
            return backend.attend(q, keys.float(), values.float(), plan, terms)

    exact = slow.decoder.run(x.flatten(0, 1), last, Keys())  # type: ignore[arg-type]
    described, index = structs.cache(cache), slots.index[:, None].expand(-1, 2).flatten()
    found = layers.run(x.flatten(0, 1), index, (last - 1).flatten(), described).view_as(exact)
    assert (found - exact).norm() / exact.norm() < bound
    alone = [layers.run(x[row, at, None], slots.index[row, None], last[row, at, None] - 1, described)
             for row in range(3) for at in range(2)]  # fmt: skip
    assert torch.equal(torch.cat(alone), found.flatten(0, 1)), "bits of a token alone"
    moved = layers.run(x.flatten(0, 1), index, (last - 2).clamp(min=0).flatten(), described).view_as(exact)
    assert (moved - exact).norm() / exact.norm() > 2 * bound, "positions matter too little to be seen"


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    target = tiny_gemma4()
    ours = load_model(target, dtype=torch.float32)
    for number, (made, error, match) in enumerate(
        [
            ({"width": 48}, ModelFormatError, "hidden states of width 48"),
            ({"text": {"global_head_dim": 64}}, ModelFormatError, "keys that the target"),
            ({"text": {"vocab_size": 12}}, VocabularyMismatchError, "made for 12 tokens"),
        ]
    ):
        path = tmp_path / str(number)
        save_assistant(path, **made)
        assert find_head(path) == path
        with pytest.raises(error, match=match):
            load_head_for(ours, target, path, dtype=torch.float32)
    save_assistant(tmp_path / "right")
    with pytest.raises(ParameterError, match="draft_dtype"):
        load_head_for(ours, target, tmp_path / "right", dtype=torch.bfloat16)
    with pytest.raises(ParameterError, match="draft_quantization"):
        load_head_for(ours, target, tmp_path / "right", dtype=torch.float32, quantization="int8")
