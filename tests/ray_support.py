"""Helpers for tests of ``paceline.ray``. Tests that need Ray are skipped if it is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from paceline.integrations.ray.data import Columns

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention": "native",  # results do not depend on the other rows of a batch
    "device": "cpu",
    "drafter": "ngram",
    "num_speculative_tokens": 4,
    "max_batch_size": 4,
    "threads": 1,
}
PARAMS: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True}


def as_columns(rows: Sequence[dict[str, Any]]) -> Columns:
    columns = {name: np.empty(len(rows), dtype=object) for name in rows[0]}
    for name, column in columns.items():
        column[:] = [row[name] for row in rows]
    return columns


@contextmanager
def local_ray() -> Iterator[None]:
    """Start a small Ray cluster on this machine, whose workers can import the tests' modules."""
    import ray

    path = os.pathsep.join(entry for entry in sys.path if entry)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "PACELINE_PACKED_CACHE": "off", "PACELINE_COST_CACHE": "off"}},
    )
    try:
        yield
    finally:
        ray.shutdown()
