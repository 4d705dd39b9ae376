"""Fill-in-the-middle prompts: each family's tokens in its order, and texts that spell such tokens stay text."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

import real_models
from models.test_tokenizer import byte_level_backend, real_model, sentencepiece_backend, smollm2, wrap
from paceline.config import SamplingParams
from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.models.text.infill import FAMILIES, InfillMarkers, Spellings
from paceline.models.text.tokenizer import Tokenizer


def with_markers(family: Spellings, *, sentencepiece: bool = False) -> Tokenizer:
    backend = sentencepiece_backend() if sentencepiece else byte_level_backend()
    names = (family.suffix, family.prefix, family.middle, *family.ends)
    backend.add_special_tokens([AddedToken(name) for name in names])
    return wrap(backend)


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_a_gap_has_the_markers_of_its_family(family: Spellings, sentencepiece: bool) -> None:
    tokenizer = with_markers(family, sentencepiece=sentencepiece)
    markers = InfillMarkers.of(tokenizer)
    ids = markers.prompt(tokenizer, "a b", " c")
    names = [tokenizer.spelling(token) for token in ids if tokenizer.is_special(token)]
    assert names == [family.prefix, family.suffix, family.middle]
    assert tokenizer.decode(ids) == "a b c"
    assert {tokenizer.spelling(token) for token in markers.ends} >= {*family.ends, family.prefix}
    assert markers.ended(SamplingParams(stop_token_ids=[1])).stop_token_ids == (1, *markers.ends)


@pytest.mark.parametrize("before", ["x <|fim_suffix|> y", "<|fim_prefix|>", ""])
def test_a_file_that_spells_a_marker_stays_text(before: str) -> None:
    tokenizer = with_markers(FAMILIES[0])
    ids = InfillMarkers.of(tokenizer).prompt(tokenizer, before, "<|fim_middle|>")
    assert sum(map(tokenizer.is_special, ids)) == 3
    assert tokenizer.decode(ids) == before + "<|fim_middle|>"


def test_token_ids_are_taken_as_they_are() -> None:
    tokenizer = with_markers(FAMILIES[0])
    markers = InfillMarkers.of(tokenizer)
    assert markers.prompt(tokenizer, [5, 6], [7]) == [markers.prefix, 5, 6, markers.suffix, 7, markers.middle]


@real_model
def test_models_without_the_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="no tokens for filling a gap"):
        InfillMarkers.of(smollm2())


@pytest.mark.slow
def test_qwen_coder_fills_a_gap() -> None:
    with LLM(real_models.find("qwen-coder-0.5b"), max_batch_size=1, max_model_len=256, use_tqdm=False) as llm:
        gap = ("def add(a, b):\n    return ", "\n\n\nprint(add(1, 2))\n")
        (output,) = llm.infill([gap], SamplingParams(temperature=0, max_tokens=24, stop=["\n"]), use_tqdm=False)
    assert output.outputs[0].text.strip() == "a + b"
