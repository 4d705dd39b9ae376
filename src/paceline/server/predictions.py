"""OpenAI's "predicted outputs": a text that the client expects in the answer, used as a source of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import LOOKS_UP, MAX_REFERENCE_TOKENS, EngineConfig
from paceline.server import errors
from paceline.server.replies import CompletionTokensDetails


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
    kept = sum(in_common(prediction, answer) for answer in answers)
    missed = len(prediction) * len(answers) - kept
    return CompletionTokensDetails(accepted_prediction_tokens=kept, rejected_prediction_tokens=missed)


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence, with Hyyrö's bit-parallel algorithm (2004).

    It does a few operations on ``len(first)``-bit integers per token of ``second``, so that long texts stay fast.
    """
    places: dict[int, int] = {}
    for place, token in enumerate(first):
        places[token] = places.get(token, 0) | 1 << place
    everywhere = (1 << len(first)) - 1
    open_ = everywhere
    for token in second:
        matched = open_ & places.get(token, 0)
        open_ = (open_ + matched | open_ - matched) & everywhere
    return len(first) - open_.bit_count()
