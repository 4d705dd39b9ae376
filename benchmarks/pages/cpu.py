"""Tables of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.runs import RESULTS, Text, listed, load, percent, side

_COLUMNS = [(shape, to) for shape in ("qwen2.5-1.5b", "smollm2-135m") for to in ("int8", "int4", "bf16")]
_BEST = {"epyc-zen4": "avx512-vnni-bf16", "xeon-amx": "amx", "epyc-zen3": "avx2"}
_SETS = "avx512-vnni-bf16", "avx512-vnni", "avx-vnni", "avx512-bw", "avx2"


def step(machine: str, kernels: str, rows: int, tokens: int, shape: str, precision: str) -> dict[str, Any]:
    """One measured step."""
    kind = {1: "decode", 4: "verify 3"}[tokens]
    wanted = {"shape": shape, "format": precision, "step": kind, "rows": rows, "kernels": kernels}
    (found,) = [each for each in load(f"sets-{machine}")["results"] if wanted.items() <= each.items()]
    return dict(found)


def steps(machine: str) -> Iterator[list[str]]:
    """Milliseconds of a step, and its share of the machine's limit, with the best instruction set."""
    for rows, tokens in ((1, 1), (4, 1), (8, 1), (16, 1), (1, 4), (8, 4), (16, 4)):
        cells = []
        for column in _COLUMNS:
            run = step(machine, _BEST[machine], rows, tokens, *column)
            limit = "memory" if run["memory_floor_ms"] > run["compute_floor_ms"] else "arithmetic"
            cells.append(f"{run['ms']:.1f} ms, {percent(run['of_floor'])} {limit}")
        yield [f"{rows} x {tokens}", *cells]


def sets(machine: str) -> Iterator[list[str]]:
    """Steps with the other instruction sets: time over the best set's, and share of the limit."""
    measured = {each["kernels"] for each in load(f"sets-{machine}")["results"]} - {_BEST[machine]}
    for name in [each for each in _SETS if each in measured]:
        for rows, tokens in ((1, 1), (8, 1), (8, 4)):
            runs = [step(machine, name, rows, tokens, *column) for column in _COLUMNS]
            cells = [f"{run['over_best']:.2f}, {percent(run['of_floor'])}" for run in runs]
            yield [f"`{name}`", f"{rows} x {tokens}", *cells]


def other_models() -> Text:
    """The table that ``python -m benchmarks.kernels --table`` prints."""
    from benchmarks import kernels

    return kernels.table([load(name) for name in ("kernels-hybrids-xeon-amx", "kernels-models-xeon-amx")]).splitlines()


def auto_by_set(machine: str) -> Iterator[list[str]]:
    """Speed of ``auto`` over plain decoding by instruction set."""
    for name in ("amx", *_SETS):
        for prompts in ("stubs", "open"):
            run = f"offline-smollm2-ngram-{prompts}-{name}-{machine}"
            if (RESULTS / f"{run}.json").exists():
                yield [f"`{name}`", prompts, *_speed_ups(run)]


def _speed_ups(run: str) -> list[str]:
    return [f"{each['speed_up']:.2f}" for each in load(run)["results"] if each["side"] == "speculation"]


def larger_model_on_avx2() -> Text:
    """``auto`` of the larger model on AVX2."""
    runs = [f"offline-qwen-ngram-stubs-avx2-{machine}" for machine in ("xeon-amx", "epyc-zen4")]
    (four, eight), (before,) = (_speed_ups(run) for run in runs)
    links = [f"([JSON](../benchmarks/results/{run}.json))." for run in runs]
    return [
        f"With Qwen2.5-Coder-1.5B on `avx2`, stubs, 64 tokens each, it is {four} at 4 rows and {eight} at 8",
        f"on the Xeon {links[0]}",
        f"Before that rule it was {before} at 8 rows on Zen 4",
        links[1],
    ]


def precisions() -> Iterator[list[str]]:
    """Perplexity, its change and the agreement of top tokens by precision."""
    for label, name in (("SmolLM2-135M", "smollm2"), ("Qwen2.5-Coder-1.5B", "qwen")):
        whole, *rounded = load(f"quality-{name}-epyc-zen4")["results"]
        cells = [
            f"{100 * each['perplexity_change']:+.2f} %, {percent(each['top_token_agreement'], 1)}" for each in rounded
        ]
        yield [label, f"{whole['perplexity']:.2f}", *cells]


def shares_of_limit(precision: str) -> str:
    """Shares of a Zen 4's limit in percent, for a decode step of 1, 4, 8 rows."""
    runs = [step("epyc-zen4", _BEST["epyc-zen4"], rows, 1, "qwen2.5-1.5b", precision) for rows in (1, 4, 8)]
    return listed([100 * run["of_floor"] for run in runs], ".0f") + " %"


def mamba2() -> Iterator[list[str]]:
    """Milliseconds of a decoding step of Granite 4 H Micro's shape, in torch and on the kernels."""
    runs = [f"granite-4-h-micro-{how}-epyc-zen4" for how in ("before", "bf16", "int8")]
    for rows in (1, 4, 8):
        yield [str(rows), *(f"{side(run, 'plain', rows)['ms_per_token']:.0f}" for run in runs)]
