"""Completions with a suffix: the same answers as offline from the prompt with the model's own markers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.config import SamplingParams, ServerConfig
from paceline.llm import LLM
from paceline.models.text.infill import FAMILIES
from server_support import Live, load, save_model, start

pytestmark = pytest.mark.usefixtures("one_thread")
GAP = ("def f(a):\n    return ", "\n\nprint(f(1))")
PARAMS: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> str:
    family = FAMILIES[0]
    return save_model(
        tmp_path_factory.mktemp("coder") / "coder", (family.prefix, family.suffix, family.middle, *family.ends)
    )


@pytest.fixture(scope="module")
def live(coder: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="coder"), coder)


@pytest.fixture(scope="module")
def offline(coder: str) -> LLM:
    return load(coder)


def test_a_gap_is_filled_as_offline(live: Live, offline: LLM) -> None:
    (output,) = offline.infill([GAP], SamplingParams(**PARAMS), use_tqdm=False)
    body = {"prompt": GAP[0], "suffix": GAP[1], **PARAMS}
    reply = live.post("/v1/completions", body).json()
    assert reply["choices"][0]["text"] == output.outputs[0].text
    assert reply["usage"]["prompt_tokens"] == len(output.prompt_token_ids) == sum(map(len, GAP)) + 3
    plain = live.post("/v1/completions", {**body, "num_speculative_tokens": 0}).json()
    assert plain["choices"][0]["text"] == output.outputs[0].text


def test_a_gap_ends_at_the_models_markers(live: Live) -> None:
    markers = live.context.texts.infill
    body = {"prompt": GAP[0], "suffix": GAP[1], "logit_bias": {str(markers.ends[0]): 100.0}, "max_tokens": 5}
    (choice,) = live.post("/v1/completions", body).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", markers.ends[0])


def test_several_gaps_have_one_suffix_and_no_echo(live: Live) -> None:
    body = {"prompt": ["a", "cc"], "suffix": "b", "max_tokens": 1}
    assert live.post("/v1/completions", body).json()["usage"]["prompt_tokens"] == 1 + 2 + 2 + 2 * 3
    refused = live.post("/v1/completions", {**body, "echo": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "suffix"
    assert live.post("/v1/completions", {**body, "suffix": "x" * 600}).status_code == 400
