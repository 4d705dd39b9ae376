"""The JSON document and the plot.

    python -m benchmarks.peers.report STUBS.json CHAT.json --plot docs/img/peers.png

draws runs that were made on one machine beside each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.config import PLOT, ROOT
from benchmarks.peers.schedule import Configuration, Outcome, label

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "avx_vnni")
UNITS = {
    "tokens_per_s": "new tokens of all rows / total_s, prefill included",
    "decode_tokens_per_s": "new tokens of all rows after each row's first / decode_s",
    "prefill_s": "from the start until the last row's first token; how it is taken: each worker's docstring; engines "
    "that prefill in pieces decode the first rows meanwhile",
    "decode_s": "total_s - prefill_s",
    "acceptance": "accepted / drafted",
    "rows_equal_plain": "rows whose tokens equal the same peer's plain decoding at the same batch size, from 0 to 1",
}


def machine() -> dict[str, Any]:
    """Properties of the machine that affect the figures."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    entries = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in entries.items()}
    flags = set(named.get("flags", "").split())
    return {
        "cpu": named.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "commit": _commit(),
    }


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One entry per configuration, in the order of the plan."""
    plain = {key(outcome.configuration): outcome for outcome in outcomes if outcome.configuration.mode == "plain"}
    return [_row(outcome, plain.get(key(outcome.configuration))) for outcome in outcomes]


def key(configuration: Configuration) -> tuple[str, int]:
    """The part of a configuration shared with its peer's plain decoding."""
    return configuration.peer, configuration.batch


def _row(outcome: Outcome, plain: Outcome | None) -> dict[str, Any]:
    configuration = outcome.configuration
    named = {
        "peer": configuration.peer,
        "precision": configuration.precision,
        "mode": configuration.mode,
        "batch": configuration.batch,
        "k": None if configuration.mode == "plain" else configuration.k,
        "status": _status(outcome),
    }
    if outcome.error is not None:
        named["error"] = outcome.error
    elif outcome.left_out is not None:
        named["left_out"] = outcome.left_out
    return {**named, **_medians(outcome.samples, plain), "samples": [_sample(sample) for sample in outcome.samples]}


def _status(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "failed"
    if outcome.samples:
        return "ok"
    return "left out" if outcome.left_out is not None else "pending"


def _medians(samples: Sequence[Mapping[str, Any]], plain: Outcome | None) -> dict[str, Any]:
    if not samples:
        return {}
    speeds = [_speeds(sample) for sample in samples]
    medians = {name: round(statistics.median(speed[name] for speed in speeds), 4) for name in speeds[0]}
    acceptance = [sample["acceptance"] for sample in samples if sample.get("acceptance") is not None]
    rounds = [sample["rounds"] for sample in samples if sample.get("rounds") is not None]
    return {
        **medians,
        "acceptance": round(statistics.median(acceptance), 4) if acceptance else None,
        "rounds": statistics.median(rounds) if rounds else None,
        "rows_equal_plain": _rows_equal(samples[0], plain.samples[0]) if plain is not None and plain.samples else None,
    }


def _speeds(sample: Mapping[str, Any]) -> dict[str, float]:
    after_first = sample["tokens"] - len(sample["output_ids"])
    return {
        "tokens_per_s": sample["tokens"] / sample["total_s"],
        "decode_tokens_per_s": after_first / sample["decode_s"] if sample["decode_s"] > 0 else 0.0,
        "prefill_s": sample["prefill_s"],
        "decode_s": sample["decode_s"],
        "total_s": sample["total_s"],
    }


def _rows_equal(sample: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    pairs = list(zip(sample["output_ids"], plain["output_ids"], strict=True))
    return float(sum(ours == theirs for ours, theirs in pairs) / len(pairs))


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in sample.items() if name != "output_ids"}
    return {**kept, "output_sha256": hashlib.sha256(json.dumps(sample["output_ids"]).encode()).hexdigest()[:16]}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def plot(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot aggregate tokens/s by batch size: one panel per document, every engine in its best mode at each size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(documents), figsize=(6.2 * len(documents), 4.8), squeeze=False)
    names = list(dict.fromkeys(_name(entry) for document in documents for entry in document["results"]))
    colours = {name: plt.get_cmap("tab10")(place % 10) for place, name in enumerate(names)}
    for axis, document in zip(axes[0], documents, strict=True):
        _panel(axis, document, colours)
    axes[0][0].set_ylabel("new tokens/s, all rows, prefill included")
    lines = {name: line for axis in axes[0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(_title(documents[0]), fontsize=10)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(document: Mapping[str, Any]) -> str:
    computer, settings = document["machine"], document["settings"]
    models = " + ".join(name for name in (settings["target"], settings["draft"]) if name)
    cores = f"{computer['cpu']}, {settings['threads']} threads"
    return f"{models}, greedy, each engine in its best mode; {cores}; {document['date'][:10]}"


def _name(entry: Mapping[str, Any]) -> str:
    engine, precision = entry["peer"], entry["precision"]
    return f"{engine.removesuffix(f'-{precision}')}, {precision}"


def best(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each peer's fastest mode at each batch size, of those that ran."""
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for entry in (entry for entry in entries if entry.get("tokens_per_s")):
        point = (entry["peer"], entry["batch"])
        if point not in found or entry["tokens_per_s"] > found[point]["tokens_per_s"]:
            found[point] = entry
    return list(found.values())


def _panel(axis: Any, document: Mapping[str, Any], colours: Mapping[str, Any]) -> None:
    entries, settings = best(document["results"]), document["settings"]
    for name, colour in colours.items():
        points = sorted((entry["batch"], entry["tokens_per_s"]) for entry in entries if _name(entry) == name)
        style = {"linewidth": 2.4} if name.startswith("paceline") else {"linewidth": 1.3, "linestyle": "--"}
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=name, **style)
    batches = sorted({entry["batch"] for entry in entries})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    prompts = settings.get("prompts", "stubs")  # older documents have no prompts field: there was one set
    tokens = f"{settings['prompt_tokens_mean']:.0f} + {settings['max_tokens']} tokens a row"
    axis.set(title=f"{prompts}, {tokens}", xlabel="rows")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def table(entries: Sequence[Mapping[str, Any]], prompts: str) -> str:
    """A table for the terminal: one line per peer and mode, one column per batch size. prompts: the set's name."""
    batches = sorted({entry["batch"] for entry in entries})
    cells = {(e["peer"], e["mode"], e["batch"]): e for e in entries}
    lines = [f"{f'tokens/s, {prompts}':<28}" + "".join(f"{f'b={batch}':>10}" for batch in batches)]
    for peer, mode in dict.fromkeys((entry["peer"], entry["mode"]) for entry in entries):
        found = [cells.get((peer, mode, batch)) for batch in batches]
        lines.append(f"{peer + ' ' + mode:<28}" + "".join(f"{_cell(entry):>10}" for entry in found))
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    return f"{entry['tokens_per_s']:.1f}" if "tokens_per_s" in entry else str(entry["status"])


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """The failed configurations with their error lines."""
    return [f"{label(o.configuration)}: {o.error}" for o in outcomes if o.error is not None]


def main() -> None:
    """Draw documents that earlier runs wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    plot([json.loads(path.read_text(encoding="utf-8")) for path in options.documents], options.plot)


if __name__ == "__main__":
    main()
