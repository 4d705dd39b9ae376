"""Tables of long contexts and many conversations."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.pages.runs import load, percent

_READ = "long-prompts-read-epyc-zen4", "long-prompts-read-64k-epyc-zen4"


def caches() -> Iterator[list[str]]:
    """Ratios of attention and of whole steps, by rows and tokens of context."""
    for cell in load("kv-cache-epyc-zen4")["cells"]:
        pages, int8 = cell["pages_over_rows"], cell["int8_over_pages"]
        yield [
            str(cell["rows"]),
            f"{cell['positions']:,}",
            *(f"{number:.2f}" for number in (pages[1], pages[0], int8[1], int8[0])),
        ]


def reading() -> Iterator[list[str]]:
    """Reading of prompts over its floor, and attention's share."""
    for run in map(load, _READ):
        for prompt in run["prompts"]:
            repeats = sorted(prompt["seconds"], key=lambda each: each["all"])
            middle = repeats[len(repeats) // 2]
            attention = middle["attention"]
            whole = middle["all"] * 23 / (run["layers"] - 1)  # the last layer only stores keys and values
            yield [
                f"{prompt['tokens']:,}",
                f"{prompt['tokens'] / whole:.0f}",
                percent(attention / middle["all"]),
                f"{middle['all'] / prompt['floor']:.2f}",
                f"{attention / prompt['attention_floor']:.2f}",
            ]


def first_tokens() -> Iterator[list[str]]:
    """Seconds to the first token by the part of the prompt that was read before."""
    for prompt in load("long-prompts-reuse-qwen-0.5b-epyc-zen4")["prompts"]:
        seconds = prompt["first_token_seconds"].values()
        yield [f"{prompt['tokens']:,}", *(f"{median(each):.2f}" for each in seconds)]


def decoding() -> Iterator[list[str]]:
    """Tokens per second after a long prompt, by the caches' dtype."""
    names = {"auto": "bfloat16", "int8": "int8", "f16": "llama.cpp, f16", "q8_0": "llama.cpp, q8_0"}
    for run in map(load, ("long-decoding-qwen-0.5b-2k-epyc-zen4", "long-decoding-qwen-0.5b-16k-epyc-zen4")):
        for side, repeats in run["sides"].items():
            seconds = median(each["decoding_s"] for each in repeats)
            first = median(each["prefill_s"] for each in repeats)
            speed = run["rows"] * (run["tokens"] - 1) / seconds
            yield [f"{run['positions']:,}", names[side], f"{speed:.1f}", f"{first:.1f}"]


def conversations() -> Iterator[list[str]]:
    """Tokens read again, first tokens and memory of many conversations on four rows."""
    for name, side in load("conversations-smollm2-epyc-zen4")["sides"].items():
        found = side["summary"]
        after = found.get("first_token_after_restart_ms_median")
        yield [
            name,
            f"{found['tokens_read']:,}",
            f"{found['prompt_tokens']:,}",
            f"{found['first_token_ms_median']:.0f}",
            f"{found['first_token_ms_p95']:.0f}",
            "-" if after is None else f"{after:.0f}",
            f"{found['peak_gib']:.2f}",
        ]
