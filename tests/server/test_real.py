"""SmolLM2 under load: every request gets the answer that it gets alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.config import SamplingParams, ServerConfig
from paceline.llm import LLM
from real_models import find
from server_support import Live, load, start

REQUESTS, CLIENTS, TOKENS = 200, 16, 20
OPENINGS = ("The capital of", "def fibonacci(", "Once upon a time", "To bake bread,", "1 2 3 4", "Dear Sir or Madam,")
PROMPTS = [f"{OPENINGS[number % len(OPENINGS)]} {number}" for number in range(REQUESTS)]


@pytest.fixture(scope="module")
def model() -> str:
    find("smollm2-135m")
    return "smollm2-135m"


@pytest.fixture(scope="module")
def live(model: str) -> Iterator[Live]:
    config = ServerConfig(port=0, served_model_name="smollm", max_waiting=REQUESTS)
    yield from start(config, model, max_batch_size=CLIENTS, max_model_len=128)


@pytest.fixture(scope="module")
def alone(model: str) -> LLM:
    return load(model, max_batch_size=1, max_model_len=128).plain()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_under_load_equal_those_of_single_requests(live: Live, alone: LLM, temperature: float) -> None:
    """float32; at temperature 0.8 with the coupled acceptance rule and the request's seed."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i) for i in range(REQUESTS)]
    expected = [
        alone.generate(prompt, each, use_tqdm=False)[0].outputs[0].text
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]

    def ask(number: int) -> str:
        time.sleep(random.Random(number).expovariate(10))
        body = {"prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": temperature, "seed": number}
        return str(live.post("/v1/completions", body).json()["choices"][0]["text"])

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(ask, range(REQUESTS)))
    assert found == expected
