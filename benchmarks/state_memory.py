"""Memory of a hybrid's recurrent states by rows, with and without draft tokens: as planned, and resident.

    python -m benchmarks.random_models DIRECTORY --shape qwen3.5-0.8b
    python -m benchmarks.state_memory DIRECTORY --quantization int8 --rows 1 4 8 --lengths 0 3 --output states.json

Linux only: it asks /proc/self/pagemap which pages of the states are present after the rows have decoded. States that
    are saved for prefixes are as many with draft tokens as without; they are counted apart. The last line is one JSON
    document.
"""

from __future__ import annotations

import argparse
import json
import mmap
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.core.recurrent_state import RecurrentStates, StatefulCache
from paceline.engine.memory import state_bytes

PAGE = mmap.PAGESIZE
PRESENT = 0x80  # bit 63 of an entry of /proc/self/pagemap, in its last byte


def resident(tensor: Tensor) -> int:
    """Bytes of the pages of a contiguous tensor that are in memory."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(8 * first)
        entries = table.read(8 * (last - first + 1))
    return PAGE * sum(flags >= PRESENT for flags in entries[7::8])


def states_of(llm: LLM) -> RecurrentStates:
    """The states of an engine's target. Exits if it has none."""
    cache = llm.engine.parts.target.cache
    if not isinstance(cache, StatefulCache):
        raise SystemExit(f"{llm.engine.describe()}: no recurrent states")
    return cache.states


def measure(llm: LLM, rows: int, length: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Let ``rows`` rows decode with ``length`` draft tokens; returns planned and resident bytes."""
    side = (llm.with_options(num_speculative_tokens=length) if length else llm.plain()).with_options(
        max_batch_size=rows
    )
    prompts = [[1 + (31 * row + 7 * place) % 97 for place in range(prompt)] for row in range(rows)]
    side.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    states, engine = states_of(side), side.engine
    saved = (rows + 1) * states.shape.state_bytes
    found = sum(resident(table) for table in (states.state, states.tail, states.inputs))
    planned = state_bytes(engine.parts.target.model, engine.config, rows)
    return {"rows": rows, "draft_tokens": length, "planned": planned - saved, "resident": found, "saved": saved}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 3], help="draft tokens; the first is compared to")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, drafter="mtp", quantization=args.quantization, dtype="bfloat16", max_model_len=1024)
    results = []
    for rows in args.rows:
        sides = [measure(llm, rows, length, args.prompt_tokens, args.max_tokens) for length in args.lengths]
        for side in sides:
            side["over_first"] = round(side["resident"] / sides[0]["resident"], 3)
            side["planned_over_first"] = round(side["planned"] / sides[0]["planned"], 3)
            print(json.dumps(side), flush=True)
        results += sides
    document = {"model": Path(args.model).name, "quantization": args.quantization, "results": results}
    end(document, args.output)


if __name__ == "__main__":
    main()
