"""The dtype of keys and values: other engines' words, and what a backend cannot have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import EngineConfig
from paceline.config.familiar import translated
from paceline.config.ranges import names_of
from paceline.core.cache import KVHeads
from paceline.engine.cache_dtype import cache_dtype
from paceline.errors import ParameterError
from paceline.kernels import native
from toy import tiny_llama, tiny_native

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"needs the CPU kernels: {native.why_none()}")


@pytest.mark.parametrize(
    ("word", "own"), [("q8_0", "int8"), ("f16", "bf16"), ("bfloat16", "bf16"), ("fp8_e4m3", "fp8"), ("auto", "auto")]
)
def test_other_engines_words_are_translated(word: str, own: str) -> None:
    given: Any = translated({"cache_type_k": word}, names_of(EngineConfig))
    assert EngineConfig(**given).kv_cache_dtype == own
    with pytest.raises(ParameterError, match=r"'auto', 'bf16', 'int8', 'fp8'"):
        EngineConfig(kv_cache_dtype="q4_0")
    with pytest.raises(ParameterError, match="kv_cache_dtype alone, which is of keys and values"):
        EngineConfig(cache_type_v=word)  # type: ignore[call-arg]


def fake(**changed: Any) -> Any:
    sizes = {"name": "m", "dtype": torch.float32, "device": torch.device("cpu"), "kv_layers": [KVHeads(2, 8)]}
    return SimpleNamespace(**(sizes | {"vocab_size": 9, "layers": 1, "kv_heads": 2, "head_dim": 8} | changed))


def test_auto_is_the_models_own_and_others_are_as_asked() -> None:
    found = [cache_dtype(tiny_llama(), EngineConfig(kv_cache_dtype=name)) for name in ("auto", "bf16", "int8", "fp8")]
    assert found == [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        pytest.param(lambda: tiny_native(0), "fp8", "'int8' on the CPU kernels", marks=needs_kernels),
        (lambda: fake(dtype=torch.float16), "bf16", "'auto' with m in float16"),
    ],
)
def test_what_a_backend_cannot_have_is_refused_with_what_it_can(make: Any, name: str, said: str) -> None:
    with pytest.raises(ParameterError, match=f"^kv_cache_dtype='{name}'.*{said}"):
        cache_dtype(make(), EngineConfig(kv_cache_dtype=name))


def test_ranks_and_odd_widths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match=r"^kv_cache_dtype='int8'.*tensor_parallel=2"):
        EngineConfig(kv_cache_dtype="int8", tensor_parallel=2)
    monkeypatch.setattr("paceline.engine.cache_dtype.kv_layers_of", lambda model: model.kv_layers)
    with pytest.raises(ParameterError, match=r"multiple of 4 numbers, not of 10"):
        cache_dtype(fake(kv_layers=[KVHeads(2, 10)]), EngineConfig(kv_cache_dtype="int8"))
