"""Tables of runs of ``benchmarks.peers``: paceline beside other engines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pages.runs import RESULTS, Rows, Text, load, ratios

MACHINES = {"xeon-amx": "Xeon with AMX", "epyc-zen5": "Zen 5", "cascade-lake": "Cascade Lake", "epyc-zen3": "Zen 3"}
BATCHES = 1, 4, 8
_ANY = "plain", "ngram", "draft"
_PLAIN, _OURS, _OPENVINO = "paceline, int8, plain", "**paceline, int8, `auto`**", "OpenVINO GenAI, int8"
_SIDES = {  # label: precision of the run, peer, its modes, of which the fastest counts
    _PLAIN: ("int8", "paceline-int8", ["plain"]),
    _OURS: ("int8", "paceline-int8", ["ngram", "draft"]),
    _OPENVINO: ("int8", "openvino", _ANY),
    "paceline, bf16, plain": ("bf16", "paceline-bf16", ["plain"]),
    "**paceline, bf16, `auto`**": ("bf16", "paceline-bf16", ["ngram"]),
    "vLLM, bf16": ("bf16", "vllm", _ANY),
}


def speed(run: str, peer: str, modes: Sequence[str], batch: int) -> float:
    """Tokens per second in the best of some modes."""
    cells = [each for each in load(run)["results"] if (each["peer"], each["batch"]) == (peer, batch)]
    return max(float(each["tokens_per_s"]) for each in cells if each["status"] == "ok" and each["mode"] in modes)


def cell(run: str, peer: str, mode: str, batch: int) -> dict[str, Any]:
    """What was measured of one mode at one batch size."""
    wanted = {"peer": peer, "mode": mode, "batch": batch}
    (found,) = [each for each in load(run)["results"] if wanted.items() <= each.items()]
    return dict(found)


def side(
    label: str, machine: str, sets: Sequence[str] = ("stubs", "chat"), batches: Sequence[int] = BATCHES
) -> list[float]:
    """Tokens per second of an engine on each set of prompts, at each batch size."""
    precision, peer, modes = _SIDES[label]
    return [speed(f"peers-qwen-{precision}-{prompts}-{machine}", peer, modes, n) for prompts in sets for n in batches]


def over_openvino(machine: str) -> list[float]:
    """Speed of ``auto`` over OpenVINO's, both in int8."""
    return [ours / theirs for ours, theirs in zip(side(_OURS, machine), side(_OPENVINO, machine), strict=True)]


def over_plain(machine: str, sets: Sequence[str] = ("stubs", "chat"), batches: Sequence[int] = BATCHES) -> list[str]:
    """Speed of ``auto`` over plain decoding's, both in int8."""
    return ratios(side(_OURS, machine, sets, batches), side(_PLAIN, machine, sets, batches))


def over_llama_cpp(run: str, ours: str) -> list[str]:
    """Speed of plain decoding over llama.cpp's."""
    own, theirs = ([speed(run, peer, ["plain"], batch) for batch in BATCHES] for peer in (ours, "llamacpp"))
    return ratios(own, theirs)


def _machines_with(precision: str) -> list[str]:
    return [each for each in MACHINES if (RESULTS / f"peers-qwen-{precision}-stubs-{each}.json").exists()]


def speeds(machine: str) -> Rows:
    """Tokens per second of all engines on a machine."""
    precisions = [to for to in ("int8", "bf16") if machine in _machines_with(to)]
    labels = [label for label, (precision, *_) in _SIDES.items() if precision in precisions]
    marks = {label: "**" if label.startswith("**") else "" for label in labels}
    return [[label, *(f"{marks[label]}{n:.0f}{marks[label]}" for n in side(label, machine))] for label in labels]


def summary() -> Iterator[list[str]]:
    """Speed of ``auto`` over other engines and over plain decoding, by machine; of plain decoding over llama.cpp."""
    for label, precision in ((_OPENVINO, "int8"), ("vLLM, bf16", "bf16")):
        for machine in _machines_with(precision):
            ours = side(f"**paceline, {precision}, `auto`**", machine)
            yield [f"`auto` over {label}", MACHINES[machine], *ratios(ours, side(label, machine))]
    for machine in _machines_with("int8"):
        yield ["`auto` over plain decoding, int8", MACHINES[machine], *over_plain(machine)]
    for pair, peer, label in (
        ("qwen-q8_0", "paceline-int8", "int8 over llama.cpp's Q8_0"),
        ("qwen", "paceline-int4", "int4 over llama.cpp's Q4_K_M"),
    ):
        for machine in ("epyc-zen5", "epyc-zen3"):
            runs = [f"peers-{pair}-{prompts}-{machine}" for prompts in ("stubs", "chat")]
            known = [over_llama_cpp(run, peer) if (RESULTS / f"{run}.json").exists() else ["-"] * 3 for run in runs]
            yield [f"plain, {label}", MACHINES[machine], *known[0], *known[1]]


def older_processors() -> Text:
    """Sentences of the README."""
    words = {
        "xeon-amx": "On a Xeon with AMX, in int8, `auto` is",
        "cascade-lake": "On a Cascade Lake, which has VNNI but no AMX, it is",
        "epyc-zen3": "On a Zen 3, which has only AVX2, it is",
    }
    over = {machine: over_openvino(machine) for machine in words}
    return [
        f"{begin} {min(over[machine]):.1f} to {max(over[machine]):.1f} times as fast as OpenVINO."
        for machine, begin in words.items()
    ]


def more_on_the_zen5() -> Rows:
    """Edits, 16 rows, and transformers."""
    edits = [side(label, "epyc-zen5", ["edits"]) for label in (_PLAIN, _OURS, _OPENVINO)]
    stubs = [side(label, "epyc-zen5", ["stubs"], (*BATCHES, 16)) for label in (_PLAIN, _OURS, _OPENVINO)]
    run = "peers-qwen-bf16-transformers-epyc-zen5"
    ours, theirs = (
        [speed(run, peer, modes, batch) for batch in BATCHES]
        for peer, modes in (("paceline-bf16", ("ngram", "draft")), ("transformers", _ANY))
    )
    rows = [
        *([f"edits, {label}", *(f"{n:.0f}" for n in one), "-"] for label, one in zip(_SIDES, edits, strict=False)),
        ["edits, `auto` over OpenVINO GenAI", *ratios(edits[1], edits[2]), "-"],
        *([f"stubs, {label}", *(f"{n:.0f}" for n in one)] for label, one in zip(_SIDES, stubs, strict=False)),
        ["stubs, paceline, bf16, `auto`, beside transformers", *(f"{n:.0f}" for n in ours), "-"],
        ["stubs, transformers, bf16", *(f"{n:.0f}" for n in theirs), "-"],
        ["stubs, `auto` over transformers", *ratios(ours, theirs), "-"],
    ]
    return [[cells[0].replace("**", ""), *cells[1:]] for cells in rows]


def losses_on_the_zen3() -> Text:
    """Where speculation loses on a Zen 3, and whether drafts are the reason."""
    stubs, chat = (f"peers-qwen-int8-{prompts}-epyc-zen3" for prompts in ("stubs", "chat"))
    drafted = {
        run: [
            sample["drafted"]
            for mode in modes
            for batch in (4, 8)
            for sample in cell(run, "paceline-int8", mode, batch)["samples"]
        ]
        for run, modes in ((stubs, ["draft"]), (chat, ["ngram", "draft"]))
    }
    lookup = cell(stubs, "paceline-int8", "ngram", 8)
    over = lookup["tokens_per_s"] / speed(stubs, "paceline-int8", ["plain"], 8)
    plain = [[sample["total_s"] for sample in cell(chat, "paceline-int8", "plain", n)["samples"]] for n in BATCHES]
    spread = max(max(each) / min(each) - 1 for each in plain)
    return [
        f"Beside the draft model `auto` made {max(drafted[stubs])} draft tokens at 4 and 8 rows of stubs,",
        f"and at most {max(drafted[chat])} in 64 rounds of chat: ratios below 1 there are the machine's.",
        f"The samples of plain decoding in chat differ by up to {100 * spread:.0f} %.",
        f"n-gram lookup alone has {over:.2f} of plain decoding's speed at 8 rows of stubs: **a loss**,",
        f"with {lookup['acceptance']:.2f} of its draft tokens accepted,",
        "because a draft token costs more there than a plain one's share of a round.",
    ]


def earlier_samples() -> Rows:
    """Single samples of stubs on a Zen 3."""
    rows = []
    for run in (f"peers-qwen-int8-stubs-epyc-zen3-{n}" for n in (1, 2)):
        plain, ours, theirs = (
            [speed(run, peer, modes, batch) for batch in BATCHES] for _, peer, modes in list(_SIDES.values())[:3]
        )
        rows.append([load(run)["date"][:10], *ratios(ours, theirs), *ratios(ours, plain)])
    return rows


def long_prompts() -> Text:
    """One row of a long prompt on a Zen 3."""
    run = "peers-qwen-int8-project-epyc-zen3"
    ours, theirs = (cell(run, peer, "ngram", 1) for peer in ("paceline-int8", "openvino"))
    (tokens,) = load(run)["settings"]["prompt_tokens"]
    first, rest = (
        [statistics.median(sample[part] for sample in each["samples"]) for each in (ours, theirs)]
        for part in ("prefill_s", "decode_s")
    )
    return [
        f"An edit behind 19 other programs, {tokens:,} tokens, at one row, with n-gram lookup in both:",
        f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} times as fast as OpenVINO GenAI.",
        f"The first token comes after {first[0]:.1f} seconds instead of {first[1]:.1f},",
        f"and the other 63 take {rest[0]:.1f} instead of {rest[1]:.1f}.",
    ]


_MODELS = {
    "gemma3": {
        "paceline, int8, plain": ("paceline-int8", "plain"),
        "paceline, int8, n-gram, `auto`": ("paceline-int8", "ngram"),
        "OpenVINO GenAI, int8, plain": ("openvino", "plain"),
        "OpenVINO GenAI, int8, n-gram": ("openvino", "ngram"),
        "transformers, bf16": ("transformers", "plain"),
    },
    "random-qwen3.5": {
        "paceline, int8": ("paceline-int8", "plain"),
        "paceline, bf16": ("paceline-bf16", "plain"),
        "transformers, bf16": ("transformers", "plain"),
    },
}


def model(pair: str) -> Rows:
    """Tokens per second of another model on a Xeon with AMX."""
    run = f"peers-{pair}-xeon-amx"
    batches = load(run)["settings"]["batches"]
    return [
        [label, *(f"{speed(run, peer, [mode], batch):.0f}" for batch in batches)]
        for label, (peer, mode) in _MODELS[pair].items()
    ]


def llama_cpp(machine: str) -> Rows:
    """Tokens per second beside llama.cpp's."""
    rows = []
    for label, pair, ours in (
        ("int4 / Q4_K_M", "qwen", "paceline-int4"),
        ("int8 / Q8_0", "qwen-q8_0", "paceline-int8"),
    ):
        for prompts in ("stubs", "chat"):
            run = f"peers-{pair}-{prompts}-{machine}"
            if (RESULTS / f"{run}.json").exists():
                for shown, mode in (("plain", "plain"), ("n-gram", "ngram")):
                    sides = ([speed(run, peer, [mode], n) for peer in (ours, "llamacpp")] for n in BATCHES)
                    rows.append([label, prompts, shown, *("{:.0f} / {:.0f}".format(*each) for each in sides)])
    return rows


def at_batch_8() -> str:
    """Milliseconds per token of a sequence and tokens per second, eight rows of stubs on a Zen 5."""
    (tokens,) = side(_OURS, "epyc-zen5", ["stubs"], [8])
    return f"{8000 / tokens:.0f} ms per token of a sequence, {tokens:.0f} tokens/s"


def llama_cpp_in_chat() -> list[str]:
    """Plain decoding in chat over llama.cpp's on a Zen 5: int8 over Q8_0, int4 over Q4_K_M."""
    runs = ("peers-qwen-q8_0-chat-epyc-zen5", "paceline-int8"), ("peers-qwen-chat-epyc-zen5", "paceline-int4")
    return [", ".join(over_llama_cpp(run, ours)) for run, ours in runs]
