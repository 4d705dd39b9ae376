"""OpenAI's "predicted outputs": a text that the client expects in the answer, used as a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from paceline.config import LOOKS_UP, MAX_REFERENCE_TOKENS, EngineConfig
from paceline.server import errors
from paceline.server.replies import CompletionTokensDetails

_CACHED = 1024  # masks of tokens, of 16 KiB each for the longest prediction; others are made again


def check_prediction(config: EngineConfig, tokens: Sequence[int]) -> None:
    """Raise ApiError (400) if no drafter of this server uses predictions, or if the prediction is too long."""
    if not config.looks_up:
        raise errors.invalid(f"this server cannot use a prediction: that needs {LOOKS_UP}", "prediction")
    if len(tokens) > MAX_REFERENCE_TOKENS:
        message = f"the prediction has {len(tokens)} tokens; at most {MAX_REFERENCE_TOKENS} are allowed"
        raise errors.invalid(message, "prediction")


def details_of(prediction: Sequence[int], answers: Sequence[Sequence[int]]) -> CompletionTokensDetails:
    """Count the prediction's tokens that do and do not occur, in order, in the answers.

    prediction: token ids. answers: token ids of every sampled sequence, including those that ``best_of`` discards. The
    counts rate the prediction itself, independent of which draft tokens came from it.
    """
    kept = sum(in_common(prediction, answers))
    missed = len(prediction) * len(answers) - kept
    return CompletionTokensDetails(accepted_prediction_tokens=kept, rejected_prediction_tokens=missed)


def in_common(text: Sequence[int], others: Sequence[Sequence[int]]) -> list[int]:
    """Lengths of the longest common subsequences of a text with each of the others, by Hyyrö's algorithm (2004).

    It is bit-parallel: a few operations on integers per token of the others. An integer has a bit for each token of
    the text that occurs in any of them. The text is indexed once.
    """
    wanted = set().union(*others)
    kept = [token for token in text if token in wanted]
    places: dict[int, list[int]] = {}
    for place, token in enumerate(kept):
        places.setdefault(token, []).append(place)

    @lru_cache(_CACHED)
    def mask(token: int) -> int:
        bits = bytearray(len(kept) // 8 + 1)
        for place in places[token]:
            bits[place >> 3] |= 1 << (place & 7)
        return int.from_bytes(bits, "little")

    everywhere = (1 << len(kept)) - 1
    lengths = []
    for other in others:
        open_ = everywhere
        for token in other:
            if token in places:
                matched = open_ & mask(token)
                open_ = (open_ + matched | open_ - matched) & everywhere
        lengths.append(len(kept) - open_.bit_count())
    return lengths
