"""Benchmarks for developers of the GPU path: ``python -m benchmarks.gpu.run lease FOLDER`` runs all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import note
from paceline.cli.document import as_text, command_line, end
from paceline.cli.main import Commands
from paceline.config.files import check_output, write_text
from paceline.errors import ParameterError

if TYPE_CHECKING:
    import torch
    from benchmarks.gpu.attention import Timed
    from benchmarks.gpu.show import Line

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
_PROGRAM = "python -m benchmarks.gpu.run"
Device = Annotated[str, typer.Option("--device", help="cuda, cuda:1, ...; cpu only for a functional test (--tiny).")]
Budget = Annotated[
    float, typer.Option("--budget", min=1, help="Seconds; cells that do not fit are dropped and listed.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Small models and few cells: only a functional test.")]
Pairs = Annotated[str | None, typer.Option("--pairs", help="Pairs of models, the most important first: a,b.")]
Formats = Annotated[str | None, typer.Option("--formats", help="Of the weights: bf16,int8,fp8,int4.")]
Rows = Annotated[str | None, typer.Option("--rows", help="1 to 64, the most important first: 8,1,32.")]
Lengths = Annotated[
    str | None, typer.Option("--lengths", help="Draft tokens per round; 0 is always included, and first.")
]
Contexts = Annotated[
    str | None, typer.Option("--contexts", help="Tokens of every row before the first round: 600,8000.")
]
Attentions = Annotated[str | None, typer.Option("--attentions", help="ragged,padded,split; the first one everywhere.")]
Autos = Annotated[str | None, typer.Option("--autos", help="Acceptance rates of the engine with auto: 0.8,0.2.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write the JSON document to a file, too, as it grows.")]


@app.command()
def rounds(
    device: Device = "cuda",
    budget: Budget = 480,
    tiny: Tiny = False,
    output: Output = None,
    pairs: Pairs = None,
    formats: Formats = None,
    rows: Rows = None,
    lengths: Lengths = None,
    contexts: Contexts = None,
    attentions: Attentions = None,
    autos: Autos = None,
) -> None:
    """Rounds on a GPU compared with their floors; acceptance is SYNTHETIC. The last line of stdout is one JSON
    document.
    """
    check_output("--output", output)
    place = _device(device, tiny)
    from benchmarks.gpu.bench import Bench, Options
    from benchmarks.gpu.cells import Axes

    options = Options.tiny_on(place, budget) if tiny else Options(place, Axes(), budget)
    others = {"contexts": contexts, "attentions": attentions, "autos": autos}
    options = replace(options, axes=options.axes.chosen(pairs, formats, rows, lengths, **others))
    bench = Bench(options, command_line(_PROGRAM), _say, _writer(output))
    report = bench.run()
    _show(bench.lines())
    end(report.as_json(bench.lines()), output)


@app.command()
def attention(
    device: Device = "cuda",
    budget: Budget = 240,
    tiny: Tiny = False,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw PAD, SPLIT, ragged and torch over rows.")] = None,
) -> None:
    """Padded, split and ragged attention compared with torch's own. The last line of stdout is one JSON document."""
    check_output("--output", output, plot)
    place = _device(device, tiny)
    import torch
    from benchmarks.gpu import attention as bench
    from benchmarks.gpu.bench import device_name, versions
    from benchmarks.gpu.floors import measure_ceiling

    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    ceiling, wanted = measure_ceiling(place, dtype, small=tiny), bench.cases(tiny=tiny)
    document: dict[str, Any] = {
        "command": command_line(_PROGRAM),
        "device": device_name(place),
        "copy_gb_s": ceiling.copy_bytes / 1e9,
        "versions": versions(),
    }
    timed: list[Timed] = []
    write = _writer(output)
    for each in bench.sweep(wanted, place, dtype, ceiling.copy_bytes, budget, 1 if tiny else 20):
        timed.append(each)
        _say(bench.describe(each))
        document |= {"cases": [known.as_json() for known in timed], "dropped": len(wanted) - len(timed)}
        write(document)
    if plot is not None and timed:
        bench.draw(timed, plot, f"{document['device']}: attention of one layer")
    end(document, output)


@app.command()
def products(device: Device = "cuda", budget: Budget = 120, tiny: Tiny = False, output: Output = None) -> None:
    """8-bit products with many rows, by every method. The last line of stdout is one JSON document."""
    check_output("--output", output)
    place = _device(device, tiny)
    import torch
    from benchmarks.gpu import products as bench
    from benchmarks.gpu.bench import device_name, versions

    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    document: dict[str, Any] = {"command": command_line(_PROGRAM), "device": device_name(place), "versions": versions()}
    wanted, timed, write = bench.cases(tiny=tiny), [], _writer(output)
    for each in bench.sweep(wanted, place, dtype, budget):
        timed.append(each.as_json())
        _say(bench.describe(each))
        document |= {"cases": timed, "dropped": len(wanted) - len(timed)}
        write(document)
    end(document, output)


@app.command()
def sampling(device: Device = "cuda", budget: Budget = 60, tiny: Tiny = False, output: Output = None) -> None:
    """Top-k and top-p by every method, old and new. The last line of stdout is one JSON document."""
    check_output("--output", output)
    place = _device(device, tiny)
    import torch
    from benchmarks.gpu import sampling as bench
    from benchmarks.gpu.bench import device_name, versions
    from benchmarks.gpu.floors import measure_ceiling

    ceiling = measure_ceiling(place, torch.bfloat16 if place.type == "cuda" else torch.float32, small=tiny)
    document: dict[str, Any] = {"command": command_line(_PROGRAM), "device": device_name(place), "versions": versions()}
    wanted, timed, write = bench.cases(tiny=tiny), [], _writer(output)
    for each in bench.sweep(wanted, place, ceiling.copy_bytes, budget, 1 if tiny else 10):
        timed.append(each.as_json())
        _say(bench.describe(each))
        document |= {"cases": timed, "dropped": len(wanted) - len(timed)}
        write(document)
    end(document, output)


@app.command()
def transformers(
    device: Device = "cuda",
    tiny: Tiny = False,
    output: Output = None,
    rows: Rows = "8,1,32",
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Tokens that each row decodes.")] = 256,
) -> None:
    """Plain decoding and auto beside transformers' plain ``generate``, in bf16, on random weights of llama-8b's sizes;
    auto's acceptance is SYNTHETIC. The last line of stdout is one JSON document.
    """
    check_output("--output", output)
    place = _device(device, tiny)
    from importlib.metadata import version

    from benchmarks.gpu.auto import beside_transformers
    from benchmarks.gpu.bench import Options, device_name, random_pair, versions
    from benchmarks.gpu.cells import Axes, Setting

    options = Options.tiny_on(place, 0) if tiny else Options(place, Axes())
    axes = options.axes.chosen("llama-8b", rows=rows)
    document: dict[str, Any] = {
        "command": command_line(_PROGRAM),
        "acceptance": "synthetic",
        "device": device_name(place),
        "versions": {**versions(), "transformers": version("transformers")},
        "cases": [],
    }
    for count in axes.rows:
        setting = Setting(axes.pairs[0], "bf16", "ragged", axes.contexts[0], count)
        found = beside_transformers(*random_pair(setting.pair, setting.format, options), setting, tokens)
        document["cases"].append({**asdict(setting), "tokens": tokens, "tokens_a_second": found})
        _say(
            f"{setting.pair}, {count} rows: {', '.join(f'{name} {rate:.0f}' for name, rate in found.items())} tokens/s"
        )
        _writer(output)(document)
    end(document, output)


@app.command()
def lease(
    folder: Annotated[
        Path, typer.Argument(help="Folder for documents and logs; parts that are done there are skipped.")
    ],
    device: Device = "cuda",
    budget: Budget = 480,
    tiny: Tiny = False,
) -> None:
    """Run everything, in parts: tests, cuts, rounds in 16, 8 and 4 bits, attention, products, the CPU's cores.

    Repeat until all ran.
    """
    from benchmarks.gpu.lease import Lease, parts

    _device(device, tiny)
    call = Lease(folder, device, tiny, budget, _say)
    left = call.run(parts(tiny=tiny))
    _say(f"left for the next call: {', '.join(left)}" if left else f"all is done: {call.done()}")


def _device(name: str, tiny: bool) -> torch.device:
    """The device. On a CPU kernels are interpreted, which must be configured before triton is imported."""
    if name == "cpu":
        if not tiny:
            raise ParameterError("--device", name, "a CUDA device; or cpu with --tiny, only for a functional test")
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from paceline.core.hardware import resolve_device

    return resolve_device(name)


def _say(text: str) -> None:
    note(f"{time.strftime('%H:%M:%S')} {text}")


def _writer(output: Path | None) -> Callable[[dict[str, Any]], None]:
    """A function that writes the results so far."""

    def write(document: dict[str, Any]) -> None:
        if output is not None:
            write_text(output, as_text(document) + "\n")

    return write


def _show(lines: Sequence[Line]) -> None:
    """Print a table that fits any terminal."""
    verdicts = {True: "yes", False: "NO", None: "-"}
    note(f"{'met':3}  {'wanted':>16}  {'measured':>12}  what was asked for (acceptance is synthetic)")
    for line in lines:
        note(f"{verdicts[line.met]:3}  {line.wanted:>16}  {line.measured or 'not measured':>12}  {line.what}")


if __name__ == "__main__":
    app()
