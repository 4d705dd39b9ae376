"""Models are told apart by their descriptions: no code outside of a family's file asks for the family's name."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import paceline
from paceline.models.families import FAMILIES, GGUF_FAMILIES

SOURCE = Path(paceline.__file__).parent
NAMES = {*FAMILIES, *GGUF_FAMILIES, *(name for family in FAMILIES.values() for name in family.other_types)}

# Comparisons with these names that are not of a model's family, by file.
OTHER_MEANINGS = {
    "drafters/heads/block_layouts.py": 1,  # whose layers block drafters have in speculators' layout
    "models/text/gguf_tokenizer.py": 4,  # kinds of tokenizers: tokenizer.ggml.model and tokenizer.ggml.pre
    "tools/training/target.py": 1,  # whose checkpoints a trained draft model can be written as
}


def strings_in(node: ast.AST, constants: dict[str, ast.expr]) -> set[str]:
    """The strings of an expression, with those of the module-level constants that it names."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.add(each.value)
        elif isinstance(each, ast.Name) and each.id in constants:
            found |= strings_in(constants[each.id], {})
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def constants_of(path: Path) -> dict[str, ast.expr]:
    """Module-level names of strings, and of tuples, sets and dictionaries with strings."""
    literal = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.IfExp)
    found = {}
    for node in parsed(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, literal):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node.value for each in targets if isinstance(each, ast.Name)}
    return found


def questions(path: Path) -> Iterator[ast.AST]:
    """Comparisons and cases of a module that name a family."""
    tree, constants = parsed(path), dict(constants_of(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paceline."):
            file = SOURCE.parent / f"{node.module.replace('.', '/')}.py"
            theirs = constants_of(file) if file.is_file() else {}
            constants |= {each.asname or each.name: theirs[each.name] for each in node.names if each.name in theirs}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue) and strings_in(node, constants) & NAMES:
            yield node


def test_no_code_outside_of_a_familys_file_asks_for_its_name() -> None:
    counts = Counter(
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "families" not in path.parts
        for _ in questions(path)
    )
    assert counts == OTHER_MEANINGS


def test_questions_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "KINDS = ('llama', 'other')\n"
        "def f(kind):\n"
        "    if kind == 'gemma3': return 1\n"
        "    if kind in KINDS: return 2\n"
        "    if kind == 'other': return 3\n"
        "    match kind:\n"
        "        case 'qwen2': return 4\n"
    )
    assert len(list(questions(module))) == 3
