"""What stands beside the headlines of the papers, and what the page of results opens with."""

from __future__ import annotations

from benchmarks.pages import cpu, drafters, gpu, humaneval, peers
from benchmarks.pages.runs import Text, listed, load, percent, side

_SMALL = "offline-qwen-int8-small-epyc-zen4"
_MULTIPLY_ADDS = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960) + 151936 * 1536  # Qwen 1.5B: layers, head
_TRAINED = "after 45 minutes of training on one core ([the table](training.md#which-kind), SmolLM2 in int8, Zen 3):"


def opening() -> Text:
    """What the page opens with beside its first table."""
    *zen5, zen4 = humaneval.in_a_budget()
    runs = [each for name in ("smollm2", "qwen") for each in load(f"bits-{name}-xeon-amx")["outcomes"]]
    compared, equal = (sum(each[what] for each in runs) for what in ("sequences", "equal"))
    return [
        "* On an H200, a model of BASS's size with random weights and synthetic acceptance gains",
        f"  {gpu.gains()} times at 1, 8, 32, 64 rows.",
        f"* Of {compared} sequences compared with plain decoding, {equal} are equal.",
        f"* HumanEval in limited time on a Zen 5: {', '.join(zen5)};",
        f"  on a Zen 4 a loss, {zen4}.",
    ]


def ours() -> dict[str, str]:
    """Our figures by headline."""
    batches = 1, 4, 8, 16
    at = dict(zip(batches, peers.over_plain("epyc-zen5", ["stubs"], batches), strict=True))
    solved = humaneval.in_a_budget()
    return {
        "B1": f"batch 8, `auto` with n-gram lookup, prefill included, Zen 5: {peers.at_batch_8()}",
        "B2": f"{at[1]} at 1, {at[4]} at 4, {at[8]} at 8 (code stubs, Zen 5)",
        "B3": "at the budget at which plain decoding has half of its unlimited Pass@First, plain to `auto`, Zen 5:"
        f" {', '.join(solved[:3])}; on a Zen 4 {solved[3]}",
        "B4": _utilisation(),
        "B5": _length_policies(),
        "B6": _pad_and_split(),
        "S1": f"{listed(load('profile-qwen-int8-epyc-zen4')['best'].values(), 'd')} at 1, 2, 4, 8, 16",
        "S2": _fitted_lengths(),
        "S3": f"{at[1]} at 1, {at[16]} at 16 (as B2); 32 was not measured",
        "S4": _traffic(),
        "E1": _equal_sequences(),
        "E2": "nothing of ours to measure: a round moves no row's keys and values",
        "L1": _with_references(),
        "A1": _over_an_oracle(),
        "A2": _wrong_drafts(),
        "D1": drafters.heads(),
        "D2": f"a parallel head {_TRAINED} {drafters.related('parallel')}."
        f" A head that reads its own draft tokens: {drafters.related('feature')}",
        "D3": f"a head of its kind {_TRAINED} {drafters.related('chimera')}."
        f" n-gram lookup: {drafters.related('ngram')}",
        "D4": drafters.trees(),
        "D5": f"hidden transfer {_TRAINED} {drafters.related('hidden_transfer')}. {drafters.short_vocabulary()}",
        "Q1": _kernels(),
    }


def _equal_sequences() -> str:
    runs = [load(f"bits-{name}-xeon-amx")["outcomes"] for name in ("smollm2", "qwen")]
    counts = [f"{sum(each['equal'] for each in run)} of {sum(each['sequences'] for each in run)}" for run in runs]
    return f"equal to plain decoding: {' and '.join(counts)} sequences (SmolLM2; the Qwen pair)"


def _utilisation() -> str:
    runs = {1: _SMALL, 4: _SMALL, 8: "offline-qwen-int8-large-epyc-zen4"}
    peak = 2 * load("kernels-qwen-epyc-zen4")["machine"]["gmac_s"]["int8"] * 1e9
    plain, auto = (
        listed(
            [200 * _MULTIPLY_ADDS * side(run, name, n)["tokens_per_second"] / peak for n, run in runs.items()], ".0f"
        )
        for name in ("plain", "k=auto")
    )
    return (
        f"batch 1, 4, 8: plain {plain} %, `auto` {auto} % of {peak / 1e12:.2f} TOP/s"
        " (int8 kernels on weights in the cache, measured in another run)"
    )


def _length_policies() -> str:
    run = "offline-qwen-int8-small-epyc-zen5"
    bass, auto = (listed(side(run, f"k={name}", n)["speed_up"] for n in (1, 2, 4, 8)) for name in ("bass", "auto"))
    four, one = side(run, "k=4", 4)["speed_up"], side(run, "k=1", 8)["speed_up"]
    return (
        f"over plain at batch 1, 2, 4, 8: `bass` {bass}; `auto` {auto};"
        f" the best fixed length at 4 and 8, four draft tokens and one, {four:.2f} and {one:.2f} (the Qwen pair, Zen 5)"
    )


def _pad_and_split() -> str:
    found = load("pad-split-qwen-0.5b-xeon-amx")["results"]
    padded, split, native = (
        listed([each["ms"][way] for each in found], ".1f") for way in ("padded", "split", "native")
    )
    return (
        f"at {listed([each['rows'] for each in found], 'd')} rows of HumanEval's lengths,"
        f" a round of three draft tokens: PAD {padded}, SPLIT {split}, the CPU kernels {native} ms;"
        f" PAD's attention does {listed(each['padded'] for each in found)} times the arithmetic"
        " (Qwen2.5-Coder-0.5B in bfloat16, PAD and SPLIT in torch, Xeon with AMX)"
    )


def _fitted_lengths() -> str:
    run = load("profile-qwen-int8-epyc-zen4")
    times = {(point["batch_size"], point["k"]): point["ms_per_token"] for point in run["sweep"]}
    fitted = {int(size): k for size, k in run["fit"]["optimum"].items()}
    longer = max(times[size, k] / times[size, run["best"][str(size)]] - 1 for size, k in fitted.items())
    return (
        f"its best k is {listed(fitted.values(), 'd')}; rounds off by {percent(run['fit']['error'], 1)} on average;"
        f" what it chooses takes at most {percent(longer)} longer than the best k"
    )


def _traffic() -> str:
    traces = "steady", "busy", "varying"
    here = [load("traffic-smollm2-int8-xeon-amx")["summary"][trace] for trace in traces]
    if {each["best_fixed"] for each in here} != {"fixed 2"}:
        raise ValueError("another fixed length is the best one now: the sentence has to say which")
    fixed, plain = (listed(each["auto_over"][policy] for each in here) for policy in ("fixed 2", "plain"))
    http = [load("traffic-http-smollm2-int8-epyc-zen4")["compared"]["mean_latency_over"][trace] for trace in traces]
    best = [max((over[k], k) for k in over if k.startswith("fixed") or k == "plain") for over in http]
    lengths = [name.removeprefix("fixed") for _, name in best]
    return (
        "SmolLM2 in int8, n-gram, Xeon with AMX: mean latency of `auto` in steady, dense and varying traffic"
        f" {fixed} of the best fixed length's, which is two draft tokens in each, and {plain} of plain decoding's;"
        f" over HTTP on a Zen 4 {listed(ratio for ratio, _ in best)}"
        f" (the best are {lengths[0]}, {lengths[1]} and {lengths[2]} draft tokens)"
        f" and {listed(over['plain'] for over in http)}"
    )


def _with_references() -> str:
    found = load("references-edits-qwen-1-row-epyc-zen4")["results"][-1]
    over, alone = found["speed_up"], found["speed_up_decoding"]
    return f"edits, one row: {over:.1f} times with prefill, decoding alone {alone:.1f}"


def _wrong_drafts() -> str:
    slower = []
    for name in ("smollm2", "qwen"):
        run = f"auto-wrong-{name}-int8-xeon-amx"
        sizes = sorted({each["batch_size"] for each in load(run)["results"]})
        slower.append(listed([100 / side(run, "k=auto, wrong drafts", n)["speed_up"] - 100 for n in sizes], "+.1f"))
    return (
        "`auto` where every draft token is wrong (`--wrong-drafts`), open questions, Xeon with AMX: rounds at"
        f" {listed(sizes, 'd')} rows take, in percent more than plain decoding's,"
        f" SmolLM2 with n-gram {slower[0]}, the Qwen pair {slower[1]}"
    )


def _over_an_oracle() -> str:
    over = load("phases-smollm2-int8-epyc-zen4")["over_oracle"]
    fixed = min(over[k] for k in over if k.isdigit())
    return (
        "SmolLM2 in int8, phases with **synthetic acceptance**, Zen 4:"
        f" `auto` takes {over['auto']:.2f} of an oracle's time, the best fixed length {fixed:.2f},"
        f" `bass` {over['bass']:.2f}"
    )


def _kernels() -> str:
    q8, q4 = peers.llama_cpp_in_chat()
    return (
        "a step of Qwen2.5-Coder-1.5B's shapes at 1, 4, 8 rows, share of the machine's own limit:"
        f" int8 {cpu.shares_of_limit('int8')}, int4 {cpu.shares_of_limit('int4')}."
        " Beside llama.cpp, built for the same CPU (Zen 5), plain, open chat, the file's own precision:"
        f" int8 over Q8_0 {q8} times, int4 over Q4_K_M {q4}"
    )
