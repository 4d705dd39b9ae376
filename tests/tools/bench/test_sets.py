"""The sets of prompts that benchmarks come with."""

import ast
import hashlib
import json
from pathlib import Path

import pytest
from benchmarks.drafters import PROMPTS as OF_TASKS

from paceline.llm import LLM
from paceline.tools.bench.offline import PROMPTS, prompts_for
from paceline.tools.bench.prompts import COPYING, FORKED, OPEN
from paceline.tools.bench.sets import EDITS, SETS, STUBS


def test_sixteen_different_stubs_that_are_python() -> None:
    assert len(set(STUBS)) == 16
    for stub in STUBS:
        compile(stub, "stub", "exec")


def test_twenty_different_programs_to_edit_whose_original_is_in_the_prompt_and_the_reference() -> None:
    assert len({edit.code for edit in EDITS}) == len({edit.change for edit in EDITS}) == 20
    for edit, asked in zip(EDITS, SETS["edits"], strict=True):
        assert edit.change in asked.text
        assert edit.code in asked.text
        assert edit.code in asked.references[0]
        if edit.language == "python":
            ast.parse(edit.code)


def test_an_edit_in_a_project_stands_behind_all_other_programs() -> None:
    for alone, asked in zip(SETS["edits"], SETS["project"], strict=True):
        assert all(asked.text.count(edit.code) == 1 for edit in EDITS)
        assert asked.text.endswith(alone.text)
        assert asked.references == alone.references
    assert len({asked.text[:200] for asked in SETS["project"]}) == len(EDITS), "prompts share no prefix"


def test_no_prompt_stands_in_a_set_twice() -> None:
    for name, asked in SETS.items():
        assert len({each.text for each in asked}) == len(asked) >= 8, name
    assert all(each.references for name in ("edits", "retrieval", "project") for each in SETS[name])
    assert not any(each.references for name in ("stubs", "chat") for each in SETS[name])


def test_no_byte_of_a_prompt_changes() -> None:
    """Results of different days are compared: these are the digests of the texts with which the first were measured."""
    sets = {name: [[each.text, each.references] for each in asked] for name, asked in SETS.items()}
    found = {
        "copying": COPYING,
        "forked": FORKED,
        "open": OPEN,
        "tasks": OF_TASKS,
        "sets": {name: content for name, content in sets.items() if name != "project"},
        "project": sets["project"],
    }
    assert {name: _digest(texts) for name, texts in found.items()} == {
        "copying": "4362263b2b1cc281",
        "forked": "78b3908ea9d57f7e",
        "open": "15433a5333f50066",
        "tasks": "acee7371166a73f1",
        "sets": "51c04e20a5cd3a59",
        "project": "c9372f8515a54e29",
    }


def _digest(texts: object) -> str:
    return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", [*SETS, *PROMPTS])
def test_a_batch_larger_than_a_set_repeats_it(bench_llm: LLM, name: str) -> None:
    prompts, references = prompts_for(bench_llm, name, 21)
    size = len(SETS[name]) if name in SETS else len(PROMPTS[name])
    assert prompts[0] == prompts[size]
    assert references[0] == references[size]
    assert len(prompts) == len(references) == 21


def test_programs_have_100_to_400_tokens() -> None:
    """By a rough count, as no tokenizer is at hand: code has about three letters a token."""
    assert all(100 <= len(edit.code) / 3.2 <= 400 for edit in EDITS), [len(edit.code) // 3.2 for edit in EDITS]


@pytest.fixture(scope="module")
def bench_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    from server_support import load, save_model

    model: str = save_model(Path(tmp_path_factory.mktemp("bench") / "tiny"))
    return load(model)
