"""Tables of the runs on an NVIDIA H200."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.runs import Text, load, percent

_MODELS = {  # run: label, context
    "llama-8b-bf16": ("llama-8b, bf16", 600),
    "gpt-7.8b-bf16": ("gpt-7.8b, bf16", 600),
    "llama-8b-bf16-contexts": ("llama-8b, bf16, context of 8000", 8000),
    "llama-8b-int8": ("llama-8b, int8", 600),
    "llama-8b-fp8": ("llama-8b, fp8", 600),
}


def timed_round(run: str, rows: int, k: int, **fields: Any) -> dict[str, Any]:
    """The cell of a round; fields: in which it differs from ragged chains at acceptance 0.8 and a context of 600."""
    wanted = {"attention": "ragged", "rate": 0.8, "width": 1, "kind": "round", "context": 600} | fields
    wanted |= {"rows": rows, "k": k}
    (found,) = [each for each in load(f"gpu-{run}-h200")["cells"] if wanted.items() <= each.items()]
    return dict(found)


def gain(run: str, rows: int, context: int = 600) -> str:
    """The best length's tokens per second over plain decoding at acceptance 0.8, and that length."""
    wanted = {"rows": rows, "attention": "ragged", "context": context}
    (found,) = [each for each in load(f"gpu-{run}-h200")["speedups"] if wanted.items() <= each.items()]
    return f"{found['best']['0.8']['speedup']:.2f} (k = {found['best']['0.8']['k']})"


def rounds() -> Iterator[list[str]]:
    """Milliseconds of a plain round, its floor over its time, and the best speed-up."""
    for run, (label, context) in _MODELS.items():
        for rows in (1, 8, 32, 64) if context == 600 else (32, 64):
            plain = timed_round(run, rows, 0, context=context)
            floor = percent(plain["of_floor"])
            yield [label, str(rows), f"{plain['ms']:.2f} ms", floor, gain(run, rows, context)]


def _autos(run: str, acceptance: float = 0.8) -> dict[int, dict[str, Any]]:
    """The engine with ``auto``, by rows."""
    cells = load(f"gpu-{run}-h200")["cells"]
    return {
        each["rows"]: each["tokens_a_second"] for each in cells if (each["kind"], each["rate"]) == ("auto", acceptance)
    }


def autos() -> Iterator[list[str]]:
    """The engine with ``auto`` by rows and acceptance."""
    for acceptance in (0.8, 0.2):
        runs = _autos("llama-8b-bf16", acceptance) | _autos("llama-8b-bf16-64-rows", acceptance)
        for rows in (1, 8, 32, 64):
            over, first, ahead = (runs[rows][name] for name in ("over_plain", "first_over_plain", "captured"))
            captured = f"{ahead['programs']}, {ahead['seconds']:.1f}, {ahead['bytes'] / 2**20:.0f}"
            yield [str(rows), str(acceptance), f"{over:.2f}", f"{first:.2f}", captured]


def autos_beside_fixed_lengths() -> Iterator[list[str]]:
    """``auto`` and one length in every round, over plain decoding, at acceptance 0.8."""
    for label, run, rows in (
        ("bf16, up to 64 tokens", "llama-8b-bf16-contexts", 32),
        ("bf16, up to 64 tokens", "llama-8b-bf16-contexts", 64),
        ("bf16, up to 1024 tokens", "llama-8b-bf16-64-rows", 64),
        ("int8, up to 1024 tokens", "llama-8b-int8", 8),
        ("int8, up to 1024 tokens", "llama-8b-int8", 64),
    ):
        cell = _autos(run)[rows]
        usual = max(cell["rounds"], key=lambda line: line["rounds"])["k"]
        over = f"{cell['over_plain']:.2f}", f"{cell['fixed'] / cell['plain']:.2f}"
        yield [label, str(rows), over[0], str(usual), over[1], str(cell["fixed_length"])]


def products() -> Iterator[list[str]]:
    """Time of 8-bit products over torch's in bf16, over llama-8b's four matrices."""
    for to in ("int8", "fp8"):
        cells = []
        for rows in (1, 64, 128, 512):
            cases = [case["us"] for case in load("gpu-products-h200")["cases"] if case["rows"] == rows]
            ways = [f"{to}, our tiles", *([f"{to}, widened"] if rows > 64 else [])]
            over = [min(us[way] for way in ways if way in us) / us["16 bits, torch"] for us in cases]
            cells.append(f"{min(over):.2f} to {max(over):.2f}")
        yield [to, *cells]


def beside_transformers() -> Text:
    """Plain decoding and ``auto`` beside transformers."""
    speeds = {case["rows"]: case["tokens_a_second"] for case in load("gpu-transformers-h200")["cases"]}
    plain, auto = ([speeds[rows][name] / speeds[rows]["transformers"] for rows in (1, 8)] for name in ("plain", "auto"))
    return [
        f"plain decoding is {plain[0]:.1f} times as fast at 1 row and {plain[1]:.1f} times at 8,",
        f"`auto` at acceptance 0.8 {auto[0]:.1f} and {auto[1]:.1f} times.",
    ]


def _paper_model() -> str:
    plain, best = (timed_round("gpt-7.8b-bf16", 8, k) for k in (0, 7))
    ms = best["ms_per_token"]["0.8"]
    return f"the same shape at batch 8: {ms:.2f} ms, {8e3 / ms:,.0f} tokens/s with k = 7; plain {plain['ms']:.2f} ms"


def gains() -> str:
    """Best speed-ups of the model of BASS's size at 1, 8, 32, 64 rows."""
    return ", ".join(gain("gpt-7.8b-bf16", rows) for rows in (1, 8, 32, 64))


def _share(rows: int, k: int) -> str:
    """The target's arithmetic in a round over the GPU's measured rate."""
    from benchmarks.gpu.models import PAIRS, matrix_parameters

    run = "gpt-7.8b-bf16"
    operations = 2 * matrix_parameters(PAIRS["gpt-7.8b"].target) * rows * (k + 1)
    rate = operations / (timed_round(run, rows, k)["ms"] / 1e3)
    return percent(rate / load(f"gpu-{run}-h200")["tflops"] / 1e12, 1)


def _attention() -> str:
    cases = load("gpu-attention-h200")["cases"]
    parts = []
    for spread in ("equal", "mixed", "one long"):
        (case,) = [each for each in cases if (each["rows"], each["tokens"], each["spread"]) == (8, 8, spread)]
        parts.append(f"{spread} {case['over_ragged']['padded']:.2f} and {case['over_ragged']['split']:.2f}")
    run = "llama-8b-bf16"
    whole = [timed_round(run, 8, k, attention="padded")["ms"] / timed_round(run, 8, k)["ms"] for k in (0, 7)]
    return (
        f"over `ragged`, 8 rows of 8 new tokens, lengths {', '.join(parts)};"
        f" whole rounds with PAD at k = 0 and 7: {whole[0]:.2f} and {whole[1]:.2f}"
    )


def headlines() -> dict[str, str]:
    """What stands beside the papers' headlines, by their names."""
    tflops = f"{load('gpu-gpt-7.8b-bf16-h200')['tflops']:.0f} TFLOP/s"
    return {
        "B1": _paper_model(),
        "B2": f"{gains()} times plain decoding at 1, 8, 32, 64 rows",
        "B4": f"a round with k = 7 at batch 8: {_share(8, 7)}, at batch 64: {_share(64, 7)} of the measured {tflops}",
        "B6": _attention(),
        "D1": "nothing of ours yet",
        "D2": "nothing of ours yet",
    }
