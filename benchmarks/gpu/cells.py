"""The cells to measure, ordered by importance: the last ones are dropped if time runs out.

First come the cells that the requested figures need, format by format; then whole sweeps, the common cases first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal, TypeVar

from benchmarks.gpu.models import PAIRS, WEIGHT_BYTES, WeightFormat

from paceline.config import MAX_SPECULATION_LENGTH, AttentionName
from paceline.errors import ParameterError

Kind = Literal["round", "verify", "auto", "trace"]
RATE = 0.8  # the synthetic acceptance rate; a round's time does not depend on it
RATES = (0.7, 0.8, 0.85, 0.9)
TREE_ROWS = (1, 4)
ATTENTIONS: dict[AttentionName, None] = dict.fromkeys(("ragged", "padded", "split"))
_LONGEST_CONTEXT = 65_536


@dataclass(frozen=True)
class Setting:
    """The properties shared by cells that use the same tensors.

    context: tokens of every row before the first round. width: draft tokens at each of k depths; more than one form a
        tree, which nothing is accepted of (the draft model's weights are random).
    """

    pair: str
    format: WeightFormat
    attention: AttentionName
    context: int
    rows: int
    rate: float = RATE
    width: int = 1


@dataclass(frozen=True)
class Cell:
    """One measurement.

    kind: a whole round with k draft tokens; the target's pass over k + 1 tokens alone; the engine with auto; or a trace
        of the device's idle time in a round with k draft tokens.
    """

    setting: Setting
    k: int
    kind: Kind = "round"

    @property
    def name(self) -> str:
        """A name for output."""
        s = self.setting
        what = "auto" if self.kind == "auto" else f"{self.kind} k={self.k}"
        rate = "" if s.rate == RATE else f", synthetic acceptance {s.rate:g}"
        tree = "" if s.width == 1 else f", trees {s.width} wide"
        return f"{s.pair} {s.format} {s.attention}, context {s.context}, {s.rows} rows, {what}{rate}{tree}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.setting), "k": self.k, "kind": self.kind}


@dataclass(frozen=True)
class Axes:
    """The swept values, each list ordered by importance. lengths: 0, then the length of the verify figures."""

    pairs: tuple[str, ...] = ("gpt-7.8b", "llama-8b")
    formats: tuple[WeightFormat, ...] = ("bf16", "int8", "fp8")
    attentions: tuple[AttentionName, ...] = tuple(ATTENTIONS)
    contexts: tuple[int, ...] = (600, 8000)
    rows: tuple[int, ...] = (8, 1, 32, 64, 4, 2, 16)
    lengths: tuple[int, ...] = (0, 7, 6, 8, 5, 4, 3, 2, 10, 9, 1)
    autos: tuple[float, ...] = (
        RATE,
        0.2,
    )  # acceptance rates; auto must not lose when no draft token is accepted, either
    trees: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: {2: (4, 6), 4: (4, 6)})  # depths by width

    def chosen(
        self,
        pairs: str | None = None,
        formats: str | None = None,
        rows: str | None = None,
        lengths: str | None = None,
        *,
        contexts: str | None = None,
        attentions: str | None = None,
        autos: str | None = None,
    ) -> Axes:
        """These axes with values from the command line; None keeps an axis."""
        counts = [0, *_numbers("--lengths", lengths, 0, MAX_SPECULATION_LENGTH)] if lengths else self.lengths
        if len(set(counts)) < 2:
            raise ParameterError("--lengths", lengths, "at least one length above 0")
        return replace(
            self,
            pairs=_named("--pairs", pairs, PAIRS) if pairs else self.pairs,
            formats=_named("--formats", formats, WEIGHT_BYTES) if formats else self.formats,
            rows=_numbers("--rows", rows, 1, 64) if rows else self.rows,
            lengths=tuple(dict.fromkeys(counts)),
            contexts=_numbers("--contexts", contexts, 1, _LONGEST_CONTEXT) if contexts else self.contexts,
            attentions=_named("--attentions", attentions, ATTENTIONS) if attentions else self.attentions,
            autos=_rates("--autos", autos) if autos else self.autos,
        )

    @staticmethod
    def tiny() -> Axes:
        """Axes for a CPU: every kind of cell once."""
        return Axes(contexts=(24,), rows=(2,), lengths=(0, 2), autos=(RATE,), trees={2: (2,)})


_Name = TypeVar("_Name", bound=str)


def _named(option: str, text: str, known: Mapping[_Name, object]) -> tuple[_Name, ...]:
    """Names from a comma-separated list. Raises ParameterError for an unknown one."""
    names = {str(name): name for name in known}
    if not set(text.split(",")) <= names.keys():
        raise ParameterError(option, text, f"any of {','.join(names)}")
    return tuple(dict.fromkeys(names[each] for each in text.split(",")))


def _numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Numbers from a comma-separated list. Raises ParameterError."""
    given = text.split(",")
    if not all(each.isdecimal() and len(each) < 9 and least <= int(each) <= most for each in given):
        raise ParameterError(option, text, f"numbers from {least} to {most}, separated by commas")
    return tuple(dict.fromkeys(map(int, given)))


def _rates(option: str, text: str) -> tuple[float, ...]:
    """Fractions from a comma-separated list. Raises ParameterError."""
    try:
        rates = tuple(dict.fromkeys(float(each) for each in text.split(",")))
    except ValueError:
        rates = (math.nan,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ParameterError(option, text, "fractions from 0 to 1, separated by commas")
    return rates


def plan(axes: Axes) -> list[Cell]:
    """Every cell once, the most important first."""
    models = list(product(axes.pairs, axes.formats))
    shown = [cell for place, (pair, to) in enumerate(models) for cell in _shown(axes, pair, to, autos=place == 0)]
    return list(dict.fromkeys([*shown, *_swept(axes)]))


def _shown(axes: Axes, pair: str, to: WeightFormat, *, autos: bool) -> Iterator[Cell]:
    """The cells that the requested figures of a pair in a format need."""
    base = Setting(pair, to, axes.attentions[0], axes.contexts[0], axes.rows[0])
    longest = axes.lengths[1]
    yield from _rounds(base, (0, longest))
    for k in (0, longest):
        yield Cell(base, k, "verify")
    for rows in axes.rows:
        yield from _rounds(replace(base, rows=rows), _likely(axes.lengths, rows))
    yield from _rounds(replace(base, rate=0.9), [k for k in _likely(axes.lengths, base.rows) if k > 0])
    for rows, rate in product(axes.rows[:4] if autos else (), axes.autos):
        yield Cell(replace(base, rows=rows, rate=rate), 0, "auto")
    tree_rows = [rows for rows in TREE_ROWS if autos and rows in axes.rows]
    for rows, (width, depths) in product(tree_rows, axes.trees.items()):
        yield from _rounds(replace(base, rows=rows), depths)
        yield from _rounds(replace(base, rows=rows, width=width), depths)
    for other in axes.attentions[1:]:
        yield from _rounds(replace(base, attention=other), (0, longest))


def traces(axes: Axes) -> list[Cell]:
    """Traces of the first pair in its first two formats; run last, because tracing may slow down later cells."""
    settings = [Setting(axes.pairs[0], to, axes.attentions[0], axes.contexts[0], axes.rows[0]) for to in axes.formats]
    return [Cell(setting, k, "trace") for setting in settings[:2] for k in axes.lengths[:2]]


def _likely(lengths: Sequence[int], rows: int) -> list[int]:
    """The first two lengths, and those that may be the best: shorter ones with more rows."""
    low, high = (5, 10) if rows <= 4 else (4, 10) if rows <= 16 else (1, 6)
    return [k for k in lengths if k in lengths[:2] or low <= k <= high]


def _swept(axes: Axes) -> Iterator[Cell]:
    for attention, context, pair, to in product(axes.attentions, axes.contexts, axes.pairs, axes.formats):
        for rows in axes.rows:
            yield from _rounds(Setting(pair, to, attention, context, rows), axes.lengths)


def _rounds(setting: Setting, lengths: Iterable[int]) -> Iterator[Cell]:
    for k in lengths:
        yield Cell(setting, k)
