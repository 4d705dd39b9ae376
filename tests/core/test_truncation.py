"""Typical sampling, epsilon and eta keep the tokens that transformers keeps; each method keeps what its paper says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, TypicalLogitsWarper

from batches import new_batch
from paceline.config import SamplingParams
from paceline.core.batch import RowStart
from paceline.core.sampling import probabilities

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 3000
Warper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens each line of logits [L, V] may draw: [L, V] bool."""
    batch = new_batch(1, 8, logits.shape[-1])
    batch.set_row(0, RowStart([0], params, 1))
    batch.set_live([0])
    return probabilities(logits[None], batch)[0] > 0


def lines(spread: float) -> torch.Tensor:
    """Twenty lines, from nearly flat to nearly certain."""
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(3))
    return logits * torch.linspace(0.1, spread, 20)[:, None]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("name", "cutoff", "warper"),
    [
        ("typical_p", 0.9, TypicalLogitsWarper),
        ("typical_p", 0.2, TypicalLogitsWarper),
        ("epsilon_cutoff", 3e-4, EpsilonLogitsWarper),
        ("epsilon_cutoff", 0.3, EpsilonLogitsWarper),
        ("eta_cutoff", 2e-3, EtaLogitsWarper),
        ("eta_cutoff", 0.4, EtaLogitsWarper),
    ],
)
def test_the_tokens_are_those_that_transformers_keeps(
    name: str, cutoff: float, warper: Callable[[float], Warper], temperature: float
) -> None:
    logits = lines(8.0)
    given: dict[str, Any] = {name: cutoff}
    ours = kept(logits, SamplingParams(temperature=temperature, **given))
    theirs = warper(cutoff)(torch.zeros(20, 1, dtype=torch.int64), logits / temperature) > -math.inf
    # Masses are whole numbers of 2^-30: a token at the very boundary may differ.
    assert int((ours != theirs).sum()) <= 2
    assert 20 <= int(ours.sum()) < ours.numel()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
def test_top_n_sigma_cuts_by_the_spread_of_the_logits_at_any_temperature(temperature: float) -> None:
    logits = lines(8.0)
    logits[:, 7] = -math.inf  # forbidden tokens have no part in the spread
    open_tokens = torch.arange(VOCAB) != 7
    spread = logits[:, open_tokens].double().std(-1, correction=0, keepdim=True)
    expected = logits.double() >= logits.amax(-1, keepdim=True).double() - 1.5 * spread
    assert torch.equal(kept(logits, SamplingParams(temperature=temperature, top_n_sigma=1.5)), expected)


def test_typical_sampling_may_cut_the_most_likely_token() -> None:
    logits = torch.log(torch.tensor([[0.4, *[0.6 / 60] * 60]]))
    tokens = kept(logits, SamplingParams(typical_p=0.5))
    assert tokens.tolist() == [[False, *[True] * 60]]
    assert kept(logits, SamplingParams(typical_p=0.5, epsilon_cutoff=0.3)).tolist() == tokens.tolist()


@pytest.mark.parametrize("params", [{"epsilon_cutoff": 1.0}, {"top_n_sigma": 1e-9}])
def test_the_most_likely_token_stays(params: dict[str, Any]) -> None:
    logits = lines(8.0)
    assert torch.equal(kept(logits, SamplingParams(**params)), logits == logits.amax(-1, keepdim=True))


def test_greedy_rows_ignore_truncation() -> None:
    logits = torch.log(torch.tensor([[0.4, *[0.6 / 60] * 60]]))
    tokens = kept(logits, SamplingParams(temperature=0, typical_p=0.5))
    assert tokens[0].nonzero().tolist() == [[0]]
