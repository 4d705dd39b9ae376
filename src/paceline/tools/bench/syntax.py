"""The syntax-tree node that each token of an answer's Python code belongs to.

The alignment is ASTxplainer's (2308.03873): a token belongs to the innermost named node around its first letter, so
``(`` after a function's name belongs to ``parameters`` and ``def`` to ``function_definition``. The code is only parsed,
never run; tree-sitter parses any input.
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
_PYTHON = ("", "py", "python", "python3")  # info strings of a fence; models often omit the language


def available() -> bool:
    """Whether the parser is installed."""
    return _INSTALLED


def node_kinds(pieces: Sequence[str]) -> list[str | None]:
    """The node of each token, given the text of each; None for tokens outside code, or without visible text."""
    ends = list(accumulate(map(len, pieces)))
    seen = [end - len(piece.lstrip()) for end, piece in zip(ends, pieces, strict=True)]  # place of its first letter
    kinds: list[str | None] = [None] * len(pieces)
    for first, code in _code("".join(pieces)):
        root, offsets = _parse(code), [0, *accumulate(len(letter.encode("utf-8", "replace")) for letter in code)]
        for token in range(bisect_left(seen, first), bisect_left(seen, first + len(code))):
            if pieces[token].strip():
                at = offsets[seen[token] - first]
                node = root.named_descendant_for_byte_range(at, at + 1)
                kinds[token] = node and str(node.type)
    return kinds


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Yield (index of the first character, code) for each block that is fenced as Python.

    A text without fences is returned whole if all of it is code.
    """
    if _FENCE in text:
        yield from (
            (match.start(2), match[2]) for match in _FENCED.finditer(text) if match[1].strip().lower() in _PYTHON
        )
    elif "\n" in text.strip() and not _parse(text).has_error:
        yield 0, text


def _parse(code: str) -> tree_sitter.Node:
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))
    return parser.parse(code.encode("utf-8", "replace")).root_node
