r"""The drafters of the related papers side by side, trained for equal time on the same answers of the target.

    PYTHONPATH=src:. python -m benchmarks.related_drafters smollm2-135m --folder DIR --output FILE --kinds feature
    PYTHONPATH=src:. python -m benchmarks.related_drafters smollm2-135m --folder DIR --output FILE --times

The first form trains each kind for ``--minutes``, 45 by default. Then it counts what the target accepts on six tasks,
none of whose prompts were trained on, and on held-out answers to prompts like those of the training. It may run once
for each kind: DIR keeps the recorded answers and what was trained, FILE the results of all. A run that was killed goes
on where it was. On a shared machine ``--epochs`` sets the work instead, a number for each of ``--kinds``; the results
have the processor time that it took. The second form needs a quiet machine. It
times drafts, and ``auto`` against plain decoding in turns, for the kinds that DIR holds: all tasks mixed, then open
chat by itself.

The target writes the prompts, too: its own user turns, and user turns that begin with the first words of a task.
Further options are those of ``paceline train-draft``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.drafters import PROMPTS, TASKS, Contender, Count, MeasurementPlan, count, draft_costs, speeds
from benchmarks.parts import Parts, engine_line

from paceline import LLM, SamplingParams
from paceline.config.files import write_text
from paceline.config.training import DRAFT_KINDS
from paceline.tools.bench.offline import machine, versions
from paceline.tools.training.prompts import opening_of

DRAFT_TOKENS = 3  # as many as the heads that draft in one pass are trained for
TEMPERATURES = 0.0, 0.8
KINDS = (*DRAFT_KINDS, "ngram")
CHAT_BATCH_SIZES = 1, 2  # where open chat is timed by itself: a head could replace n-gram lookup there
NOT_IN_TIME = "10000"  # minutes between evaluations: the only one follows the training
TOKENS_OF_A_CONVERSATION = 200  # fewer than usual, so that few prompts are used twice
OPENINGS = (
    "", "", "", "", "Write a Python function that", "Complete this function.\n\n```python\ndef",
    "Translate into French:", "Translate into German:", "Translate into Spanish:", "Translate into English:",
    "Summarise this report in one sentence.\n\n", "Summarise this text:", "A shop sells", "How many", "What is the",
    "Who was the first", "Explain why", "Write a short story about", "Give me advice on", "Correct this text:",
)  # fmt: skip


def usable(texts: Iterable[str]) -> list[str]:
    """The different prompts among texts, without those of the six tasks."""
    known = {prompt for task in TASKS for prompt in PROMPTS[task]}
    return [text for text in dict.fromkeys(text.strip() for text in texts) if text and text not in known]


def written_prompts(llm: LLM, number: int) -> list[str]:
    """At most ``number`` user turns that the target writes, in equal parts after each of ``OPENINGS``."""
    tokenizer = llm.requests.tokenizer
    opening = opening_of(tokenizer)
    if opening is None:
        sys.exit("the target has no chat template, and so writes no user turns")
    begun = [OPENINGS[place % len(OPENINGS)] for place in range(number)]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=128, stop_token_ids=opening.ends, seed=seed)
        for seed in range(number)
    ]
    prompts = [[*opening.tokens, *tokenizer.encode(words, add_special_tokens=False)] for words in begun]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return usable(words + output.outputs[0].text for words, output in zip(begun, outputs, strict=True))


def prepare(options: argparse.Namespace) -> None:
    """Write the prompts, and a place for data that all kinds share, unless an earlier run did."""
    (options.folder / "data").mkdir(parents=True, exist_ok=True)
    file = options.folder / "prompts.jsonl"
    if not file.exists():
        llm = LLM(options.model, drafter=None, quantization="int8", max_batch_size=64, max_model_len=512)
        prompts = written_prompts(llm, max(2 * len(OPENINGS), options.tokens // TOKENS_OF_A_CONVERSATION))
        write_text(file, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def amount_of_training(kind: str, options: argparse.Namespace) -> list[str]:
    """The options of ``paceline train-draft`` that end the training of this kind."""
    if options.epochs is None:
        return ["--minutes", str(options.minutes)]
    return ["--epochs", str(options.epochs[options.kinds.index(kind)])]


def train(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one kind, or go on with it, and return what its report says."""
    directory = options.folder / kind
    directory.mkdir(exist_ok=True)
    if not (directory / "data").exists():
        (directory / "data").symlink_to(Path("..") / "data")
    line = [sys.executable, "-m", "paceline.cli.main", "train-draft", options.model, "--kind", kind, "--resume"]
    line += ["--output", str(directory), "--prompts", str(options.folder / "prompts.jsonl"), "--quantization", "int8"]
    line += ["--tokens", str(options.tokens), *amount_of_training(kind, options), "--evaluate-every", NOT_IN_TIME]
    subprocess.run([*line, *options.training], check=True, stdout=subprocess.DEVNULL)
    report = json.loads((directory / "report.json").read_text())
    return {
        "minutes": report["seconds_of_training"] / 60,
        "cpu_seconds": report["cpu_seconds_of_training"],
        "epochs": report["passes"] / report["data"]["tokens_made"],
        "steps": len(report["losses"]),
        "tokens_seen": report["passes"],
        "head": report["head"],
        "data": report["data"],
        "held_out": report["acceptance"][-1],  # of the kind that it was trained on, greedy
    }


def contender(kind: str, options: argparse.Namespace) -> Contender:
    """The target with this drafter, whose length is ``auto``."""
    directory = options.folder / kind
    if kind == "ngram":
        llm = LLM(options.model, drafter="ngram", lookup_tokens=0, quantization="int8", use_tqdm=False)
    elif (directory / "model.safetensors").exists():
        drafter = "model" if kind == "model" else "feature"
        llm = LLM(options.model, str(directory), drafter=drafter, quantization="int8", use_tqdm=False)
    else:
        sys.exit(f"{directory} holds no drafter: run without --times first")
    return Contender(kind, llm)


def plan_of(options: argparse.Namespace) -> MeasurementPlan:
    """What is counted and timed."""
    sizes, repeats = tuple(options.batch_sizes), options.repeats
    return MeasurementPlan(PROMPTS, options.prompts, DRAFT_TOKENS, options.max_tokens, TEMPERATURES, sizes, repeats)


def about(drafter: Contender) -> dict[str, Any]:
    """What ran where."""
    engine = drafter.llm.engine
    return {"engine": engine_line(drafter.llm), "machine": machine(engine.threads), "versions": versions()}


def summary(counts: Sequence[Count], temperature: float) -> str:
    """Acceptance by position and tokens per round, means over the tasks."""
    here = [each for each in counts if each.temperature == temperature]
    columns = zip(*(each.by_position for each in here), strict=True)
    rates = [[rate for rate in column if rate is not None] for column in columns]
    shown = " ".join(f"{fmean(column):.3f}" if column else "-" for column in rates)
    length = fmean(each.mean_acceptance_length for each in here)
    return f"T={temperature:g}: accepted {shown}, {length:.2f} tokens per round"


def without_bar(steps: Iterable[Any], _what: str) -> Iterable[Any]:
    """Progress for the benches: none is shown."""
    return steps


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one kind and count what is accepted of it."""
    trained = {} if kind == "ngram" else {"training": train(kind, options)}
    drafter = contender(kind, options)
    counts = list(count([drafter], plan_of(options), without_bar))
    for temperature in TEMPERATURES:
        print(f"{kind:16} {summary(counts, temperature)}", flush=True)
    return {**trained, "acceptance": [each.as_document() for each in counts], **about(drafter)}


def times(options: argparse.Namespace) -> dict[str, Any]:
    """Time a draft of each kind, and ``auto`` against plain decoding; plain and all kinds take turns."""
    drafters, plan = [contender(kind, options) for kind in options.kinds], plan_of(options)
    chat = replace(plan, texts={"chat": PROMPTS["chat"]}, batch_sizes=CHAT_BATCH_SIZES)
    found = {
        "draft_costs": [asdict(each) for each in draft_costs(drafters, plan)],
        "auto_over_plain": [asdict(each) for each in speeds(drafters, plan, without_bar)],
        "auto_over_plain_in_chat": [asdict(each) for each in speeds(drafters, chat, without_bar, plan.prompts)],
    }
    for name, cells in found.items():
        print(name, *cells, sep="\n", flush=True)
    return {**found, "ran": {each.name: about(each) for each in drafters}}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``training`` holds the options that are those of ``paceline train-draft``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True, help="recorded answers and trained drafters")
    parser.add_argument("--output", type=Path, required=True, help="the results, as one JSON document")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=45.0, help="training of each kind")
    parser.add_argument("--epochs", type=float, nargs="+", help="epochs of each of --kinds, in place of --minutes")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="recorded tokens, at least")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--times", action="store_true", help="time what was trained")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8], help="with --times")
    parser.add_argument("--repeats", type=int, default=3, help="with --times")
    options, training = parser.parse_known_args(words)
    options.training = training
    if options.epochs is not None:
        options.minutes = None
        if len(options.epochs) != len(options.kinds):
            parser.error("--epochs needs one number for each of --kinds")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Train and count, or time."""
    options = arguments(words)
    names = ("minutes", "tokens", "prompts", "max_tokens", "training")
    settings = {"model": Path(options.model).name, **{name: getattr(options, name) for name in names}}
    parts = Parts(options.output, settings | {"draft_tokens": DRAFT_TOKENS, "openings": list(OPENINGS)}, {})
    if options.times:
        parts.add("times", times(options))
        return
    prepare(options)
    for kind in options.kinds:
        if kind not in parts.results:
            parts.add(kind, measure(kind, options))


if __name__ == "__main__":
    main()
