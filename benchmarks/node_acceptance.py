r"""Acceptance of draft tokens by node of the syntax tree, over answers to HumanEval (as in ASTxplainer, 2308.03873).

    PYTHONPATH=src:. python -m benchmarks.node_acceptance qwen-coder-1.5b.gguf --draft-model qwen-coder-0.5b.gguf \
        --output FILE

A token belongs to the innermost named node around its first letter, in the tree of the problem's function with the
answer in it. A token counts as drafted if it was accepted or recovered, as in ``paceline trace``. Programs are parsed
and not run. Greedy decoding, four draft tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts import engine_line

from paceline import LLM, SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.syntax import node_kinds
from paceline.tools.bench.trace import by_node
from paceline.tools.evaluation.problems import STOP, Problem, human_eval, style_of, tokens_of

DRAFT_TOKENS = 4
Counts = Mapping[str, Sequence[int]]  # node -> (drafted, accepted), of one answer


def counts(problem: Problem, answer: CompletionOutput) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of one answer by node."""
    before = f"```python\n{problem.prompt}"  # a fence, because an answer alone begins inside a function
    nodes = node_kinds([before, *answer.pieces])[1:]
    return {node: (drafted, accepted) for node, drafted, accepted in by_node(answer, nodes)}


def share(answers: Sequence[Counts], nodes: Sequence[str]) -> tuple[int, float, float]:
    """Drafted tokens of these nodes, the share that was accepted, and its standard error.

    The error is that of a ratio of sums over answers, because the tokens of one answer are not independent.
    """
    pairs = [[sum(answer.get(node, (0, 0))[i] for node in nodes) for i in (0, 1)] for answer in answers]
    drafted, accepted = (sum(pair[i] for pair in pairs) for i in (0, 1))
    ratio, many = accepted / drafted, len(pairs)
    spread = sum((kept - ratio * made) ** 2 for made, kept in pairs)
    return drafted, ratio, math.sqrt(spread * many / (many - 1)) / drafted


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Acceptance of draft tokens by node of the syntax tree.")
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth problem")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    drafting: dict[str, Any] = {"drafter": "model" if options.draft_model else "ngram", "quantization": "int8"}
    llm = LLM(
        options.model,
        options.draft_model,
        num_speculative_tokens=DRAFT_TOKENS,
        max_batch_size=16,
        max_model_len=1024,
        use_tqdm=False,
        **drafting,
    )
    tokenizer = llm.requests.tokenizer
    problems, style = human_eval()[:: options.every], style_of(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, stop=STOP)
    outputs = llm.generate([tokens_of(each, tokenizer, style) for each in problems], params, use_tqdm=False)
    made = [counts(problem, output.outputs[0]) for problem, output in zip(problems, outputs, strict=True)]
    document = {
        "model": Path(options.model).name,
        "draft_model": options.draft_model and Path(options.draft_model).name,
        "engine": engine_line(llm),
        "problems": [problem.task_id for problem in problems],
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "rounds": sum(output.outputs[0].metrics.rounds for output in outputs),
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "answers": made,
    }
    nodes = {node for answer in made for node in answer}
    for node in sorted(nodes, key=lambda node: -share(made, [node])[0]):
        drafted, accepted, error = share(made, [node])
        print(f"{node:28} {drafted:6} drafted {accepted:6.1%} accepted, error {error:.1%}")
    if options.output is not None:
        options.output.write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
