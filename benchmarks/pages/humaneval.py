"""Tables of HumanEval within a time budget."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.runs import Rows, Text, load

_PAIR, _NGRAM = "humaneval-qwen-epyc-zen5", "humaneval-qwen-ngram-epyc-zen5"
_ZEN4 = "humaneval-qwen-n8-epyc-zen4"
_OTHERS = {
    "Zen 4": _ZEN4,
    "Cascade Lake": "humaneval-qwen-n8-cascade-lake",
    "Zen 3": "humaneval-qwen-n8-epyc-zen3",
}
_BUDGETS = 2, 3, 5, 8, 12, 16, 24


def answers() -> Iterator[list[str]]:
    """Pass@First within each budget, Pass@All without one, seconds to all answers: a Zen 5."""
    sides = [(each["mode"].replace("auto", "`auto`"), each) for each in load(_PAIR)["results"]]
    sides.append(("`auto`, n-gram alone", load(_NGRAM)["results"][1]))
    for mode, each in sides:
        first = [f"{100 * at['first']['mean']:.0f}" for at in each["at"]]
        every = f"{100 * each['at'][-1]['all']['mean']:.0f}"
        yield [str(each["n"]), mode, *first, every, f"{each['seconds_to_all']:.1f}"]


def other_processors() -> Iterator[list[str]]:
    """The same for eight answers on other processors."""
    for machine, run in _OTHERS.items():
        for each in load(run)["results"]:
            first = {at["budget"]: f"{100 * at['first']['mean']:.0f}" for at in each["at"]}
            cells = [first.get(budget, "-") for budget in (*_BUDGETS, None)]
            mode = each["mode"].replace("auto", "`auto`")
            yield [machine, mode, str(each["problems"]), *cells, f"{each['seconds_to_all']:.1f}"]


def half_way() -> Rows:
    """Plain decoding and ``auto`` at the budget at which plain decoding has half of its unlimited Pass@First."""
    runs = {"Zen 5": _PAIR, "Zen 5, n-gram alone": _NGRAM} | _OTHERS
    return [
        [
            machine,
            str(half["n"]),
            f"{half['budget']:.1f} s",
            f"{100 * half['plain']:.0f} %",
            f"{100 * half['speculation']:.0f} %",
            f"{100 * half['gain']['mean']:+.0f} ± {100 * half['gain']['error']:.0f}",
        ]
        for machine, run in runs.items()
        for half in load(run)["half_way"]
    ]


def ranking() -> Text:
    """What the ranking of eight answers is worth."""
    (ranked,) = [each["ranking"] for each in load(_PAIR)["results"] if (each["n"], each["mode"]) == (8, "plain")]
    points = f"{100 * ranked['mean']:.1f} points (standard error {100 * ranked['error']:.1f})"
    return [f"The top-ranked of eight answers passes more often than one taken at random, by {points}."]


def in_a_budget() -> list[str]:
    """Shares at half way, plain to ``auto``: n = 1, 4, 8 on a Zen 5, n = 8 on a Zen 4."""
    halves = [*load(_PAIR)["half_way"], *load(_ZEN4)["half_way"]]
    return [f"{100 * half['plain']:.0f} to {100 * half['speculation']:.0f} % at n = {half['n']}" for half in halves]


def in_two_seconds() -> Text:
    """Sentences of the README."""

    def share(run: str, n: int, mode: str) -> str:
        (first,) = [e["at"][0] for e in load(run)["results"] if (e["n"], e["mode"]) == (n, mode)]
        if first["budget"] != 2:
            raise ValueError(f"{run} has no budget of two seconds")
        return f"{100 * first['first']['mean']:.0f}"

    (eight, slow, one) = (
        [share(run, n, mode) for mode in ("auto", "plain")] for run, n in ((_PAIR, 8), (_ZEN4, 8), (_PAIR, 1))
    )
    return [
        "With eight answers to each problem of HumanEval,",
        f"`auto` solves {eight[0]} % within two seconds on a Zen 5 and plain decoding {eight[1]} %;",
        f"on a Zen 4, which does less arithmetic in the same time, {slow[0]} and {slow[1]} %.",
        f"With one answer it is {one[0]} and {one[1]} % on the Zen 5.",
    ]
