"""docs/results.md says what the committed JSON says: every figure of ours in its tables is worked out here again."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.models import PAIRS, matrix_parameters

from benchmarks import kernels, node_acceptance
from paceline.engine.utilisation import Arithmetic, Peak

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def table_lines(page: Path, heading: str) -> list[str]:
    """The lines of the first table below a heading."""
    below = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line for line in below.splitlines() if line.startswith("|")]


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    lines = table_lines(PAGE, heading)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def cell(row: str, column: int = 2) -> str:
    """Return a cell of the table of headlines."""
    (found,) = [cells[column] for cells in table("The papers' headlines") if cells[0] == row]
    return found


def side(run: dict[str, Any], name: str, batch: int) -> dict[str, Any]:
    """One side of ``bench offline`` at one batch size."""
    (found,) = [r for r in run["results"] if (r["side"], r["batch_size"]) == (name, batch)]
    return dict(found)


# --- beside other engines ---------------------------------------------------------------------------------------------

ANY = ("plain", "ngram", "draft")


def speed(run: str, peer: str, modes: Sequence[str], batch: int) -> float:
    played = [r for r in load(run)["results"] if r["status"] == "ok" and (r["peer"], r["batch"]) == (peer, batch)]
    return max(float(r["tokens_per_s"]) for r in played if r["mode"] in modes)


XEON, ZEN5, CASCADE_LAKE, ZEN3 = (
    f"Beside other engines, on a {machine}" for machine in ("Xeon with AMX", "Zen 5", "Cascade Lake", "Zen 3")
)
PEERS = {
    "paceline, int8, plain": ("int8", "paceline-int8", ("plain",)),
    "**paceline, int8, `auto`**": ("int8", "paceline-int8", ("ngram", "draft")),
    "OpenVINO GenAI, int8": ("int8", "openvino", ANY),
    "paceline, bf16, plain": ("bf16", "paceline-bf16", ("plain",)),
    "**paceline, bf16, `auto`**": ("bf16", "paceline-bf16", ("ngram",)),
    "vLLM, bf16": ("bf16", "vllm", ANY),
}


PLAIN_INT8, *INT8 = list(PEERS)[:3]
BF16 = list(PEERS)[4:]


def peer_speeds(
    name: str, machine: str, sets: Sequence[str] = ("stubs", "chat"), rows: Sequence[int] = (1, 4, 8)
) -> list[float]:
    """Tokens per second of each set of prompts at each number of rows."""
    precision, peer, modes = PEERS[name]
    runs = [f"peers-qwen-{precision}-{prompts}-{machine}" for prompts in sets]
    return [speed(run, peer, modes, batch) for run in runs for batch in rows]


@pytest.mark.parametrize(
    ("heading", "machine", "precisions"),
    [
        (XEON, "xeon-amx", ("int8", "bf16")),
        (ZEN5, "epyc-zen5", ("int8", "bf16")),
        (CASCADE_LAKE, "cascade-lake", ("int8",)),
        (ZEN3, "epyc-zen3", ("int8",)),
    ],
)
def test_peers_on_stubs_and_chat_are_what_was_measured(heading: str, machine: str, precisions: Sequence[str]) -> None:
    rows = {name: [number.strip("*") for number in numbers] for name, *numbers in table(heading)}
    measured = {name: peer_speeds(name, machine) for name, side in PEERS.items() if side[0] in precisions}
    assert rows == {name: [f"{found:.0f}" for found in speeds] for name, speeds in measured.items()}
    for precision, theirs in zip(precisions, ("OpenVINO GenAI", "vLLM"), strict=False):
        ours = measured[f"**paceline, {precision}, `auto`**"]
        other = next(speeds for name, speeds in measured.items() if name.startswith(theirs))
        over = [f"{mine / found:.2f}" for mine, found in zip(ours, other, strict=True)]
        said = f"{', '.join(over[:3])} times as fast as {theirs} on stubs, {', '.join(over[3:])} times on chat."
        assert said in " ".join(PAGE.read_text().split())


def test_readme_has_the_table_of_the_zen5() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [line for line in table_lines(PAGE, ZEN5) if line not in readme] == []
    ours, theirs = (peer_speeds(name, "xeon-amx") for name in INT8)
    over = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    assert f"in int8, `auto` is {min(over):.1f} to {max(over):.1f} times as fast as OpenVINO" in readme


def test_remarks_on_the_zen5_are_what_was_measured() -> None:
    text, sides = text_below(ZEN5), (*INT8, PLAIN_INT8)
    edits = [peer_speeds(name, "epyc-zen5", ["edits"]) for name in sides]
    ours, theirs, plain = (", ".join(f"{found:.0f}" for found in side) for side in edits)
    over = ", ".join(f"{mine / other:.2f}" for mine, other in zip(*edits[:2], strict=True))
    assert f"{ours} tokens per second at 1, 4, 8 rows beside {theirs} of OpenVINO GenAI, {over} times" in text
    assert f"plain decoding has {plain}." in text
    ours, theirs, plain = (f"{peer_speeds(name, 'epyc-zen5', ['stubs'], [16])[0]:.0f}" for name in sides)
    assert f"plain {plain}, `auto` {ours}, OpenVINO GenAI {theirs} tokens per second" in text
    run = "peers-qwen-bf16-transformers-epyc-zen5"
    found = [
        [speed(run, *side, rows) for rows in (1, 4, 8)] for side in (("transformers", ANY), ("paceline-bf16", ANY[1:]))
    ]
    theirs, ours = (", ".join(f"{each:.0f}" for each in side) for side in found)
    over = ", ".join(f"{mine / other:.2f}" for other, mine in zip(*found, strict=True))
    assert f"{theirs} tokens per second beside {ours} of paceline with `auto`, {over} times as fast" in text
    gains = ", ".join(over_plain(1, 4, 8)).replace("at 1", "times at 1 row")
    assert f"speculation on stubs gains {gains}" in text


def test_remarks_on_the_cascade_lake_are_what_was_measured() -> None:
    text = text_below(CASCADE_LAKE)
    plain = {
        run["peer"]: run["samples"]
        for run in load("peers-qwen-int8-stubs-cascade-lake")["results"]
        if (run["mode"], run["batch"]) == ("plain", 8)
    }
    prefill, whole = (
        {peer: f"{statistics.median(each[part] for each in samples):.1f}" for peer, samples in plain.items()}
        for part in ("prefill_s", "total_s")
    )
    ours, theirs = ((prefill[peer], whole[peer]) for peer in ("paceline-int8", "openvino"))
    assert f"takes {ours[0]} of plain decoding's {ours[1]} seconds, {theirs[0]} of OpenVINO's {theirs[1]}" in text
    before, after = (peer_speeds(name, "cascade-lake") for name in (PLAIN_INT8, INT8[0]))
    gains = [f"{mine / found:.2f}" for mine, found in zip(after, before, strict=True)]
    assert f"gains {', '.join(gains[:3])} times on stubs, {', '.join(gains[3:])} times on chat" in text


def test_remarks_on_the_zen3_are_what_was_measured() -> None:
    plain, auto = (peer_speeds(name, "epyc-zen3") for name in list(PEERS)[:2])
    text = text_below(ZEN3)
    shares = [f"{mine / found:.2f}" for mine, found in zip(auto[4:], plain[4:], strict=True)]
    assert f"has {shares[0]} and {shares[1]} of plain decoding's speed" in text
    drafted = [
        sample["drafted"]
        for r in load("peers-qwen-int8-chat-epyc-zen3")["results"]
        if r["peer"] == "paceline-int8" and r["mode"] != "plain" and r["batch"] > 1
        for sample in r["samples"]
    ]
    assert f"at most {max(drafted)} draft tokens in 64 rounds" in text
    gains = [f"{mine / found:.2f}" for mine, found in zip(auto[:3], plain[:3], strict=True)]
    assert f"speculation gains {', '.join(gains)} times on stubs, {auto[3] / plain[3]:.2f} at one row of chat" in text
    stubs = "peers-qwen-int8-stubs-epyc-zen3"
    idle = [
        r for r in load(stubs)["results"] if (r["peer"], r["mode"]) == ("paceline-int8", "draft") and r["batch"] > 1
    ]
    assert {sample["drafted"] for r in idle for sample in r["samples"]} == {0}
    (lookup,) = [
        r for r in load(stubs)["results"] if (r["peer"], r["mode"], r["batch"]) == ("paceline-int8", "ngram", 8)
    ]
    share = lookup["tokens_per_s"] / plain[2]
    assert f"n-gram lookup alone has {share:.2f} of plain decoding's speed at eight rows of stubs" in text
    assert f"with {lookup['acceptance']:.2f} of its draft tokens accepted" in text
    assert f"int8 over its Q8_0 {over_llama_cpp('peers-qwen-q8_0-chat-epyc-zen3', 'paceline-int8')} times" in text
    assert f"int4 over its Q4_K_M {over_llama_cpp('peers-qwen-chat-epyc-zen3', 'paceline-int4')} " in text
    singles = [
        [
            [speed(f"{stubs}-{run}", peer, modes, rows) for rows in (1, 4, 8)]
            for _, peer, modes in list(PEERS.values())[:3]
        ]
        for run in (1, 2)
    ]
    over, gains = (
        " and ".join(
            ", ".join(f"{mine / found:.2f}" for mine, found in zip(each[1], each[side], strict=True))
            for each in singles
        )
        for side in (2, 0)
    )
    assert f"have {over} times OpenVINO's speed, and {gains} times plain decoding's" in text
    behind = [r["left_out"] for r in load("peers-qwen-int8-chat-epyc-zen3")["results"] if r["status"] == "left out"]
    shares = sorted(int(re.search(r"(\d+)% of this peer's best", reason)[1]) for reason in behind)  # type: ignore[index]
    assert f"{shares[0]} to {shares[-1]} % of its plain speed" in text


def test_long_prompts_on_the_zen3_are_what_was_measured() -> None:
    run = load("peers-qwen-int8-project-epyc-zen3")
    ours, theirs = (
        next(r for r in run["results"] if (r["peer"], r["mode"]) == (peer, "ngram"))
        for peer in ("paceline-int8", "openvino")
    )
    first, rest = (
        [f"{statistics.median(sample[part] for sample in side['samples']):.1f}" for side in (ours, theirs)]
        for part in ("prefill_s", "decode_s")
    )
    over, text = ours["tokens_per_s"] / theirs["tokens_per_s"], text_below(ZEN3)
    (tokens,) = run["settings"]["prompt_tokens"]
    assert f"(an edit behind 19 other programs, {tokens:,} tokens)" in text
    assert f"{over:.2f} times as fast as OpenVINO GenAI. The first token comes after {first[0]} seconds" in text
    assert f"instead of {first[1]}, and the other 63 take {rest[0]} instead of {rest[1]}." in text


@pytest.mark.parametrize(
    ("machine", "words"),
    [("cascade-lake", "On a Cascade Lake, which has VNNI but no"), ("epyc-zen3", "On a Zen 3, which")],
)
def test_readme_says_how_much_faster_older_processors_are(machine: str, words: str) -> None:
    ours, theirs = (peer_speeds(name, machine) for name in INT8)
    over = [mine / found for mine, found in zip(ours, theirs, strict=True)]
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(words)]
    assert f"{min(over):.1f} to {max(over):.1f} times as fast as OpenVINO" in line


# --- Gemma 3, and a hybrid with random weights ------------------------------------------------------------------------

GEMMA, HYBRID = "peers-gemma3-xeon-amx", "peers-random-qwen3.5-xeon-amx"
MODEL_PEERS = {
    "Gemma 3": {
        "paceline, int8, plain": (GEMMA, "paceline-int8", ["plain"]),
        "paceline, int8, n-gram, `auto`": (GEMMA, "paceline-int8", ["ngram"]),
        "OpenVINO GenAI, int8, plain": (GEMMA, "openvino", ["plain"]),
        "OpenVINO GenAI, int8, n-gram": (GEMMA, "openvino", ["ngram"]),
        "transformers, bf16": (GEMMA, "transformers", ["plain"]),
    },
    "A hybrid with random weights": {
        "paceline, int8": (HYBRID, "paceline-int8", ["plain"]),
        "paceline, bf16": (HYBRID, "paceline-bf16", ["plain"]),
        "transformers, bf16": (HYBRID, "transformers", ["plain"]),
    },
}


@pytest.mark.parametrize(("heading", "batches"), [("Gemma 3", (1, 4, 8)), ("A hybrid with random weights", (1, 8))])
def test_the_tables_of_other_models_beside_peers_are_what_was_measured(heading: str, batches: Sequence[int]) -> None:
    rows = {name: numbers for name, *numbers in table(heading)}
    assert rows.keys() == MODEL_PEERS[heading].keys()
    for name, given in MODEL_PEERS[heading].items():
        assert rows[name] == [f"{speed(*given, batch):.0f}" for batch in batches], name


def test_speculation_on_a_hybrid_is_what_was_measured() -> None:
    run, rows = load("acceptance-qwen3.5-0.8b-xeon-amx"), table("Speculation on a hybrid")
    assert (run["acceptance"], run["rates"], len(rows)) == ("synthetic", [0.82], 4)
    for k, *said in rows:
        assert said == [f"{side(run, f'k={k}', batch)['tokens_per_second']:.0f}" for batch in (1, 4, 8)], k
    plain = side(run, "k=0", 8)["tokens_per_second"] / side(run, "k=0", 1)["tokens_per_second"]
    many = f"8 rows carry {run['more_rows_carry']:.1f} times the tokens of one row"
    assert f"{many}; plain rows carry {plain:.1f} times." in PAGE.read_text()


def test_the_memory_of_recurrent_states_is_what_was_measured() -> None:
    run = {(line["rows"], line["draft_tokens"]): line for line in load("state-memory-qwen3.5-0.8b-xeon-amx")["results"]}
    for k, *said in table("Memory of recurrent states"):
        sides = [run[rows, int(k)] for rows in (1, 4, 8)]
        assert said == [*(f"{each['resident'] / 1e6:.1f}" for each in sides), f"{sides[-1]['over_first']:.2f}"], k
    assert max(abs(each["planned"] / each["resident"] - 1) for each in run.values()) < 0.03
    assert {each["saved"] for (rows, _), each in run.items() if rows == 1} == {40402944}, "two of 20 MB"


def test_speculation_on_a_mixture_is_what_was_measured() -> None:
    run, rows = load("acceptance-qwen3-30b-a3b-xeon-amx"), table("Speculation on a mixture of experts")
    assert (run["acceptance"], run["rates"], run["drafter"], len(rows)) == ("synthetic", [0.8], "free", 6)
    for k, *said in rows:
        sides = [side(run, f"k={k.strip('`')}", batch) for batch in (1, 4, 8)]
        assert said == [*(f"{each['tokens_per_second']:.0f}" for each in sides), f"{sides[-1]['speed_up']:.2f}"], k


def test_the_time_of_a_short_draft_vocabulary_is_what_was_measured() -> None:
    whole, short, *_ = load("short-vocabulary-qwen3.5-0.8b-xeon-amx")["passes"]
    one, eight = ((f"{short['ms'][place]:.1f}", f"{whole['ms'][place]:.1f}") for place in (0, 2))
    said = (
        f"a draft token takes {one[0]} ms in place of {one[1]} at one row, {eight[0]} in place of {eight[1]} at eight."
    )
    assert f"Scoring {short['size']:,} tokens instead, {said}" in " ".join(PAGE.read_text().split())


# --- better answers in the same time ----------------------------------------------------------------------------------

EVALUATED, NGRAM_EVALUATED, ZEN_4_EVALUATED, CASCADE_LAKE_EVALUATED, ZEN_3_EVALUATED = (
    "humaneval-qwen-epyc-zen5",
    "humaneval-qwen-ngram-epyc-zen5",
    "humaneval-qwen-n8-epyc-zen4",
    "humaneval-qwen-n8-cascade-lake",
    "humaneval-qwen-n8-epyc-zen3",
)


def half_ways(run: str = EVALUATED) -> list[dict[str, Any]]:
    """Both sides at the budget at which plain decoding has half of its unlimited rate, by n."""
    halves: list[dict[str, Any]] = load(run)["half_way"]
    return halves


def percent(share: dict[str, float]) -> str:
    return f"{100 * share['mean']:.0f}"


def test_the_table_of_answers_within_a_budget_is_what_was_measured() -> None:
    runs = {run: load(run) for run in (EVALUATED, NGRAM_EVALUATED, ZEN_4_EVALUATED)}
    assert {(run["texts_changed_by_speculation"], len(run["problems"])) for run in runs.values()} == {(0, 164)}
    sides = {(str(each["n"]), each["mode"].replace("auto", "`auto`")): each for each in runs[EVALUATED]["results"]}
    sides["8", "`auto`, n-gram alone"] = runs[NGRAM_EVALUATED]["results"][1]
    rows = table("Better answers in the same time")
    assert {(n, mode) for n, mode, *_ in rows} == sides.keys()
    for n, mode, *said in rows:
        found = sides[n, mode]
        first, every = ([percent(reading[kind]) for reading in found["at"]] for kind in ("first", "all"))
        assert [reading["budget"] for reading in found["at"]] == [2, 3, 5, 8, 12, None]
        assert said == [*first, every[-1], f"{found['seconds_to_all']:.1f}"], (n, mode)


@pytest.mark.parametrize(
    ("name", "problems", "shown"),
    [(CASCADE_LAKE_EVALUATED, 80, slice(4)), (ZEN_3_EVALUATED, 60, slice(1, 6))],
    ids=["cascade lake", "zen 3"],
)
def test_answers_within_a_budget_on_other_processors_are_what_was_measured(
    name: str, problems: int, shown: slice
) -> None:
    run, text = load(name), text_below("Better answers in the same time")
    assert (run["texts_changed_by_speculation"], len(run["problems"])) == (0, problems)
    at = {each["mode"]: [percent(reading["first"]) for reading in each["at"]][shown] for each in run["results"]}
    budgets = ", ".join(f"{reading['budget']:g}" for reading in run["results"][0]["at"][shown])
    plain, auto = ", ".join(at["plain"]), ", ".join(at["auto"])
    assert f"At {budgets} s plain decoding has {plain} % there and `auto` {auto} %" in text
    ends = " and ".join(f"{each['seconds_to_all']:.1f}" for each in run["results"])
    assert f"all eight answers end after {ends} s" in text


def test_what_the_readme_says_of_humaneval_is_what_was_measured() -> None:
    def in_two_seconds(run: str, n: int) -> list[str]:
        sides = {each["mode"]: each["at"][0] for each in load(run)["results"] if each["n"] == n}
        assert {side["budget"] for side in sides.values()} == {2}
        return [percent(sides[mode]["first"]) for mode in ("auto", "plain")]

    readme = " ".join((ROOT / "README.md").read_text().split())
    auto, plain = in_two_seconds(EVALUATED, 8)
    assert f"`auto` solves {auto} % within two seconds on a Zen 5 and plain decoding {plain} %" in readme
    assert "in the same time, {} and {} %.".format(*in_two_seconds(ZEN_4_EVALUATED, 8)) in readme
    assert "With one answer it is {} and {} % on the Zen 5.".format(*in_two_seconds(EVALUATED, 1)) in readme


def test_what_is_said_below_the_table_is_what_was_measured() -> None:
    run = load(EVALUATED)
    text = " ".join(PAGE.read_text().split("\n## Better answers in the same time\n")[1].split("\n## ")[0].split())
    runs = EVALUATED, NGRAM_EVALUATED, ZEN_4_EVALUATED, CASCADE_LAKE_EVALUATED, ZEN_3_EVALUATED
    for half in [half for run in runs for half in half_ways(run)]:
        plain, ours, budget = 100 * half["plain"], 100 * half["speculation"], half["budget"]
        gain, error = 100 * half["gain"]["mean"], 100 * half["gain"]["error"]
        said = f"n = {half['n']}: {plain:.0f} and {ours:.0f} % at {budget:.1f} s"
        assert f"{said} (difference {gain:+.0f} points, standard error {error:.0f})" in text
    ranked = next(each["ranking"] for each in run["results"] if (each["n"], each["mode"]) == (8, "plain"))
    assert f"by {100 * ranked['mean']:.1f} points (standard error {100 * ranked['error']:.1f})" in text


# --- memory of rows; a thousand lines ---------------------------------------------------------------------------------


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of the table of a page whose first line begins with ``head``."""
    lines = (ROOT / "docs" / f"{page}.md").read_text().split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def text_below(heading: str) -> str:
    return " ".join(PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0].split())


def test_the_memory_of_rows_is_what_was_measured() -> None:
    before, after = (load(f"memory-rows-{when}-epyc-zen4") for when in ("before", "after"))
    assert before["answers"] == after["answers"]
    grown = [f"{run['resident_bytes_of_rows'] / 1e9:.2f} GB" for run in (before, after)]
    assert f"{grown[0]} before rows took the memory that they use, {grown[1]} since" in text_below("Memory of rows")


def test_the_thousand_lines_are_what_was_measured() -> None:
    run = load("batch-killed-smollm2-epyc-zen4")
    assert (run["lines"], run["answered"], run["different_answers"], len(run["killed_at"])) == (1000, 1000, 0, 5)
    least, most = (f"{bound(run['resident_bytes_by_tenths']) / 1e6:.0f}" for bound in (min, max))
    assert f"between {least} and {most} MB" in text_below("A thousand lines")


def test_the_thousand_lines_through_a_server_are_what_was_measured() -> None:
    run = load("served-batch-killed-smollm2-epyc-zen4")
    assert (run["lines"], run["answered"], run["different_answers"], len(run["killed_at"])) == (1000, 1000, 0, 3)
    grown = [*run["resident_bytes_by_tenths"], *run["resident_bytes_by_tenths_killed"]]
    assert f"between {min(grown) / 1e6:.0f} and {max(grown) / 1e6:.0f} MB" in text_below("A thousand lines")


# --- open questions; what was read before ----------------------------------------------------------------------------


def test_the_table_of_open_questions_is_what_was_measured() -> None:
    runs = [load(f"offline-smollm2-{name}") for name in ("int8-open-epyc-zen4", "ngram-open-epyc-zen5")]
    for rows, *ratios in table("Open questions"):
        for ratio, run in zip(ratios, runs, strict=True):
            played = side(run, "speculation", int(rows))
            assert len(played["decode_seconds_of_all"]) == 9
            assert float(ratio) == pytest.approx(played["speed_up"], abs=0.0051)


def test_what_was_read_before_is_what_was_measured() -> None:
    run = load("prefixes-smollm2-int8-epyc-zen4")
    for (_, *shown), kind in zip(table("What was read before"), ("chat", "document"), strict=True):
        assert run[kind]["answers_and_logprobs_equal"]
        measured = [_after_the_first(run[kind]["seconds"][name]) for name in ("read anew", "reused")]
        assert [float(number) for number in shown] == [pytest.approx(1000 * time, abs=0.6) for time in measured]
    scored = load("scoring-smollm2-int8-epyc-zen4")
    assert scored["equal"]
    assert scored["texts"] == 500
    slow, fast = scored["seconds"]["one by one"], scored["seconds"]["shared"]
    assert f"{slow:.0f} seconds text by text, {fast:.1f} together" in PAGE.read_text()


def _after_the_first(seconds: list[list[float]]) -> float:
    """The median over all prompts but the first, which nothing came before, of each one's median over the runs."""
    return statistics.median([statistics.median(prompt) for prompt in zip(*seconds, strict=True)][1:])


# --- edits ------------------------------------------------------------------------------------------------------------


def test_the_table_of_edits_is_what_was_measured() -> None:
    for name, rows, rounds, right, with_prefill, decoding in table("Editing, with the original as reference"):
        run = load(f"references-edits-qwen-{rows}-{'row' if rows == '1' else 'rows'}-epyc-zen4")
        assert "--seconds" in run["command"]
        (found,) = [r for r in run["results"] if r["side"] == ("references" if "reference" in name else "lookup")]
        assert len(found["seconds_of_all"]) >= 3, "medians of three repeats at least"
        assert rounds == f"{found['tokens_a_round']:.1f}"
        assert right == f"{found['acceptance_rate']:.0%}".replace("%", " %")
        assert (with_prefill, decoding) == (f"{found['speed_up']:.1f}x", f"{found['speed_up_decoding']:.1f}x")


def test_answers_beside_requests_are_what_was_measured() -> None:
    run = load("references-separate-qwen-epyc-zen4")
    assert run["prompt_tokens"] == [286]
    measured = {found["side"]: found for found in run["results"]}
    words = {", no prefix cache": ", reading all", ", prefix cache": ", copying what was read"}  # the page's, the run's
    rows = {name.strip("`"): seconds for name, seconds in table("Eight answers to one prompt, beside eight requests")}
    shown = {re.sub(", .*", lambda found: words[found[0]], name): seconds for name, seconds in rows.items()}
    assert shown == {name: f"{found['seconds']:.1f}" for name, found in measured.items()}
    assert all(len(found["seconds_of_all"]) == 3 for found in measured.values())
    assert all(found["tokens"] == 8 * 48 for found in measured.values())


# --- headlines --------------------------------------------------------------------------------------------------------

Worked = Callable[[], list[str]]
PAIR = "offline-qwen-int8-small-epyc-zen4"


def at_batch_8() -> list[str]:
    (tokens,) = peer_speeds(INT8[0], "epyc-zen5", ["stubs"], [8])
    return [f"{1000 * 8 / tokens:.0f} ms", f"{tokens:.0f} tokens/s"]


def over_plain(*batches: int) -> list[str]:
    """Speed of ``auto`` on stubs over plain decoding's."""
    ours, plain = (peer_speeds(name, "epyc-zen5", ["stubs"], batches) for name in (INT8[0], PLAIN_INT8))
    return [f"{mine / other:.2f} at {batch}" for mine, other, batch in zip(ours, plain, batches, strict=True)]


QWEN_MULTIPLY_ADDS = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960) + 151936 * 1536  # layers, head


def utilisations() -> list[str]:
    """By the formula of ``utilisation``; the peak is of another run."""
    runs = {1: PAIR, 4: PAIR, 8: "offline-qwen-int8-large-epyc-zen4"}
    peak = 2 * load("kernels-qwen-epyc-zen4")["machine"]["gmac_s"]["int8"] * 1e9
    arithmetic = Arithmetic(QWEN_MULTIPLY_ADDS, Peak(peak, "of another run"))

    def share(name: str, batch: int) -> float:
        found = arithmetic.utilisation(side(load(runs[batch]), name, batch)["tokens_per_second"], 1.0)
        assert found is not None
        return found

    texts = [", ".join(f"{100 * share(name, batch):.0f}" for batch in runs) for name in ("plain", "k=auto")]
    return [f"plain {texts[0]} %", f"`auto` {texts[1]} %", f"{peak / 1e12:.2f} TOP/s"]


def bass_and_auto() -> list[str]:
    run = load("offline-qwen-int8-small-epyc-zen5")
    return [
        f"`{name}` " + ", ".join(f"{side(run, f'k={name}', batch)['speed_up']:.2f}" for batch in (1, 2, 4, 8))
        for name in ("bass", "auto")
    ] + [f"four draft tokens and one, {side(run, 'k=4', 4)['speed_up']:.2f} and {side(run, 'k=1', 8)['speed_up']:.2f}"]


def best_lengths() -> list[str]:
    return [", ".join(map(str, load("profile-qwen-int8-epyc-zen4")["best"].values()))]


def fitted_lengths() -> list[str]:
    run = load("profile-qwen-int8-epyc-zen4")
    times = {(point["batch_size"], point["k"]): point["ms_per_token"] for point in run["sweep"]}
    fitted = {int(size): k for size, k in run["fit"]["optimum"].items()}
    lost = max(times[size, k] / times[size, run["best"][str(size)]] - 1 for size, k in fitted.items())
    return [", ".join(map(str, fitted.values())), f"{run['fit']['error']:.1%}".replace("%", " %"), f"{lost:.0%}"[:-1]]


def varying_traffic() -> list[str]:
    found = load("traffic-smollm2-int8-xeon-amx")["summary"]
    over = [found[trace]["auto_over"] for trace in ("steady", "busy", "varying")]
    assert {each["best_fixed"] for each in found.values()} == {"fixed 2"}
    http = load("traffic-http-smollm2-int8-epyc-zen4")["compared"]["mean_latency_over"]
    traces = [http[trace] for trace in ("steady", "busy", "varying")]
    best = [max((over[name], name) for name in over if name.startswith("fixed") or name == "plain") for over in traces]
    assert [name for _, name in best] == ["fixed4", "fixed2", "fixed2"]
    served = [ratio for ratio, _ in best], [trace["plain"] for trace in traces]
    in_process = [[each[policy] for each in over] for policy in ("fixed 2", "plain")]
    return [", ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (*in_process, *served)]


def equal_sequences() -> list[str]:
    runs = [load(f"bits-{name}-xeon-amx")["outcomes"] for name in ("smollm2", "qwen")]
    return [f"{sum(o['equal'] for o in run)} of {sum(o['sequences'] for o in run)}" for run in runs]


def with_references() -> list[str]:
    found = load("references-edits-qwen-1-row-epyc-zen4")["results"][-1]
    return [f"{found['speed_up']:.1f} times", f"decoding alone {found['speed_up_decoding']:.1f}"]


def without_gain() -> list[str]:
    """Return how much longer rounds take where ``auto`` has wrong draft tokens only."""
    found = []
    for name in ("smollm2", "qwen"):
        run = load(f"auto-wrong-{name}-int8-xeon-amx")
        sizes = sorted({line["batch_size"] for line in run["results"]})
        slower = [100 / side(run, "k=auto, wrong drafts", size)["speed_up"] - 100 for size in sizes]
        found.append(", ".join(f"{part:+.1f}" for part in slower))
    return found


def over_an_oracle() -> list[str]:
    over = load("phases-smollm2-int8-epyc-zen4")["over_oracle"]
    fixed = min(over[k] for k in over if k.isdigit())
    return [f"`auto` takes {over['auto']:.2f}", f"the best fixed length {fixed:.2f}", f"`bass` {over['bass']:.2f}"]


COUNTED = {
    "Qwen's 0.5B draft model": "tree-gain-rounds-qwen",
    "SmolLM2's head": "tree-gain-rounds-smollm2-head",
    "n-gram lookup, SmolLM2": "tree-gain-rounds-smollm2-ngram",
}
BESIDE = ("chain", "chain by survival", "EAGLE-2's shape")


def fewer_rounds(who: str, temperature: float, beside: str, draft_tokens: str) -> str:
    """Return the reduction of rounds by survival trees over all sets of prompts; negative: more rounds."""
    (found,) = [
        each["tokens_a_round"]
        for each in load(COUNTED[who])["results"]
        if (each["prompts"], each["temperature"]) == ("all", temperature)
    ]
    other, tree = found[beside][draft_tokens], found["tree by survival"][draft_tokens]
    return "-" if None in (other, tree) else f"{100 * (1 - other / tree):.0f}".replace("-0", "0") + " %"


@pytest.mark.parametrize("who", COUNTED)
def test_the_rounds_that_trees_save_are_those_that_were_counted(who: str) -> None:
    lines = (ROOT / "docs" / "drafters.md").read_text().splitlines()
    said = [line.strip("| ").split(" | ")[1:] for line in lines if line.startswith(f"| {who} |")]
    temperatures = sorted({each["temperature"] for each in load(COUNTED[who])["results"]})
    assert said == [
        [f"{t:g}", *(", ".join(fewer_rounds(who, t, beside, n) for n in ("2", "4", "8")) for beside in BESIDE)]
        for t in temperatures
    ]


def test_the_kinds_of_heads_are_those_that_were_trained() -> None:
    page, results = (ROOT / "docs" / "training.md").read_text(), load(RELATED)["results"]
    for kind in (*TRAINED, "ngram"):
        assert Related(kind).line() in page
        assert Related(kind).chat_line() in page
    text = " ".join(page.split())
    ngram, feature, model = (Related(kind).in_chat() for kind in ("ngram", "feature", "model"))
    speed = "times plain decoding's speed (greedy, T = 0.8)"
    assert f"`auto` with it has {feature[1]} {speed}, with n-gram lookup {ngram[1]}." in text
    assert f"At two rows it has {feature[2]}, lookup {ngram[2]}." in text
    assert f"`model` has {model[1]} at one row, {model[2]} at two." in text
    lengths = [[Related(kind, run).rounds() for kind in TRAINED] for run in (RELATED_EARLIER, RELATED)]
    seven, now = (f"{min(each)} to {max(each)}" for each in lengths)
    assert f"Seven minutes had given {seven} tokens per round, 45 give {now}." in text
    cells = results["times"]["auto_over_plain_in_chat"]
    spread = max((max(each["of_all"]) - min(each["of_all"])) / each["speed_up"] for each in cells)
    assert f"These runs spread by up to {100 * spread:.0f} % of their median." in text
    before = load(RELATED_EARLIER)["results"]
    more = [results[kind]["training"]["tokens_seen"] / before[kind]["training"]["tokens_seen"] for kind in TRAINED]
    data = [run["feature"]["training"]["data"]["tokens_made"] for run in (results, before)]
    seen = (
        f"seen {min(more):.1f} to {max(more):.0f} times as many tokens, of {data[0] / data[1]:.2f} times as much data"
    )
    assert seen in text
    at_home, first = results["feature"]["training"]["held_out"]["conditional"][0], Related("feature").rates()[:4]
    assert f"`feature` has {at_home:.2f} of its first draft tokens accepted, on these tasks {first}." in text
    trained = [results[kind]["training"] for kind in TRAINED]
    assert all(each["minutes"] == pytest.approx(RELATED_MINUTES, rel=0.02) for each in trained)
    assert len({each["data"]["tokens_made"] for each in trained}) == 1
    assert f"{trained[0]['data']['tokens_made']:,} tokens" in page


@pytest.mark.parametrize("run", ["drafters-smollm2-epyc-zen5", "drafters-qwen-epyc-zen5"])
def test_the_tables_of_drafters_are_what_was_measured(run: str) -> None:
    page, found = (ROOT / "docs" / "drafters.md").read_text(), load(run)
    below = page.split("### Two targets")[1].split(f"results/{run}.json")[1].split("\n\n")[1].splitlines()[2:]
    told = dict.fromkeys((each["drafter"], each["temperature"]) for each in found["acceptance"])
    assert len(below) == len(told)
    for line, who in zip(below, told, strict=True):
        counted = [each for each in found["acceptance"] if (each["drafter"], each["temperature"]) == who]
        timed = {
            each["batch_size"]: f"{each['speed_up']:.2f}"
            for each in found["speeds"]
            if (each["drafter"], each["temperature"]) == who
        }
        lengths = [f"{each['mean_acceptance_length']:.2f}" for each in counted]
        ratios = [timed.get(rows, "-") for rows in found["plan"]["batch_sizes"]]
        assert line == f"| {who[0]} | {who[1]:g} | {' | '.join([*lengths, *ratios])} |"


def test_temperature_costs_the_head_little() -> None:
    def kept(place: int, temperature: float) -> str:
        rates = [
            each["by_position"][place]
            for each in load("drafters-smollm2-epyc-zen5")["acceptance"]
            if (each["drafter"], each["temperature"]) == ("head", temperature)
        ]
        return f"{statistics.mean(rates):.2f}"

    greedy, sampled = ([kept(place, temperature) for place in (0, 1)] for temperature in (0.0, 0.8))
    said = " ".join((ROOT / "docs" / "drafters.md").read_text().split())
    told = (
        f"SmolLM2's head has {greedy[0]} of its first and {greedy[1]} of its second draft tokens accepted when greedy, "
        f"and {sampled[0]} and {sampled[1]} at temperature 0.8."
    )
    assert told in said


CLOCKED = {
    "n-gram and Qwen's 0.5B draft model": "trees-qwen",
    "n-gram, SmolLM2, alone": "trees-smollm2-ngram",
    "SmolLM2's head, alone": "trees-smollm2-head",
}


def over_chains(run: dict[str, Any], width: int) -> list[str]:
    """Time over that of chains, at 1, 2, 4 and 8 rows."""
    of = {(each["rows"], each["side"]): each["time_of_chains"] for each in run["results"]}
    return [f"{of[rows, f'width {width}']:.2f}" for rows in (1, 2, 4, 8)]


@pytest.mark.parametrize("who", CLOCKED)
def test_the_times_of_trees_are_those_that_were_measured(who: str) -> None:
    lines = (ROOT / "docs" / "drafters.md").read_text().splitlines()
    said = [line.strip("| ").split(" | ")[1:] for line in lines if line.startswith(f"| {who} |")]
    runs = [load(f"{CLOCKED[who]}-{how}-epyc-zen5") for how in ("greedy", "sampled")]
    assert said == [
        [f"{run['temperature']:g}", width, *over_chains(run, int(width))] for run in runs for width in widths(run)
    ]


def widths(run: dict[str, Any]) -> list[str]:
    """But for that of chains."""
    return sorted({each["side"].split()[-1] for each in run["results"]} - {"plain", "1"})


def trees() -> list[str]:
    """Return the gain of a tree with two candidates per position over a chain, for one row."""
    runs = {r["prompts"]: r["widths"] for r in load("tree-gain-draft-qwen")["results"] if r["temperature"] == 0}
    gains = {
        draft_tokens: [
            f"{wide['apart'][draft_tokens] / chain['apart'][draft_tokens]:.2f}"
            for task in ("chat", "retrieval", "stubs", "edits")
            for chain, wide in [runs[task][:2]]
        ]
        for draft_tokens in ("8", "4")
    }
    told = "{} times its chain's tokens in open chat, {} in retrieval, {} in code stubs, {} in edits"
    pair, head = ([fewer_rounds(who, 0.0, beside, "4") for beside in BESIDE] for who in list(COUNTED)[:2])
    counted = "{} fewer rounds than a chain, {} than a chain chosen by survival, and {} than EAGLE-2's shape"
    rounds = [counted.format(*pair), f"with SmolLM2's head {head[0]} and {head[2]}"]
    clocked = ", ".join(over_chains(load("trees-qwen-sampled-epyc-zen5"), 2))
    return [told.format(*gains["8"]), ", ".join(gains["4"]), *rounds, f"T = 0.8: {clocked} at 1, 2, 4, 8 rows"]


def in_a_budget() -> list[str]:
    """Return pass rates at the budget at which plain decoding has half of its unlimited rate."""
    shares = [
        (f"{100 * each['plain']:.0f} to {100 * each['speculation']:.0f} %", f"at n = {each['n']}")
        for each in (*half_ways(), *half_ways(ZEN_4_EVALUATED))
    ]
    return [*(f"{share} {n}" for share, n in shares[:3]), f"on a Zen 4 {shares[3][0]} {shares[3][1]}"]


RELATED, RELATED_MINUTES = "related-drafters-smollm2-epyc-zen3", 45
RELATED_EARLIER = "related-drafters-smollm2-epyc-zen4"  # seven minutes each
TRAINED = "feature", "parallel", "hidden_transfer", "chimera", "model"
BOTH = "head or copies"


def heads_of_ours() -> list[str]:
    """Return the speed over plain of our heads in EAGLE-3's format, alone, and at one row after n-gram drafts."""

    def speeds(name: str, drafter: str, *batches: int) -> str:
        found = {
            each["batch_size"]: each["speed_up"]
            for each in load(f"drafters-{name}-epyc-zen5")["speeds"]
            if (each["drafter"], each["temperature"]) == (drafter, 0)
        }
        return ", ".join(f"{found[batch]:.2f}" for batch in batches)

    names = ("smollm2", "qwen")
    alone, mixed = ([speeds(name, side, *at) for name in names] for side, at in (("head", (1, 4, 8)), (BOTH, (1,))))
    minutes = load("train-head-qwen-epyc-zen5")["seconds_of_training"] / 60
    return [
        f"SmolLM2's shipped head {alone[0]};",
        f"after {minutes:.0f} minutes of training {alone[1]}",
        f"at one row: {mixed[0]} and {mixed[1]} (Zen 5)",
    ]


class Related:
    """A drafter of the related papers: means over six tasks that it was not trained on, as the pages write them."""

    def __init__(self, kind: str, run: str = RELATED) -> None:
        results = load(run)["results"]
        self.kind, self._training = kind, results[kind].get("training")
        self._counted, self._times = results[kind]["acceptance"], results["times"]

    def rates(self, temperature: float = 0) -> str:
        columns = zip(*(each["by_position"] for each in self._at(temperature)), strict=True)
        return ", ".join(f"{statistics.fmean(rate for rate in column if rate is not None):.2f}" for column in columns)

    def rounds(self, temperature: float = 0, task: str | None = None) -> str:
        asked = [each for each in self._at(temperature) if task in (None, each["task"])]
        return f"{statistics.fmean(each['mean_acceptance_length'] for each in asked):.2f}"

    def ms(self) -> str:
        """Of a draft at 1, 4, 8 rows."""
        return ", ".join(f"{each['ms']:.1f}" for each in self._times["draft_costs"] if each["drafter"] == self.kind)

    def over_plain(self, temperature: float = 0) -> str:
        """Speed of ``auto`` over plain decoding's at 1, 4, 8 rows."""
        return ", ".join(f"{each['speed_up']:.2f}" for each in self._timed("auto_over_plain", temperature))

    def headline(self) -> list[str]:
        reached = f"accepted at {self.rates()}, {self.rounds()} tokens a round"
        return [reached, f"a draft takes {self.ms()} ms", f"`auto` over plain {self.over_plain()}"]

    def line(self) -> str:
        """The line of the training page's table."""
        seen = ["-", "-"]
        if self._training is not None:
            many = self._training["head"]["weights_trained"], self._training["tokens_seen"]
            seen = [f"{number / 1e6:.2f}" for number in many]
        lengths = self.rounds(), Related(self.kind, RELATED_EARLIER).rounds(), self.rounds(0.8)
        cells = [f"`{self.kind}`", *seen, self.rates(), *lengths, self.ms(), self.over_plain(), self.over_plain(0.8)]
        return f"| {' | '.join(cells)} |"

    def chat_line(self) -> str:
        """The line of the training page's table of open chat: tokens per round, and ``auto`` over plain."""
        cells = [f"`{self.kind}`"]
        for temperature in (0, 0.8):
            cells += [self.rounds(temperature, "chat")]
            cells += [
                f"{each['speed_up']:.2f} ({min(each['of_all']):.2f} to {max(each['of_all']):.2f})"
                for each in self._timed("auto_over_plain_in_chat", temperature)
            ]
        return f"| {' | '.join(cells)} |"

    def in_chat(self) -> dict[int, str]:
        """Speed of ``auto`` over plain decoding's in open chat, greedy and at T = 0.8, by rows."""
        both = [self._timed("auto_over_plain_in_chat", temperature) for temperature in (0, 0.8)]
        return {
            greedy["batch_size"]: f"{greedy['speed_up']:.2f} and {sampled['speed_up']:.2f}"
            for greedy, sampled in zip(*both, strict=True)
        }

    def _at(self, temperature: float) -> list[dict[str, Any]]:
        return [each for each in self._counted if each["temperature"] == temperature]

    def _timed(self, what: str, temperature: float) -> list[dict[str, Any]]:
        found = [each for each in self._times[what] if each["drafter"] == self.kind]
        return [each for each in found if each["temperature"] == temperature]


def parallel() -> list[str]:
    return [*Related("parallel").headline(), *Related("feature").headline()]


def chimera() -> list[str]:
    ngram = Related("ngram")
    return [*Related("chimera").headline(), f"{ngram.rounds()} tokens a round", ngram.over_plain()]


def hidden_transfer_and_short_vocabulary() -> list[str]:
    part = load("short-vocabulary-qwen")["acceptance in chat and stubs"]["sizes"]
    found = {each["size"]: (f"{each['accepted']['all']:.3f}"[1:], f"{each['mib']:.0f}") for each in part}
    (whole, all_read), (short, read) = found[0], found[32768]
    shrunk = f"accepted {whole} to {short}, weights that a draft pass reads {all_read} to {read} MiB"
    return [*Related("hidden_transfer").headline(), shrunk]


def over_llama_cpp(run: str, ours: str) -> str:
    by = {(r["peer"], r["batch"]): r for r in load(run)["results"] if r["mode"] == "plain"}
    ratios = [by[ours, rows]["tokens_per_s"] / by["llamacpp", rows]["tokens_per_s"] for rows in (1, 4, 8)]
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def kernels_and_llama_cpp() -> list[str]:
    """Return shares of the machine's limit, and plain speed over llama.cpp's at the same precision."""

    def shares(to: str) -> str:
        steps = [cpu_step("epyc-zen4", "avx512-vnni-bf16", f"{rows} x 1", ("qwen2.5-1.5b", to)) for rows in (1, 4, 8)]
        return ", ".join(f"{100 * step['of_floor']:.0f}" for step in steps) + " %"

    return [
        f"int8 {shares('int8')}, int4 {shares('int4')}",
        f"int8 over Q8_0 {over_llama_cpp('peers-qwen-q8_0-chat-epyc-zen5', 'paceline-int8')} times",
        f"int4 over Q4_K_M {over_llama_cpp('peers-qwen-chat-epyc-zen5', 'paceline-int4')}",
    ]


def pad_and_split() -> list[str]:
    """Return milliseconds of a round under PAD and SPLIT by rows, and how much more arithmetic PAD does."""
    found = load("pad-split-qwen-0.5b-xeon-amx")["results"]
    ms = {way: ", ".join(f"{each['ms'][way]:.1f}" for each in found) for way in ("padded", "split", "native")}
    rows, padded = ", ".join(str(each["rows"]) for each in found), ", ".join(f"{each['padded']:.2f}" for each in found)
    times = f"PAD {ms['padded']}, SPLIT {ms['split']}, the CPU kernels {ms['native']} ms"
    return [f"at {rows} rows", times, f"PAD's attention does {padded} times the arithmetic"]


HEADLINES: dict[str, Worked] = {
    "B1": at_batch_8,
    "B2": lambda: over_plain(1, 4, 8),
    "B3": in_a_budget,
    "B4": utilisations,
    "B5": bass_and_auto,
    "B6": pad_and_split,
    "S1": best_lengths,
    "S2": fitted_lengths,
    "S3": lambda: over_plain(1, 16),
    "S4": varying_traffic,
    "E1": equal_sequences,
    "L1": with_references,
    "A1": over_an_oracle,
    "A2": without_gain,
    "D1": heads_of_ours,
    "D2": parallel,
    "D3": chimera,
    "D4": trees,
    "D5": hidden_transfer_and_short_vocabulary,
    "Q1": kernels_and_llama_cpp,
}


@pytest.mark.parametrize("row", HEADLINES)
def test_what_stands_beside_a_headline_is_what_was_measured(row: str) -> None:
    said = cell(row)
    assert [figure for figure in HEADLINES[row]() if figure not in said] == []


def test_every_headline_has_figures_or_says_that_there_are_none() -> None:
    for row, _, ours, verdict in table("The papers' headlines"):
        assert verdict
        assert (row in HEADLINES) != ("nothing of ours" in ours.lower()), row


def test_every_run_is_the_one_whose_json_lies_there() -> None:
    used = set()
    for rows, command, when, link in table("The runs"):
        found = re.search(r"\]\(\.\./benchmarks/results/([^)]+)\.json\)", link)
        assert found is not None
        used |= set(rows.split(", "))
        written = load(found[1]).get("command")
        if written is not None:
            assert re.sub(r" --output \S+", "", written) == command.strip("`"), found[1]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d, `[0-9a-f]{7}`", when)
    counted = {"calls", "transcript", "methods", "nodes", "files"}
    timed = {
        "peers",
        "edits",
        "separate",
        "open",
        "prefixes",
        "scoring",
        "memory",
        "lines",
        "gemma",
        "hybrid",
        "mixture",
        "steps",
        "gpu",
    }
    assert used == HEADLINES.keys() | counted | timed


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def gpu_round(run: str, rows: int, k: int, **others: Any) -> dict[str, Any]:
    """The cell of a round; others: fields in which it differs from ragged chains at acceptance 0.8."""
    wanted = {"attention": "ragged", "rate": 0.8, "width": 1, "kind": "round", "rows": rows, "k": k} | others
    wanted = {"context": 600} | wanted
    (found,) = [c for c in load(f"gpu-{run}-h200")["cells"] if wanted.items() <= c.items()]
    return dict(found)


def gpu_gain(run: str, rows: int, rate: str = "0.8", context: int = 600) -> str:
    """The best length's tokens per second over plain decoding, and that length."""
    wanted = {"rows": rows, "attention": "ragged", "context": context}
    (found,) = [s for s in load(f"gpu-{run}-h200")["speedups"] if wanted.items() <= s.items()]
    best = found["best"][rate]
    return f"{best['speedup']:.2f} (k = {best['k']})"


def gpu_share(rows: int, k: int) -> str:
    """The target's arithmetic in a round over the GPU's measured rate."""
    run = "gpt-7.8b-bf16"
    operations = 2 * matrix_parameters(PAIRS["gpt-7.8b"].target) * rows * (k + 1)
    rate = operations / (gpu_round(run, rows, k)["ms"] / 1e3)
    return f"{rate / load(f'gpu-{run}-h200')['tflops'] / 1e12:.1%}".replace("%", " %")


def gpu_paper_model() -> list[str]:
    plain, best = (gpu_round("gpt-7.8b-bf16", 8, k) for k in (0, 7))
    ms = best["ms_per_token"]["0.8"]
    return [f"{ms:.2f} ms", f"{8e3 / ms:,.0f} tokens/s", f"plain {plain['ms']:.2f} ms"]


def gpu_attention() -> list[str]:
    cases = load("gpu-attention-h200")["cases"]
    found = []
    for spread in ("equal", "mixed", "one long"):
        (case,) = [c for c in cases if (c["rows"], c["tokens"], c["spread"]) == (8, 8, spread)]
        found.append(f"{spread} {case['over_ragged']['padded']:.2f} and {case['over_ragged']['split']:.2f}")
    llama = "llama-8b-bf16"
    rounds = [gpu_round(llama, 8, k, attention="padded")["ms"] / gpu_round(llama, 8, k)["ms"] for k in (0, 7)]
    return [*found, "{:.2f} and {:.2f}".format(*rounds)]


GPU_HEADLINES: dict[str, Worked] = {
    "B1": gpu_paper_model,
    "B2": lambda: [gpu_gain("gpt-7.8b-bf16", rows) for rows in (1, 8, 32, 64)],
    "B4": lambda: [gpu_share(8, 7), gpu_share(64, 7)],
    "B6": gpu_attention,
}


def test_what_was_measured_on_a_gpu_is_what_stands_there() -> None:
    rows = {row: ours for row, _, ours in table("Headlines that need a GPU")}
    assert rows.keys() <= {row for row, *_ in table("The papers' headlines")}
    for row, ours in rows.items():
        if row in GPU_HEADLINES:
            assert [figure for figure in GPU_HEADLINES[row]() if figure not in ours] == [], row
        else:
            assert ours == "nothing of ours yet", row


def opening_figures() -> list[str]:
    """The figures that the page opens with, each from the run that its section names."""

    def over(ours: Sequence[float], theirs: Sequence[float]) -> str:
        return ", ".join(f"{mine / other:.2f}" for mine, other in zip(ours[:3], theirs, strict=False))

    xeon, zen5, cascade_lake, zen3 = (
        {name: peer_speeds(name, machine) for name in names} for machine, names in OPENING_RUNS.items()
    )
    _, int8, int4 = kernels_and_llama_cpp()
    *won, lost = in_a_budget()
    return [
        f"{over(*(xeon[name] for name in INT8))} times as fast as in OpenVINO GenAI",
        f"{over(*(zen5[name] for name in INT8))} times on a Zen 5",
        f"{over(*(cascade_lake[name] for name in INT8))} times on a Cascade Lake",
        f"{over(*(zen3[name] for name in INT8))} times on a Zen 3",
        f"{over(*(xeon[name] for name in BF16))} times as fast as in vLLM",
        f"{over(*(zen5[name] for name in BF16))} times on the Zen 5",
        int8.replace("over", "over llama.cpp's").replace("Q8_0", "Q8_0 is"),
        int4,
        ", ".join(over_plain(1, 4, 8)).replace("at 1", "at 1 row"),
        ", ".join(gpu_gain("gpt-7.8b-bf16", rows) for rows in (1, 8, 32, 64)),
        f"Of {sum(int(each.split()[0]) for each in equal_sequences())} sequences",
        ", ".join(won),
        lost.replace("on a Zen 4", "on a Zen 4 a loss,").removesuffix(" at n = 8"),
    ]


OPENING_RUNS = {"xeon-amx": (*INT8, *BF16), "epyc-zen5": (*INT8, *BF16), "cascade-lake": INT8, "epyc-zen3": INT8}


def test_the_page_opens_with_figures_of_its_runs() -> None:
    opening = " ".join(PAGE.read_text().split("\nEvery figure on this page")[0].split())
    assert [figure for figure in opening_figures() if figure not in opening] == []


GPU_RUNS = {
    **{
        run: (run.rsplit("-", 1)[1], 600, (8, 1, 32, 64))
        for run in ("llama-8b-bf16", "gpt-7.8b-bf16", "llama-8b-int8", "llama-8b-fp8")
    },
    "llama-8b-bf16-contexts": ("bf16, context of 8000", 8000, (32, 64)),
}


@pytest.mark.parametrize("run", GPU_RUNS)
def test_the_gpu_pages_table_is_what_was_measured(run: str) -> None:
    lines = table_lines(ROOT / "docs" / "gpu.md", "What was measured")
    label, context, sizes = GPU_RUNS[run]
    for rows in sizes:
        plain, gain = gpu_round(run, rows, 0, context=context), gpu_gain(run, rows, context=context)
        figures = f"{plain['ms']:.2f} ms | {plain['of_floor']:.0%} | {gain}".replace("%", " %")
        assert f"| {run.split('b-')[0]}b, {label} | {rows} | {figures} |" in lines


def gpu_autos(run: str, acceptance: float = 0.8) -> dict[int, dict[str, Any]]:
    """The engine with ``auto``, by rows."""
    cells = load(f"gpu-{run}-h200")["cells"]
    return {c["rows"]: c["tokens_a_second"] for c in cells if (c["kind"], c["rate"]) == ("auto", acceptance)}


@pytest.mark.parametrize("acceptance", [0.8, 0.2])
def test_the_gpu_pages_table_of_auto_is_what_was_measured(acceptance: float) -> None:
    lines = table_lines(ROOT / "docs" / "gpu.md", "What was measured")
    runs = gpu_autos("llama-8b-bf16", acceptance) | gpu_autos("llama-8b-bf16-64-rows", acceptance)
    for rows in (1, 8, 32, 64):
        over, first, ahead = (runs[rows][name] for name in ("over_plain", "first_over_plain", "captured"))
        captured = f"{ahead['programs']}, {ahead['seconds']:.1f}, {ahead['bytes'] / 2**20:.0f}"
        assert f"| {rows} | {acceptance} | {over:.2f} | {first:.2f} | {captured} |" in lines


def gpu_words() -> str:
    return " ".join((ROOT / "docs" / "gpu.md").read_text().split())


def test_auto_stands_beside_fixed_lengths_as_measured() -> None:
    older, before, after = (gpu_autos(f"llama-8b-bf16{name}") for name in ("", "-contexts", "-64-rows"))
    int8 = gpu_autos("llama-8b-int8")
    fixed = [run["fixed"] / run["plain"] for run in (after[64], before[32], int8[8], int8[64])]
    words, over = gpu_words(), "over_plain"
    assert f"k = 3 in every round reaches {fixed[0]:.2f} at 64 rows and {fixed[1]:.2f} at 32" in words
    assert f"{before[64][over]:.2f} and {older[64][over]:.2f} times plain decoding in two runs" in words
    assert f"{int8[8][over]:.2f} times plain decoding at 8 rows and {int8[64][over]:.2f} at 64" in words
    assert f"k = 7 and 4 in every round give {fixed[2]:.2f} and {fixed[3]:.2f}" in words
    usual = [max(run[64]["rounds"], key=lambda line: line["rounds"])["k"] for run in (before, after)]  # type: ignore[no-any-return]
    assert usual == [6, 3]


def test_8_bit_products_on_a_gpu_are_as_measured() -> None:
    for to in ("int8", "fp8"):
        for rows in (1, 64, 128, 512):
            cases = [case["us"] for case in load("gpu-products-h200")["cases"] if case["rows"] == rows]
            ways = [f"{to}, our tiles", *([f"{to}, widened"] if rows > 64 else [])]
            over = [min(us[way] for way in ways if way in us) / us["16 bits, torch"] for us in cases]
            assert f"{min(over):.2f} to {max(over):.2f}" in gpu_words(), (to, rows)


def test_what_stands_beside_transformers_on_a_gpu_is_what_was_measured() -> None:
    speeds = {case["rows"]: case["tokens_a_second"] for case in load("gpu-transformers-h200")["cases"]}
    plain, auto = ([speeds[rows][name] / speeds[rows]["transformers"] for rows in (1, 8)] for name in ("plain", "auto"))
    words = gpu_words()
    assert f"{plain[0]:.1f} times as fast at 1 row and {plain[1]:.1f} times at 8" in words
    assert f"`auto` at acceptance 0.8 {auto[0]:.1f} and {auto[1]:.1f} times" in words


def test_the_table_of_deadlines_is_the_committed_run() -> None:
    cells = load("deadlines-smollm2-int8-epyc-zen4")["cells"]
    rows = [
        f"| {c['budget']:g} s | {c['rows']} | {c['prompt']} "
        f"| {c['late_ms_median']:.1f} ms | {c['late_ms_max']:.1f} ms |"
        for c in cells
    ]
    page = (ROOT / "docs" / "serving.md").read_text()
    head = "| budget | rows | prompt tokens | median | latest |"
    table_lines = page.split(head)[1].split("\n\n")[0].splitlines()[2:]
    assert [line.strip() for line in table_lines] == rows
    assert max(c["late_ms_median"] for c in cells) < 10


def test_the_forced_calls_are_the_committed_runs() -> None:
    rows = [cells for cells in table("Tool calls and transcripts") if cells[0].startswith("Qwen")]
    for (label, *cells), size in zip(rows, ("0.5b", "1.5b"), strict=True):
        tools = load(f"forced-calls-qwen-{size}-xeon-amx")["results"].values()
        assert len(tools) == 40
        calls, different, tokens, rounds = (
            sum(tool[what] for tool in tools) for what in ("calls", "different", "tokens", "rounds")
        )
        invalid = sum(len(tool["invalid"]) for tool in tools)
        assert cells == [f"{calls:,}", str(invalid), str(different), f"{tokens / rounds:.2f}"], label
        assert invalid == different == 0


def test_the_transcript_is_the_committed_run() -> None:
    run, text = load("agent-turns-qwen-0.5b-xeon-amx"), text_below("Tool calls and transcripts")
    summary, sides = run["summary"], run["sides"]
    assert summary["answers_equal"]
    (share,) = set(summary["cached_share_after_the_first_turn"].values())
    assert f"{100 * share:.1f} % of the prompts' tokens" in text
    rounds = summary["rounds"]
    assert f"in {rounds['speculative']} rounds instead of {rounds['plain']}" in text
    agents = (ROOT / "docs" / "agents.md").read_text()
    assert f"reduced {rounds['plain']} rounds to {rounds['speculative']}" in agents
    for turn in (1, 2, 5, 10, 15, 20):
        plain, speculative = (sides[name] for name in ("plain", "speculative"))
        ms = [f"{1000 * side['seconds_to_first_token'][turn - 1]:.0f}" for side in (plain, speculative)]
        assert plain["cached_tokens"][turn - 1] == speculative["cached_tokens"][turn - 1]
        cells = [turn, plain["prompt_tokens"][turn - 1], plain["cached_tokens"][turn - 1], *ms]
        assert f"| {' | '.join(map(str, cells))} |" in text


def test_the_decoding_methods_are_the_committed_run() -> None:
    runs = load("decoding-methods-qwen-0.5b-xeon-amx")["results"]
    rows = {method: cells for method, *cells in table("Decoding methods")}
    assert list(rows) == list(runs)
    for method, run in runs.items():
        many = len(run["passed"])
        more = [int(here) - int(there) for here, there in zip(run["passed"], runs["no cut"]["passed"], strict=True)]
        difference = f"{100 * statistics.fmean(more):+.1f} ± {100 * statistics.stdev(more) / many**0.5:.1f}"
        passed = f"{100 * statistics.fmean(run['passed']):.0f} % of {many}"
        rounds = f"{run['tokens'] / run['rounds']:.2f}"
        assert rows[method] == [passed, difference, rounds, str(run["different"])], method
        assert run["different"] == 0


def test_acceptance_by_node_is_the_committed_runs() -> None:
    for node, *cells in table("Acceptance by node of the syntax tree"):
        for run, shown in zip(("", "-0.5b-ngram"), cells, strict=True):
            answers = load(f"node-acceptance-qwen{run}-xeon-amx")["answers"]
            drafted, accepted, error = node_acceptance.share(answers, [node.strip("`")])
            assert shown == f"{100 * accepted:.0f} ± {100 * error:.0f} % of {drafted:,}", (node, run)


def test_the_perplexity_of_file_types_is_the_committed_run() -> None:
    run, rows = load("quality-files-qwen-0.5b-xeon-amx"), rows_of("files", "| file | matrices | ")
    found = {(each["file"].removesuffix(".gguf"), each["precision"]): each for each in run["results"]}
    original, precisions = run["original"].removesuffix(".gguf"), ("bfloat16", "int8", "int4")
    assert {file for file, *_ in rows} == {file for file, _ in found}
    for file, types, *cells in rows:
        counts = sorted(found[file, "bfloat16"]["types"].items(), key=lambda count: -count[1])
        assert types == ", ".join(f"{many} {kind}" for kind, many in counts)
        for precision, shown in zip(precisions, cells, strict=True):
            here = found.get((file, precision))
            if here is None:
                assert shown == "not run"
            elif (file, precision) == (original, "bfloat16"):
                assert shown == f"{here['perplexity']:.2f}"
                assert f"the perplexity there is {shown}." in (ROOT / "docs" / "files.md").read_text()
            else:
                change = f"{100 * here['perplexity_change']:+.2f} ± {100 * here['standard_error']:.2f} %"
                assert shown == change, (file, precision)
    beside = {key: each["perplexity"] / found[key[0], "bfloat16"]["perplexity"] - 1 for key, each in found.items()}
    assert max(abs(change) for (_, to), change in beside.items() if to == "int8") < 0.003
    assert all(0.04 < change < 0.05 for (_, to), change in beside.items() if to == "int4")


# --- docs/cpu.md ------------------------------------------------------------------------------------------------------

CPU_COLUMNS = [(shape, to) for shape in ("qwen2.5-1.5b", "smollm2-135m") for to in ("int8", "int4", "bf16")]


def cpu_rows(head: str) -> list[list[str]]:
    """The cells of the table of docs/cpu.md whose first line begins with ``head``."""
    return rows_of("cpu", head)


def cpu_step(machine: str, kernels: str, step: str, column: tuple[str, str]) -> dict[str, Any]:
    """One measured step. step: "rows x tokens" of the page."""
    rows, tokens = step.split(" x ")
    wanted = (*column, {"1": "decode", "4": "verify 3"}[tokens], int(rows), kernels)
    (found,) = [
        r
        for r in load(f"sets-{machine}")["results"]
        if (r["shape"], r["format"], r["step"], r["rows"], r["kernels"]) == wanted
    ]
    return dict(found)


@pytest.mark.parametrize(
    ("machine", "best", "head"),
    [
        ("epyc-zen4", "avx512-vnni-bf16", "| rows x tokens | Qwen2.5-Coder-1.5B, int8 "),
        ("xeon-amx", "amx", "| Xeon: rows x tokens | Qwen2.5-Coder-1.5B, int8 "),
        ("epyc-zen3", "avx2", "| Zen 3: rows x tokens | Qwen2.5-Coder-1.5B, int8 "),
    ],
)
def test_the_steps_of_the_best_instruction_set_are_the_committed_run(machine: str, best: str, head: str) -> None:
    for step, *cells in cpu_rows(head):
        for column, shown in zip(CPU_COLUMNS, cells, strict=True):
            run = cpu_step(machine, best, step, column)
            limit = "memory" if run["memory_floor_ms"] > run["compute_floor_ms"] else "arithmetic"
            assert shown == f"{run['ms']:.1f} ms, {100 * run['of_floor']:.0f} % {limit}", (step, column)


@pytest.mark.parametrize(
    ("machine", "head"),
    [
        ("epyc-zen4", "| set | rows x tokens | Qwen2.5-Coder-1.5B, int8 "),
        ("xeon-amx", "| Xeon: set | rows x tokens | Qwen2.5-Coder-1.5B, int8 "),
    ],
)
def test_the_other_instruction_sets_are_the_committed_run(machine: str, head: str) -> None:
    for name, step, *cells in cpu_rows(head):
        for column, shown in zip(CPU_COLUMNS, cells, strict=True):
            run = cpu_step(machine, name.strip("`"), step, column)
            assert shown == f"{run['over_best']:.2f}, {100 * run['of_floor']:.0f} %", (name, step, column)


SHAPES = ("kernels-hybrids-xeon-amx", "kernels-models-xeon-amx")


def test_what_precisions_cost_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "cpu.md").read_text()
    for model, name in (("SmolLM2-135M", "smollm2"), ("Qwen2.5-Coder-1.5B", "qwen")):
        whole, *rounded = load(f"quality-{name}-epyc-zen4")["results"]
        cells = [
            f"{100 * each['perplexity_change']:+.2f} %, {100 * each['top_token_agreement']:.1f} %" for each in rounded
        ]
        assert f"| {model} | {whole['perplexity']:.2f} | {' | '.join(cells)} |" in page


def test_hybrids_and_mixtures_beside_their_floors_are_the_committed_runs() -> None:
    """``python -m benchmarks.kernels --table FILE ...`` prints the table."""
    runs = [load(name) for name in SHAPES if (RESULTS / f"{name}.json").exists()]
    page = (ROOT / "docs" / "cpu.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("| model: rows x tokens | ")]
    assert bool(shown) == bool(runs)
    assert not runs or f"\n\n{kernels.table(runs)}\n\n" in page


def test_the_table_of_steps_names_what_sets_the_floor() -> None:
    step = {"shape": "small", "format": "int8", "rows": 8, "tokens": 1, "total_ms": 10.04}
    small = [step | {"memory_floor_ms": 8.0, "compute_floor_ms": 2.0}]
    small += [step | {"tokens": 4, "memory_floor_ms": 8.0, "compute_floor_ms": 9.0}]
    other = [small[0] | {"shape": "other"}]
    assert kernels.table([{"steps": small}, {"steps": other}]).splitlines() == [
        "| model: rows x tokens | 8 x 1 | 8 x 4 |",
        "| --- | --- | --- |",
        "| small, int8 | 10.0 ms, 80 % memory | 10.0 ms, 90 % arithmetic |",
        "| other, int8 | 10.0 ms, 80 % memory | - |",
    ]


@pytest.mark.parametrize(
    ("machine", "head"), [("epyc-zen4", "| set | prompts | 1 row "), ("xeon-amx", "| Xeon: set | prompts | 1 row ")]
)
def test_auto_by_instruction_set_is_the_committed_runs(machine: str, head: str) -> None:
    for name, prompts, *cells in cpu_rows(head):
        runs = load(f"offline-smollm2-ngram-{prompts}-{name.strip('`')}-{machine}")["results"]
        assert cells == [f"{run['speed_up']:.2f}" for run in runs if run["side"] == "speculation"], (name, prompts)


def test_auto_of_the_larger_model_on_avx2_is_the_committed_runs() -> None:
    page = (ROOT / "docs" / "cpu.md").read_text()
    four, eight, before = (
        f"{run['speed_up']:.2f}"
        for machine in ("xeon-amx", "epyc-zen4")
        for run in load(f"offline-qwen-ngram-stubs-avx2-{machine}")["results"]
        if run["side"] == "speculation"
    )
    assert f"64 tokens each, it is {four} at 4 rows and {eight} at 8 on the Xeon" in page
    assert f"Before that rule it was {before} at 8 rows on Zen 4" in page


@pytest.mark.parametrize(
    ("machine", "table"), [("epyc-zen5", "| paceline / llama.cpp "), ("epyc-zen3", "| Zen 3: paceline / llama.cpp ")]
)
def test_the_table_beside_llama_cpp_is_the_committed_run(machine: str, table: str) -> None:
    sides = {"int4 / Q4_K_M": ("qwen", "paceline-int4"), "int8 / Q8_0": ("qwen-q8_0", "paceline-int8")}
    for precision, prompts, mode, *cells in cpu_rows(table):
        pair, ours = sides[precision]
        runs = load(f"peers-{pair}-{prompts}-{machine}")["results"]
        by = {(r["peer"], r["batch"]): r for r in runs if r["mode"] == {"plain": "plain", "n-gram": "ngram"}[mode]}
        for batch, shown in zip((1, 4, 8), cells, strict=True):
            own, peer = (by[name, batch]["tokens_per_s"] for name in (ours, "llamacpp"))
            assert shown == f"{own:.0f} / {peer:.0f}", (precision, prompts, mode, batch)
            assert own > peer
