"""``paceline bench quality``: what fewer bits cost."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import stderr, table, working
from paceline.cli.options import DEFAULT_MODEL, Model
from paceline.errors import ParameterError
from paceline.files import read_text
from paceline.params import EngineOptions

if TYPE_CHECKING:
    from paceline.bench.quality import Predictions, Quality

PRECISIONS: dict[str, EngineOptions] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def quality(
    model: Model = DEFAULT_MODEL,
    precisions: Annotated[
        str, typer.Option("--precisions", help=f"Of {', '.join(PRECISIONS)}; all are compared with the first.")
    ] = "bfloat16,int8,int4",
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file. Default: the reference that comes with Python.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="How much of the text.")] = 8192,
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON document to a file, too.")] = None,
) -> None:
    """Perplexity, top-token and greedy agreement of rounded weights. The last line of stdout is one JSON document."""
    from paceline.bench.offline import machine, versions
    from paceline.bench.quality import python_reference

    wanted = _known(precisions)
    content = python_reference() if text is None else read_text("--text", text)
    results = _measure(model, wanted, content, tokens)
    stderr().print(_table(results))
    document = {
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "model": model,
        "text": "the reference that comes with Python" if text is None else text.name,
        "tokens": tokens,
        "results": [result.as_document() for result in results],
        "machine": machine(),
        "versions": versions(),
    }
    if output is not None:
        output.write_text(json.dumps(document) + "\n")
    typer.echo(json.dumps(document))


def _known(precisions: str) -> list[str]:
    wanted = [word.strip() for word in precisions.split(",")]
    if unknown := [word for word in wanted if word not in PRECISIONS]:
        raise ParameterError("--precisions", unknown[0], f"some of {', '.join(PRECISIONS)}")
    return wanted


def _measure(model: str, precisions: list[str], text: str, tokens: int) -> list[Quality]:
    """One model in memory at a time."""
    from paceline.bench.quality import compare, predict
    from paceline.llm import LLM

    first: Predictions | None = None
    results = []
    for precision in precisions:
        with working(f"{model} in {precision}"):
            options: EngineOptions = {"max_batch_size": 8, "max_model_len": 512, **PRECISIONS[precision]}
            llm = LLM(model, **options)
            assert llm.tokenizer is not None, "models that have a name have a tokenizer"
            here = predict(llm, llm.tokenizer.encode(text)[:tokens])
            first = first or here
            results.append(compare(precision, here, first, llm.engine.models.target.weight_bytes()))
            llm.close()
    return results


def _table(results: list[Quality]) -> object:
    columns = ["", "perplexity", "change", "top token\nequal", "greedy tokens\nequal", "weights MB"]
    rows = [
        [
            result.precision,
            f"{result.perplexity:.3f}",
            f"{result.perplexity_change:+.2%} ± {result.standard_error:.2%}",
            f"{result.top_token_agreement:.1%}",
            f"{result.greedy_agreement:.1%}",
            f"{result.weight_bytes / 1e6:.0f}",
        ]
        for result in results
    ]
    return table("beside the first precision", columns, rows)
