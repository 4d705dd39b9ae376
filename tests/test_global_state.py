"""Engines of every kind leave the process's global state alone: random generators, threads, dtype, locale.

A caller's ``torch.manual_seed`` before the first call must give the same numbers as with no engine at all.
"""

from __future__ import annotations

import locale
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gemma4_support import tiny_assistant, tiny_native_gemma4
from head_support import published, published_chimera, published_transfer, tiny_native_head
from model_support import NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.config import ServerConfig
from paceline.engine.engine import Engine
from paceline.kernels import native
from paceline.transformers import generate
from server_support import save_model, start
from toy import ToyModel, make_engine, run, tiny_llama_of_transformers, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=10)
OFFLINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "attention": "padded"}


def global_state() -> dict[str, object]:
    return {
        "torch's draws": torch.get_rng_state().tolist(),
        "numpy's draws": repr(np.random.get_state()),
        "Python's draws": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "locale": locale.setlocale(locale.LC_ALL),
    }


@contextmanager
def unchanged() -> Iterator[None]:
    """The block changes no global state."""
    before = global_state()
    yield
    after = global_state()
    assert [name for name in before if before[name] != after[name]] == []


def needs_kernels() -> None:
    if not native.available():
        pytest.skip(f"no kernels here: {native.why_none()}")


@pytest.mark.parametrize(
    ("attention", "drafter"), [("padded", None), ("padded", "hybrid"), ("native", "ngram"), ("native", "hybrid")]
)
def test_an_engine_changes_no_global_state(attention: str, drafter: str | None) -> None:
    if attention == "native":
        needs_kernels()
    model = tiny(*NATIVE["llama"][:1], NATIVE["llama"][1] | {"head_dim": 16})
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "attention": attention, "drafter": drafter}
    draft = model if drafter in ("model", "hybrid") else None
    with unchanged():
        llm = LLM(model, draft, max_batch_size=2, threads=2, **options)
        llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY], use_tqdm=False)


HEADS: dict[str, Callable[[Path], Path]] = {
    "feature": published,
    "parallel": partial(published, parallel=True),
    "hidden transfer": published_transfer,
    "chimera": published_chimera,
}


@pytest.mark.parametrize(("kind", "drafter"), zip(HEADS, ("feature", "hybrid", "feature", "feature"), strict=True))
def test_an_engine_with_a_head_changes_no_global_state(tmp_path: Path, kind: str, drafter: str) -> None:
    head, target = HEADS[kind](tmp_path), tiny_llama_of_transformers()
    with unchanged():
        llm = LLM(target, head, drafter=drafter, num_speculative_tokens="auto", threads=1, **OFFLINE)
        llm.generate(PROMPTS, SAMPLED, use_tqdm=False)


def native_pair() -> tuple[Any, Any]:
    needs_kernels()
    return tiny_native(1), tiny_native(2)


def native_head() -> tuple[Any, Any]:
    needs_kernels()
    return tiny_native(1), tiny_native_head(tiny_native(1), 72)


def assistant() -> tuple[Any, Any]:
    needs_kernels()
    target = tiny_native_gemma4()
    return target, tiny_assistant(target)


def toys() -> tuple[Any, Any]:
    return ToyModel(), ToyModel(blur=0.3)


KINDS: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any]]] = {
    "kernels with a draft model": (native_pair, {"drafter": "model"}),
    "kernels with a head": (native_head, {"drafter": "feature"}),
    "an assistant": (assistant, {"drafter": "feature"}),
    "rounds on a device": (toys, {"drafter": "model", "rounds": "device", "attention": "padded"}),
    "the rejection rule": (toys, {"drafter": "hybrid", "acceptance": "rejection"}),
    "trees": (toys, {"drafter": "model", "speculation_width": 3}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_of_any_kind_changes_no_global_state(kind: str) -> None:
    models, options = KINDS[kind]
    target, draft = models()
    with unchanged():
        engine: Engine = make_engine(target, draft, **options | {"num_speculative_tokens": "auto"})
        run(engine, PROMPTS, [SAMPLED] * 3)


def test_a_server_changes_no_global_state(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny")
    with unchanged():
        for live in start(ServerConfig(port=0), model, num_speculative_tokens="auto"):
            assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize("drafted", [False, True])
def test_a_seeded_call_of_transformers_generate_is_the_same_with_and_without_a_new_engine(drafted: bool) -> None:
    """The first call loads, packs and calibrates; it may draw the seeds of its answers only."""
    model, prompt = tiny(*NATIVE["llama"]), torch.tensor([[5, 9, 5, 9]])
    more = {"assistant_model": tiny(*NATIVE["llama"], seed=1)} if drafted else {}
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        torch.manual_seed(1)
        answer = generate(model, prompt, do_sample=True, max_new_tokens=12, **more)
        assert isinstance(answer, Tensor)
        found.append((answer, torch.rand(3)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    with unchanged():
        generate(model, prompt, do_sample=False, max_new_tokens=12, **more)
