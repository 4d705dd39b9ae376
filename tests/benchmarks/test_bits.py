"""``benchmarks/bits.py``: the digests of instruction sets are compared, in int8 and int4."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.bits import Outcome, different_between_sets

RESULT = Path(__file__).parents[2] / "benchmarks/results/bits-sets-smollm2-epyc-zen4.json"
ONE = Outcome("avx2", "int8", "greedy", 2, 2, 8, None, 0.1, "a")


def test_sets_differ_where_their_digests_do() -> None:
    other = replace(ONE, kernels="avx512-bw")
    assert different_between_sets([ONE, other, replace(ONE, precision="int4", digest="b")]) == []
    assert different_between_sets([ONE, replace(other, digest="b")]) == ["int8, greedy"]


def test_bfloat16_may_differ_between_sets() -> None:
    assert different_between_sets([replace(ONE, precision="bfloat16", digest=digest) for digest in "ab"]) == []


def test_the_committed_run_has_equal_sequences_on_three_sets() -> None:
    outcomes = [Outcome(**outcome) for outcome in json.loads(RESULT.read_text())["outcomes"]]
    assert {outcome.kernels for outcome in outcomes} == {"avx2", "avx512-bw", "avx512-vnni"}
    assert all(outcome.equal == outcome.sequences == 64 for outcome in outcomes)
    assert different_between_sets(outcomes) == []
