"""Whether a model can be another one's assistant: it has to have the same tokens."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.errors import ParameterError, VocabularyMismatchError
from paceline.models.files.boundary import name_of
from paceline.models.text.tokenizer import Tokenizer, check_same_vocabulary


def check_assistant(model: PreTrainedModel, assistant: Any, tokenizer: Any, of_assistant: Any) -> None:
    """Raise ParameterError for what is no assistant of the model.

    Models of one family may pad their vocabularies to different sizes. Then their tokenizers say whether they are the
    same: without both such an assistant is refused, as in transformers.
    """
    if of_assistant is not None:
        _check_tokenizers(tokenizer, of_assistant)
    if assistant is None:
        return
    if not isinstance(assistant, PreTrainedModel):
        raise ParameterError("assistant_model", assistant, "a loaded transformers model, or None")
    ours, theirs = (each.config.get_text_config().vocab_size for each in (model, assistant))
    if ours != theirs and of_assistant is None:
        allowed = (
            f"a model with the same vocabulary: it has {theirs} tokens, the target {ours}. If that is only padding, "
            "give tokenizer= and assistant_tokenizer=, and it is checked"
        )
        raise ParameterError("assistant_model", name_of(assistant), allowed)


def _check_tokenizers(tokenizer: Any, of_assistant: Any) -> None:
    for name, given in (("assistant_tokenizer", of_assistant), ("tokenizer", tokenizer)):
        if not isinstance(given, PreTrainedTokenizerBase):
            raise ParameterError(name, given, "a loaded tokenizer; the target's and the assistant's are compared")
    try:
        check_same_vocabulary(Tokenizer.load(tokenizer), Tokenizer.load(of_assistant))
    except VocabularyMismatchError as error:
        raise ParameterError("assistant_tokenizer", of_assistant.name_or_path, f"like the target's: {error}") from error
