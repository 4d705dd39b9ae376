"""Tables of runs over kinds of work: edits, prefixes, files of lines, tool calls, decoding methods."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from benchmarks.pages.runs import Text, load, percent, side


def edits() -> Iterator[list[str]]:
    """Copying from the prompt or from a reference."""
    for rows in (1, 4, 8):
        run = load(f"references-edits-qwen-{rows}-row{'s' * (rows > 1)}-epyc-zen4")["results"]
        for name, label in (
            ("lookup", "the prompt, which contains the original"),
            ("references", "the original as reference"),
        ):
            (each,) = [one for one in run if one["side"] == name]
            rounds, accepted = f"{each['tokens_a_round']:.1f}", percent(each["acceptance_rate"])
            over = [f"{each[what]:.1f}x" for what in ("speed_up", "speed_up_decoding")]
            yield [label, str(rows), rounds, accepted, *over]


def samples() -> Iterator[list[str]]:
    """Eight samples of one prompt beside eight requests."""
    run = {each["side"]: each for each in load("references-separate-qwen-epyc-zen4")["results"]}
    words = {", reading all": ", no prefix cache", ", copying what was read": ", prefix cache"}
    for name, each in run.items():
        label = "`n = 8`" if name == "n = 8" else name
        for old, new in words.items():
            label = label.replace(old, new)
        yield [label, f"{each['seconds']:.1f}"]


def open_questions() -> Iterator[list[str]]:
    """Speed of ``auto`` over plain decoding on a Zen 4 and a Zen 5."""
    for rows in (1, 2, 4, 8, 16):
        runs = "offline-smollm2-int8-open-epyc-zen4", "offline-smollm2-ngram-open-epyc-zen5"
        yield [str(rows), *(f"{side(run, 'speculation', rows)['speed_up']:.2f}" for run in runs)]


def prefixes() -> Iterator[list[str]]:
    """Milliseconds to the first token without and with the prefix cache: the median of all prompts but the first."""
    run = load("prefixes-smollm2-int8-epyc-zen4")
    for kind, label in (
        ("chat", "a chat of 12 turns"),
        ("document", "30 questions on one document of 2,000 tokens"),
    ):
        cells = []
        for name in ("read anew", "reused"):
            prompts = [statistics.median(prompt) for prompt in zip(*run[kind]["seconds"][name], strict=True)]
            cells.append(f"{1000 * statistics.median(prompts[1:]):.0f}")
        yield [label, *cells]


def scoring() -> Text:
    """Scores of texts that share a prefix."""
    seconds = load("scoring-smollm2-int8-epyc-zen4")["seconds"]
    return [f"It takes {seconds['one by one']:.0f} seconds text by text, {seconds['shared']:.1f} together."]


def memory() -> Text:
    """Resident memory of rows."""
    before, after = (
        load(f"memory-rows-{when}-epyc-zen4")["resident_bytes_of_rows"] / 1e9 for when in ("before", "after")
    )
    return [
        "Resident memory of caches and workspace was",
        f"**{before:.2f} GB before rows took the memory that they use, {after:.2f} GB since**",
        "(commits `1a9d469`, `3174188`; the answers are the same).",
    ]


def killed() -> Iterator[list[str]]:
    """Batches of lines that were killed and resumed."""
    for label, name in (
        ("`paceline batch`", "batch-killed-smollm2-epyc-zen4"),
        ("`/v1/files` and `/v1/batches`", "served-batch-killed-smollm2-epyc-zen4"),
    ):
        run = load(name)
        resident = [*run["resident_bytes_by_tenths"], *run.get("resident_bytes_by_tenths_killed", [])]
        memory = f"{min(resident) / 1e6:.0f} to {max(resident) / 1e6:.0f} MB"
        counts = [
            f"{run['lines']:,}",
            str(len(run["killed_at"])),
            f"{run['answered']:,}",
            str(run["different_answers"]),
        ]
        yield [label, *counts, memory]


def forced_calls() -> Iterator[list[str]]:
    """Forced calls of tools."""
    for size, label in (
        ("0.5b", "Qwen2.5-Coder-0.5B, n-gram"),
        ("1.5b", "Qwen2.5-Coder-1.5B, n-gram or the 0.5B"),
    ):
        tools = load(f"forced-calls-qwen-{size}-xeon-amx")["results"].values()
        calls, different, tokens, rounds = (
            sum(tool[what] for tool in tools) for what in ("calls", "different", "tokens", "rounds")
        )
        invalid = sum(len(tool["invalid"]) for tool in tools)
        yield [label, f"{calls:,}", str(invalid), str(different), f"{tokens / rounds:.2f}"]


_TRANSCRIPT = "agent-turns-qwen-0.5b-xeon-amx"


def transcript() -> Iterator[list[str]]:
    """Milliseconds to the first token in an agent's transcript."""
    plain, speculative = (load(_TRANSCRIPT)["sides"][name] for name in ("plain", "speculative"))
    for turn in (1, 2, 5, 10, 15, 20):
        ms = [f"{1000 * each['seconds_to_first_token'][turn - 1]:.0f}" for each in (plain, speculative)]
        yield [str(turn), *(str(plain[what][turn - 1]) for what in ("prompt_tokens", "cached_tokens")), *ms]


def transcript_in_all() -> Text:
    """The share of prompts from the cache, and the rounds."""
    summary = load(_TRANSCRIPT)["summary"]
    (share,) = set(summary["cached_share_after_the_first_turn"].values())
    rounds = summary["rounds"]
    return [
        f"After the first turn {100 * share:.1f} % of the prompts' tokens come from the cache,",
        "with speculation and without.",
        f"The answers are equal, in {rounds['speculative']} rounds instead of {rounds['plain']}.",
    ]


def decoding_methods() -> Iterator[list[str]]:
    """Problems solved by decoding method, and by how many points more than without a cut."""
    runs = load("decoding-methods-qwen-0.5b-xeon-amx")["results"]
    for method, run in runs.items():
        passed = run["passed"]
        more = [int(here) - int(there) for here, there in zip(passed, runs["no cut"]["passed"], strict=True)]
        error = 100 * statistics.stdev(more) / len(passed) ** 0.5
        yield [
            method,
            f"{100 * statistics.fmean(passed):.0f} % of {len(passed)}",
            f"{100 * statistics.fmean(more):+.1f} ± {error:.1f}",
            f"{run['tokens'] / run['rounds']:.2f}",
            str(run["different"]),
        ]


def nodes() -> Iterator[list[str]]:
    """Acceptance by node of the syntax tree, of the twelve nodes with most draft tokens of the draft model."""
    from benchmarks import node_acceptance

    runs = [load(f"node-acceptance-qwen{run}-xeon-amx")["answers"] for run in ("", "-0.5b-ngram")]
    drafted: Counter[str] = Counter()
    for answer in runs[0]:
        drafted.update({node: counts[0] for node, counts in answer.items()})
    for node, _ in drafted.most_common(12):
        shares = [node_acceptance.share(answers, [node]) for answers in runs]
        yield [f"`{node}`", *(f"{100 * accepted:.0f} ± {100 * error:.0f} % of {n:,}" for n, accepted, error in shares)]


def deadlines() -> Iterator[list[str]]:
    """How much later than its budget a call returned."""
    for each in load("deadlines-smollm2-int8-epyc-zen4")["cells"]:
        late = [f"{each[what]:.1f} ms" for what in ("late_ms_median", "late_ms_max")]
        yield [f"{each['budget']:g} s", str(each["rows"]), str(each["prompt"]), *late]


def servers() -> Iterator[list[str]]:
    """Requests per second and milliseconds between tokens of servers, by clients."""
    contenders = load("serve-smollm2-xeon-amx")["contenders"]
    for loads in zip(*(contender["loads"] for contender in contenders), strict=True):
        cells = [f"{each['requests_per_s']:.1f}, {each['itl_ms_p50']:.1f} ms" for each in loads]
        yield [str(loads[0]["clients"]), *cells]


def file_types() -> Iterator[list[str]]:
    """Change of perplexity by type of GGUF file and precision."""
    run = load("quality-files-qwen-0.5b-xeon-amx")
    found = {(each["file"], each["precision"]): each for each in run["results"]}
    for file in dict.fromkeys(file for file, _ in found):
        counts = sorted(found[file, "bfloat16"]["types"].items(), key=lambda count: -count[1])
        cells = []
        for precision in ("bfloat16", "int8", "int4"):
            here = found.get((file, precision))
            if here is None:
                cells.append("not run")
            elif (file, precision) == (run["original"], "bfloat16"):
                cells.append(f"{here['perplexity']:.2f}")
            else:
                cells.append(f"{100 * here['perplexity_change']:+.2f} ± {100 * here['standard_error']:.2f} %")
        yield [file.removesuffix(".gguf"), ", ".join(f"{many} {kind}" for kind, many in counts), *cells]
