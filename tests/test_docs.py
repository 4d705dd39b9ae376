"""Documentation cannot rot: its Python runs, its commands and flags exist, its links lead somewhere; the site."""

import functools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import real_models
from paceline.cli.main import app
from paceline.core.ops import RoundOps
from paceline.kernels.abi import SIGNATURES
from paceline.kernels.gpu.steps import LayerSteps

ROOT = Path(__file__).parent.parent
GENERATE = ["generate", "smollm2-135m"]  # a model that comes with the package
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[list[str]]:
    whole = (block.replace("\\\n", "") for page in PAGES for block in blocks(page, "sh"))
    lines = [line for block in whole for line in block.splitlines()]
    ours = [line.removeprefix(".venv/bin/") for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in ours if line.startswith("paceline ")]


@pytest.mark.usefixtures("caches_of_the_run")
def test_the_pythons_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    real_models.find("smollm2-135m")
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    shown = (ROOT / "README.md").read_text().split(code)[1].split("```")[2].strip().splitlines()
    assert len(said) == len(shown)
    assert said[0].split("' ")[0] == shown[0].split("' ")[0], "copied text: the same on every machine"


# The others talk to a server that the reader has started.
PLAYED_HERE = [page for page in PAGES[1:] if any("import LLM" in block for block in blocks(page, "python"))]


@pytest.mark.usefixtures("caches_of_the_run")
@pytest.mark.parametrize("page", PLAYED_HERE, ids=lambda page: page.name)
def test_the_pythons_of_a_page_run_one_after_the_other(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real_models.find("smollm2-135m")
    names: dict[str, Any] = {}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "write"), [("models", "write_families"), ("files", "write_types")])
def test_tables_of_families_and_of_types_are_those_of_the_code(name: str, write: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / f"{name}.md").read_text())
    runpy.run_path(str(ROOT / "docs" / "generated.py"))[write](page)
    assert page.read_text() == (ROOT / "docs" / f"{name}.md").read_text(), "python docs/generated.py writes it"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = ROOT / "docs" / "index.md"
    trees = re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", index.read_text(), re.DOTALL)
    listed = [line for tree in trees for line in tree.split()]
    assert sorted(listed) == sorted(page.stem for page in PAGES[1:] if page != index)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """The site cannot show a folder; where its tools are missing, nothing else looks at links."""
    targets = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text())
    assert [to for to in targets if not (page.parent / to).is_file()] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """A link that leads nowhere and a docstring that cannot be read are warnings."""
    for tool in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: make docs installs it")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "docs", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "POST /v1/completions" in (tmp_path / "site" / "reference-http.html").read_text()
    assert "--num-speculative-tokens" in (tmp_path / "site" / "reference-cli.html").read_text()


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_commands_of_the_documentation_exist_with_their_flags(command: list[str]) -> None:
    said = help_of(*command[: 2 if command[0] in ("bench", "eval") else 1])
    assert [word for word in command if word.startswith("--") and word not in said] == []


@functools.cache
def help_of(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--help", "all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_benches_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"-m (benchmarks(?:\.\w+)+)", page.read_text())}
    assert "benchmarks.drafters" in named
    files = [ROOT / name.replace(".", "/") for name in named]
    assert [file for file in files if not (file.with_suffix(".py").is_file() or (file / "__main__.py").is_file())] == []


@pytest.mark.usefixtures("caches_of_the_run")
@pytest.mark.parametrize("command", [words for words in commands() if words[:2] == GENERATE], ids=" ".join)
def test_the_answers_that_the_documentation_asks_for_are_not_empty(command: list[str]) -> None:
    """Four tokens of each tell, and a fixed length needs no calibration."""
    real_models.find("smollm2-135m")
    result = CliRunner().invoke(app, [*command, "--quiet", "--max-tokens", "4", "-k", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_the_readme_names_the_commands_that_set_everything_up() -> None:
    first = blocks(ROOT / "README.md", "sh")[0]
    assert re.findall(r"^make ([a-z-]+)", first, re.MULTILINE) == ["demo", "test"]


@pytest.mark.parametrize("line", re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
def test_the_make_targets_of_the_readme_exist(line: str) -> None:
    assert re.search(rf"^{line}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


SOURCE = ROOT / "src" / "paceline"
INTERNALS = ("architecture", "tour", "reference-internals", "gpu")


@pytest.mark.skipif(not (SOURCE / "core").is_dir(), reason="these pages show the modules in their folders")
@pytest.mark.parametrize("page", INTERNALS)
def test_the_files_that_the_internals_name_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / f"{page}.md").read_text())
    assert named
    folders = SOURCE, ROOT / "tests"
    there = [name for name in named if (ROOT / name).is_file() or any(list(folder.rglob(name)) for folder in folders)]
    assert [name for name in named if name not in there] == []


def implementations() -> list[list[tuple[str, str]]]:
    """Files and names in each cell of the table of implementations, behind its first column."""
    section = (ROOT / "docs" / "reference-internals.md").read_text().split("### One definition, several")[1]
    lines = [line for line in section.split("\n### ")[0].split("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    cells = [cell for line in lines for cell in line.strip("| ").split(" | ")[1:]]
    return [re.findall(r"`([\w/]+\.(?:py|cpp|h))::(\w+)`", cell) for cell in cells]


def defines(file: str, name: str) -> bool:
    """Whether a file of the package, of the tests or of the kernels defines a function or class of this name."""
    folders = SOURCE, ROOT, ROOT / "tests", ROOT / "tests" / "kernels"
    texts = [(folder / file).read_text() for folder in folders if (folder / file).is_file()]
    definition = rf"^ *(?:def|class) {name}\b" if file.endswith(".py") else rf"^\w.*\b{name}\("
    return any(re.search(definition, text, re.MULTILINE) for text in texts)


@pytest.mark.skipif(not (SOURCE / "core").is_dir(), reason="the page shows the modules in their folders")
def test_functions_with_several_implementations_exist_and_a_test_holds_them_together() -> None:
    cells = implementations()
    assert [f"{file}::{name}" for cell in cells for file, name in cell if not defines(file, name)] == []
    assert all(cell and all(name.startswith("test_") for _, name in cell) for cell in cells[3::4])


ADMINISTRATION = {  # functions of the kernels' library that compute nothing, or only for benchmarks
    *("pl_interface", "pl_layout", "pl_source_hash", "pl_experts_read"),
    *("pl_kernels", "pl_obstacle", "pl_multiplies_correctly"),
    *(f"pl_{each}" for owned in ("pool", "arena", "model", "texts") for each in (f"{owned}_new", f"{owned}_free")),
    *("pl_texts_append", "pl_texts_copy", "pl_texts_count", "pl_texts_held", "pl_texts_size", "pl_read", "pl_place"),
    *("pl_exchange_bytes", "pl_ranks_ended"),
}


@pytest.mark.skipif(not (SOURCE / "core").is_dir(), reason="the page shows the modules in their folders")
def test_every_operation_of_a_device_and_every_kernel_is_among_these() -> None:
    named = {name for cell in implementations() for _, name in cell}
    methods = {name for protocol in (RoundOps, LayerSteps) for name, each in vars(protocol).items() if callable(each)}
    operations = {name for name in methods if not name.startswith("_")}
    assert (operations | SIGNATURES.keys()) - named == ADMINISTRATION


def test_the_modules_that_the_kernels_name_exist() -> None:
    """Comments of the C++ sources name what defines them."""
    named = {name for file in (ROOT / "csrc").iterdir() for name in re.findall(r"src/\w+/[\w/]+\.py", file.read_text())}
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.skipif(not (SOURCE / "core").is_dir(), reason="the page shows the modules in their folders")
def test_every_folder_has_a_section_in_the_internals() -> None:
    text = (ROOT / "docs" / "reference-internals.md").read_text()
    sections = " ".join(re.findall(r"^## (.+/.*)$", text, re.MULTILINE))
    assert [path.parent.name for path in SOURCE.glob("*/__init__.py") if f"{path.parent.name}/" not in sections] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_of_prose_is_longer_than_120_characters(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []


TAGS = {"auto", "cpu", "gpu", "heads", "server", "trees", "formats"}


def test_every_entry_of_the_log_has_a_date_and_tags_and_is_in_the_index() -> None:
    log = (ROOT / "docs" / "log.md").read_text()
    told = [each.splitlines() for each in re.split(r"^## ", log, flags=re.MULTILINE)[1:]]
    dated = [(re.match(r"\d{4}-\d\d-\d\d(?= · `)", lines[2]), re.findall(r"`(\w+)`", lines[2])) for lines in told]
    entries = [(date and date[0], lines[0], ", ".join(tags)) for lines, (date, tags) in zip(told, dated, strict=True)]
    assert re.findall(r"^\| (\S+) \| \[(.*)\]\(#\S+\) \| (.*) \|$", log, re.MULTILINE) == entries
    assert {tag for _, _, tags in entries for tag in tags.split(", ")} <= TAGS
    assert [date for date, _, _ in entries] == sorted((date or "" for date, _, _ in entries), reverse=True)
