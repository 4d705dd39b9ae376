"""Write the measured figures of the pages anew: ``PYTHONPATH=src:. python -m benchmarks.pages``.

Between a marker and ``<!-- end -->`` a page has what a function of this folder returns, called with the words behind
    its name:

    <!-- rows: peers.speeds epyc-zen5 -->     the rows of a table, below the two lines of its head
    <!-- text: peers.long_prompts -->         lines
    <!-- column: headlines.ours -->           the third cell of each row, found by the first
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)<!-- (rows|text|column): ([\w.]+)((?: [\w.-]+)*) -->\n(.*?)^ *<!-- end -->$", re.M | re.S)


def written_anew(page: str) -> str:
    """The text of a page with its generated blocks replaced."""
    return BLOCK.sub(_block, page)


def _block(match: re.Match[str]) -> str:
    indent, kind, name, words, old = match.groups()
    module, _, function = name.partition(".")
    value = getattr(importlib.import_module(f"benchmarks.pages.{module}"), function)(*words.split())
    before = old.splitlines()
    if kind == "rows":
        lines = [line.strip() for line in before[:2]] + [f"| {' | '.join(cells)} |" for cells in value]
    elif kind == "column":
        rows = [line.strip("| ").split(" | ") for line in before[2:]]
        if {row[0] for row in rows} != value.keys():
            raise ValueError(f"{name} has the rows {', '.join(value)}, the page others")
        lines = before[:2] + [f"| {' | '.join([*row[:2], value[row[0]], *row[3:]])} |" for row in rows]
    else:
        lines = value
    marker, end = f"<!-- {kind}: {name}{words} -->", "<!-- end -->"
    return "\n".join(indent + line for line in (marker, *lines, end))


def main() -> None:
    """Rewrite the pages in place."""
    for page in PAGES:
        page.write_text(written_anew(page.read_text()))


if __name__ == "__main__":
    main()
