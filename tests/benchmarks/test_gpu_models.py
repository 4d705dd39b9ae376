"""Models with random weights, and the floors that follow from their sizes."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu.floors import Ceiling, Weights, pass_work, round_floor, tokens_a_round
from benchmarks.gpu.models import PAIRS, RandomWeights, WeightFormat, matrices, matrix_parameters, random_model, tiny

from paceline.kernels.attention import make_backend
from paceline.kernels.spec import LinearWeights
from paceline.models.decoding.decoder import Decoder
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weights import slots

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
H100, H200 = Ceiling(3.0e12, 790e12), Ceiling(4.3e12, 790e12)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (PAIRS["gpt-7.8b"].target, 7.8),
        (PAIRS["llama-8b"].target, 8.0),
        (PAIRS["gpt-7.8b"].draft, 0.31),
        (PAIRS["llama-8b"].draft, 0.30),
    ],
)
def test_the_models_have_the_sizes_that_their_names_say(config: DecoderSpec, billions: float) -> None:
    targets = {slot.target: slot for slot in slots(config).values()}
    tables = ("positions.weight",)
    total = sum(slot.total * (slot.shape[1] if len(slot.shape) == 2 else 1) for slot in targets.values())
    total -= sum(targets[name].total * config.width for name in tables if name in targets)
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("pair", PAIRS)
def test_counted_matrices_are_those_of_the_forward_pass(pair: str) -> None:
    config = tiny(PAIRS[pair]).target
    multiplied: list[int] = []

    class Counting:
        def __init__(self, weights: LinearWeights) -> None:
            self.weight, self.bias = weights.weight, weights.bias
            multiplied.append(weights.weight.numel())

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

        def tensors(self) -> tuple[torch.Tensor, ...]:
            return ()

    from paceline.models.torch.transformer import Transformer

    Transformer(config, RandomWeights(config, torch.float32, CPU), "counted", linear=Counting)
    assert sum(multiplied) == matrix_parameters(config)
    assert len(multiplied) == len(matrices(config))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("to", ["bf16", "int8", "fp8"])
def test_random_models_compute_in_every_format(pair: str, to: WeightFormat) -> None:
    config = tiny(PAIRS[pair]).target
    model = random_model(config, pair, to, torch.float32, CPU)
    decoder = Decoder(model, make_backend("padded", CPU), 1, 8)
    logits = decoder.logits(decoder.forward(torch.tensor([[1, 2]]), torch.zeros(1, dtype=torch.int64), 8))
    assert logits.shape == (1, 2, config.vocab_size)
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize(
    ("ceiling", "to", "ms"), [(H100, "bf16", 6.0), (H100, "int8", 3.4), (H200, "bf16", 4.2), (H200, "fp8", 2.4)]
)
def test_a_decode_step_of_the_papers_model_has_the_floor_that_was_published(
    ceiling: Ceiling, to: WeightFormat, ms: float
) -> None:
    work = pass_work(Weights(PAIRS["gpt-7.8b"].target, to), 8, 1, 600)
    assert work.seconds(ceiling) * 1e3 == pytest.approx(ms, rel=0.03)


def test_a_round_is_at_least_its_drafts_and_its_verification() -> None:
    target, draft = (Weights(config, "bf16") for config in (PAIRS["gpt-7.8b"].target, PAIRS["gpt-7.8b"].draft))
    plain, speculating = (round_floor(target, draft, 8, k, 600, H100) for k in (0, 7))
    step = pass_work(draft, 8, 1, 600).seconds(H100)
    assert speculating - plain == pytest.approx(7 * step)


def test_tokens_of_a_round() -> None:
    assert tokens_a_round(0.8, 0) == 1
    assert tokens_a_round(0.5, 2) == 1.75
    assert tokens_a_round(1.0, 4) == 5
