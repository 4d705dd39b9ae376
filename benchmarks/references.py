"""The effect of reference texts and of parallel samples on n-gram lookup: tokens per round, and time.

    python benchmarks/references.py edits qwen-coder-1.5b.gguf --rows 4 --prompts 20 --quantization int8
    python benchmarks/references.py siblings qwen-coder-1.5b.gguf --rows 8 --prompts 4 --n 8 -k 8 --counts
    python benchmarks/references.py separate qwen-coder-1.5b.gguf --rows 8 --prompts 1 --n 8 --max-tokens 48
    python benchmarks/references.py answers qwen-coder-1.5b.gguf --set changes --rows 8 --n 1 -k 8 --counts

edits: programs with a small change to make (`paceline bench offline --prompts edits` has them), greedy: plain decoding,
    lookup in the prompt (which contains the original, too), lookup with the original as reference.
siblings: n samples of one prompt: as one request, as one request without copying from each other, as n requests. They
    copy from each other while they run at the same time, so n rows are needed.
separate: n samples of one prompt, all equally long: as one request, as n requests at once and one after the other, with
    and without prefix reuse between requests. Each side starts with an empty cache.
answers: requests whose drafts are copied from their own text only (prompt lookup), from the answers of their own
    request, or of all requests so far. Prompts are those of ``--set``; changes are twenty changes to one program, turns
    the same as the turns of one conversation, questions two hundred of one document (eight about each of 25 things in
    it), humaneval the 164 problems of HumanEval. Each side starts with a new engine. Only the last one keeps prefixes
    for later requests, so where prompts begin alike compare the time of decoding.

--counts: acceptance counts instead of times; with a number for -k they do not depend on timing. Sides take turns, the
median of the repeats counts. Prompts are computed once per sample or request, as in the engine. The last line of stdout
is the result as one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts import engine_line

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.core.outputs import RequestOutput
from paceline.tools.bench.measure import BatchRun, turns
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.sets import EDITS, SETS, BenchPrompt
from paceline.tools.evaluation.problems import human_eval

Side = tuple[str, Callable[[], BatchRun]]

CHANGES = (
    *("Add a docstring to every function.", "Add type hints.", "Rename the first function.", "Log each call."),
    *("Raise ValueError on empty input.", "Use f-strings.", "Sort the results.", "Remove all comments."),
    *("Add a parameter verbose=False to each function.", "Add a comment above each loop.", "Use early returns."),
    *("Make the names of variables longer.", "Make the names of variables shorter.", "Add a main function."),
    *("Write all constants at the top.", "Add a type alias.", "Rename the last function.", "Add one more check."),
    *("Add a doctest to the first function.", "Wrap lines at 79 characters."),
)  # fmt: skip
THINGS = (
    *("young plants", "tomatoes", "the tank", "the tap", "rain", "noon", "June", "leaves", "the heap", "meat"),
    *("diseased plants", "April", "September", "the cover", "the shed", "blades", "broken tools", "the red box"),
    *("Marta", "the first Saturday", "keys", "the gate", "the book", "the board", "twenty euros"),
)  # fmt: skip
QUESTIONS = (
    *("What does the handbook say about {}?", "Quote every sentence that mentions {}.", "Which section has {} in it?"),
    *("Copy the section that mentions {}.", "Why does the handbook mention {}?", "Write a notice about {}."),
    *("What must a new member know about {}?", "List all rules about {}, one a line."),
)  # fmt: skip
MADE = ("changes", "turns", "questions", "humaneval")  # sets that are made here
TIMES = {"seconds", "seconds_of_all", "ms_per_token", "speed_up", "speed_up_decoding"}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("edits", "siblings", "separate", "answers"))
    parser.add_argument("model")
    parser.add_argument("--set", choices=(*SETS, *MADE), default="changes", help="prompts of answers")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="of the set: the first of the prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e6, help="no repeat starts that would end later")
    parser.add_argument("-k", default="auto", help="speculation length")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--counts", action="store_true", help="each side once, no times")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(given)
    if options.what in ("siblings", "separate") and options.rows < options.n:
        parser.error(f"--rows {options.rows}: siblings need a row each, {options.n} of them (--n)")
    if options.set == "turns" and options.n > 1:
        parser.error(f"--n {options.n}: a conversation goes on with one answer")
    return options


def timed(run: Callable[[], list[RequestOutput]]) -> BatchRun:
    """A batch and its seconds."""
    started = time.perf_counter()
    outputs = run()
    return BatchRun(time.perf_counter() - started, outputs)


def edits(options: argparse.Namespace, llm: LLM, tasks: Sequence[BenchPrompt]) -> list[Side]:
    """The three sides of ``edits``."""
    plain = llm.plain()
    prompts = [llm.tokens_of_chat(each.messages) for each in tasks]
    originals = [each.references for each in tasks]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    return [
        ("plain", lambda: timed(lambda: plain.generate(prompts, params, use_tqdm=False))),
        ("lookup", lambda: timed(lambda: llm.generate(prompts, params, use_tqdm=False))),
        ("references", lambda: timed(lambda: llm.generate(prompts, params, references=originals, use_tqdm=False))),
    ]


def siblings(options: argparse.Namespace, llm: LLM, tasks: Sequence[BenchPrompt]) -> list[Side]:
    """The sides of ``siblings``; each prompt runs alone."""
    alone = llm.with_options(max_batch_size=options.rows, lookup_tokens=0)
    prompts = [llm.tokens_of_chat(each.messages) for each in tasks]
    one = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1)
    many = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1, n=options.n)

    def call(engine: LLM, params: SamplingParams, times: int) -> list[RequestOutput]:
        rounds = [engine.generate([prompt] * times, _seeds(params, times), use_tqdm=False) for prompt in prompts]
        return [output for outputs in rounds for output in outputs]

    sides = [
        (f"{options.n} requests", lambda: timed(lambda: call(llm, one, options.n))),
        (f"n = {options.n}, not from each other", lambda: timed(lambda: call(alone, many, 1))),
        (f"n = {options.n}", lambda: timed(lambda: call(llm, many, 1))),
    ]
    return sides[1:] if options.counts else sides  # with counts, separate requests equal samples without siblings


def separate(options: argparse.Namespace, llm: LLM, tasks: Sequence[BenchPrompt]) -> list[Side]:
    """The sides of ``separate``."""
    prompts = [llm.tokens_of_chat(each.messages) for each in tasks]
    one = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1, ignore_eos=True)
    copying = llm.with_options(prefix_cache=True)

    def call(engine: LLM, params: SamplingParams, calls: int, rows: int) -> BatchRun:
        """For each prompt, ``calls`` calls of ``rows`` requests each."""
        seeds = [_seeds(params, rows, first=rows * call) for call in range(calls)]
        engine.engine.slots.forget()
        rounds = [(prompt, each) for prompt in prompts for each in seeds]
        return timed(
            lambda: [o for prompt, each in rounds for o in engine.generate([prompt] * rows, each, use_tqdm=False)]
        )

    n = options.n
    sides: list[Side] = [(f"n = {n}", lambda: call(llm, replace(one, n=n), 1, 1))]
    for engine, how in ((llm, "reading all"), (copying, "with prefix reuse")):
        sides.append((f"{n} requests at once, {how}", lambda e=engine: call(e, one, 1, n)))  # type: ignore[misc]
        sides.append((f"{n} requests in turn, {how}", lambda e=engine: call(e, one, n, 1)))  # type: ignore[misc]
    return sides


def answers(options: argparse.Namespace, llm: LLM, tasks: Sequence[BenchPrompt]) -> list[Side]:
    """The sides of ``answers``."""
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1, n=options.n)

    def call(keep_prefix: bool, **given: Any) -> BatchRun:
        engine, each = llm.with_options(prefix_cache=True, **given), replace(params, keep_prefix=keep_prefix)
        if options.set == "turns":
            return timed(lambda: conversation(engine, tasks, each))
        prompts = [llm.tokens_of_chat(task.messages) for task in tasks]
        return timed(lambda: engine.generate(prompts, each, use_tqdm=False))

    sides: list[Side] = [
        ("own text", lambda: call(False, lookup_tokens=0)),
        ("of its own request", lambda: call(False)),
        ("of all requests", lambda: call(True)),
    ]
    return sides if options.n > 1 else [sides[0], sides[2]]  # a request with one answer has no others


def conversation(llm: LLM, tasks: Sequence[BenchPrompt], params: SamplingParams) -> list[RequestOutput]:
    """Ask for all tasks in one conversation, turn by turn."""
    outputs: list[RequestOutput] = []
    messages: list[Mapping[str, str]] = []
    for task in tasks:
        messages += task.messages
        outputs += llm.generate([llm.tokens_of_chat(messages)], params, use_tqdm=False)
        messages.append({"role": "assistant", "content": outputs[-1].outputs[0].text})
    return outputs


def prompts_of(options: argparse.Namespace) -> Sequence[BenchPrompt]:
    """The prompts of a run."""
    if options.what != "answers":
        return SETS["edits" if options.what == "edits" else "retrieval"]
    if options.set in SETS:
        return SETS[options.set]
    if options.set == "humaneval":
        return [BenchPrompt(f"Complete this function.\n\n```python\n{problem.prompt}```") for problem in human_eval()]
    if options.set == "questions":
        (handbook,) = SETS["retrieval"][0].references
        asked = (question.format(thing) for thing in THINGS for question in QUESTIONS)
        return [BenchPrompt(f"{handbook}\n\n{question}") for question in asked]
    program = max(EDITS, key=lambda edit: len(edit.code))
    asks = (f"{change} Answer with the whole file and nothing else." for change in CHANGES)
    file = f"\n\n```{program.language}\n{program.code}```"
    return [BenchPrompt(ask + file * (number == 0 or options.set == "changes")) for number, ask in enumerate(asks)]


def _seeds(params: SamplingParams, times: int, first: int = 0) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(first, first + times)]


def summary(name: str, runs: Sequence[BatchRun], first: Sequence[BatchRun]) -> dict[str, Any]:
    """The results of one side; speed-ups over the first side, turn by turn."""
    one = runs[0]
    drafted, accepted = (sum(getattr(m, kind) for m in one.metrics) for kind in ("drafted", "accepted"))
    return {
        "side": name,
        "seconds": statistics.median(run.seconds for run in runs),
        "seconds_of_all": [run.seconds for run in runs],
        "ms_per_token": statistics.median(run.ms_per_token for run in runs),
        "tokens": one.tokens,
        "rounds": sum(m.rounds for m in one.metrics),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_a_round": one.mean_acceptance_length,
        "speed_up": statistics.median(a.seconds / b.seconds for a, b in zip(first, runs, strict=True)),
        "speed_up_decoding": statistics.median(
            a.ms_per_token / b.ms_per_token for a, b in zip(first, runs, strict=True)
        ),
    }


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    tasks = prompts_of(options)[options.first : options.first + options.prompts]
    length = int(options.k) if options.k.isdigit() else options.k
    llm = LLM(
        options.model,
        drafter="ngram",
        num_speculative_tokens=length,
        max_batch_size=options.rows,
        quantization=options.quantization,
        max_model_len=8192 if options.set == "turns" else 1024,
        prefix_cache=False,  # the time of prefill is part of the measurement
    )
    kinds = {"edits": edits, "siblings": siblings, "separate": separate, "answers": answers}
    sides = kinds[options.what](options, llm, tasks)
    runs: dict[str, list[BatchRun]] = {name: [] for name, _ in sides}
    llm.generate([llm.tokens_of_chat(tasks[0].messages)], SamplingParams(max_tokens=8), use_tqdm=False)  # warm-up
    started, longest = time.monotonic(), 0.0
    for turn in turns(sides, 1 if options.counts else options.repeats):
        began = time.monotonic()
        if began - started + longest > options.seconds:
            break
        for name, run in turn:
            runs[name].append(run())
        longest = max(longest, time.monotonic() - began)
    first = next(iter(runs.values()))
    results = [summary(name, each, first) for name, each in runs.items()]
    if options.counts:
        results = [{name: value for name, value in each.items() if name not in TIMES} for each in results]
    if options.what == "edits":
        same = [run.token_ids == first[0].token_ids for each in runs.values() for run in each]
        assert all(same), "speculation changed an answer"
    names = {"edits": "edits", "answers": options.set}
    document = {
        "benchmark": "references",
        "command": "python " + " ".join(sys.argv),
        "prompts": f"{len(tasks)} of {names.get(options.what, 'retrieval')}",
        "prompt_tokens": [len(llm.tokens_of_chat(each.messages)) for each in tasks],
        "engine": engine_line(llm),
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "results": results,
    }
    for each in results:
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in each.items()}, file=sys.stderr)
    end(document, options.output)


if __name__ == "__main__":
    main()
