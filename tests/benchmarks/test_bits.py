"""``benchmarks/bits.py``: the digests of instruction sets are compared, in int8 and int4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.bits import Outcome, different_between_sets

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
ONE = Outcome("avx2", "int8", "greedy", 2, 2, 8, None, 0.1, "a")


def test_sets_differ_where_their_digests_do() -> None:
    other = replace(ONE, kernels="avx512-bw")
    assert different_between_sets([ONE, other, replace(ONE, precision="int4", digest="b")]) == []
    assert different_between_sets([ONE, replace(other, digest="b")]) == ["int8, greedy"]


def test_the_committed_runs_have_equal_sequences_on_all_sets_of_three_machines() -> None:
    machines = ("epyc-zen4", "xeon-amx", "epyc-zen3")
    runs = [json.loads((RESULTS / f"bits-sets-smollm2-{cpu}.json").read_text()) for cpu in machines]
    outcomes = [Outcome(**outcome) for run in runs for outcome in run["outcomes"]]
    vnni = {"avx512-vnni", "avx512-vnni-bf16", "avx-vnni"}
    assert {outcome.kernels for outcome in outcomes} == {"amx", "avx2", "avx512-bw", *vnni}
    assert all(outcome.equal == outcome.sequences == 64 for outcome in outcomes)
    assert different_between_sets(outcomes) == []
