"""Small models, saved as any others are."""

import pytest
from typer.testing import CliRunner, Result

from byte_model import byte_tokenizer, save_llama
from paceline.cli.main import app


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", byte_tokenizer(), seed=1)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny-draft"
    return save_llama(path, byte_tokenizer(), seed=2, hidden_size=16, intermediate_size=32)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with another vocabulary."""
    path = tmp_path_factory.mktemp("models") / "stranger"
    return save_llama(path, byte_tokenizer(words=("the", "of")), seed=3)


class Shell:
    """Runs paceline as the shell does, within this process."""

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, [*arguments], input=stdin, env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _quick(one_thread: None) -> None:
    """Tiny tensors need one thread."""


@pytest.fixture
def paceline() -> Shell:
    return Shell()
