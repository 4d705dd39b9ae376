"""Choice of kernels for a loaded model, and combinations that are refused."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from model_support import NATIVE, tiny
from paceline import LLM
from paceline.config import SamplingParams
from paceline.core import hardware
from paceline.drafters.heads.decoder import TorchHead
from paceline.drafters.heads.loading import load_own_head
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.kernels.attention import make_backend
from paceline.kernels.gpu import launch
from paceline.kernels.gpu.steps import TritonSteps
from paceline.models.load import kept_matrices
from paceline.models.load import prepare as module
from paceline.models.load.loading import open_checkpoint
from paceline.models.load.prepare import ModelOptions, load, would_run_natively
from paceline.models.native import matrices
from paceline.models.native.model import NativeModel
from paceline.models.torch import transformer
from paceline.models.torch.experts import Experts
from paceline.models.torch.layers import RecurrentLayer
from paceline.models.torch.transformer import Transformer
from recurrent_support import in_torch, save_tokenizer, save_with_head, tiny_granite_hybrid, tiny_lfm2, tiny_qwen3_5
from toy import ToyModel, answers, make_engine, run, tiny_llama, tiny_llama_of_transformers

pytestmark = pytest.mark.usefixtures("one_thread")


def in_triton(
    quantization: Any, deterministic: bool = False, *, source: Any = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Load a model, tiny_llama's by default, for Triton's matrix products."""
    source = tiny_llama_of_transformers() if source is None else source
    options = ModelOptions(dtype, CPU, "auto", quantization, deterministic)
    return module._in_triton(open_checkpoint(source), "the model", options)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_ragged_attention_runs_in_torch() -> None:
    assert isinstance(load(tiny(*NATIVE["llama"]), ModelOptions(torch.bfloat16, CPU, "ragged")), Transformer)
    with pytest.raises(ParameterError, match=r"quantization='int8'.*None with attention='ragged'"):
        load(tiny(*NATIVE["llama"]), ModelOptions(torch.bfloat16, CPU, "ragged", "int8"))


@pytest.mark.parametrize(
    ("quantization", "deterministic", "precision"),
    [
        ("int8", False, "int8 weights, float32"),
        ("int4", True, "int4 weights, float32"),
        ("fp8", True, "fp8 weights, float32"),
        (None, True, "float32"),
    ],
)
def test_on_cuda_the_linear_layers_are_tritons(
    quantization: Any, deterministic: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu.linear import SmallRowLinear

    monkeypatch.setattr(launch, "interpreted", lambda: True)
    made = in_triton(quantization, deterministic)
    assert made.precision == precision
    head = cast(SmallRowLinear, made._head)
    assert head.weight.kind == {"fp8": "fp8", None: "same"}.get(quantization, "int8")
    assert head.linears.deterministic == deterministic
    hidden = torch.randn(3, 32)
    expected = cast(Transformer, tiny_llama()).logits(hidden)
    torch.testing.assert_close(made.logits(hidden), expected, atol=0.3, rtol=0.1)
    layer = cast(SmallRowLinear, made._blocks[0].attention.output)
    assert layer.weight.kind.split()[0] == (quantization or "same")


@pytest.mark.parametrize(("to", "fewer"), [("fp8", 2), ("int8", 1), ("int4", 1)])  # inputs are filled up to 64 or 128
def test_quantised_weights_replace_the_original_ones(
    to: Any, fewer: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Matrix by matrix while they are read: loading needs the finished model and one matrix in 16 or 32 bits."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    before, live, most = cast(Transformer, tiny_llama()).weight_bytes(), 0, 0
    tiny_llama_of_transformers().save_pretrained(tmp_path)

    def freed(size: int) -> None:
        nonlocal live
        live -= size

    def numbers_of(part: Any) -> torch.Tensor:
        nonlocal live, most
        numbers = matrices.numbers_of(part)
        live += numbers.nbytes
        weakref.finalize(numbers, freed, numbers.nbytes)
        most = max(most, live)
        return numbers

    monkeypatch.setattr(kept_matrices, "numbers_of", numbers_of)
    shares: list[float] = []
    options = ModelOptions(torch.float32, CPU, "auto", to)
    made = module._in_triton(open_checkpoint(tmp_path), "the model", options, shares.append)
    assert live == 0
    assert 0 < most <= 4 * 32 * 96  # gate and up of a layer, the largest matrix
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    layers = [getattr(owner, name).weight for owner, name in made._linears()]
    others = sum(tensor.nbytes for tensor in made._kept)
    assert made.weight_bytes() == sum(tensor.nbytes for layer in layers for tensor in layer.tensors()) + others
    assert made.weight_bytes() < before / fewer


def test_float8_in_bfloat16_rounds_the_activations_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with ``deterministic``, because the bits of torch's products depend on the number of rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu.float8 import Float8Linear

    monkeypatch.setattr(launch, "interpreted", lambda: True)
    made = in_triton("fp8", dtype=torch.bfloat16)
    assert made.precision == "fp8 weights and activations, bfloat16"
    kinds = {type(layer) for layer in made.linears()}
    assert Float8Linear in kinds
    fixed = in_triton("fp8", deterministic=True, dtype=torch.bfloat16)
    assert Float8Linear not in {type(layer) for layer in fixed.linears()}
    assert fixed.precision == "fp8 weights, bfloat16"


def test_fp8_is_refused_if_the_device_does_not_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    for capability, supported in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)):
        launch.capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert launch.has_fp8(CUDA) == supported
    launch.capability.cache_clear()
    monkeypatch.setattr(module, "has_fp8", lambda device: False)
    with pytest.raises(ParameterError, match=r"quantization='fp8'.*'int8'.*no float8"):
        in_triton("fp8")


def test_on_cuda_foreign_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require_triton", lambda *_: None)
    with pytest.raises(ParameterError, match=r"deterministic=True.*native family"):
        module._in_triton(None, "toy", ModelOptions(torch.float32, CPU, deterministic=True))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_on_cuda_hybrids_have_quantised_weights_and_may_be_deterministic(
    quantization: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then the product of a delta net's gates, which is never rounded, is not torch's either."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    model = in_torch(save_with_head(tmp_path)[0])
    fixed = in_triton(quantization, deterministic=True, source=tmp_path)
    assert {(gates.weight.kind, gates.linears.deterministic) for gates in gates_of(fixed)} == {("same", True)}
    if quantization is not None:
        before = model.weight_bytes()
        model = in_triton(quantization, source=tmp_path)
        assert model.weight_bytes() < before / (2 if quantization == "int8" else 1.6)  # inputs are filled up to 128
        options = {"rounds": "device", "attention": "padded", "num_speculative_tokens": 2}
        params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)]
        head = load_own_head(model, tmp_path)  # whose vocabulary is the target's, read anew
        with pytest.raises(ParameterError, match=r"draft_quantization='int8'.*torch"):
            load_own_head(model, tmp_path, quantization="int8")
        assert isinstance(head, TorchHead)
        assert head.head.lm_head.weight.dtype == model.dtype
        plain, drafted = (
            answers(run(make_engine(model, *heads, drafter=drafter, **options), [[1, 2, 3]], params))
            for heads, drafter in (((), "ngram"), ((head,), "mtp"))
        )
        assert plain == drafted


def gates_of(model: Transformer) -> list[Any]:
    """The matrices of recurrent layers' gates and of routers."""
    mixers = [mixer for block in model._blocks for mixer in block.mixers if isinstance(mixer, RecurrentLayer)]
    routers = [block.mlp.router for block in model._blocks if isinstance(block.mlp, Experts)]
    return [*(mixer.gates for mixer in mixers), *routers]


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_on_cuda_mixtures_may_be_deterministic(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    monkeypatch.setattr(transformer, "steps_for", lambda _: TritonSteps())
    model = tiny(*NATIVE["qwen3_moe"])
    fixed = in_triton(quantization, deterministic=True, source=model)
    assert fixed.steps.deterministic  # type: ignore[attr-defined]
    assert {(gates.weight.kind, gates.linears.deterministic) for gates in gates_of(fixed)} == {("same", True)}
    assert not in_triton("int4", source=model).steps.deterministic  # type: ignore[attr-defined]
    with pytest.raises(ParameterError, match=r"deterministic=True.*latent attention"):
        in_triton(quantization, deterministic=True, source=tiny(*NATIVE["deepseek_v3"]))


def test_on_a_cpu_fp8_is_refused() -> None:
    with pytest.raises(ParameterError, match="fp8 weights need a CUDA device"):
        load(tiny(*NATIVE["llama"]), ModelOptions(torch.float32, CPU, "auto", "fp8"))


def test_without_triton_ragged_attention_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ParameterError, match=r'attention=.ragged.*pip install "paceline\[gpu\]"'):
        make_engine(ToyModel(), attention="ragged")
    assert make_backend("auto", CUDA).name == "padded"


def test_without_a_gpu_ragged_attention_is_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv(launch.INTERPRET, "0")
    with pytest.raises(ParameterError, match=r"attention='ragged'.*CUDA device"):
        make_engine(ToyModel(), attention="ragged")
    assert make_backend("auto", CPU).name == "padded"
    assert make_backend("auto", CUDA).name == "ragged"


_WIDER = {"hidden_size": 64, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 16}


needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")


@needs_kernels
def test_a_configuration_tells_what_the_kernels_run() -> None:
    """All families with heads as wide as the kernels need, and some with narrower heads."""
    told, run = set(), set()
    wide = {name: tiny(kind, _widened(fields)) for name, (kind, fields) in NATIVE.items()}
    narrow = {f"narrow {name}": tiny(*NATIVE[name]) for name in [*NATIVE][::9]}
    recurrent = {"qwen3_5": tiny_qwen3_5(), "lfm2": tiny_lfm2(), "granite 4": tiny_granite_hybrid()}
    for name, model in (wide | narrow | recurrent).items():
        if would_run_natively(model, CPU, "auto"):
            told.add(name)
        if isinstance(load(model, ModelOptions(torch.bfloat16, CPU)), NativeModel):
            run.add(name)
    assert told == run
    assert {"llama", "gemma4", *recurrent} <= run
    assert "narrow llama" not in run


def _widened(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {name: size for name, size in _WIDER.items() if fields.get(name)}


@needs_kernels
@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ({}, torch.bfloat16, torch.float32),
        ({"quantization": "int8", "draft_quantization": None}, torch.bfloat16, torch.float32),
        ({"attention": "padded"}, torch.float32, torch.float32),
        ({"dtype": "float32"}, torch.float32, torch.float32),
        ({"dtype": "float32", "draft_dtype": "auto"}, torch.float32, torch.float32),
        ({"draft_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_auto_is_bfloat16_on_the_kernels_of_every_processor(
    options: Any, target: torch.dtype, draft: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is one that the kernels do not run; then they change places."""
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2"})
    _llama_of_the_kernels().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    gpt2, common = tiny(*NATIVE["gpt2"]), {"tokenizer": None, "device": "cpu", "max_model_len": 32, "use_tqdm": False}
    for source in (tmp_path, _llama_of_the_kernels()):
        models = LLM(source, gpt2, **common, **options).engine.models
        assert isinstance(models.target, NativeModel) == (target == torch.bfloat16)
        assert (models.target.dtype, models.draft.dtype) == (target, draft)
    if not options:
        models = LLM(gpt2, tmp_path, **common).engine.models
        assert (models.target.dtype, models.draft.dtype) == (torch.float32, torch.bfloat16)
        assert isinstance(models.draft, NativeModel)


def test_auto_is_float32_without_kernels_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(native, "select", lambda: None)
    llm = LLM(_llama_of_the_kernels(), drafter=None, tokenizer=None, device="cpu", max_model_len=32, use_tqdm=False)
    assert llm.engine.models.target.dtype == torch.float32


def test_the_start_line_names_what_the_kernels_lack_and_not_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2"})
    llm = LLM(tiny(*NATIVE["llama"]), drafter=None, tokenizer=None, device="cpu", max_model_len=32, use_tqdm=False)
    assert llm.engine.models.target.dtype == torch.float32
    assert "a head width that is a multiple of 16" in llm.engine.describe()


def test_without_kernels_models_run_in_torch_and_packed_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start line names the kernels, not the dtype: "auto" is float32 without them."""
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(native, "select", lambda: None)
    monkeypatch.setattr(native, "why_none", lambda: "the C++ extension is not built")
    common: dict[str, Any] = {"device": "cpu", "max_model_len": 32, "use_tqdm": False, "tokenizer": None}
    llm = LLM(_llama_of_the_kernels(), drafter="ngram", **common)
    assert "(not native: the C++ extension is not built)" in llm.engine.describe()
    for option in ({"quantization": "int8"}, {"quantization": "int4"}, {"attention": "native"}):
        with pytest.raises(ParameterError, match=f"{next(iter(option))}=.*not possible here: the C\\+\\+ extension"):
            LLM(_llama_of_the_kernels(), drafter=None, **common, **option)  # type: ignore[arg-type]


def _llama_of_the_kernels() -> PreTrainedModel:
    return tiny("llama", NATIVE["llama"][1] | {"head_dim": 16})


@pytest.mark.parametrize("name", ["padded", "split", "auto"])
def test_determinism_is_refused_by_other_attention_backends(name: Any) -> None:
    with pytest.raises(ParameterError, match=r"deterministic=True.*ragged"):
        make_backend(name, CPU, deterministic=True)


@pytest.mark.parametrize("hip", ["6.4", None])
def test_amds_gpus_are_named_as_the_reason(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for them calls their devices cuda, too."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.version, "hip", hip)
    found = launch.why_not(CUDA)
    assert (found is not None and "AMD" in found) == (hip is not None)


def test_8_bits_on_old_gpus_need_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    monkeypatch.setattr(module, "native_bfloat16", lambda device: False)
    with pytest.raises(ParameterError, match="dtype='float16'"):
        in_triton("int8", dtype=torch.bfloat16)


def test_deterministic_products_are_refused_where_some_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    checkpoint = open_checkpoint(tiny_llama_of_transformers())
    assert checkpoint is not None
    narrow = replace(checkpoint, spec=replace(checkpoint.spec, embed_width=16))
    with pytest.raises(ParameterError, match="projects its embeddings"):
        module._in_triton(narrow, "narrow", ModelOptions(torch.float32, CPU, deterministic=True))
