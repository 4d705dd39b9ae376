"""The JSON document and the plot."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.config import OWN_MODES, ROOT
from benchmarks.peers.schedule import Configuration, Outcome, label

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "avx_vnni")
TITLES = {
    "plain": "plain decoding",
    "draft": "draft model",
    "ngram": "n-gram (prompt lookup)",
    "hybrid": "n-gram or draft model",
}
REASONS = {"failed": "", "left out": "far behind its best mode, not repeated"}
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


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Plot aggregate tokens/s by batch size: one panel per mode, and one with every peer's best."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    entries = document["results"]
    panels = [(TITLES[mode], [e for e in entries if e["mode"] == mode]) for mode in OWN_MODES]
    panels = [(title, found) for title, found in panels if found] + [("each one's best mode", _best(entries))]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.8), squeeze=False, sharey=True)
    colours = _colours(entries, plt.get_cmap("tab10"))
    for axis, (title, found) in zip(axes[0], panels, strict=True):
        _panel(axis, title, found, colours)
    axes[0][0].set_ylabel("new tokens/s, all rows, prefill included")
    axes[0][0].set_ylim(bottom=0)
    names = {name: line for axis in axes[0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(names.values(), names.keys(), loc="lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(_title(document), fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(document: Mapping[str, Any]) -> str:
    computer, settings = document["machine"], document["settings"]
    models = " + ".join(name for name in (settings["target"], settings["draft"]) if name)
    prompts = settings.get("prompts", "stubs")  # older documents have no prompts field: there was one set
    tokens = f"{prompts}: {settings['prompt_tokens_mean']:.0f} + {settings['max_tokens']} tokens"
    return (
        f"{models}, greedy, {tokens} per row; {computer['cpu']}, {settings['threads']} threads; {document['date'][:10]}"
    )


def _colours(entries: Iterable[Mapping[str, Any]], palette: Any) -> dict[str, Any]:
    return {peer: palette(index % 10) for index, peer in enumerate(dict.fromkeys(e["peer"] for e in entries))}


def _best(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    best: dict[tuple[str, int], Mapping[str, Any]] = {}
    for entry in (entry for entry in entries if entry.get("tokens_per_s")):
        point = (entry["peer"], entry["batch"])
        if point not in best or entry["tokens_per_s"] > best[point]["tokens_per_s"]:
            best[point] = entry
    return list(best.values())


def _panel(axis: Any, title: str, entries: Sequence[Mapping[str, Any]], colours: Mapping[str, Any]) -> None:
    for peer, colour in colours.items():
        points = sorted((e["batch"], e["tokens_per_s"]) for e in entries if e["peer"] == peer and e.get("tokens_per_s"))
        precision = next((e["precision"] for e in entries if e["peer"] == peer), "")
        if points:
            name = peer if peer.endswith(precision) else f"{peer} ({precision})"
            style = {"linewidth": 2.4} if peer.startswith("paceline") else {"linewidth": 1.3, "linestyle": "--"}
            axis.plot(*zip(*points, strict=True), marker="o", color=colour, label=name, **style)
    for line, text in enumerate(_missing(entries)):
        axis.annotate(text, (0.02, 0.01 + 0.04 * line), xycoords="axes fraction", fontsize=6, color="firebrick")
    batches = sorted({entry["batch"] for entry in entries})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set(title=title, xlabel="batch")
    axis.grid(alpha=0.3)


def _missing(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each peer and reason of missing points, with the batch sizes."""
    found: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        if entry["status"] in REASONS:
            found.setdefault((entry["peer"], entry.get("error", REASONS[entry["status"]])), []).append(entry["batch"])
    return [f"{peer} b={','.join(map(str, batches))}: {error[:60]}" for (peer, error), batches in found.items()]


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
