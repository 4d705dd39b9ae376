"""The effect of quantised weights: perplexity on a text, and how long greedy answers stay the same.

The text is fed in pieces of ``PIECE`` tokens, each on its own, so that every precision has the same contexts. The
standard error is that of the paired difference: both precisions predict the same tokens and share most of their noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.engine.prefixes import common_prefix_length
from paceline.kernels.attention import BACKENDS
from paceline.models.base import AnyModel
from paceline.models.decoding.decoder import Decoder
from paceline.tools.bench.measure import questions, run_batch
from paceline.tools.bench.prompts import OPEN

if TYPE_CHECKING:
    from paceline.llm import LLM

PIECE = 512
GREEDY_TOKENS = 64


@dataclass(frozen=True)
class Predictions:
    """logprobs [N]: of the text's own tokens; top [N]: the most likely tokens; answers: greedy token ids."""

    logprobs: Tensor
    top: Tensor
    answers: list[list[int]]


@dataclass(frozen=True)
class Quality:
    """A precision compared with the first one. Changes are relative; agreements are fractions from 0 to 1.

    standard_error: of perplexity_change; None if a single token was predicted.
    greedy_agreement: tokens before the answers differ, out of all.
    """

    precision: str
    perplexity: float
    perplexity_change: float
    standard_error: float | None
    top_token_agreement: float
    greedy_agreement: float
    weight_bytes: int


def python_reference() -> str:
    """A text that comes with every Python: its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.inference_mode()
def predict(llm: LLM, tokens: Sequence[int]) -> Predictions:
    """A model's predictions on a text of at least two tokens, and its greedy answers to the built-in prompts."""
    pieces = [list(tokens[start : start + PIECE]) for start in range(0, len(tokens) - 1, PIECE)]
    parts = [_piece(llm.engine.models.target, piece) for piece in pieces]
    run = run_batch(llm, questions(llm, OPEN), SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True))
    logprobs, top = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Predictions(logprobs, top, run.token_ids)


def _piece(model: AnyModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    decoder = Decoder(model, BACKENDS["padded"](), 1, len(tokens))
    ids = torch.tensor([tokens], device=model.device)
    hidden = decoder.forward(ids, ids.new_zeros(1), len(tokens))
    logits = decoder.logits(hidden[0, :-1])
    own = logits.log_softmax(dim=1).gather(1, ids[0, 1:, None])[:, 0]
    return own.cpu(), logits.argmax(dim=1).cpu()


def compare(precision: str, here: Predictions, first: Predictions, weight_bytes: int) -> Quality:
    """Compare ``here`` with ``first``, which predicted the same tokens."""
    difference = (first.logprobs - here.logprobs).double()
    same = sum(common_prefix_length(a, b, len(a)) for a, b in zip(here.answers, first.answers, strict=True))
    ratio, count = math.exp(difference.mean()), len(difference)
    return Quality(
        precision=precision,
        perplexity=math.exp(-here.logprobs.double().mean()),
        perplexity_change=ratio - 1,
        standard_error=None if count < 2 else ratio * float(difference.std()) / math.sqrt(count),
        top_token_agreement=float((here.top == first.top).float().mean()),
        greedy_agreement=same / sum(map(len, first.answers)),
        weight_bytes=weight_bytes,
    )
