"""What belongs to a release agrees with itself."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import paceline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_DEVELOPERS = {"dev", "docs"}
# What comes with something that is named.
BROUGHT_BY = {"starlette": "fastapi", "pydantic-core": "pydantic", "h11": "uvicorn"}
# Public names by module. Taking one away breaks scripts and plugins that work today.
PROMISED = {
    "paceline": "LLM CompletionOutput EngineConfig Metrics RequestOutput SamplingParams StructuredOutputs __version__",
    "paceline.batch": "Batch SpeculationPlan",
    "paceline.config": "EngineConfig SamplingParams ServerConfig StructuredOutputs",
    "paceline.draft": "Draft Verdict",
    "paceline.drafters": "DRAFTERS Drafter Equipment",
    "paceline.lengths": "LENGTHS FixedLength LengthPolicy PolicyInputs",
    "paceline.params": "EngineConfig SamplingParams ServerConfig StructuredOutputs",
    "paceline.ray": "Answers",
    "paceline.row_keeper": "PerRow RowKeeper RowKeepers",
    "paceline.transformers": "generate",
}
OURS = {"paceline", "_typeshed"}  # and what type checkers alone know


def names(requirements: Iterable[str]) -> set[str]:
    """Packages, without versions: "fastapi>=0.115" is fastapi."""
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}  # type: ignore[index]


def imported(path: Path) -> Iterator[str]:
    """The packages of others that a module imports, wherever in it, outside of TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for first in {module.partition(".")[0] for module in modules} - OURS - sys.stdlib_module_names:
            package = first.replace("_", "-")
            yield BROUGHT_BY.get(package, package)


def test_every_package_that_is_imported_comes_with_the_installation_or_an_extra() -> None:
    known = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in set(EXTRAS) - OF_DEVELOPERS))
    found = {(package, path.name) for path in SOURCE.rglob("*.py") for package in imported(path)}
    assert {package for package, _ in found} > {"torch", "fastapi"}
    assert {(package, place) for package, place in found if package not in known} == set()


def test_all_is_every_extra_that_users_have() -> None:
    (everything,) = EXTRAS["all"]
    assert set(re.findall(r"\w+", everything)[1:]) == set(EXTRAS) - OF_DEVELOPERS - {"all"}


def test_an_extra_that_somebody_is_told_to_install_exists() -> None:
    texts = [path.read_text() for path in [*SOURCE.rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]]
    told = {extra for text in texts for some in re.findall(r"paceline\[([\w,]+)\]", text) for extra in some.split(",")}
    told |= {extra for text in texts for extra in re.findall(r'MissingPackageError\([^()]*, "(\w+)"\)', text)}
    assert "structured" in told
    assert told <= set(EXTRAS)


def test_the_pythons_that_are_promised_are_those_that_pip_lets_in() -> None:
    versions = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">=3.{min(map(int, versions))}"


def test_the_changelog_and_the_package_name_the_same_version() -> None:
    assert PROJECT["version"] == paceline.__version__
    assert f"\n## [{paceline.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(("module", "promised"), PROMISED.items(), ids=list(PROMISED))
def test_every_promised_name_can_be_imported(module: str, promised: str) -> None:
    """The changelog, docs/extending.md and docs/reference-python.md name them; installed plugins import them."""
    if module == "paceline.ray":
        pytest.importorskip("ray")
    found = import_module(module)
    assert set(promised.split()) <= set(found.__all__)
    assert all(getattr(found, name) is not None for name in found.__all__)


def test_every_entry_point_of_the_package_leads_somewhere() -> None:
    pytest.importorskip("llm")
    points = [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["llm"].values()]
    assert all(resolve_name(point) is not None for point in points)
