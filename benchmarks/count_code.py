"""Counts the code of the length policies: lines and named numbers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent


def named_numbers(path: Path) -> Iterator[str]:
    """Names that a module or a class binds to numbers that it writes down."""
    tree = ast.parse(path.read_text())
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for statement in (each for body in bodies for each in body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            constants = (node.value for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if ast.unparse(target).isupper() and any(type(value) in (int, float) for value in constants):
                yield ast.unparse(statement)


def main() -> None:
    """Print the counts."""
    files = sorted((SOURCE / "lengths").glob("*.py"))
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    numbers = [(path.name, number) for path in files for number in named_numbers(path)]
    sys.stdout.write("".join(f"{count:5} {name}\n" for name, count in lines.items()))
    sys.stdout.write("".join(f"{name}: {number}\n" for name, number in numbers))
    sys.stdout.write(f"{sum(lines.values())} lines, {len(numbers)} named numbers\n")


if __name__ == "__main__":
    main()
