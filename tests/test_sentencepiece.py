"""An ``LLM`` with a SentencePiece vocabulary: spaces before texts, byte tokens, and texts that continue others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.test_tokenizer import sentencepiece
from paceline import SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.errors import ParameterError
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")


def ids(*spellings: str) -> list[int]:
    found = sentencepiece().huggingface.convert_tokens_to_ids(list(spellings))
    assert sentencepiece().huggingface.unk_token_id not in found
    return [int(token) for token in found]


def answer(prompt: str | list[int], *spellings: str, **params: Any) -> CompletionOutput:
    """The answer of a model that says these tokens, unless something else is forced."""
    said = ids(*spellings)

    def process(before: list[int], logits: Tensor) -> Tensor:
        said_next = torch.arange(len(logits)) == said[min(len(before), len(said) - 1)]
        return logits + torch.where(said_next, 50.0, -50.0)

    options = {"temperature": 0, "max_tokens": len(said), "logits_processors": [process]} | params
    llm = toy_llm(tokenizer=sentencepiece(), drafter=None)
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("prompt", ["the", "the\n", "\n", "the日", [*ids("▁the"), 2]])
def test_an_answer_continues_its_prompt(prompt: str | list[int]) -> None:
    """Its first space belongs to the text, as indentation does in Python."""
    assert answer(prompt, "▁", "▁", "▁cat").text == "   cat"
    assert answer(prompt, "▁", "▁", "▁cat").pieces == [" ", " ", " cat"]


@pytest.mark.parametrize("prompt", ["", [1]])
def test_an_answer_without_a_text_before_it_begins_one(prompt: str | list[int]) -> None:
    assert answer(prompt or [1], "▁the", "▁cat").text == "the cat"


def test_a_stop_string_of_byte_tokens_ends_the_answer_at_once() -> None:
    found = answer("the", "▁cat", "<0x0A>", "<0x0A>", "▁the", stop="\n")
    assert (found.text, found.finish_reason, found.stop_reason, len(found.token_ids)) == (" cat", "stop", "\n", 2)


def test_a_stop_string_in_held_back_text_is_reported() -> None:
    found = answer("the", "▁cat", "<0x0A>", "<0xFF>", stop=["\ufffd"])
    assert (found.finish_reason, found.stop_reason) == ("stop", "\ufffd")


@pytest.mark.parametrize("said", [("▁", "at"), ("▁c", "at"), ("at", "at")])
def test_a_bad_word_is_forbidden_inside_of_words_too(said: tuple[str, str]) -> None:
    assert answer("the", *said, bad_words=["at"]).token_ids != ids(*said)


def test_a_continuation_is_scored_as_it_is_written() -> None:
    llm = toy_llm(tokenizer=sentencepiece(), drafter=None)
    by_text, by_ids = llm.score(["the", ids("▁the")], [" cat", " cat"], use_tqdm=False)
    assert by_text.token_ids == by_ids.token_ids == ids("▁cat")
    assert by_text.logprobs == by_ids.logprobs
    assert llm.score("the", " cat", use_tqdm=False) == llm.score("the", [" cat"], use_tqdm=False) == [by_text]
    assert llm.score([ids("▁the")], ["at"], use_tqdm=False)[0].token_ids == ids("at")


@pytest.mark.parametrize("gaps", [("ab", "ba"), [("a", b"x")], [("a", "b", "c")], [("a", None)], "ab", None])
def test_gaps_that_are_no_pairs_of_texts_are_refused(gaps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.models.text.infill import InfillMarkers

    markers = InfillMarkers(3, 4, 5, (5,))
    monkeypatch.setattr(InfillMarkers, "of", lambda tokenizer: markers)
    llm = toy_llm(tokenizer=sentencepiece(), drafter=None)
    with pytest.raises(ParameterError, match=r"^gaps="):
        llm.infill(gaps, use_tqdm=False)
    with pytest.raises(ParameterError, match=r"^params="):
        llm.infill([("a", "b")], [SamplingParams()], use_tqdm=False)  # type: ignore[arg-type]
