"""Tables of models with random weights, whose acceptance is synthetic."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.runs import Text, load, side

_HYBRID = "acceptance-qwen3.5-0.8b-xeon-amx"
_BATCHES = 1, 4, 8


def hybrid() -> Iterator[list[str]]:
    """Tokens per second of a hybrid by draft tokens."""
    for k in range(4):
        yield [str(k), *(f"{side(_HYBRID, f'k={k}', batch)['tokens_per_second']:.0f}" for batch in _BATCHES)]


def hybrid_by_rows() -> Text:
    """How many times the tokens of one row eight rows carry."""
    plain = side(_HYBRID, "k=0", 8)["tokens_per_second"] / side(_HYBRID, "k=0", 1)["tokens_per_second"]
    more = load(_HYBRID)["more_rows_carry"]
    return [
        f"With three draft tokens on both sides 8 rows carry {more:.1f} times the tokens of one row;",
        f"plain rows carry {plain:.1f} times.",
    ]


def short_vocabulary() -> Text:
    """Milliseconds of a draft token with a short draft vocabulary."""
    whole, short, *_ = load("short-vocabulary-qwen3.5-0.8b-xeon-amx")["passes"]
    one, eight = ((short["ms"][rows], whole["ms"][rows]) for rows in (0, 2))
    return [
        f"Scoring {short['size']:,} tokens instead, a draft token takes {one[0]:.1f} ms in place of {one[1]:.1f}",
        f"at one row, {eight[0]:.1f} in place of {eight[1]:.1f} at eight.",
    ]


def recurrent_states() -> Iterator[list[str]]:
    """Resident megabytes of recurrent states by draft tokens."""
    run = {(each["rows"], each["draft_tokens"]): each for each in load("state-memory-qwen3.5-0.8b-xeon-amx")["results"]}
    for k in (0, 1, 3, 8):
        sides = [run[rows, k] for rows in _BATCHES]
        yield [str(k), *(f"{each['resident'] / 1e6:.1f}" for each in sides), f"{sides[-1]['over_first']:.2f}"]


def mixture() -> Iterator[list[str]]:
    """Tokens per second of a mixture of experts by draft tokens."""
    for k in ("0", "1", "2", "3", "4", "auto"):
        sides = [side("acceptance-qwen3-30b-a3b-xeon-amx", f"k={k}", batch) for batch in _BATCHES]
        speeds = [f"{each['tokens_per_second']:.0f}" for each in sides]
        yield ["`auto`" if k == "auto" else k, *speeds, f"{sides[-1]['speed_up']:.2f}"]
