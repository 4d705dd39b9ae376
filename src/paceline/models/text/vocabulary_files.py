"""Directories without a tokenizer.json: Mistral's tekken.json alone, or a SentencePiece model alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.errors import ModelFormatError
from paceline.models.files.json_files import read_object

_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_PROTOBUF = b"\n"  # the first byte of a SentencePiece model; files of tiktoken are lines of base64


def check_packages(path: Path) -> None:
    """Raise ModelFormatError for a directory with a SentencePiece model alone if no package here reads it."""
    file = path / "tokenizer.model"
    if (path / "tokenizer.json").is_file() or not file.is_file() or find_spec("sentencepiece") is not None:
        return
    with file.open("rb") as stream:
        if stream.read(1) == _PROTOBUF:
            raise ModelFormatError(
                f"{path} has its vocabulary as a SentencePiece model alone ({file.name}), which transformers reads "
                "with the packages sentencepiece and protobuf: pip install sentencepiece protobuf"
            )


def with_ends(tokenizer: PreTrainedTokenizerBase, path: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the ends of texts of tekken.json, from which transformers takes the vocabulary alone.

    Texts begin with <s>, as in mistral-common. Tokenizers of other files are returned as they are.
    """
    file = path / "tekken.json"
    if (path / "tokenizer.json").is_file() or not file.is_file() or tokenizer.bos_token is not None:
        return tokenizer
    spelled = {str(entry.get("token_str")) for entry in read_object(file).get("special_tokens") or _DEFAULTS}
    if missing := [token for token in ("<s>", "</s>") if token not in spelled]:
        raise ModelFormatError(f"{file} has no special token {missing[0]}, which texts begin and end with")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **{role: token for role, token in _ENDS.items() if token in spelled},
        add_bos_token=True,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )


_DEFAULTS = tuple({"token_str": token} for token in _ENDS.values())  # of files before version 7, which list none
