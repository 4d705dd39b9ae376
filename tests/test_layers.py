"""The import rule: a module imports from its own package and from lower layers.

Within a layer a package may use another one, as ``cli`` uses ``bench``, so long as no two need each other. Imports
inside functions and under TYPE_CHECKING count as well: they are dependencies, too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

LAYERS: list[set[str]] = [
    {"errors", "ranges", "registry", "params", "inputs", "outputs", "files"},
    {
        "draft",
        "batch",
        "nodes",
        "rows",
        "row_keeper",
        "cache",
        "row_tables",
        "room",
        "sampling",
        "rules",
        "acceptance",
        "processors",
        "attention",
        "kernels",
        "gpu",
        "hardware",
        "cgroups",
    },
    {"models", "heads", "decoder", "tokenizer", "structured", "parallel"},
    {"drafters", "lengths"},
    {"round", "device_round", "native_round"},
    {
        "waiting",
        "guard",
        "chunks",
        "prefixes",
        "sequences",
        "scheduler",
        "memory",
        "scoring",
        "pipeline",
        "request",
        "assembly",
        "description",
        "engine",
        "sharing",
        "utilisation",
    },
    {"llm", "calls", "server", "cli", "bench", "training", "evaluation", "transformers", "llm_plugin", "ray"},
]
LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}
FREE = {"__init__", "__main__"}  # the front door: it may name everything, lazily


def unit_of(path: Path, root: Path) -> str:
    """The package or module just below the root that a file belongs to."""
    first = path.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path, root: Path) -> Iterator[str]:
    """Dotted names of this package's modules that a file imports, as seen from the root: "models.hub"."""
    here = list(path.relative_to(root).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            start = [root.name, *here[: len(here) - node.level]]
            names = [".".join([*start, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        prefix = f"{root.name}."
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


def violations(root: Path) -> list[str]:
    """Every import that the rule forbids, in words."""
    needs = dependencies(root)
    units = {unit_of(path, root) for path in root.rglob("*.py")} - FREE
    broken = [f"{unit}: in no layer; give it one in test_layers.py" for unit in sorted(units - LAYER_OF.keys())]
    for (unit, other), path in needs.items():
        if not {unit, other} <= LAYER_OF.keys():
            continue
        where = path.relative_to(root)
        if LAYER_OF[other] > LAYER_OF[unit]:
            broken.append(f"{where} (layer {LAYER_OF[unit]}) imports {other} (layer {LAYER_OF[other]})")
        elif LAYER_OF[other] == LAYER_OF[unit] and unit < other and reaches(needs, other, unit):
            broken.append(f"{unit} and {other} (layer {LAYER_OF[unit]}) need each other")
    return broken


def reaches(needs: dict[tuple[str, str], Path], start: str, goal: str) -> bool:
    """Whether ``start`` needs ``goal``, directly or through others."""
    seen, frontier = {start}, {start}
    while frontier:
        frontier = {other for unit, other in needs if unit in frontier} - seen
        seen |= frontier
    return goal in seen


def test_a_module_imports_from_its_own_package_and_from_lower_layers_only() -> None:
    assert violations(SOURCE) == []


def test_every_unit_that_the_rule_names_exists() -> None:
    assert LAYER_OF.keys() - {unit_of(path, SOURCE) for path in SOURCE.rglob("*.py")} == set()
    assert sum(map(len, LAYERS)) == len(LAYER_OF), "a unit has one layer"


def plant(root: Path, files: dict[str, str]) -> Path:
    package = root / "paceline"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


@pytest.mark.parametrize(
    "files",
    [
        {"cache.py": "from paceline.engine import Engine", "engine.py": ""},
        {"cache.py": "def f():\n    import paceline.engine", "engine.py": ""},
        {"cache.py": "from paceline import engine", "engine.py": ""},
        {"attention/padded.py": "from ..engine import Engine", "engine.py": ""},
        {"attention/padded.py": "from .. import engine", "engine.py": ""},
        {"drafters/a.py": "from paceline.lengths import b", "lengths/b.py": "from paceline.drafters import a"},
        {"someones_own.py": ""},
    ],
    ids=["upwards", "inside a function", "from the root", "relative", "relative root", "circle", "unknown unit"],
)
def test_the_rule_notices(tmp_path: Path, files: dict[str, str]) -> None:
    assert len(violations(plant(tmp_path, files))) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"engine.py": "from paceline.cache import KVCache\nimport torch.nn", "cache.py": "class KVCache: ..."},
        {
            "attention/padded.py": "from paceline.attention.base import Plan\nfrom .base import Plan",
            "attention/base.py": "",
        },
        {"cli/bench.py": "from paceline.bench import offline", "bench/offline.py": ""},
        {"__init__.py": "from paceline.llm import LLM", "llm.py": ""},
        {"cache.py": "from paceline import __version__", "__init__.py": ""},
    ],
    ids=["downwards", "own package", "sideways", "the front door", "the version"],
)
def test_the_rule_lets_pass(tmp_path: Path, files: dict[str, str]) -> None:
    assert violations(plant(tmp_path, files)) == []


# --- who asks which class a part is -----------------------------------------------------------------------------------

BASES = {"Drafter", "LengthPolicy"}


def kinds_of(root: Path, bases: set[str]) -> set[str]:
    """The names of all classes below these, wherever they are."""
    trees = [ast.parse(path.read_text()) for path in root.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while True:
        more = {each.name for each in classes if {ast.unparse(base) for base in each.bases} & (bases | found)} - found
        if not more:
            return found
        found |= more


def asked_for(path: Path, kinds: set[str]) -> list[str]:
    """Where a file asks whether something is of one of these classes: isinstance, or ``type(x) is``."""
    asked = []
    for node in ast.walk(ast.parse(path.read_text())):
        call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        compare = isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type(")
        if (call or compare) and {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & kinds:
            asked.append(f"{path.name}:{node.lineno}")
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
