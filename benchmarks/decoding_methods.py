"""HumanEval by decoding method: the share of answers that pass, and what speculation does under each method.

    PYTHONPATH=src:. python -m benchmarks.decoding_methods qwen-coder-0.5b.gguf --every 2 --output FILE

Every method answers the same problems once, with n-gram lookup and plain, under the same seeds; both must give the same
texts. The methods are those of "A Thorough Examination of Decoding Methods" (2402.06925) that are exact under
speculation, beside min-p and top-n-sigma. Cuts are taken at temperature 1, with the values that their authors suggest.
Programs run in the sandbox of ``paceline eval humaneval``.
``--methods`` makes a part of the table; FILE keeps the parts that were made before with the same settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parts import Parts, engine_line, sums

from paceline import LLM, SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.tools.bench.offline import machine, versions
from paceline.tools.evaluation.problems import STOP, Problem, human_eval, style_of, tokens_of
from paceline.tools.evaluation.sandbox import Sandbox

DRAFT_TOKENS = 4  # a fixed number: ``auto`` would draft by the clock, and hardly ever with sixteen rows
METHODS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "no cut": {},
    "top-p 0.95": {"top_p": 0.95},
    "min-p 0.1": {"min_p": 0.1},
    "typical-p 0.95": {"typical_p": 0.95},
    "epsilon 0.0009": {"epsilon_cutoff": 0.0009},
    "eta 0.002": {"eta_cutoff": 0.002},
    "top-n-sigma 1": {"top_n_sigma": 1.0},
}


def answers(llm: LLM, problems: Sequence[Problem], params: SamplingParams) -> list[CompletionOutput]:
    """One answer to each problem, under a seed of its own."""
    tokenizer = llm.requests.tokenizer
    prompts = [tokens_of(problem, tokenizer, style_of(tokenizer)) for problem in problems]
    seeded = [replace(params, seed=number) for number in range(len(problems))]
    return [output.outputs[0] for output in llm.generate(prompts, seeded, use_tqdm=False)]


def evaluate(
    llm: LLM, plain: LLM, problems: Sequence[Problem], params: SamplingParams, sandbox: Sandbox
) -> dict[str, Any]:
    """Answer all problems with speculation and plain, and run the programs."""
    found, expected = (answers(side, problems, params) for side in (llm, plain))
    return {
        "passed": [
            sandbox.run(problem.program(answer.text), problem.check, problem.entry_point).passed
            for problem, answer in zip(problems, found, strict=True)
        ],
        "different": sum(ours.token_ids != theirs.token_ids for ours, theirs in zip(found, expected, strict=True)),
        **sums(found),
    }


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="HumanEval by decoding method.")
    parser.add_argument("model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--every", type=int, default=1, help="take every so manieth problem")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--weak-sandbox", action="store_true", help="as in `paceline eval humaneval`")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    sandbox, problems = Sandbox(weak=options.weak_sandbox), human_eval()[:: options.every]
    llm = LLM(
        options.model,
        drafter="ngram",
        num_speculative_tokens=DRAFT_TOKENS,
        lookup_tokens=0,  # every method answers the same problems
        quantization="int8",
        max_batch_size=16,
        max_model_len=1024,
        use_tqdm=False,
    )
    settings = {
        "model": Path(options.model).name,
        "problems": [problem.task_id for problem in problems],
        "max_tokens": options.max_tokens,
        "draft_tokens": DRAFT_TOKENS,
        "engine": engine_line(llm),
    }
    plain = llm.plain()
    parts = Parts(options.output, settings, {"machine": machine(llm.engine.threads), "versions": versions()})
    for method in options.methods:
        params = SamplingParams(max_tokens=options.max_tokens, stop=STOP, **METHODS[method])  # type: ignore[arg-type]
        found = evaluate(llm, plain, problems, params, sandbox)
        parts.add(method, found)
        print(method, {**found, "passed": sum(found["passed"])}, flush=True)


if __name__ == "__main__":
    main()
