"""``paceline verify``: checks on the user's own models that speculation does not change the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import Sheet, stdout
from paceline.cli.options import (
    DEFAULT_MODEL,
    EngineFlags,
    Model,
    Quiet,
    check_draft_tokens,
    speculation_length,
    whole_numbers,
)
from paceline.cli.questions import PromptsFile, questions_in, tokens_of
from paceline.config import AcceptanceName, SamplingParams
from paceline.config.limits import MAX_ANSWERS
from paceline.progress import Bar
from paceline.tools.bench.prompts import COPYING, FORKED, OPEN

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.tools.evaluation.lossless import Comparison, DistributionTest, FirstDifference

SAMPLING_TEMPERATURE = 0.8


def verify(
    engine: EngineFlags,
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt. Repeatable.")] = None,
    prompts_file: PromptsFile = None,
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="Batch sizes, separated by commas.")] = "1,8",
    lengths: Annotated[str, typer.Option("--lengths", help="Speculation lengths, separated by commas.")] = "4,bass",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens of each compared answer.")] = 32,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=0,
            max=MAX_ANSWERS,
            help="Continuations sampled for the test of the distribution; 0: no test.",
        ),
    ] = 1000,
    quiet: Quiet = False,
) -> None:
    """Check on your own models that speculation does not change the output. Exit code 1 if it does."""
    from paceline.tools.evaluation.lossless import compare_with_plain, distribution_test

    sizes, ks = whole_numbers("--batch-sizes", batch_sizes), [speculation_length(part) for part in lengths.split(",")]
    asked = [] if prompts_file is None else questions_in(prompts_file)
    llm = engine.load(model, quiet)
    check_draft_tokens(llm, engine.drafter)
    own = [*(_encode(llm, text) for text in prompt or ()), *(tokens_of(llm, job) for job in asked)]
    prompts = own or [_encode(llm, text) for text in [*COPYING[:4], *OPEN[:4]]]
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, keep_prefix=False)  # no side drafts from another
    rules: tuple[AcceptanceName, ...] = ("coupled", "rejection") if samples else ()
    comparisons: list[Comparison] = []
    tests: list[DistributionTest] = []
    with Bar("checks", 2 * len(sizes) * len(ks) + len(rules), shown=not quiet) as bar:
        for params in (greedy, replace(greedy, temperature=SAMPLING_TEMPERATURE)):
            for comparison in compare_with_plain(llm, prompts, params, sizes, ks):
                comparisons.append(comparison)
                bar.change(advance=1)
        for rule in rules:
            tests.append(distribution_test(llm, prompts[0] if own else _encode(llm, FORKED), rule, samples))
            bar.change(advance=1)
    if not report(llm, comparisons, tests):
        raise typer.Exit(1)


def _encode(llm: LLM, text: str) -> list[int]:
    return llm.requests.tokenizer.encode(text)


def report(llm: LLM, comparisons: Sequence[Comparison], tests: Sequence[DistributionTest]) -> bool:
    """Print all results; returns whether speculation left the output unchanged."""
    console = stdout()
    columns = ["against plain decoding", "rows", "k", "equal answers", "largest gap"]
    console.print(Sheet("Token by token", columns, [_comparison_row(entry) for entry in comparisons]))
    for entry in comparisons:
        for parted in entry.divergences:
            console.print(_sentence(llm, entry, parted), soft_wrap=True, markup=False)
    if tests:
        columns = ["rule", "samples", "drafts accepted", "cells", "chi-squared", "p-value"]
        console.print(Sheet("Distribution of the next tokens", columns, [_probability_row(test) for test in tests]))
    violated = [entry.what for entry in comparisons if entry.violated]
    violated += [f"the distribution under {test.acceptance}" for test in tests if test.violated]
    ties = sum(len(entry.divergences) for entry in comparisons)
    if violated:
        console.print(f"[bold red]VIOLATED: {', '.join(dict.fromkeys(violated))}[/bold red]", soft_wrap=True)
    elif ties:
        first = comparisons[0]
        text = f"Lossless up to {ties} near-ties of {first.precision} (gap at most {first.tolerance:g} logits)."
        console.print(f"[bold yellow]{text}[/bold yellow]", soft_wrap=True)
    else:
        console.print("[bold green]Lossless: every answer equals plain decoding's.[/bold green]")
    return not violated


def _probability_row(test: DistributionTest) -> list[str]:
    accepted = f"{test.accepted} of {test.drafted}"
    statistic, p_value = f"{test.statistic:.1f}", f"{test.p_value:.3g}"
    return [test.acceptance, str(test.samples), accepted, str(test.cells), statistic, p_value]


def _comparison_row(entry: Comparison) -> list[str]:
    equal = entry.answers - len(entry.divergences)
    gap = max((divergence.gap for divergence in entry.divergences), default=None)
    shown = "" if gap is None else f"{gap:.3g}"
    return [entry.what, str(entry.batch_size), str(entry.length), f"{equal} of {entry.answers}", shown]


def _sentence(llm: LLM, entry: Comparison, parted: FirstDifference) -> str:
    tokenizer = llm.requests.tokenizer
    names = [
        "the end" if token is None else repr(tokenizer.token_text(token)) for token in (parted.found, parted.expected)
    ]
    kind = "violation" if parted.gap > entry.tolerance else "near-tie"
    return (
        f"{entry.what}, {entry.batch_size} rows, k={entry.length}: prompt {parted.prompt + 1}, token "
        f"{parted.position + 1}: {names[0]} instead of {names[1]}, gap {parted.gap:.3g} logits ({kind})"
    )
