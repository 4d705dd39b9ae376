"""The parts of a round's time: all are present and add up; on a tiny model their sizes are arbitrary."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.rounds import ATTENTION, HEAD, PRODUCTS, Clock, Profile, profile, table

from kernels.tools import random_spec
from paceline.config import EngineConfig, SamplingParams
from paceline.engine.engine import Engine, Models
from paceline.engine.requests import RequestMaker
from paceline.engine.sharing import SharedEngine
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.llm import LLM
from paceline.models.native.model import NativeModel
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(not native.available(), reason="the kernels' own clocks need the extension")
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Repeating:
    """A tokenizer that gives every text the same tokens, so that n-gram lookup finds drafts."""

    def encode(self, text: str) -> list[int]:
        return [1, 2, 3, 4] * 3


def tiny_llm() -> LLM:
    llm: Any = LLM.__new__(LLM)
    llm._recommended, llm._pooling = {}, None
    llm.tokenizer = Repeating()
    llm._models = Models(NativeModel(random_spec(), "tiny", quantization="int8", threads=1), None)
    llm.requests = RequestMaker(llm.tokenizer, llm._models.target.vocab_size, ())
    llm._shared = SharedEngine(Engine(llm._models, EngineConfig(max_model_len=64, device="cpu", quantization="int8")))
    return llm  # type: ignore[no-any-return]


def test_a_clock_counts_nested_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr("benchmarks.rounds.time.perf_counter", lambda: next(times))
    clock = Clock()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.seconds == {"outer": 8.0, "inner": 2.0}


@needs_kernels
@pytest.mark.parametrize("k", [0, 2])
def test_every_part_of_a_round_is_timed_and_they_add_up(k: int) -> None:
    found = profile(tiny_llm(), 3, k, PARAMS)
    assert {PRODUCTS, ATTENTION, HEAD, "accept", "commit", "process outputs", "decoder"} <= set(found.parts_ms)
    assert all(ms >= 0 for ms in found.parts_ms.values())
    assert found.round_ms == pytest.approx(sum(found.parts_ms.values()), abs=0.01)
    assert 0 < found.outside < 1
    assert found.tokens_a_round == 3 if k == 0 else found.tokens_a_round >= 3
    assert found.rounds > 0
    assert found.as_json()["precision"] == "int8"


def test_time_outside_of_products_and_attention() -> None:
    parts = {PRODUCTS: 5.0, HEAD: 2.0, ATTENTION: 1.0, "accept": 2.0}
    one = Profile("m", "k", "int8", 8, 0, 0.0, 9, 8.0, 10.0, parts)
    assert one.outside == pytest.approx(0.2)
    assert "20.0%  accept" in table(one)
    assert "outside of matrix products and attention: 20.0%" in table(one)


def test_a_model_without_the_kernels_clocks_is_refused() -> None:
    with pytest.raises(ParameterError, match="CPU kernels"):
        profile(toy_llm(), 2, 0, PARAMS)
