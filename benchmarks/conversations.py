"""Many conversations on few rows, in turn: tokens read again, time to first token, memory; also over a restart.

    python -m benchmarks.conversations smollm2-135m --quantization int8 --output conversations.json

Each turn continues all conversations, ``--rows`` at a time. Sides: prefixes in free rows only (``prefix_memory`` 0);
beside the rows; and the latter with a restart in the middle, without and with a directory of prefixes. Every side runs
in processes of its own, so that its memory is its own. Answers are greedy and are compared. The last line of stdout has
the figures of each side, as JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.tools.bench.offline import machine, versions

ASKED = (
    "Conversation {0}, turn {1}: tell me about harbour {2}, its lamps, its keepers and the weather of that year.",
    "Conversation {0}, turn {1}: now compare this with harbour {2}, which was built later and burned down twice.",
    "Conversation {0}, turn {1}: what would a sailor from harbour {2} say to all that? Answer in a few sentences.",
)
SIDES: dict[str, dict[str, Any]] = {
    "in free rows": {"prefix_memory": 0, "restarts": False, "files": False},
    "beside the rows": {"prefix_memory": None, "restarts": False, "files": False},
    "restarted": {"prefix_memory": None, "restarts": True, "files": False},
    "restarted, with files": {"prefix_memory": None, "restarts": True, "files": True},
}


def messages_of(number: int, answers: list[str]) -> list[dict[str, str]]:
    """The messages of a conversation's next turn. answers: of its earlier turns."""
    messages = [{"role": "system", "content": "You are a historian of lighthouses and harbours. Answer briefly."}]
    for turn in range(len(answers) + 1):
        asked = ASKED[turn % len(ASKED)].format(number, turn, 31 * number + turn)
        messages.append({"role": "user", "content": asked})
        messages += [{"role": "assistant", "content": text} for text in answers[turn : turn + 1]]
    return messages


def run_turns(wanted: dict[str, Any]) -> dict[str, Any]:
    """Run some turns in this process.

    wanted: model, options of ``LLM``, rows, turns, tokens of an answer, and the answers of each conversation so far.
    Returns the answers so far, and lists by prompt: tokens, cached tokens, seconds to the first token.
    """
    began = time.perf_counter()
    llm = LLM(wanted["model"], max_batch_size=wanted["rows"], use_tqdm=False, **wanted["options"])
    found: dict[str, Any] = {"prompt": [], "cached": [], "seconds": [], "load_seconds": time.perf_counter() - began}
    params = SamplingParams(temperature=0, max_tokens=wanted["tokens"], ignore_eos=True)
    told: list[list[str]] = wanted["answers"]
    for _ in range(wanted["turns"]):
        for first in range(0, len(told), wanted["rows"]):
            some = range(first, min(first + wanted["rows"], len(told)))
            prompts = [llm.tokens_of_chat(messages_of(number, told[number])) for number in some]
            for number, output in zip(some, llm.generate(prompts, params, use_tqdm=False), strict=True):
                told[number].append(output.outputs[0].text)
                found["prompt"].append(len(output.prompt_token_ids))
                found["cached"].append(output.cached_tokens)
                found["seconds"].append(output.outputs[0].metrics.time_to_first_token)
    engine = llm.engine.describe()
    ended = time.perf_counter()
    llm.close()
    found |= {"close_seconds": time.perf_counter() - ended, "answers": told, "engine": engine}
    return found | {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def run_side(side: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run all turns of a side, in one process or in two."""
    half = options.turns // 2
    told: list[list[str]] = [[] for _ in range(options.conversations)]
    with tempfile.TemporaryDirectory(prefix="prefixes-") as directory:
        given: dict[str, Any] = {"max_model_len": options.max_model_len, "drafter": options.drafter}
        given |= {"quantization": options.quantization, "prefix_memory": side["prefix_memory"]}
        given |= {"prefix_dir": directory} if side["files"] else {}
        runs = []
        for turns in (half, options.turns - half) if side["restarts"] else (options.turns,):
            wanted = {"model": options.model, "options": given, "rows": options.rows, "tokens": options.tokens}
            text = json.dumps(wanted | {"turns": turns, "answers": told})
            command = [sys.executable, "-m", "benchmarks.conversations", "--child"]
            child = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(child.stdout.splitlines()[-1]))
            told = runs[-1].pop("answers")
        files = sum(file.stat().st_size for file in Path(directory).iterdir())
    return {"answers": told, "files_bytes": files, "runs": runs, "summary": summary(runs, options)}


def summary(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens of all prompts and those read; milliseconds to the first token, without each conversation's first turn."""
    prompt, cached, seconds = ([each for run in runs for each in run[name]] for name in ("prompt", "cached", "seconds"))
    first = options.conversations
    later, restart = seconds[first:], runs[-1]["seconds"][:first] if len(runs) > 1 else []
    figures = {
        "prompt_tokens": sum(prompt),
        "tokens_read": sum(prompt) - sum(cached),
        "first_token_ms_median": 1000 * statistics.median(later),
        "first_token_ms_p95": 1000 * sorted(later)[int(0.95 * len(later))],
        "peak_gib": max(run["peak_bytes"] for run in runs) / 2**30,
    }
    if restart:
        figures["first_token_after_restart_ms_median"] = 1000 * statistics.median(restart)
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    """The command line."""
    if "--child" in sys.argv:
        print(json.dumps(run_turns(json.loads(sys.stdin.read()))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {name: run_side(SIDES[name], options) for name in options.sides}
    told = [each.pop("answers") for each in found.values()]
    equal = all(each == told[0] for each in told)
    what = {"model": options.model, "rows": options.rows, "conversations": options.conversations}
    what |= {"turns": options.turns, "tokens": options.tokens, "answers_equal": equal}
    if options.output is not None:
        text = json.dumps(what | {"machine": machine(), "versions": versions(), "sides": found})
        options.output.write_text(text + "\n")
    print(json.dumps(what | {name: each["summary"] for name, each in found.items()}))


if __name__ == "__main__":
    main()
