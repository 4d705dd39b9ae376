"""The effect of quantised weights or caches: perplexity on a text, and how long greedy answers stay the same.

    python -m benchmarks.quality MODEL --precisions bfloat16,int8,int4
    python -m benchmarks.quality MODEL --precisions bfloat16,int8-cache --piece 4096
    python -m benchmarks.quality MODEL --precisions bfloat16,fp8,fp8-weights

The text is fed in pieces of ``--piece`` tokens, each on its own, so that every precision has the same contexts. The
standard error is that of the paired difference: both precisions predict the same tokens and share most of their noise.
fp8 is of weights and activations, fp8-weights of weights alone; without a GPU that has float8 its products are emulated
(``benchmarks.float8``). The last line is one JSON document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from benchmarks.float8 import load_emulated
from benchmarks.options import words
from torch import Tensor

from paceline.cli.console import Sheet, stderr, working
from paceline.cli.document import command_line, end
from paceline.cli.options import DEFAULT_MODEL, Model
from paceline.config import EngineOptions, SamplingParams
from paceline.config.files import check_output, read_text
from paceline.core.hardware import resolve_device
from paceline.engine.cache_dtype import cache_dtype
from paceline.engine.prefixes import common_prefix_length
from paceline.errors import ParameterError
from paceline.kernels.attention import BACKENDS
from paceline.kernels.gpu.launch import has_fp8
from paceline.llm import LLM
from paceline.models.decoding.decoder import Decoder
from paceline.tools.bench.measure import questions, run_batch
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.prompts import OPEN

PIECE = 512
GREEDY_TOKENS = 64
PRECISIONS: dict[str, EngineOptions] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "fp8-weights": {"dtype": "bfloat16", "quantization": "fp8", "deterministic": True},
    "int8-cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8-cache": {"dtype": "bfloat16", "attention": "padded", "kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True)
class Predictions:
    """logprobs [N]: of the text's own tokens; top [N]: the most likely tokens; answers: greedy token ids."""

    logprobs: Tensor
    top: Tensor
    answers: list[list[int]]


@dataclass(frozen=True)
class Quality:
    """A precision compared with the first one. Changes are relative; agreements are fractions from 0 to 1.

    standard_error: of perplexity_change; None if a single token was predicted.
    greedy_agreement: tokens before the answers differ, out of all.
    """

    precision: str
    perplexity: float
    perplexity_change: float
    standard_error: float | None
    top_token_agreement: float
    greedy_agreement: float
    weight_bytes: int


def python_reference() -> str:
    """A text that comes with every Python: its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.inference_mode()
def predict(llm: LLM, tokens: Sequence[int], size: int = PIECE) -> Predictions:
    """A model's predictions on a text of at least two tokens, and its greedy answers to the built-in prompts.

    size: tokens of the pieces in which the text is fed.
    """
    pieces = [list(tokens[start : start + size]) for start in range(0, len(tokens) - 1, size)]
    parts = [_piece(llm, piece) for piece in pieces]
    run = run_batch(llm, questions(llm, OPEN), SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True))
    logprobs, top = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Predictions(logprobs, top, run.token_ids)


def _piece(llm: LLM, tokens: list[int]) -> tuple[Tensor, Tensor]:
    model = llm.engine.models.target
    kv_dtype = cache_dtype(model, llm.engine.config)
    decoder = Decoder(model, BACKENDS["padded"](), 1, len(tokens), kv_dtype=kv_dtype)
    ids = torch.tensor([tokens], device=model.device)
    hidden = decoder.forward(ids, ids.new_zeros(1), len(tokens))[0, :-1]
    own, top = [], []
    for states, following in zip(torch.split(hidden, PIECE), torch.split(ids[0, 1:], PIECE), strict=True):
        logits = decoder.logits(states)
        own.append(logits.log_softmax(dim=1).gather(1, following[:, None])[:, 0].cpu())
        top.append(logits.argmax(dim=1).cpu())
    return torch.cat(own), torch.cat(top)


def compare(precision: str, here: Predictions, first: Predictions, weight_bytes: int) -> Quality:
    """Compare ``here`` with ``first``, which predicted the same tokens."""
    difference = (first.logprobs - here.logprobs).double()
    same = sum(common_prefix_length(a, b, len(a)) for a, b in zip(here.answers, first.answers, strict=True))
    ratio, count = math.exp(difference.mean()), len(difference)
    return Quality(
        precision=precision,
        perplexity=math.exp(-here.logprobs.double().mean()),
        perplexity_change=ratio - 1,
        standard_error=None if count < 2 else ratio * float(difference.std()) / math.sqrt(count),
        top_token_agreement=float((here.top == first.top).float().mean()),
        greedy_agreement=same / sum(map(len, first.answers)),
        weight_bytes=weight_bytes,
    )


def main(
    model: Model = DEFAULT_MODEL,
    precisions: Annotated[
        str, typer.Option("--precisions", help=f"Some of {', '.join(PRECISIONS)}; all are compared with the first.")
    ] = "bfloat16,int8,int4",
    text: Annotated[
        Path | None, typer.Option("--text", help="A text file. Default: the reference that comes with Python.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 8192,
    piece: Annotated[int, typer.Option("--piece", min=2, help="Tokens of the pieces in which it is fed.")] = PIECE,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the JSON document to a file.")] = None,
) -> None:
    """Perplexity, top-token and greedy agreement of quantised weights. The last line is one JSON document."""
    check_output("--output", output)
    wanted = words("--precisions", precisions, PRECISIONS)
    content = python_reference() if text is None else read_text("--text", text)
    results, used = measure(model, wanted, content, tokens, piece)
    stderr().print(_table(results))
    document = {
        "command": command_line("python -m benchmarks.quality"),
        "model": model,
        "text": "the reference that comes with Python" if text is None else text.name,
        "tokens": used,
        "piece": piece,
        "results": [asdict(result) for result in results],
        "machine": machine(),
        "versions": versions(),
    }
    end(document, output)


def measure(model: str, precisions: list[str], text: str, tokens: int, piece: int) -> tuple[list[Quality], int]:
    """The quality of each precision and the number of tokens used, one model in memory at a time."""
    first: Predictions | None = None
    results: list[Quality] = []
    used = 0
    for precision in precisions:
        with working(f"{model} in {precision}"):
            options: EngineOptions = {"max_batch_size": 8, "max_model_len": 512, **PRECISIONS[precision]}
            llm = load(model, options)
            ids = llm.requests.tokenizer.encode(text)[:tokens]
            if (used := len(ids)) < 2:
                raise ParameterError("--text", f"{used} tokens", "a text of at least 2 tokens")
            here = predict(llm, ids, piece)
            first = first or here
            results.append(compare(precision, here, first, llm.engine.models.target.weight_bytes()))
            llm.close()
    return results, used


def load(model: str, options: EngineOptions) -> LLM:
    """Load a model. Without a GPU that has float8, products of float8 numbers are emulated."""
    device = resolve_device("auto")
    if options.get("quantization") != "fp8" or (device.type == "cuda" and has_fp8(device)):
        return LLM(model, use_tqdm=False, **options)
    rounds_rows = not options.get("deterministic", False)
    on_cpu: EngineOptions = {
        **options, "quantization": None, "deterministic": False, "attention": "padded", "device": "cpu"
    }  # fmt: skip
    llm = LLM(model, use_tqdm=False, **on_cpu)
    llm.engine.models.target = load_emulated(model, rounds_rows=rounds_rows)
    return llm.plain()


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


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
