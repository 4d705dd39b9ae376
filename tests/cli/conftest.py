"""A model small enough for every test: random weights, every byte a token, saved as any other model is."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from paceline.cli.main import app

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"


def make_tokenizer(words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, *words])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=TEMPLATE)


def save_model(path: Path, tokenizer: PreTrainedTokenizerFast, seed: int, width: int = 32) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.5,  # far from flat: greedy answers have no near-ties
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny", make_tokenizer(), seed=1))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny-draft", make_tokenizer(), seed=2, width=16))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with another vocabulary."""
    return str(save_model(tmp_path_factory.mktemp("models") / "stranger", make_tokenizer(("the", "of")), seed=3))


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
