"""The measured figures of the pages are those of the committed runs, and the runs are honest."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.pages import __main__ as pages
from benchmarks.pages import peers
from benchmarks.pages.runs import RESULTS, load

from benchmarks import kernels

ROOT = Path(__file__).parent.parent
RUNS = sorted(path.stem for path in RESULTS.glob("*.json"))


def named(*beginnings: str) -> list[str]:
    return [run for run in RUNS if run.startswith(beginnings)]


WITH_FIGURES = [page for page in pages.PAGES if "<!-- end -->" in page.read_text()]


@pytest.mark.parametrize("page", WITH_FIGURES, ids=lambda page: page.stem)
def test_the_figures_of_a_page_are_up_to_date(page: Path) -> None:
    assert pages.written_anew(page.read_text()) == page.read_text(), "python -m benchmarks.pages writes it"


@pytest.mark.parametrize("page", WITH_FIGURES, ids=lambda page: page.stem)
def test_every_marker_begins_a_block(page: Path) -> None:
    """A marker with a typing error would leave its figures to be changed by hand."""
    text = page.read_text()
    unmarked = pages.BLOCK.sub("", text)
    assert pages.BLOCK.search(text)
    assert re.findall(r"<!--.*?-->", unmarked) == []


def test_every_run_of_the_list_is_the_one_whose_json_lies_there() -> None:
    lines = [line for line in (ROOT / "docs" / "runs.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(lines) > 80
    for line in lines:
        _, command, when, link = line.strip("| ").split(" | ")
        (run,) = re.findall(r"\]\(\.\./benchmarks/results/([^)]+)\.json\)", link)
        written = load(run).get("command")
        assert written is None or re.sub(r" --output \S+", "", written) == command.strip("`"), run
        assert re.fullmatch(r"\d{4}-\d\d-\d\d, `[0-9a-f]{7}`", when)


# --- honest figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", named("peers-"))
def test_speeds_beside_peers_are_medians_of_seconds_that_were_kept(run: str) -> None:
    cells = [each for each in load(run)["results"] if each["status"] == "ok"]
    assert cells
    for cell in cells:
        seconds = [sample["total_s"] for sample in cell["samples"]]
        tokens = {sample["tokens"] for sample in cell["samples"]}
        assert cell["total_s"] == pytest.approx(statistics.median(seconds), rel=1e-3)
        assert len(tokens) == 1
        assert cell["tokens_per_s"] == pytest.approx(tokens.pop() / statistics.median(seconds), rel=2e-3)
        assert not cell["peer"].startswith("paceline") or cell["rows_equal_plain"] == 1


@pytest.mark.parametrize("machine", ["epyc-zen5", "cascade-lake", "epyc-zen3"])
def test_speeds_that_are_said_to_be_medians_of_three_are(machine: str) -> None:
    """Of each engine's modes the fastest is shown; one that is far behind has one sample."""
    for run in [run for run in named("peers-qwen-int8-", "peers-qwen-bf16-") if run.endswith(machine)]:
        cells = [each for each in load(run)["results"] if each["status"] == "ok" and each["peer"] != "transformers"]
        for peer, batch in {(each["peer"], each["batch"]) for each in cells}:
            sides = [each for each in cells if (each["peer"], each["batch"]) == (peer, batch)]
            assert len(max(sides, key=lambda each: float(each["tokens_per_s"]))["samples"]) == 3, (run, peer, batch)


@pytest.mark.parametrize("run", named("offline-", "auto-wrong-"))
def test_ratios_are_of_three_repeats_of_one_run_or_more(run: str) -> None:
    """Ratio of medians, median of ratios or ratio of sums, as the bench did at the time."""
    results = load(run)["results"]
    plain = {each["batch_size"]: each["decode_seconds_of_all"] for each in results if each["side"] == "plain"}
    for each in results:
        seconds, base = each["decode_seconds_of_all"], plain[each["batch_size"]]
        assert len(seconds) == len(base) >= 3
        ratios = [before / after for before, after in zip(base, seconds, strict=True)]
        medians, sums = ([reduce(side) for side in (base, seconds)] for reduce in (statistics.median, sum))
        kinds = medians[0] / medians[1], statistics.median(ratios), sums[0] / sums[1]
        assert min(abs(each["speed_up"] / kind - 1) for kind in kinds) < 1e-6


def test_synthetic_acceptance_is_named_in_the_runs_and_beside_their_figures() -> None:
    synthetic = named("acceptance-", "gpu-llama", "gpu-gpt", "gpu-transformers")
    assert {load(run)["acceptance"] for run in synthetic} == {"synthetic"}
    page = (ROOT / "docs" / "results.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        if re.search(r"synthetic\.(hybrid|mixture) |gpu\.headlines|phases-", section):
            assert "synthetic" in section.replace("synthetic.", "")
    assert "**acceptance is synthetic**" in (ROOT / "docs" / "gpu.md").read_text()


def forced_calls(run: dict[str, Any]) -> bool:
    tools = run["results"].values()
    return len(tools) == 40 and not any(tool["invalid"] or tool["different"] for tool in tools)


def equal_training(run: dict[str, Any]) -> bool:
    trained = [each["training"] for each in run["results"].values() if "training" in each]
    tokens = {each["data"]["tokens_made"] for each in trained}
    by_epochs = run["settings"]["minutes"] is None  # processor time is only known afterwards
    times = [each["cpu_seconds" if by_epochs else "minutes"] for each in trained]
    return bool(max(times) < (1.2 if by_epochs else 1.02) * min(times)) and len(tokens) == 1


def nine_repeats(run: dict[str, Any]) -> bool:
    return {len(each["decode_seconds_of_all"]) for each in run["results"]} == {9}


def rounding_costs(run: dict[str, Any]) -> bool:
    """int8 costs at most 0.3 %, int4 4 to 5 %, beside the same file in bfloat16."""
    perplexity = {(each["file"], each["precision"]): each["perplexity"] for each in run["results"]}
    change = {key: value / perplexity[key[0], "bfloat16"] - 1 for key, value in perplexity.items()}
    int8, int4 = ([value for (_, to), value in change.items() if to == precision] for precision in ("int8", "int4"))
    return bool(max(map(abs, int8)) < 0.003 and 0.04 < min(int4) <= max(int4) < 0.05)


HOLDS: dict[str, Callable[[dict[str, Any]], bool]] = {  # what the pages say of runs beside their figures
    "bits-": lambda run: all(each["equal"] == each["sequences"] for each in run["outcomes"]),
    "humaneval-": lambda run: (
        run["texts_changed_by_speculation"] == 0
        and {each["problems"] for each in run["results"]} == {len(run["problems"])}
    ),
    "batch-killed-": lambda run: run["answered"] == run["lines"] == 1000 and not run["different_answers"],
    "served-batch-killed-": lambda run: run["answered"] == run["lines"] == 1000 and not run["different_answers"],
    "memory-rows-": lambda run: run["answers"] == load("memory-rows-before-epyc-zen4")["answers"],
    "prefixes-": lambda run: all(run[kind]["answers_and_logprobs_equal"] for kind in ("chat", "document")),
    "scoring-": lambda run: run["equal"] and run["texts"] == 500 and run["repeats"] >= 3,
    "forced-calls-": forced_calls,
    "agent-turns-": lambda run: (
        run["summary"]["answers_equal"]
        and run["sides"]["plain"]["cached_tokens"] == run["sides"]["speculative"]["cached_tokens"]
    ),
    "decoding-methods-": lambda run: not any(each["different"] for each in run["results"].values()),
    "references-edits-": lambda run: all(len(each["seconds_of_all"]) >= 3 for each in run["results"]),
    "references-answers-": lambda run: len({each["tokens"] for each in run["results"]}) == 1,
    "references-separate-": lambda run: (
        run["prompt_tokens"] == [286]
        and all((len(each["seconds_of_all"]), each["tokens"]) == (3, 8 * 48) for each in run["results"])
    ),
    "state-memory-": lambda run: all(
        abs(each["planned"] / each["resident"] - 1) < 0.03 and each["saved"] == (each["rows"] + 1) * 20201472
        for each in run["results"]
    ),
    "acceptance-qwen3.5-": lambda run: run["rates"] == [0.82],
    "acceptance-qwen3-30b-": lambda run: (run["rates"], run["drafter"]) == ([0.8], "free"),
    "offline-smollm2-int8-open-": nine_repeats,
    "offline-smollm2-ngram-open-epyc-zen5": nine_repeats,
    "quality-files-": rounding_costs,
    "deadlines-": lambda run: max(each["late_ms_median"] for each in run["cells"]) < 10,
    "related-drafters-": equal_training,
    "peers-qwen-chat-": lambda run: ahead_of_llama_cpp(run, "paceline-int4"),
    "peers-qwen-q8_0-": lambda run: ahead_of_llama_cpp(run, "paceline-int8"),
}


def ahead_of_llama_cpp(run: dict[str, Any], ours: str) -> bool:
    speeds = {(each["peer"], each["mode"], each["batch"]): each["tokens_per_s"] for each in run["results"]}
    return all(
        speeds[ours, mode, batch] > speeds["llamacpp", mode, batch]
        for mode in ("plain", "ngram")
        for batch in peers.BATCHES
    )


@pytest.mark.parametrize("kind", HOLDS)
def test_what_is_said_of_a_kind_of_run_holds(kind: str) -> None:
    assert named(kind)
    assert [run for run in named(kind) if not HOLDS[kind](load(run))] == []


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
