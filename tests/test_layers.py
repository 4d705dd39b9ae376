"""The import rules: a folder imports only from folders below it, and no file imports itself by way of others.

Run as a script, it prints the import graph and the modules without a test file of their name.

Imports inside functions and under TYPE_CHECKING count as well: they are dependencies, too.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

FLOORS = (  # from the ground up; units on one floor do not import each other
    ("errors", "progress", "version"),
    ("config",),
    ("chat",),
    ("core",),
    ("kernels",),
    ("models",),
    ("drafters", "structured"),
    ("lengths",),
    ("engine",),
    ("llm",),
    ("server", "tools"),
    ("integrations",),
    ("cli",),
)
# Public names whose home is elsewhere: docs/extending.md and users' scripts have them.
RE_EXPORTS = {"batch", "draft", "row_keeper", "params", "transformers", "ray"}
FLOOR_OF = {unit: number for number, units in enumerate(FLOORS) for unit in units}
ROOMS = (  # the same within models/
    ("base",),
    ("files",),
    ("description",),
    ("families",),
    ("text", "torch", "native"),
    ("decoding", "load"),
    ("parallel",),
)
ROOM_FLOOR_OF = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
FREE = {"__init__", "__main__", *RE_EXPORTS}  # front doors: they may name everything


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def unit_of(path: Path, root: Path) -> str:
    """The folder or module just below the root that a file belongs to."""
    first = path.relative_to(root).parts[0]
    return first.removesuffix(".py")


def package_of(root: Path) -> str:
    """The dotted name of the package in a folder: "paceline.models"."""
    return ".".join(root.parts[-1 - root.parts[::-1].index("paceline") :])


def statements_in(block: ast.AST) -> Iterator[ast.AST]:
    """All statements in a module, function, branch or handler, those of inner blocks included."""
    for node in ast.iter_child_nodes(block):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements_in(node)


def imported_modules(path: Path, root: Path) -> Iterator[str]:
    """Dotted names of this package's modules that a file imports, as seen from the root: "models.files.hub"."""
    package = package_of(root)
    here = list(path.relative_to(root).with_suffix("").parts)
    for node in statements_in(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            start = [package, *here[: len(here) - node.level]]
            names = [".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        prefix = f"{package}."
        yield from (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def dependencies(root: Path) -> dict[tuple[str, str], Path]:
    """Which unit needs which other one, each with a file that shows it."""
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(root.rglob("*.py")):
        unit = unit_of(path, root)
        for module in imported_modules(path, root):
            other = module.split(".")[0]
            exists = (root / other).is_dir() or (root / f"{other}.py").is_file()
            if unit not in FREE and other != unit and exists:
                found.setdefault((unit, other), path)
    return found


def violations(root: Path, floor_of: dict[str, int] = FLOOR_OF) -> list[str]:
    """Every import that the rule forbids, in words."""
    units = {unit_of(path, root) for path in root.rglob("*.py")} - FREE
    broken = [f"{unit}: on no floor; give it one in test_layers.py" for unit in sorted(units - floor_of.keys())]
    for (unit, other), path in dependencies(root).items():
        if other in FREE:
            broken.append(f"{path.relative_to(root)} imports {other}, which is for users; name its home")
        elif {unit, other} <= floor_of.keys() and floor_of[other] >= floor_of[unit]:
            broken.append(f"{path.relative_to(root)} (floor {floor_of[unit]}) imports {other} ({floor_of[other]})")
    return broken


def file_of(module: str, root: Path) -> Path | None:
    """The file that defines a dotted name, "core.batch.Batch": the module's or its package's; None for the root's."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def circle(root: Path) -> list[str]:
    """Files that import each other in a circle, the first one again at the end; empty if there is no circle."""
    files = [path for path in sorted(root.rglob("*.py")) if unit_of(path, root) not in FREE]
    needs = {path: {file_of(module, root) for module in imported_modules(path, root)} - {None, path} for path in files}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return [str(path.relative_to(root)) for path in error.args[1]]
    return []


def import_levels(root: Path) -> dict[str, int]:
    """Each unit's level: 0 if it imports no other unit, else one more than the highest that it imports."""
    needs = dependencies(root)
    units = {unit_of(path, root) for path in root.rglob("*.py")} - FREE
    levels = dict.fromkeys(units, 0)
    for _ in units:
        for unit, other in needs:
            levels[unit] = max(levels[unit], levels.get(other, -1) + 1)
    return levels


def test_a_folder_imports_from_lower_floors_only() -> None:
    assert violations(SOURCE) == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    assert circle(SOURCE) == []


def test_a_room_of_models_imports_from_lower_floors_only() -> None:
    assert violations(SOURCE / "models", ROOM_FLOOR_OF) == []
    assert {unit_of(path, SOURCE / "models") for path in SOURCE.glob("models/*/*.py")} == ROOM_FLOOR_OF.keys() - {
        "base"
    }


def test_every_unit_that_the_rule_names_exists() -> None:
    units = {unit_of(path, SOURCE) for path in SOURCE.rglob("*.py")}
    assert FLOOR_OF.keys() - units == set()
    assert RE_EXPORTS - units == set()
    assert sum(map(len, FLOORS)) == len(FLOOR_OF), "a unit is on one floor"


def test_a_re_export_is_nothing_else() -> None:
    for name in RE_EXPORTS:
        body = ast.parse((SOURCE / f"{name}.py").read_text()).body
        assert {type(each) for each in body[1:-1]} == {ast.ImportFrom}, name
        assert isinstance(body[-1], ast.Assign), name


@pytest.mark.parametrize(
    "folder",
    sorted(
        str(path.parent.relative_to(SOURCE))
        for pattern in ("*/__init__.py", "models/*/__init__.py")
        for path in SOURCE.glob(pattern)
    ),
)
def test_a_folder_says_in_one_line_what_it_is_for(folder: str) -> None:
    purpose = ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text()))
    assert purpose, folder
    assert purpose.splitlines()[0].endswith((".", ":")), folder


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / "paceline"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


@pytest.mark.parametrize(
    "files",
    [
        {"core/cache.py": "from paceline.engine.engine import Engine", "engine/engine.py": ""},
        {"core/cache.py": "def f():\n    import paceline.engine", "engine/engine.py": ""},
        {"core/cache.py": "from paceline import engine", "engine/engine.py": ""},
        {"kernels/padded.py": "from ..engine import Engine", "engine/engine.py": ""},
        {"kernels/padded.py": "from .. import engine", "engine/engine.py": ""},
        {"drafters/a.py": "from paceline.structured import b", "structured/b.py": ""},
        {"engine/a.py": "from paceline.batch import Batch", "batch.py": ""},
        {"unknown.py": ""},
    ],
    ids=[
        "upwards",
        "inside a function",
        "from the root",
        "relative",
        "relative root",
        "same floor",
        "a re-export",
        "unknown unit",
    ],
)
def test_the_rule_notices(tmp_path: Path, files: dict[str, str]) -> None:
    assert len(violations(plant(tmp_path, files))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from paceline.models.load.loading import load_model",
        "from ..load import loading",
        "import paceline.models.load",
    ],
)
def test_the_rule_notices_between_rooms(tmp_path: Path, text: str) -> None:
    package = plant(tmp_path, {"models/torch/transformer.py": text, "models/load/loading.py": ""})
    assert len(violations(package / "models", ROOM_FLOOR_OF)) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"engine/engine.py": "from paceline.core.cache import KVCache\nimport torch.nn", "core/cache.py": ""},
        {"kernels/a.py": "from paceline.kernels.base import Plan\nfrom .base import Plan", "kernels/base.py": ""},
        {"cli/bench.py": "from paceline.tools.bench import offline", "tools/bench/offline.py": ""},
        {"__init__.py": "from paceline.llm import LLM", "llm.py": ""},
        {"core/cache.py": "from paceline.version import __version__", "version.py": ""},
        {"batch.py": "from paceline.core.batch import Batch", "core/batch.py": ""},
    ],
    ids=["downwards", "own folder", "several floors", "the front door", "the version", "a re-export"],
)
def test_the_rule_lets_pass(tmp_path: Path, files: dict[str, str]) -> None:
    assert violations(plant(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"core/a.py": "from paceline.core.b import B", "core/b.py": "from paceline.core import a"}, 2),
        (
            {
                "core/a.py": "import paceline.core.b",
                "core/b.py": "def f():\n    from .c import C",
                "core/c.py": "from .a import A",
            },
            3,
        ),
        ({"core/a.py": "if TYPE_CHECKING:\n    from .b import B", "core/b.py": "from .a import A"}, 2),
        ({"core/__init__.py": "from .a import A", "core/a.py": "from paceline.core import A"}, 2),
        ({"core/a.py": "from .b import B", "core/b.py": "", "core/c.py": "from .a import A\nfrom .b import B"}, 0),
    ],
    ids=["two files", "inside a function", "for types", "by the package", "no circle"],
)
def test_a_circle_is_noticed(tmp_path: Path, files: dict[str, str], length: int) -> None:
    found = circle(plant(tmp_path, files))
    assert len(set(found)) == length
    assert found[:1] == found[-1:]


# --- who asks which class a part is -----------------------------------------------------------------------------------

BASES = {"Drafter", "LengthPolicy"}


def kinds_of(root: Path, bases: set[str]) -> set[str]:
    """The names of all classes below these, wherever they are."""
    trees = [tree_of(path) for path in root.rglob("*.py")]
    classes = [node for tree in trees for node in statements_in(tree) if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while True:
        more = {each.name for each in classes if {ast.unparse(base) for base in each.bases} & (bases | found)} - found
        if not more:
            return found
        found |= more


def calls(node: ast.AST, *functions: str) -> bool:
    """Whether an expression is a call of one of these functions."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions


def asked_for(path: Path, kinds: set[str]) -> list[str]:
    """Where a file asks whether something is of one of these classes: isinstance, or ``type(x) is``."""
    asked = []
    for node in ast.walk(tree_of(path)):
        compare = isinstance(node, ast.Compare) and calls(node.left, "type")
        if (compare or calls(node, "isinstance", "issubclass")) and {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name)
        } & kinds:
            asked.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    return asked


def test_nobody_asks_which_drafter_or_length_policy_it_is() -> None:
    """What they can do they say themselves."""
    kinds = kinds_of(SOURCE, BASES)
    assert {"ModelDrafter", "NgramDrafter", "HybridDrafter", "NoDrafter", "AutoLength", "FixedLength"} <= kinds
    assert [place for path in sorted(SOURCE.rglob("*.py")) for place in asked_for(path, kinds)] == []


@pytest.mark.parametrize(
    "question", ["isinstance(x, B)", "isinstance(x, (int, B))", "type(x) is B", "issubclass(type(x), B | C)"]
)
def test_the_count_notices(tmp_path: Path, question: str) -> None:
    text = f"class A(Drafter): ...\nclass B(Other, A): ...\n{question}\nisinstance(x, Drafter)\ntype(x) is int"
    package = plant(tmp_path, {"some.py": text})
    assert asked_for(package / "some.py", kinds_of(package, BASES)) == ["some.py:3"]


def without_test_file(source: Path, tests: Path) -> list[str]:
    """Modules for which neither their own name nor their folder's has a test file at the same place."""
    modules = [path.relative_to(source) for path in sorted(source.rglob("*.py")) if not path.stem.startswith("__")]
    missing = []
    for module in modules:
        own, folder = tests / module.parent, module.parent
        if not any(path.is_file() for path in (own / f"test_{module.stem}.py", own.parent / f"test_{folder.name}.py")):
            missing.append(str(module))
    return missing


def main() -> None:
    """Print the import graph between folders, from the ground up, and the modules without a test file."""
    needs, levels = dependencies(SOURCE), import_levels(SOURCE)
    for unit in sorted(levels, key=lambda unit: (levels[unit], unit)):
        print(f"{levels[unit]:2}  {unit:14} {' '.join(sorted(other for each, other in needs if each == unit))}")
    print(f"{len(levels)} units, {max(levels.values()) + 1} levels, {len(needs)} edges")
    missing = without_test_file(SOURCE, Path(__file__).parent)
    print(f"{len(missing)} modules without a test file of their name: {' '.join(missing)}")


if __name__ == "__main__":
    main()
