"""Perplexity of a model's copies in other types of GGUF files, beside the file that they were made from.

    LLAMA_CPP=.../xllamacpp.abi3.so python tests/gguf_support.py qwen-coder-0.5b.gguf qwen-Q2_K.gguf Q2_K
    python -m benchmarks.file_types qwen-coder-0.5b.gguf qwen-Q2_K.gguf ... --output FILE

Every copy is run in each precision and compared with the original in bfloat16, on the text of
``benchmarks.quality``.
The document is written after each run, and a call goes on with the runs that it lacks.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import torch
from benchmarks.quality import PRECISIONS, Predictions, compare, predict, python_reference

from paceline.config import EngineOptions
from paceline.llm import LLM
from paceline.tools.bench.offline import machine, versions

ORIGINAL = "bfloat16"


def main() -> None:
    """Measure what the document lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="the original, then its copies")
    parser.add_argument("--precisions", default="bfloat16,int8,int4")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=1000, help="of this call")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    document = json.loads(asked.output.read_text()) if asked.output.exists() else begun(asked.files, asked.tokens)
    kept = asked.output.with_suffix(".pt")
    first = Predictions(**torch.load(kept)) if kept.exists() else None
    wanted = [(file, precision) for file in asked.files for precision in asked.precisions.split(",")]
    done = {(result["file"], result["precision"]) for result in document["results"]}
    for file, precision in [each for each in wanted if (each[0].name, each[1]) not in done][: asked.runs]:
        here, size = run(file, precision, asked.tokens)
        if first is None:
            assert (file, precision) == (asked.files[0], ORIGINAL)
            first = here
            torch.save(vars(here), kept)
        quality = asdict(compare(precision, here, first, size))
        document["results"].append({"file": file.name, "types": types_of(file), **quality})
        asked.output.write_text(json.dumps(document))
        print(file.name, precision, quality["perplexity"], quality["perplexity_change"])


def begun(files: list[Path], tokens: int) -> dict[str, Any]:
    """A document without results. files: the original, then its copies."""
    names = [file.name for file in files]
    return {
        "command": f"python -m benchmarks.file_types {' '.join(names)}",
        "original": names[0],
        "text": "the reference that comes with Python",
        "tokens": tokens,
        "results": [],
        "machine": machine(),
        "versions": versions(),
    }


def types_of(file: Path) -> dict[str, int]:
    """Return the number of matrices of each type."""
    tensors = gguf.GGUFReader(file).tensors
    return dict(Counter(each.tensor_type.name for each in tensors if len(each.shape) > 1))


def run(file: Path, precision: str, tokens: int) -> tuple[Predictions, int]:
    """Return a file's predictions in a precision, and the bytes of its weights."""
    options: EngineOptions = {**PRECISIONS[precision], "drafter": None, "max_batch_size": 8, "max_model_len": 512}
    llm = LLM(file, use_tqdm=False, **options)
    here = predict(llm, llm.requests.tokenizer.encode(python_reference())[:tokens])
    return here, llm.engine.models.target.weight_bytes()


if __name__ == "__main__":
    main()
