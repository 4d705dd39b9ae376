"""Fill-in-the-middle prompts: a model's own tokens mark the text before and after the gap that it fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from paceline.config import SamplingParams
from paceline.errors import RequestError
from paceline.models.text.tokenizer import Tokenizer

Text: TypeAlias = str | list[int]


@dataclass(frozen=True)
class Spellings:
    """Marker tokens of one model family, as its vocabulary spells them.

    prefix, suffix, middle: written before the text before the gap, before the text behind it, and at the end.
    ends: tokens by which such models end the text of a gap, beside their end-of-text token.
    """

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()


_REPOSITORY = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>")
# Qwen2.5-Coder and CodeGemma, StarCoder, SantaCoder, DeepSeek-Coder, CodeLlama
FAMILIES = (
    Spellings("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _REPOSITORY),
    Spellings(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")
    ),  # StarCoder
    Spellings("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<|endoftext|>", "<fim-pad>")),
    Spellings("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<｜end▁of▁sentence｜>",)),
    Spellings("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
)


@dataclass(frozen=True)
class InfillMarkers:
    """Ids of the marker tokens of one model. ends: ids of all tokens that end the text of a gap."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> InfillMarkers:
        """Return the markers of the first family whose tokens the vocabulary has. Raises RequestError if none fits."""
        ids = {spelling: index for index, spelling in enumerate(tokenizer.tokens()) if spelling is not None}
        for family in FAMILIES:
            markers = [ids.get(spelling) for spelling in (family.prefix, family.suffix, family.middle)]
            if None not in markers:
                return _markers(ids, family)
        raise RequestError(
            f"{tokenizer.name} has no tokens for filling a gap, such as {FAMILIES[0].prefix}: it only continues texts"
        )

    def ended(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the ends of a gap as further stop tokens."""
        return replace(params, stop_token_ids=list(dict.fromkeys([*params.stop_token_ids, *self.ends])))

    def prompt(self, tokenizer: Tokenizer, before: Text, after: Text) -> list[int]:
        """Return the token ids of the prompt for a gap between two texts, given as strings or token ids."""
        first = tokenizer.huggingface.bos_token_id
        bos = [token for token in tokenizer.encode("") if token == first]  # where texts begin with it
        begin, end = _ids(tokenizer, before), _ids(tokenizer, after)
        return [*bos, self.prefix, *begin, self.suffix, *end, self.middle]


def _markers(ids: Mapping[str, int], family: Spellings) -> InfillMarkers:
    prefix, suffix, middle = ids[family.prefix], ids[family.suffix], ids[family.middle]
    ends = [ids[spelling] for spelling in family.ends if spelling in ids]
    return InfillMarkers(prefix, suffix, middle, tuple(dict.fromkeys([*ends, prefix, suffix, middle])))


def _ids(tokenizer: Tokenizer, text: Text) -> list[int]:
    if not isinstance(text, str):
        return text
    return tokenizer.encode_inside(text, tokenizer.encode_as_text)
