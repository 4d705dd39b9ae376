"""Model-FLOP utilisation: arithmetic of the output tokens over the machine's peak."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.tools import random_spec
from model_support import NATIVE, tiny
from paceline.config import SamplingParams
from paceline.engine.utilisation import Arithmetic, Peak, arithmetic_of, data_sheet, peak_of
from paceline.kernels import native
from paceline.models.base import AnyModel, Counted
from paceline.models.load.loading import load_model
from paceline.models.native.model import NativeModel
from paceline.models.torch.huggingface import HuggingFaceModel
from paceline.server.metrics import Meter
from toy import ToyModel, make_engine, make_request, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")


def test_utilisation_is_output_arithmetic_over_the_peak() -> None:
    known = Arithmetic(100, Peak(1000.0, "said so"))
    assert known.utilisation(tokens=5, seconds=2.0) == 0.5  # two operations each
    assert Arithmetic(None, Peak(1000.0, "")).utilisation(5, 2.0) is None
    assert Arithmetic(100, Peak(None, "unknown")).utilisation(5, 2.0) is None
    assert known.as_document() == {
        "multiply_adds_a_token": 100,
        "peak": {"operations_per_second": 1000.0, "source": "said so"},
    }


@pytest.mark.parametrize("target", ["native", "toy"])
def test_measuring_a_peak_leaves_the_global_generator_alone(target: str) -> None:
    before = torch.get_rng_state()
    peak_of(tiny_native(0) if target == "native" else ToyModel(), threads=1, seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def counted(model: AnyModel) -> int:
    assert isinstance(model, Counted)
    return model.multiply_adds()


BY_HAND = {
    "llama": 3 * (24 * (24 + 12 + 12 + 24) + 3 * 24 * 40) + 61 * 24,  # q, k, v, out; gate, up, down; head
    "gpt2": 3 * (4 * 24 * 24 + 2 * 24 * 96) + 61 * 24,
    "opt": 3 * (4 * 24 * 24 + 2 * 24 * 40) + 61 * 24,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_operations_per_token_equal_the_matrices_multiply_adds(name: str) -> None:
    own = load_model(tiny(*NATIVE[name]), dtype=torch.float32)
    assert not isinstance(own, HuggingFaceModel)
    assert counted(own) == BY_HAND[name]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_through_transformers_code_count_the_same(name: str) -> None:
    assert counted(HuggingFaceModel(tiny(*NATIVE[name]))) == BY_HAND[name]


def test_the_packed_model_counts_the_same() -> None:
    spec = random_spec()
    model = NativeModel(spec, "tiny", quantization="int8", threads=1)
    inner, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    a_layer = spec.width * (2 * inner + 2 * kv) + 3 * spec.width * spec.layers[0].down.weight.shape[1]
    assert counted(model) == len(spec.layers) * a_layer + spec.vocab_size * spec.width


def test_a_gpus_peak_comes_from_its_data_sheet() -> None:
    assert data_sheet("NVIDIA H100 80GB HBM3", torch.bfloat16).operations_per_second == 989.5e12
    assert data_sheet("NVIDIA H100 PCIe", torch.bfloat16).operations_per_second == 756e12
    assert data_sheet("NVIDIA A100-SXM4-80GB", torch.float32).operations_per_second == 19.5e12
    assert data_sheet("NVIDIA L40S", torch.bfloat16).operations_per_second == 362e12
    unknown = data_sheet("Someone's A1000", torch.bfloat16)
    assert unknown.operations_per_second is None
    assert str(unknown) == "unknown: no data sheet for Someone's A1000"


def test_a_cpus_peak_is_measured_in_the_precision_that_runs() -> None:
    plain = ToyModel()
    peak = peak_of(plain, 1, seconds=0.01)
    assert peak.operations_per_second is not None
    assert peak.operations_per_second > 1e7
    assert "float32" in str(peak)
    assert arithmetic_of(plain, 1, seconds=0.01).multiply_adds is None, "a toy does not say"


@pytest.mark.skipif(not native.available(), reason="needs the extension")
@pytest.mark.parametrize(("quantization", "to"), [(None, "bf16"), ("int8", "int8"), ("int4", "int4")])
def test_packed_weights_are_measured_on_their_own_kernels(quantization: object, to: str) -> None:
    model = NativeModel(random_spec(), "tiny", quantization=quantization, threads=1)  # type: ignore[arg-type]
    found = arithmetic_of(model, 1, seconds=0.01)
    assert found.peak.source.startswith(f"measured: {to} kernels (")
    assert found.peak.operations_per_second is not None
    assert found.utilisation(tokens=1, seconds=1.0) == pytest.approx(
        2 * counted(model) / found.peak.operations_per_second
    )


class Ticks:
    """A clock set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_server_reports_utilisation() -> None:
    engine, meter, now = make_engine(ToyModel()), Meter(1e9, clock := Ticks()), {"seconds": 0.0, "tokens": 0.0}
    value = meter.registry.get_sample_value
    assert math.isnan(value("paceline:peak_operations_per_second") or 0.0)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add(make_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    while engine.busy:
        engine.step()
        meter.record_round(engine)
        if engine.last_verdict is not None:
            now["seconds"] += engine.chunks.rounds.last
            now["tokens"] += len(engine.last_verdict.accepted)
    assert now["tokens"] == 12
    assert value("paceline:decode_seconds_total") == pytest.approx(now["seconds"])
    assert meter.stats().utilisation is None, "the machine's peak is unknown"
    meter.set_arithmetic(Arithmetic(100, Peak(1e6, "said so")))
    assert meter.stats().utilisation == pytest.approx(200 * 12 / now["seconds"] / 1e6)
    assert value("paceline:token_operations") == 200
    assert value("paceline:peak_operations_per_second") == 1e6
    clock.now = 1000.0
    assert meter.stats().utilisation is None, "no round ran recently"
