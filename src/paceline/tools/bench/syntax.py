"""Which kind of syntax-tree node each token of an answer's Python code belongs to.

As ASTxplainer aligns them (2308.03873): a token belongs to the innermost named node around its first letter,
so ``(`` after a function's name belongs to ``parameters`` and ``def`` to ``function_definition``. What a model wrote is
only parsed, never run; tree-sitter parses whatever it is given.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

try:
    import tree_sitter
    import tree_sitter_python
except ImportError:
    _INSTALLED = False
else:
    _INSTALLED = True

MISSING = 'pip install "paceline[trace]"'
_FENCE = "```"
_FENCED = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "py", "python", "python3")  # what a fence may say; most models leave the name out at times


def available() -> bool:
    """Whether there is a parser."""
    return _INSTALLED


def node_kinds(pieces: Sequence[str]) -> list[str | None]:
    """Of each token, by the text that it let out; None of what is no code, or nothing to be seen."""
    ends = list(accumulate(map(len, pieces)))
    seen = [end - len(piece.lstrip()) for end, piece in zip(ends, pieces, strict=True)]  # its first letter's place
    kinds: list[str | None] = [None] * len(pieces)
    for first, code in _code("".join(pieces)):
        root, offsets = _parse(code), [0, *accumulate(map(_bytes, code))]
        for token in range(bisect_left(seen, first), bisect_left(seen, first + len(code))):
            if pieces[token].strip():
                at = offsets[seen[token] - first]
                node = root.named_descendant_for_byte_range(at, at + 1)
                kinds[token] = node and str(node.type)
    return kinds


def _code(text: str) -> Iterator[tuple[int, str]]:
    """(place of the first letter, code): fenced as Python; of a text without fences all, if it is nothing but code."""
    if _FENCE in text:
        yield from (
            (found.start(2), found[2]) for found in _FENCED.finditer(text) if found[1].strip().lower() in _PYTHON
        )
    elif "\n" in text.strip() and not _parse(text).has_error:
        yield 0, text


def _parse(code: str) -> tree_sitter.Node:
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))
    return parser.parse(code.encode("utf-8", "replace")).root_node


def _bytes(letter: str) -> int:
    return len(letter.encode("utf-8", "replace"))
