"""The possible gain of trees: a draft at a place does not depend on the places visited before it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tree_gain import (
    DEEP,
    WIDE,
    Answer,
    Grown,
    best,
    replay,
    rounds,
)

from batches import new_batch
from head_support import tiny_head
from paceline.config import SamplingParams
from paceline.core.batch import RowStart
from paceline.drafters.model import ModelDrafter
from toy import ToyModel, make_engine, slow_answer, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [5, 3, 8, 1]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def grown(kind: str, *, noise: bool = True) -> tuple[Answer, Grown]:
    """The trees of the second of two rows."""
    target = tiny_llama() if kind == "feature" else ToyModel()
    draft: Any = tiny_head(target, 32) if kind == "feature" else ToyModel(blur=0.3 if kind == "model" else 0.0)
    engine = make_engine(target, draft, drafter="feature" if kind == "feature" else "model", speculation_width=WIDE)
    drafter, batch = engine.parts.drafter, new_batch(4, 64, target.vocab_size)
    assert isinstance(drafter, ModelDrafter)
    text = slow_answer(target, PROMPT, GREEDY)
    answer = Answer("chat", 0.0, PROMPT, [], text)
    for row in range(2):
        batch.set_row(row, RowStart([*PROMPT, *text], SamplingParams(), 0))
        with torch.inference_mode():
            engine.parts.target.prefill(batch, [row], [0], [len(PROMPT) + len(text)])
    batch.set_live(range(2))
    return answer, Grown(drafter, batch, 1, answer, noise=noise)


@pytest.mark.parametrize("kind", ["model", "feature"])
def test_a_tree_does_not_depend_on_the_order_of_places(kind: str) -> None:
    _, there = grown(kind)
    _, back = grown(kind)
    places = [0, 3, 4, 11, 17]
    trees = {place: there.tree(place, DEEP) for place in places}
    for place in reversed(places):
        tree = back.tree(place, DEEP)
        assert (tree.tokens, tree.parents) == (trees[place].tokens, trees[place].parents)
        assert tree.scores == pytest.approx(trees[place].scores, abs=1e-5)
    assert any(len(tree.tokens) > len(tree.path(tree.tokens)) for tree in trees.values()), "some of them branch"


def test_a_model_that_drafts_for_itself_takes_the_fewest_rounds() -> None:
    answer, own = grown("self")
    totals = replay([(answer.answer, own.chain)], best(DEEP))
    assert totals.tokens == len(answer.answer)
    assert totals.rounds == -(-len(answer.answer) // (DEEP + 1))
    assert totals.saved == 0
    assert replay([(answer.answer, own.tree)], best(WIDE * DEEP)).rounds == totals.rounds


def test_ngram_trees_need_no_model_and_results_are_kept(tmp_path: Path) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9, 5, 6, 7, 1, 2, 3, 4, 8]
    answers, output = tmp_path / "answers.json", tmp_path / "out.json"
    answers.write_text(json.dumps([Answer(name, 0.0, text, [], text[1:])._asdict() for name in ("chat", "edits")]))
    options = argparse.Namespace(what="rounds", model=None, answers=answers, output=output, prompts=1, sets=["chat"])
    chat, alone = rounds(options)
    assert (alone["prompts"], alone["tokens_a_round"]) == ("all", chat["tokens_a_round"])
    found = chat["tokens_a_round"]
    assert found["chain"]["1"] < found["chain"]["4"]
    assert chat["curves"]["chain"][0] == (0, 1), "nothing verified: a token a round"
    assert json.loads(output.read_text())["results"] == [json.loads(json.dumps(chat))]
    output.write_text(json.dumps({"results": [chat | {"tokens": 2 * chat["tokens"]}, alone]}))
    options.sets = ["chat", "edits"]
    first, second, both = rounds(options)
    assert [each["tokens"] for each in (first, second, both)] == [count * (len(text) - 1) for count in (2, 1, 3)]
    assert second["tokens_a_round"] == found
    assert json.loads(output.read_text())["results"][1]["prompts"] == "edits"
