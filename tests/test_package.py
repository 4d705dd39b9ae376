"""What belongs to a release agrees with itself."""

import tomllib
from pathlib import Path

import paceline

ROOT = Path(__file__).parent.parent


def test_the_changelog_and_the_package_name_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == paceline.__version__
    assert f"\n## [{paceline.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_exported_name_can_be_imported() -> None:
    assert all(getattr(paceline, name) is not None for name in paceline.__all__)
