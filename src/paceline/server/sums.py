"""Statistics of several models or replicas as one document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

_OF_THE_FRONT = "paceline:request_errors"
_ADDED = ("running", "waiting", "capacity", "cache_bytes", "cache_limit_bytes", "tokens_per_second", "rounds")
_MEANT = ("cache_usage", "acceptance_rate", "mean_acceptance_length", "saved_by_sibling", "utilisation")


class _Families:
    """Metric families as a registry for ``generate_latest``."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def labelled(texts: Mapping[str, str], label: str, front: str = "") -> bytes:
    """Metrics of several sources by name, each value labelled with the name; from a front's own, only the refusals."""
    families: dict[str, Metric] = {}
    for name, text in [*texts.items(), ("front", front)]:
        for family in text_string_to_metric_families(text):
            if name != "front" or family.name == _OF_THE_FRONT:
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [each._replace(labels={**each.labels, label: name}) for each in family.samples]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)


def together(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``/stats`` of several sources: counts are added, fractions averaged over the sources that report them."""
    added = {name: sum(each[name] for each in stats) for name in _ADDED}
    meant = {name: _mean([each[name] for each in stats if each[name] is not None]) for name in _MEANT}
    longest = max((each["num_speculative_tokens"] for each in stats), default=0)
    return added | meant | {"cache_usage": meant["cache_usage"] or 0.0, "num_speculative_tokens": longest}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
