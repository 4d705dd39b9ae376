"""What a client expects most of the answer to be (OpenAI's "predicted outputs"): draft tokens are copied from it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import LOOKS_UP, MAX_REFERENCE_TOKENS, EngineConfig
from paceline.server import errors
from paceline.server.replies import CompletionTokensDetails


def check_prediction(config: EngineConfig, tokens: Sequence[int]) -> None:
    """Raise ApiError (400) where nobody would look at it, and for one that is too long."""
    if not config.looks_up:
        raise errors.invalid(f"this server makes no use of a prediction: it needs {LOOKS_UP}", "prediction")
    if len(tokens) > MAX_REFERENCE_TOKENS:
        message = f"the prediction has {len(tokens)} tokens, and {MAX_REFERENCE_TOKENS} are the most"
        raise errors.invalid(message, "prediction")


def details_of(prediction: Sequence[int], answers: Sequence[Sequence[int]]) -> CompletionTokensDetails:
    """How many tokens of the prediction an answer has in common with it, in order, and how many not: of all answers.

    answers: all that were made, ``best_of`` of them. It says how good the prediction was, whatever was drafted from it.
    """
    kept = sum(in_common(prediction, answer) for answer in answers)
    missed = len(prediction) * len(answers) - kept
    return CompletionTokensDetails(accepted_prediction_tokens=kept, rejected_prediction_tokens=missed)


def in_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens of the longest common subsequence, by Hyyrö's bit vectors (2004): for each token of the second text a few
    operations on numbers with a bit for each of the first, so that no text takes long.
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
