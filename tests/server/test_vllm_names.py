"""/metrics under vLLM's names: everything that its dashboards and autoscalers need, with paceline's values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.config import ServerConfig
from polling import wait_until
from server_support import Live, start

pytestmark = pytest.mark.usefixtures("one_thread")

Labels: TypeAlias = frozenset[tuple[str, str]]
Samples: TypeAlias = dict[tuple[str, Labels], float]
LABELS = {"model_name": "tiny", "engine": "0"}
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds",
)  # fmt: skip
COUNTERS = (
    "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def vllm(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny", metrics_names="vllm"), tiny)


def samples(live: Live) -> Samples:
    """Values by name and labels."""
    families = text_string_to_metric_families(live.get("/metrics").text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }


def values(found: Samples, name: str, labels: Labels) -> list[float]:
    """A metric's value under vLLM's name and under ours."""
    return [found[f"vllm:{name}", labels], found[f"paceline:{name}", frozenset()]]


def test_vllm_names_have_the_same_values(vllm: Live) -> None:
    body = {"prompt": "abcabcabcabc", "max_tokens": 100, "n": 2, "temperature": 0, "ignore_eos": True}
    assert vllm.post("/v1/completions", body).status_code == 200
    vllm.wait_until_idle()
    labels = frozenset(LABELS.items())
    # the engine's last update of its gauges may come in the middle of a scrape
    wait_until(lambda: all(len(set(values(samples(vllm), name, labels))) == 1 for name in GAUGES))
    found = samples(vllm)
    for name in (*COUNTERS, *GAUGES):
        assert len(set(values(found, name, labels))) == 1, name
    assert found["vllm:generation_tokens_total", labels] == 200
    assert found["vllm:spec_decode_num_draft_tokens_total", labels] > 0
    for name in HISTOGRAMS:
        assert found[f"vllm:{name}_count", labels] > 0, name
        assert found[f"vllm:{name}_bucket", labels | {("le", "+Inf")}] == found[f"vllm:{name}_count", labels]
    first = found["paceline:spec_decode_num_accepted_tokens_per_pos_total", frozenset({("position", "0")})]
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", labels | {("position", "0")}] == first > 0
    assert found["vllm:request_success_total", labels | {("finished_reason", "length")}] == 2
    assert found["vllm:request_time_per_output_token_seconds_count", labels] == 1, "only the mean, once per request"


def test_vllm_names_are_opt_in(live: Live) -> None:
    assert "vllm:" not in live.get("/metrics").text
    assert "paceline:" in live.get("/metrics").text
