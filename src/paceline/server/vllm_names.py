"""The metrics under vLLM's names and labels, for dashboards and autoscalers made for vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_OURS, _VLLM = "paceline:", "vllm:"
_ONE_ENGINE = "0"  # vLLM's number of the engine
_ALIKE = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions", "prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_time_per_output_token_seconds", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
)  # fmt: skip
_NAMES = {f"{_OURS}{name}": [f"{_VLLM}{name}"] for name in _ALIKE}
_NAMES[f"{_OURS}inter_token_latency_seconds"] += [f"{_VLLM}time_per_output_token_seconds"]  # vLLM's former name
_SEQUENCE = "sequence"  # our label; vLLM has one value per request, the mean over its sequences
_MEAN = "all"


class VllmNames(Collector):
    """Collector that renames the metrics of another registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._labels = registry, {"model_name": model_name, "engine": _ONE_ENGINE}

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            for name in _NAMES.get(family.name, ()):
                yield self._renamed(family, name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        made = Metric(name, family.documentation, family.type)
        made.samples = [
            self._relabelled(sample, sample.name.replace(family.name, name, 1))
            for sample in family.samples
            if sample.labels.get(_SEQUENCE, _MEAN) == _MEAN
        ]
        return made

    def _relabelled(self, sample: Sample, name: str) -> Sample:
        labels = {key: value for key, value in sample.labels.items() if key != _SEQUENCE}
        return sample._replace(name=name, labels={**self._labels, **labels})


def exposition(registry: CollectorRegistry, model_name: str) -> bytes:
    """All renamed metrics in Prometheus' text format."""
    renamed = CollectorRegistry()
    renamed.register(VllmNames(registry, model_name))
    return generate_latest(renamed)
