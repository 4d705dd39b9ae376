"""``paceline bench quality``: the cost of quantisation in quality."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import Sheet, stderr, working
from paceline.cli.document import command_line, end
from paceline.cli.options import DEFAULT_MODEL, Model, words
from paceline.config import EngineOptions
from paceline.config.files import check_output, read_text
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.tools.bench.quality import Predictions, Quality

PRECISIONS: dict[str, EngineOptions] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


def quality(
    model: Model = DEFAULT_MODEL,
    precisions: Annotated[
        str, typer.Option("--precisions", help=f"Some of {', '.join(PRECISIONS)}; all are compared with the first.")
    ] = "bfloat16,int8,int4",
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file. Default: the reference that comes with Python.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 8192,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the JSON document to a file.")] = None,
) -> None:
    """Perplexity, top-token and greedy agreement of quantised weights. The last line is one JSON document."""
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.bench.quality import python_reference

    check_output("--output", output)
    wanted = words("--precisions", precisions, PRECISIONS)
    content = python_reference() if text is None else read_text("--text", text)
    results, used = _measure(model, wanted, content, tokens)
    stderr().print(_table(results))
    document = {
        "command": command_line(),
        "model": model,
        "text": "the reference that comes with Python" if text is None else text.name,
        "tokens": used,
        "results": [asdict(result) for result in results],
        "machine": machine(),
        "versions": versions(),
    }
    end(document, output)


def _measure(model: str, precisions: list[str], text: str, tokens: int) -> tuple[list[Quality], int]:
    """The quality of each precision and the number of tokens used, one model in memory at a time."""
    from paceline.llm import LLM
    from paceline.tools.bench.quality import compare, predict

    first: Predictions | None = None
    results: list[Quality] = []
    used = 0
    for precision in precisions:
        with working(f"{model} in {precision}"):
            options: EngineOptions = {"max_batch_size": 8, "max_model_len": 512, **PRECISIONS[precision]}
            llm = LLM(model, use_tqdm=False, **options)
            ids = llm.requests.tokenizer.encode(text)[:tokens]
            if (used := len(ids)) < 2:
                raise ParameterError("--text", f"{used} tokens", "a text of at least 2 tokens")
            here = predict(llm, ids)
            first = first or here
            results.append(compare(precision, here, first, llm.engine.models.target.weight_bytes()))
            llm.close()
    return results, used


def _table(results: list[Quality]) -> Sheet:
    columns = ["", "perplexity", "change", "top token\nequal", "greedy tokens\nequal", "weights MB"]
    rows = [
        [
            result.precision,
            f"{result.perplexity:.3f}",
            f"{result.perplexity_change:+.2%}" + ("" if error is None else f" ± {error:.2%}"),
            f"{result.top_token_agreement:.1%}",
            f"{result.greedy_agreement:.1%}",
            f"{result.weight_bytes / 1e6:.0f}",
        ]
        for result in results
        for error in [result.standard_error]
    ]
    return Sheet("beside the first precision", columns, rows)
