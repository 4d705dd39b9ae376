"""LFM2 and Granite 4 without experts: states of other kinds; what the CPU kernels lack is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from model_support import packed, packed_at_once
from paceline import LLM
from paceline.config import EngineConfig
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import WINDOW, StatefulCache
from paceline.engine.memory import state_bytes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import native
from paceline.models.base import cache_of
from paceline.models.load.loading import load_model
from paceline.models.load.prepare import ModelOptions, load
from paceline.models.native.model import NativeModel
from paceline.models.torch.transformer import Transformer
from paceline.models.torch.whole_texts import WholeTextModel
from recurrent_support import (
    GRANITE_SIZES,
    LFM2_SIZES,
    on_kernels,
    reference_of,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_nemotron,
)
from toy import VOCAB

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any]]] = {
    **{f"lfm2 {name}": (tiny_lfm2, sizes) for name, sizes in LFM2_SIZES.items()},
    **{f"granite {name}": (tiny_granite_hybrid, sizes) for name, sizes in GRANITE_SIZES.items()},
    "nemotron": (tiny_nemotron, {}),
    "nemotron with latent experts": (tiny_nemotron, {"moe_latent_size": 40}),
    "falcon": (tiny_falcon_h1, {}),
    "falcon normed": (tiny_falcon_h1, {"mamba_rms_norm": True, "mamba_conv_bias": False, "num_key_value_heads": 4}),
}
TOKENS = [(7 * place + 1) % VOCAB for place in range(70)]


def chain(tokens: list[int], start: int = 0) -> Nodes:
    places = torch.arange(start, start + len(tokens))
    return Nodes(torch.tensor(tokens), torch.zeros_like(places), places)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loaded", ["in memory", "from files"])
def test_logits_equal_those_of_transformers(name: str, loaded: str, tmp_path: Path) -> None:
    make, sizes = MODELS[name]
    theirs = make(1, **sizes)
    theirs.save_pretrained(tmp_path)
    model = reference_of(tmp_path if loaded == "from files" else theirs)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([TOKENS])).logits[0]
        found = model.logits(model.forward(chain(TOKENS), cache_of(model, 1, 80)).hidden)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_state_goes_on_after_rejected_draft_tokens_and_from_where_it_was_saved(name: str) -> None:
    make, sizes = MODELS[name]
    model = reference_of(make(**sizes))
    cache, fresh = cache_of(model, 2, 96), cache_of(model, 1, 96)
    assert isinstance(cache, StatefulCache)
    model.fill(chain(TOKENS[:30]), cache)
    cache.states.save(0)
    model.forward(chain([TOKENS[30], 5, 5, 5], 30), cache)
    found = model.forward(chain(TOKENS[31:40], 31), cache).hidden
    wanted = model.forward(chain(TOKENS[:40]), fresh).hidden
    torch.testing.assert_close(found, wanted[31:], atol=1e-5, rtol=1e-5)
    cache.copy_row(0, 1, 30)
    nodes = chain(TOKENS[30:40], 30)._replace(rows=torch.ones(10, dtype=torch.int64))
    torch.testing.assert_close(model.forward(nodes, cache).hidden, wanted[30:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_plan_counts_what_slots_keep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, sizes = MODELS[name]
    model = reference_of(make(**sizes))
    cache = cache_of(model, 5, 16)
    assert isinstance(cache, StatefulCache)
    states = cache.states
    allocated = sum(each.nbytes for each in (states.state, states.tail, states.inputs)) // 5
    assert states.shape.slot_bytes() == allocated + states.shape.state_bytes, "a slot and one saved state"
    config = EngineConfig(drafter="ngram", num_speculative_tokens=4)
    shape = states.shape
    assert state_bytes(model, config, 4) == 4 * shape.slot_bytes(5) + shape.state_bytes
    monkeypatch.setattr(model, "device", torch.device("cuda"))  # which allocates what a CPU would not touch
    assert state_bytes(model, config, 4) == 4 * shape.slot_bytes(WINDOW) + shape.state_bytes
    assert states.inputs.shape[2] == WINDOW
    assert states.state[0, 0].numel() == math.prod(states.shape.state)


def test_what_the_cpu_kernels_cannot_run_is_refused_by_name_and_torch_runs_it(tmp_path: Path) -> None:
    narrow = tiny_granite_hybrid(heads=8, head_dim=24)
    narrow.save_pretrained(tmp_path)
    needed = "need recurrent layers of head widths that are multiples of 16"
    for request in ({"quantization": "int8"}, {"attention": "native"}):
        with pytest.raises(ParameterError, match=needed):
            LLM(narrow, device="cpu", **request)
    for load_packed in (packed, packed_at_once):
        with pytest.raises(ModelFormatError, match=needed):
            load_packed(narrow, "int8")
    assert not isinstance(load(tmp_path, ModelOptions(torch.bfloat16, torch.device("cpu"))), NativeModel)
    llm = LLM(narrow, dtype="bfloat16", device="cpu", max_batch_size=2, max_model_len=64)
    assert needed in llm.engine.describe()
    assert "(bfloat16 on cpu)" in llm.engine.describe()


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize("make", [tiny_lfm2, tiny_granite_hybrid])
def test_the_cpu_kernels_run_states_of_other_kinds_where_their_sizes_fit(make: Callable[..., PreTrainedModel]) -> None:
    llm = LLM(make(), dtype="bfloat16", device="cpu", max_batch_size=2, max_model_len=64)
    assert llm.engine.rounds.choice.kernels is not None, "the kernels run whole rounds"
    assert "in torch" not in llm.engine.describe()
    wrong = {"2 to 8 taps": {"taps": 9}} | (
        {"widths that are multiples of 16": {"width": 40}} if make is tiny_lfm2 else {}
    )
    for needed, sizes in wrong.items():
        with pytest.raises(ModelFormatError, match=f"need recurrent layers of {needed}"):
            on_kernels(make(**sizes))


def test_granite_4_with_attention_alone_runs_on_the_native_decoder() -> None:
    theirs = tiny_granite_hybrid(kinds="fff", positions="rope")
    model = load_model(theirs, dtype=torch.float32)
    assert isinstance(model, Transformer)


def test_mamba2_and_lfm2_with_biases_compute_whole_texts_by_the_kind_of_their_layers() -> None:
    granite = tiny_granite_hybrid()
    granite.config.mamba_proj_bias = True
    lfm2 = tiny_lfm2()
    lfm2.config.conv_bias = True
    for theirs, named in ((granite, "linear_attention"), (lfm2, "conv")):
        ours = load_model(theirs, dtype=torch.float32)
        assert isinstance(ours, WholeTextModel)
        assert f"of the kind {named}" in ours.whole_texts
