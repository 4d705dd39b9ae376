"""Perplexity and agreement of two precisions."""

import math

import pytest
import torch

from paceline.tools.bench.quality import Predictions, compare


def predictions(logprobs: list[float], top: list[int], answers: list[list[int]]) -> Predictions:
    return Predictions(torch.tensor(logprobs), torch.tensor(top), answers)


def test_a_precision_compared_with_itself_loses_nothing() -> None:
    same = predictions([-1.0, -3.0], [4, 5], [[1, 2, 3]])
    quality = compare("bfloat16", same, same, 10)
    assert quality.perplexity == pytest.approx(math.exp(2))
    assert (quality.perplexity_change, quality.standard_error) == (0, 0)
    assert (quality.top_token_agreement, quality.greedy_agreement) == (1, 1)


def test_losses_are_counted() -> None:
    first = predictions([-1.0, -1.0, -1.0, -1.0], [1, 2, 3, 4], [[1, 2, 3, 4], [5, 6, 7, 8]])
    worse = predictions([-1.1, -1.3, -1.1, -1.3], [1, 2, 3, 9], [[1, 2, 9, 4], [5, 6, 7, 8]])
    quality = compare("int4", worse, first, 10)
    assert quality.perplexity_change == pytest.approx(math.exp(0.2) - 1)
    assert quality.standard_error == pytest.approx(math.exp(0.2) * math.sqrt(0.04 / 3) / 2)
    assert quality.top_token_agreement == 0.75
    assert quality.greedy_agreement == 6 / 8  # tokens after the first difference do not count


def test_a_single_token_has_no_standard_error() -> None:
    same = predictions([-1.0], [4], [[1]])
    assert compare("bfloat16", same, same, 10).standard_error is None
