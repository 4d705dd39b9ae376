"""Trees compared with chains by time: the sides."""

from __future__ import annotations

import pytest
from benchmarks.trees import arguments, compared

from toy_llm import toy_llm


@pytest.mark.usefixtures("one_thread")
def test_trees_chains_and_plain_decoding_give_the_same_answers() -> None:
    llm = toy_llm(drafter="ngram", num_speculative_tokens=3)
    llm.tokens_of_chat = lambda messages: [1 + len(str(messages)) % 5, *[1, 2, 3] * 4]  # type: ignore[method-assign]
    options = arguments(["model", "--rows", "3", "--widths", "1", "3", "--repeats", "2", "--max-tokens", "12"])
    found = compared(llm, 3, options)
    assert [(each["rows"], each["side"]) for each in found] == [(3, "plain"), (3, "width 1"), (3, "width 3")]
    plain, chain, tree = found
    assert plain["tokens_a_round"] == 1
    assert (plain["over_plain"], chain["time_of_chains"]) == (1, 1)
    assert tree["draft_tokens_a_round"] > chain["draft_tokens_a_round"] > 0
    assert chain["saved_by_sibling"] == 0
    assert all(len(each["seconds_of_all"]) == 2 for each in found)
