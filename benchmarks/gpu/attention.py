"""Attention alone: the backends compared with torch's own, over rows, new tokens, contexts, and row lengths.

BASS (2404.15778) compares PAD and SPLIT; ``ragged`` should match the better one everywhere. Keys and values of several
layers take turns, so that they come from memory as in a forward pass, and one call is one layer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from benchmarks.gpu.floors import best_seconds
from torch import Tensor

from paceline.config import AttentionName
from paceline.kernels.attention import AttentionBackend, Plan, make_backend
from paceline.kernels.attention.base import PLAIN, AttentionTerms
from paceline.kernels.gpu.graphs import Graphs
from paceline.tools.bench.plots import new_figure, save

Spread = Literal["equal", "mixed", "one long"]
SDPA = "torch SDPA"
BACKENDS = ("ragged", "padded", "split", SDPA)
LONGER = 8  # length of the one long row over the others'
_COLD_BYTES = 1 << 28  # keys and values that take turns: several times the L2 cache
_MOST_LAYERS = 16


@dataclass(frozen=True)
class Heads:
    """A model's heads: H query heads, G key and value heads, each ``dim`` wide."""

    name: str
    heads: int
    kv_heads: int
    dim: int


MHA, GQA = Heads("gpt-7.8b", 40, 40, 128), Heads("llama-8b", 32, 8, 128)


@dataclass(frozen=True)
class Case:
    """``rows`` rows with ``tokens`` queries each; the longest has ``context`` positions, including its queries.

    spread: all rows as long as the longest; evenly from half of it on; or one long row among others an eighth as long.
    """

    heads: Heads
    rows: int
    tokens: int
    context: int
    spread: Spread

    @property
    def lengths(self) -> list[int]:
        """Length of every row, including its queries."""
        if self.spread == "equal":
            lengths = [self.context] * self.rows
        elif self.spread == "mixed":
            half = self.context // 2
            lengths = [self.context - half * row // max(1, self.rows - 1) for row in range(self.rows)]
        else:
            lengths = [self.context] + [self.context // LONGER] * (self.rows - 1)
        return [max(length, self.tokens) for length in lengths]

    @property
    def name(self) -> str:
        """A name for output."""
        rows = f"{self.rows} rows x {self.tokens}"
        return f"{self.heads.name} heads, {rows}, context {self.context}, {self.spread}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "heads": self.heads.name}


class TorchSDPA:
    """Plain torch: one call over the longest row's positions, with a mask of the visible keys."""

    name = SDPA

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        plan = Plan(positions, longest, ancestors)
        plan.masks[None, 0] = ~plan.hidden(None)[:, None]
        return plan

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        assert terms is PLAIN, "the shapes of this benchmark have no others"
        keys, values = k_cache[:, :, : plan.longest], v_cache[:, :, : plan.longest]
        gqa = q.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=plan.masks[None, 0], enable_gqa=gqa)


def backend_of(name: str, device: torch.device) -> AttentionBackend:
    """The backend named in BACKENDS. Raises ParameterError if it cannot run here."""
    return TorchSDPA() if name == SDPA else make_backend(cast("AttentionName", name), device)


@dataclass(frozen=True)
class Timed:
    """A case's microseconds per layer by backend, its floor, and the errors of backends that failed."""

    case: Case
    us: dict[str, float]
    floor_us: float
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def over_ragged(self) -> dict[str, float]:
        """Each other backend's time over ragged's; empty without ragged's."""
        own = self.us.get("ragged")
        return {} if own is None else {name: us / own for name, us in self.us.items() if name != "ragged"}

    def as_json(self) -> dict[str, Any]:
        document = {**self.case.as_json(), "us": self.us, "floor_us": self.floor_us, "over_ragged": self.over_ragged}
        return document | ({"failed": self.failed} if self.failed else {})


class Tensors:
    """A case's queries, and keys and values of enough layers to exceed all caches."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device = case, device
        heads, longest = case.heads, max(case.lengths)
        one = 2 * case.rows * heads.kv_heads * longest * heads.dim * dtype.itemsize
        layers = max(1, min(_MOST_LAYERS, -(-_COLD_BYTES // one))) if device.type == "cuda" else 1
        shape = (layers, case.rows, heads.kv_heads, longest, heads.dim)
        self.keys, self.values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        self.q = torch.randn(case.rows, heads.heads, case.tokens, heads.dim, device=device, dtype=dtype)
        ends = torch.tensor(case.lengths, device=device)
        self.positions = ends[:, None] - case.tokens + torch.arange(case.tokens, device=device)

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that some query sees, in one layer."""
        heads = self.case.heads
        return 2 * sum(self.case.lengths) * heads.kv_heads * heads.dim * self.keys.itemsize

    def program(self, backend: AttentionBackend) -> Callable[[], Tensor]:
        """All layers, one after the other, without the plan, which is made once per forward pass."""
        plan = backend.plan(self.positions, self.keys.shape[3])

        def run() -> Tensor:
            for keys, values in zip(self.keys, self.values, strict=True):
                out = backend.attend(self.q, keys, values, plan)
            return out

        return run

    def seconds(self, backend: AttentionBackend, repeats: int) -> float:
        """Seconds of one layer's call; on CUDA without the host's overhead, which a captured round does not have."""
        graphs, program = Graphs(self.device), self.program(backend)
        return best_seconds(lambda: graphs.run(0, program), self.device, repeats) / self.keys.shape[0]


def measure(case: Case, device: torch.device, dtype: torch.dtype, copy_bytes: float, repeats: int) -> Timed:
    """Time all backends on one case; failures are recorded. copy_bytes: the device's bandwidth, for the floor."""
    tensors = Tensors(case, device, dtype)
    us: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in BACKENDS:
        try:
            us[name] = tensors.seconds(backend_of(name, device), repeats) * 1e6
        except Exception as error:  # noqa: BLE001 (what one backend cannot do must not hide the others)
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Timed(case, us, tensors.read_bytes / copy_bytes * 1e6, failed)


def cases(*, tiny: bool = False) -> list[Case]:
    """The cases, the most important first."""
    spreads: tuple[Spread, ...] = ("equal", "one long", "mixed")
    if tiny:
        heads = (Heads("tiny", 4, 2, 16),)
        return [Case(*each) for each in product(heads, (1, 3), (2,), (40,), spreads)]
    grid = product((600, 8000), (MHA, GQA), (8, 1), spreads, (8, 1, 32, 64, 4, 2, 16))
    return [Case(heads, rows, tokens, context, spread) for context, heads, tokens, spread, rows in grid]


def sweep(
    wanted: Iterable[Case], device: torch.device, dtype: torch.dtype, copy_bytes: float, seconds: float, repeats: int
) -> Iterator[Timed]:
    """Measure the cases that can begin within ``seconds``; those that do not fit in memory are reported as failed."""
    end = time.perf_counter() + seconds
    for case in wanted:
        if time.perf_counter() > end:
            return
        try:
            yield measure(case, device, dtype, copy_bytes, repeats)
        except torch.OutOfMemoryError as error:
            yield Timed(case, {}, 0.0, dict.fromkeys(BACKENDS, str(error).splitlines()[0]))


def describe(timed: Timed) -> str:
    """One line of progress."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in timed.us.items())
    failed = "".join(f"; {name} FAILED: {why}" for name, why in timed.failed.items())
    return f"attention, {timed.case.name}: {times} µs per layer, floor {timed.floor_us:.1f}{failed}"


def draw(timed: list[Timed], path: Path, title: str) -> None:
    """Plot time over rows, one panel per spread, for the first heads, tokens and context that were measured."""
    first = timed[0].case
    shown = [each for each in timed if _same_panel(each.case, first)]
    spreads = list(dict.fromkeys(each.case.spread for each in shown))
    figure, axes = new_figure(columns=max(2, len(spreads)))
    for axis, spread in zip(axes, spreads, strict=False):
        here = sorted((each for each in shown if each.case.spread == spread), key=lambda each: each.case.rows)
        for name in BACKENDS:
            known = [(each.case.rows, each.us[name]) for each in here if name in each.us]
            axis.plot(*zip(*known, strict=True) if known else ([], []), marker="o", markersize=3, label=name)
        axis.plot([e.case.rows for e in here], [e.floor_us for e in here], color="0.6", linestyle="--", label="floor")
        axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="µs per layer", title=f"lengths: {spread}")
    axes[0].legend(fontsize=7)
    save(figure, path, f"{title}\n{first.heads.name} heads, {first.tokens} new tokens per row, context {first.context}")


def _same_panel(a: Case, b: Case) -> bool:
    return (a.heads, a.tokens, a.context) == (b.heads, b.tokens, b.context)
