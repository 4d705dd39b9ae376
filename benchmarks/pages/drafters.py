"""Tables of drafters, trees and trained heads."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.runs import listed, load

_COUNTED = {
    "Qwen's 0.5B draft model": "tree-gain-rounds-qwen",
    "SmolLM2's head": "tree-gain-rounds-smollm2-head",
    "n-gram lookup, SmolLM2": "tree-gain-rounds-smollm2-ngram",
}
_TIMED = {
    "n-gram and Qwen's 0.5B draft model": "trees-qwen",
    "SmolLM2's head, alone": "trees-smollm2-head",
    "n-gram, SmolLM2, alone": "trees-smollm2-ngram",
}
_BESIDE = "chain", "chain by survival", "EAGLE-2's shape"


def beside_plain(name: str) -> Iterator[list[str]]:
    """Mean acceptance length by task, and the speed of ``auto`` over plain decoding by rows."""
    run = load(f"drafters-{name}-epyc-zen5")
    for drafter, temperature in dict.fromkeys((each["drafter"], each["temperature"]) for each in run["acceptance"]):
        here = {"drafter": drafter, "temperature": temperature}
        lengths = [f"{e['mean_acceptance_length']:.2f}" for e in run["acceptance"] if here.items() <= e.items()]
        timed = {e["batch_size"]: f"{e['speed_up']:.2f}" for e in run["speeds"] if here.items() <= e.items()}
        rows = [timed.get(batch, "-") for batch in run["plan"]["batch_sizes"]]
        yield [drafter, f"{temperature:g}", *lengths, *rows]


def fewer_rounds(drafter: str, temperature: float, beside: str, draft_tokens: str) -> str:
    """Reduction of rounds by trees chosen by survival, over all sets of prompts; negative: more rounds."""
    here = {"prompts": "all", "temperature": temperature}
    (found,) = [each["tokens_a_round"] for each in load(_COUNTED[drafter])["results"] if here.items() <= each.items()]
    other, tree = found[beside][draft_tokens], found["tree by survival"][draft_tokens]
    return "-" if None in (other, tree) else f"{100 * (1 - other / tree):.0f}".replace("-0", "0") + " %"


def rounds_saved() -> Iterator[list[str]]:
    """Rounds that trees save, with 2, 4 and 8 draft tokens a round."""
    for drafter, run in _COUNTED.items():
        for temperature in sorted({each["temperature"] for each in load(run)["results"]}):
            cells = [
                ", ".join(fewer_rounds(drafter, temperature, beside, n) for n in ("2", "4", "8")) for beside in _BESIDE
            ]
            yield [drafter, f"{temperature:g}", *cells]


def _over_chains(run: dict[str, Any], width: str) -> list[str]:
    times = {(each["rows"], each["side"]): each["time_of_chains"] for each in run["results"]}
    return [f"{times[rows, f'width {width}']:.2f}" for rows in (1, 2, 4, 8)]


def time_of_trees() -> Iterator[list[str]]:
    """Time of trees over that of chains at 1, 2, 4, 8 rows."""
    for drafter, name in _TIMED.items():
        for run in (load(f"{name}-{how}-epyc-zen5") for how in ("greedy", "sampled")):
            for width in sorted({each["side"].split()[-1] for each in run["results"]} - {"plain", "1"}):
                yield [drafter, f"{run['temperature']:g}", width, *_over_chains(run, width)]


def trees() -> str:
    """What trees gain: the headline of graph-structured speculation."""
    found = [each for each in load("tree-gain-draft-qwen")["results"] if each["temperature"] == 0]
    widths = {each["prompts"]: [width["apart"] for width in each["widths"]] for each in found}
    tasks = "chat", "retrieval", "stubs", "edits"
    eight, four = ([f"{widths[task][1][n] / widths[task][0][n]:.2f}" for task in tasks] for n in ("8", "4"))
    clocked = ", ".join(_over_chains(load("trees-qwen-sampled-epyc-zen5"), "2"))
    return (
        f"time of `auto` with branches over that with chains, the Qwen pair, T = 0.8: {clocked} at 1, 2, 4, 8 rows."
        " Counted on recorded answers, the Qwen pair, greedy: with eight draft tokens a round a tree of the draft model"
        f" gives {eight[0]} times its chain's tokens in open chat, {eight[1]} in retrieval, {eight[2]} in code stubs,"
        f" {eight[3]} in edits; with four {', '.join(four)}."
        " The rounds that whole trees save: [drafters](drafters.md#rounds-saved-counted)"
    )


def heads() -> str:
    """Our heads in EAGLE-3's format: speed over plain decoding, greedy."""

    def speeds(name: str, drafter: str, *batches: int) -> str:
        here = {"drafter": drafter, "temperature": 0}
        timed = [each for each in load(f"drafters-{name}-epyc-zen5")["speeds"] if here.items() <= each.items()]
        return listed({each["batch_size"]: each["speed_up"] for each in timed}[batch] for batch in batches)

    minutes = load("train-head-qwen-epyc-zen5")["seconds_of_training"] / 60
    small, large = (speeds(name, "head", 1, 4, 8) for name in ("smollm2", "qwen"))
    mixed = " and ".join(speeds(name, "head or copies", 1) for name in ("smollm2", "qwen"))
    return (
        "no public head could be had here, so these are our own heads in its format: greedy, `auto` over plain at"
        f" 1, 4, 8 rows, SmolLM2's shipped head {small};"
        f" Qwen2.5-Coder-1.5B's after {minutes:.0f} minutes of training {large}."
        f" With n-gram drafts first, at one row: {mixed} (Zen 5)"
    )


def short_vocabulary() -> str:
    """What a short draft vocabulary costs in acceptance and saves in reads."""
    sizes = load("short-vocabulary-qwen")["acceptance in chat and stubs"]["sizes"]
    found = {each["size"]: (f"{each['accepted']['all']:.3f}"[1:], f"{each['mib']:.0f}") for each in sizes}
    (whole, all_read), (short, read) = found[0], found[32768]
    return (
        "A draft vocabulary of 32,768 of the 0.5B's 151,936 tokens:"
        f" first draft tokens accepted {whole} to {short}, weights that a draft pass reads {all_read} to {read} MiB"
    )


_RUN, _EARLIER = "related-drafters-smollm2-epyc-zen3", "related-drafters-smollm2-epyc-zen4"  # 45 and 7 minutes each
_TRAINED = "feature", "parallel", "hidden_transfer", "chimera", "model"
_KINDS = *_TRAINED, "ngram"


def _lengths(kind: str, run: str = _RUN, temperature: float = 0, task: str | None = None) -> str:
    """Tokens per round, a mean over tasks."""
    counted = [e for e in load(run)["results"][kind]["acceptance"] if e["temperature"] == temperature]
    return f"{statistics.fmean(e['mean_acceptance_length'] for e in counted if task in (None, e['task'])):.2f}"


def _rates(kind: str, run: str = _RUN) -> str:
    """Acceptance by position when greedy, means over tasks."""
    counted = [e["by_position"] for e in load(run)["results"][kind]["acceptance"] if not e["temperature"]]
    return listed(statistics.fmean(rate for rate in each if rate is not None) for each in zip(*counted, strict=True))


def _timed(kind: str, what: str, temperature: float = 0) -> list[dict[str, Any]]:
    here = {"drafter": kind, "temperature": temperature}
    return [each for each in load(_RUN)["results"]["times"][what] if here.items() <= each.items()]


def _over_plain(kind: str, temperature: float = 0) -> str:
    return listed(each["speed_up"] for each in _timed(kind, "auto_over_plain", temperature))


def _draft_ms(kind: str) -> str:
    costs = load(_RUN)["results"]["times"]["draft_costs"]
    return listed([each["ms"] for each in costs if each["drafter"] == kind], ".1f")


def related(kind: str) -> str:
    """Figures of a drafter in ``training.md``'s table, for a headline."""
    return f"{_lengths(kind)} tokens a round, `auto` over plain {_over_plain(kind)} at 1, 4, 8 rows"


def kinds() -> Iterator[list[str]]:
    """Kinds of drafters after equal training."""
    for kind in _KINDS:
        training = load(_RUN)["results"][kind].get("training")
        trained = ["-", "-"]
        if training is not None:
            trained = [f"{n / 1e6:.2f}" for n in (training["head"]["weights_trained"], training["tokens_seen"])]
        lengths = [_lengths(kind), _lengths(kind, _EARLIER), _lengths(kind, temperature=0.8)]
        times = [_draft_ms(kind), _over_plain(kind), _over_plain(kind, 0.8)]
        yield [f"`{kind}`", *trained, _rates(kind), *lengths, *times]


def in_and_out_of_domain(run: str) -> Iterator[list[str]]:
    """Acceptance on held-out answers to prompts like those of the training, and on the six tasks."""
    for kind, result in load(run)["results"].items():
        cells, domain = ["-"] * 2, ["-"] * 2
        if (training := result.get("training")) is not None:
            held_out = training["held_out"]
            cells = [f"{training['cpu_seconds'] / 60:.1f}", f"{training['tokens_seen'] / 1e6:.2f}"]
            domain = [listed(held_out["conditional"][:3]), f"{held_out['length'][2]:.2f}"]
        tasks = [_rates(kind, run), _lengths(kind, run), _lengths(kind, run, 0.8)]
        yield [f"`{kind}`", *cells, *domain, *tasks]


_WORK = {
    "changes": "twenty changes to one file, four at a time",
    "turns": "the same as twenty turns of a conversation",
    "humaneval": "HumanEval, eight samples of each of 164 problems, T = 0.8",
    "questions": "two hundred questions on one document, four at a time",
    "chat": "sixteen open questions, four at a time",
}


def answers_as_sources() -> Iterator[list[str]]:
    """Tokens per round with eight draft tokens, by what lookup copies from."""
    for name, label in _WORK.items():
        run = {each["side"]: each for each in load(f"references-answers-{name}-qwen-0.5b")["results"]}
        sides = (run.get(side) for side in ("own text", "of its own request", "of all requests"))
        yield [label, *("-" if each is None else f"{each['tokens_a_round']:.2f}" for each in sides)]


_TIMED_WORK = {
    "changes-4": "twenty changes to one file, greedy",
    "stubs-8": "eight functions of eight samples each, T = 0.8",
    "chat-1": "six open questions, greedy",
    "chat-8": "sixteen open questions, greedy",
}


def answers_by_the_clock() -> Iterator[list[str]]:
    """Median seconds with ``auto`` over prompt lookup's, by what lookup copies from; in brackets tokens per round."""
    for name, label in _TIMED_WORK.items():
        run = {each["side"]: each for each in load(f"references-answers-auto-{name}-qwen-0.5b-epyc-zen4")["results"]}
        own = run["own text"]
        cells = [label, name.split("-")[1], f"{own['seconds']:.1f} s ({own['tokens_a_round']:.2f})"]
        for side in ("of its own request", "of all requests"):
            if (each := run.get(side)) is None:
                cells.append("-")
            else:
                cells.append(f"{each['seconds'] / own['seconds']:.2f} ({each['tokens_a_round']:.2f})")
        yield cells


def kinds_in_chat() -> Iterator[list[str]]:
    """The same in open chat: tokens per round, and ``auto`` over plain decoding at 1 and 2 rows."""
    for kind in _KINDS:
        cells = [f"`{kind}`"]
        for temperature in (0, 0.8):
            timed = _timed(kind, "auto_over_plain_in_chat", temperature)
            ranges = [f"{e['speed_up']:.2f} ({min(e['of_all']):.2f} to {max(e['of_all']):.2f})" for e in timed]
            cells += [_lengths(kind, temperature=temperature, task="chat"), *ranges]
        yield cells
