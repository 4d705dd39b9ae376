"""Memory of rows: resident bytes of this process while many short rows of a long-context model decode at once.

    python benchmarks/memory_rows.py --rows 64 --max-model-len 8192 --output rows.json

Linux only: it reads /proc/self/smaps_rollup. Memory that is resident before the rows begin is subtracted, which leaves
    caches and workspace. The answers' digest is equal on any machine with the same weights and kernels. The last line
    is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.cli.document import end


def resident() -> int:
    """Resident memory in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("no Rss in /proc/self/smaps_rollup")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--words", type=int, default=150, help="of each prompt")
    parser.add_argument("--memory-limit", type=int, help="bytes")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options = {"quantization": args.quantization, "max_batch_size": args.rows, "max_model_len": args.max_model_len}
    if args.memory_limit is not None:
        options["memory_limit"] = args.memory_limit
    llm = LLM(args.model, drafter=None, **options)
    before = resident()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [f"{row}: " + " ".join(str(row * word % 97) for word in range(args.words)) for row in range(args.rows)]
    outputs = llm.generate(prompts, params)
    grown = resident() - before
    told = [output.outputs[0].token_ids for output in outputs]
    result = {
        "rows": args.rows,
        "max_model_len": args.max_model_len,
        "tokens_of_all_rows": sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs),
        "resident_bytes_of_rows": grown,
        "answers": hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16],
        "engine": llm.engine.describe(),
    }
    end(result, args.output)


if __name__ == "__main__":
    main()
