"""Features of tapped layers equal transformers' hidden states, and tapping does not change the results."""

from __future__ import annotations

import pytest
import torch

import real_models
from model_support import FOREIGN, NATIVE, Runner, packed, random_tokens, tiny
from paceline.config import QuantizationName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.models.load.loading import load_model
from paceline.models.torch.huggingface import HuggingFaceModel

TAPS = (2, 0, 1)


@pytest.mark.parametrize("name", [*NATIVE, *FOREIGN])
@torch.no_grad()
def test_features_are_transformers_hidden_states(name: str) -> None:
    theirs = tiny(*(NATIVE | FOREIGN)[name])
    ours = load_model(theirs, dtype=torch.float32)
    tokens, positions = random_tokens(2, 12), torch.arange(12).expand(2, -1)
    tapped, plain = (Runner(ours, 2).hidden_states(tokens, positions, taps=taps) for taps in (TAPS, ()))
    states = theirs(tokens, output_hidden_states=True).hidden_states
    assert tapped.features is not None
    assert (tapped.features - torch.stack([states[tap] for tap in TAPS], 2)).abs().max() < 1e-4
    assert plain.features is None
    assert torch.equal(tapped.hidden, plain.hidden)


@torch.no_grad()
def test_bfloat16_gives_features_in_bfloat16() -> None:
    ours = load_model(tiny(*NATIVE["llama"], dtype=torch.bfloat16), dtype=torch.bfloat16)
    features = Runner(ours, 1).hidden_states(random_tokens(1, 5), torch.arange(5)[None], taps=(1,)).features
    assert features is not None
    assert (features.dtype, features.shape) == (torch.bfloat16, (1, 5, 1, 24))


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_only_layers_can_be_tapped(name: str) -> None:
    ours = load_model(tiny(*(NATIVE | FOREIGN)[name]), dtype=torch.float32)
    with pytest.raises(ParameterError, match="taps"):
        Runner(ours, 1).hidden_states(random_tokens(1, 5), torch.arange(5)[None], taps=(ours.layers + 1,))


def test_a_model_that_returns_no_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_model(tiny(*FOREIGN["gpt_neox"]), dtype=torch.float32)
    assert isinstance(ours, HuggingFaceModel)
    call = ours._decoder.forward
    monkeypatch.setattr(ours._decoder, "forward", lambda output_hidden_states=False, **rest: call(**rest))
    with pytest.raises(ModelFormatError, match="hidden states of 3 layers"):
        Runner(ours, 1).hidden_states(random_tokens(1, 5), torch.arange(5)[None], taps=(1,))


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "bound"), [(None, 0.03), ("int8", 0.08), ("int4", 0.3)])
@torch.no_grad()
def test_features_of_the_kernels_are_close_to_those_of_transformers(
    quantization: QuantizationName | None, bound: float
) -> None:
    path = real_models.find("smollm2-135m")
    theirs = real_models.load_in_transformers(path)
    ours = packed(theirs, quantization)
    tokens = torch.arange(1000, 1040)
    taps = (2, ours.layers // 2, ours.layers - 3)  # EAGLE-3's
    nodes = Nodes(tokens, torch.zeros_like(tokens), torch.arange(40))
    caches = (KVCache(ours.kv_layers, 1, 40, ours.dtype) for _ in range(2))
    tapped, plain = (ours.forward(nodes, cache, which) for cache, which in zip(caches, (taps, ()), strict=True))
    assert torch.equal(tapped.hidden, plain.hidden)
    assert tapped.features is not None
    states = theirs(tokens[None], output_hidden_states=True).hidden_states
    for place, tap in enumerate(taps):
        found, wanted = tapped.features[:, place], states[tap][0]
        assert float((found - wanted).norm() / wanted.norm()) < bound
