"""Reference texts and siblings: the command line and the sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.references import Side, answers, arguments, prompts_of, separate, siblings

from paceline.llm import LLM
from paceline.tools.bench.measure import BatchRun
from paceline.tools.bench.sets import SETS
from toy_llm import toy_llm

PROMPT = [1 + i % 7 for i in range(61)]


def on_toys(**options: Any) -> LLM:
    llm = toy_llm(drafter="ngram", num_speculative_tokens=3, prefix_cache=False, **options)
    llm.tokens_of_chat = lambda _: PROMPT  # type: ignore[method-assign]
    return llm


def run_sides(sides: Sequence[Side]) -> dict[str, BatchRun]:
    return {name: run() for name, run in sides}


@pytest.mark.usefixtures("one_thread")
def test_sides_prefill_or_copy_as_their_names_say() -> None:
    """Each side starts with an empty cache."""
    options = arguments(["separate", "model", "--rows", "4", "--n", "4", "--max-tokens", "12", "--prompts", "1"])
    sides = separate(options, on_toys(), SETS["retrieval"][:1])
    for _ in range(2):
        runs = run_sides(sides)
        assert {run.tokens for run in runs.values()} == {4 * 12}
        assert {name: sum(m.cached_tokens for m in run.metrics) for name, run in runs.items()} == {
            "n = 4": 3 * 60,
            "4 requests at once, reading all": 0,
            "4 requests in turn, reading all": 0,
            "4 requests at once, with prefix reuse": 3 * 60,
            "4 requests in turn, with prefix reuse": 3 * 60,
        }


@pytest.mark.usefixtures("one_thread")
def test_sibling_drafts_are_counted_with_and_without_copying() -> None:
    """The answers are equal; copying from siblings gives more draft tokens."""
    given = ["siblings", "model", "--rows", "4", "--n", "4", "--max-tokens", "24", "--temperature", "0.5", "--counts"]
    alone, together = run_sides(siblings(arguments(given), on_toys(), SETS["retrieval"][:1])).values()
    assert alone.token_ids == together.token_ids
    assert sum(m.drafted for m in alone.metrics) < sum(m.drafted for m in together.metrics)


@pytest.mark.usefixtures("one_thread")
def test_answers_of_all_requests_save_rounds() -> None:
    given = ["answers", "model", "--rows", "2", "--max-tokens", "24", "--temperature", "0.5", "--n"]
    for options, sides in ((arguments([*given, "1"]), 2), (arguments([*given, "2"]), 3)):
        runs = [*run_sides(answers(options, on_toys(), prompts_of(options)[:12])).values()]
        rounds = [sum(m.rounds for m in run.metrics) for run in runs]
        assert all(run.token_ids == runs[0].token_ids for run in runs)
        assert len(rounds) == sides
        assert rounds == sorted(rounds, reverse=True)
        assert rounds[0] > rounds[-1]


def test_the_turns_of_a_conversation_have_the_program_once() -> None:
    given = ["answers", "model", "--set", "turns", "--n"]
    turns = prompts_of(arguments([*given, "1"]))
    assert len(turns) == 20
    assert ["```" in turn.text for turn in turns] == [True] + 19 * [False]
    with pytest.raises(SystemExit):
        arguments([*given, "2"])
