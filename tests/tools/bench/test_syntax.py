"""Tokens of code and the nodes of its syntax tree."""

from __future__ import annotations

import time

import pytest

from paceline.tools.bench import syntax
from paceline.tools.bench.syntax import node_kinds

pytest.importorskip("tree_sitter_python", reason=syntax.MISSING)
BODY = ["def", " add", "(", "x", "):", "\n    ", "return", " x", " +", " 1", "\n"]
KINDS = [
    *("function_definition", "identifier", "parameters", "identifier", "parameters", None),
    *("return_statement", "identifier", "binary_operator", "integer", None),
]


def test_a_token_belongs_to_the_innermost_named_node_around_its_first_letter() -> None:
    assert node_kinds(BODY) == KINDS


def test_only_fenced_python_in_prose_is_code() -> None:
    before, after = ["Sure: é\ud800\n", "```python\n"], ["```", "\nx = 1\n", "```js\nlet", " y\n```\n"]
    assert node_kinds([*before, *BODY, *after]) == [None, None, *KINDS, None, None, None, None]
    cut = node_kinds(["```", "\n", *BODY[:4]])
    assert cut[2:] != [None] * 4, "a block that max_tokens cut off is code, too"
    assert cut[:2] == [None, None]


def test_text_between_blocks_of_other_languages_is_not_code() -> None:
    pieces = ["```js\n", "let y\n", "```", "\n", "and then\n", "so\n", "```Python \n", "y\n", "```", "\nthen", "\nz\n"]
    assert node_kinds(pieces) == [None] * 7 + ["identifier"] + [None] * 3


def test_text_without_fences_is_code_if_all_of_it_parses() -> None:
    assert node_kinds(BODY) == KINDS
    assert set(node_kinds(["Here it is: ", *BODY])) == {None}


@pytest.mark.parametrize("text", ["", "Hello", "Hello world,\nthis is no code.", "```", "```python\n", "\ud800\n" * 3])
def test_text_outside_of_code_has_no_nodes(text: str) -> None:
    assert set(node_kinds(list(text))) <= {None}


HOSTILE = {
    "deep": ["```py\n", "(" * 20_000, "\x00é\ud800", "[[" * 5_000, "'''", "\n```"],
    "many blocks": ["```\n"] * 20_000,
    "many deep tokens": ["```py\n", *["lambda:"] * 8_000],
}


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_is_parsed_in_bounded_time(text: str) -> None:
    began = time.process_time()
    assert len(node_kinds(HOSTILE[text])) == len(HOSTILE[text])
    assert time.process_time() - began < 20  # takes a fifth of a second; a quadratic algorithm takes minutes
