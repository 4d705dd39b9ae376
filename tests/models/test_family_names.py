"""Models are told apart by their descriptions: no code outside of a family's file asks for the family's name."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator
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
MENTIONS = re.compile("|".join(rf"""["']{name}["']""" for name in map(re.escape, sorted(NAMES))))


def names_a_family(node: ast.AST, constants: Collection[str]) -> bool:
    """Whether an expression has a family's name, or one of the constants that have one."""
    return any(
        each.value in NAMES if isinstance(each, ast.Constant) else isinstance(each, ast.Name) and each.id in constants
        for each in ast.walk(node)
    )


@functools.cache
def constants_of(path: Path) -> frozenset[str]:
    """Module-level names of strings, tuples, sets and dictionaries that have a family's name."""
    if not MENTIONS.search(path.read_text()):
        return frozenset()
    literal, found = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.IfExp), set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, literal):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if names_a_family(node.value, found):
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return frozenset(found)


def questions(path: Path) -> Iterator[ast.AST]:
    """Comparisons and cases of a module that name a family."""
    text, constants = path.read_text(), set(constants_of(path))
    for module, names in re.findall(r"^ *from paceline\.([\w.]+) import (\([^)]+\)|.+)$", text, re.MULTILINE):
        file = SOURCE / f"{module.replace('.', '/')}.py"
        theirs = constants_of(file) if file.is_file() else ()
        imported = re.findall(r"(\w+)(?: as (\w+))?", names)
        constants |= {alias or name for name, alias in imported if name in theirs}
    if constants or MENTIONS.search(text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare | ast.MatchValue) and names_a_family(node, constants):
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
