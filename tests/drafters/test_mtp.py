"""The head in a checkpoint of Qwen3.5, dense and with experts, against transformers' own code and plain decoding."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import in_turn
from model_support import NATIVE, packed, tiny
from models.test_families import _written as written
from models.test_latent_gguf import write as written_latent
from paceline import LLM
from paceline.config import SamplingParams
from paceline.core.batch import SpeculationPlan
from paceline.drafters.heads.decoder import HeadModel, TorchHead
from paceline.drafters.heads.layers import UnrolledAttention
from paceline.drafters.heads.loading import has_own_head, load_own_head
from paceline.drafters.heads.mtp import MtpHead
from paceline.errors import ParameterError
from paceline.lengths.base import FixedLength
from paceline.models.base import AnyModel
from paceline.models.load.loading import load_config, load_model
from paceline.models.native.model import Quantization
from quantised_support import CONVERTERS, convert_files
from recurrent_support import head_state, save_with_head, tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next
from toy import VOCAB, RandomCaps, answers, make_engine, make_request, run

pytestmark = pytest.mark.usefixtures("one_thread")

_rng = random.Random(4)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(size)] for size in (1, 9, 2, 20)]
PROMPTS_TO_COMPARE = [[(5 * row + 3 * i * i) % VOCAB for i in range(12)] for row in range(8)]
PARAMS = [
    SamplingParams(temperature=(0, 0.9)[seed % 2], max_tokens=12, seed=seed, n=1 + seed % 2)
    for seed in range(len(PROMPTS))
]


def tiny_routed(name: str, seed: int = 0, **sizes: Any) -> Any:
    """A random model of ``NATIVE`` with the vocabulary of these tests."""
    kind, fields = NATIVE[name]
    return tiny(kind, fields | {"vocab_size": VOCAB, "max_position_embeddings": 128} | sizes, seed=seed)


MAKERS: dict[str, Callable[..., Any]] = {
    "deepseek_v3": functools.partial(tiny_routed, "deepseek_v3"),
    "glm4_moe": functools.partial(tiny_routed, "glm4_moe", head_dim=16),
    "glm4_moe_lite": functools.partial(tiny_routed, "glm4_moe_lite", hidden_size=48),
    "mellum": functools.partial(
        tiny_routed, "mellum", head_dim=16, mtp_layer_types=["sliding_attention"], sliding_window=8
    ),
    "dense": tiny_qwen3_5,
    "experts": tiny_qwen3_5_moe,
    "next": functools.partial(tiny_qwen3_next, mlp_only_layers=[1]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a checkpoint of ``MAKERS`` with its head, once."""

    @functools.cache
    def save(maker: str) -> Path:
        path = tmp_path_factory.mktemp(maker)
        save_with_head(path, make=MAKERS[maker])
        return path

    return save


@pytest.fixture
def checkpoint(saved: Callable[[str], Path]) -> Path:
    return saved("dense")


@functools.cache
def loaded(checkpoint: Path, kind: str) -> tuple[AnyModel, HeadModel]:
    """The target and its head: in torch ("float32"), or on the CPU kernels."""
    quantization: dict[str, Quantization | None] = {"bf16": None, "int8": "int8", "int4": "int4"}
    target: AnyModel
    if kind == "float32":
        target = load_model(checkpoint, dtype=torch.float32)
    else:
        target = packed(checkpoint, quantization[kind], threads=1)
    return target, load_own_head(target, checkpoint)


@functools.cache
def plain_answers(checkpoint: Path, kind: str) -> list[list[list[int]]]:
    """Answers of plain decoding, one prompt at a time."""
    return answers(run(make_engine(loaded(checkpoint, kind)[0], max_batch_size=1), PROMPTS, PARAMS))


@pytest.mark.parametrize("maker", MAKERS)
def test_the_head_equals_that_of_transformers(maker: str, tmp_path: Path) -> None:
    theirs, their_head = save_with_head(tmp_path, 3, MAKERS[maker])
    assert has_own_head(tmp_path)
    _, head = loaded(tmp_path, "float32")
    assert isinstance(head, TorchHead)
    tokens = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(23)[None]
    with torch.inference_mode():
        hidden = theirs.model(tokens).last_hidden_state
        wanted = their_head.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
        step = head.head.step(tokens[:, 1:], head.head.fuse(hidden[:, :-1, None]), positions, UnrolledAttention())
    torch.testing.assert_close(step.normed, wanted, atol=1e-4, rtol=1e-4)


WRITERS: dict[str, tuple[str, Callable[..., Path]]] = {
    "keys and values apart": ("deepseek_v3", written_latent),
    "keys and values joined": ("deepseek_v3", functools.partial(written_latent, joined=True)),
    "glm4_moe": ("glm4_moe", lambda path, theirs, head: written(path, theirs, head=("glm4_moe", head))),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_head_of_a_gguf_file_is_that_of_its_original(writer: str, tmp_path: Path) -> None:
    """Qwen3.5's are in tests/models/test_qwen3_5_gguf.py."""
    maker, write = WRITERS[writer]
    theirs, own = save_with_head(tmp_path, 4, MAKERS[maker])
    layers = theirs.config.num_hidden_layers
    path = write(tmp_path / "model.gguf", theirs, head=head_state(own, layers))
    assert has_own_head(path)
    assert load_config(path).num_hidden_layers == layers
    heads = [load_own_head(load_model(each, dtype=torch.float32), each) for each in (path, tmp_path)]
    ours, original = (each.head.state_dict() for each in heads)  # type: ignore[attr-defined]
    assert ours.keys() == original.keys()
    for name, weight in original.items():
        torch.testing.assert_close(ours[name], weight, msg=name, rtol=0, atol=0)
    assert load_own_head(packed(path, "int8", threads=1), path).name.endswith("(mtp)")


def test_the_head_of_a_quantised_checkpoint_is_dequantised(tmp_path: Path) -> None:
    save_with_head(tmp_path)
    numbers = convert_files(tmp_path, CONVERTERS["float8 in small blocks"])
    head = loaded(tmp_path, "float32")[1]
    assert isinstance(head, TorchHead)
    assert isinstance(head.head, MtpHead)
    attention, mlp = "self_attn.{}_proj", "mlp.{}_proj"
    stacks = {
        "qkv": (attention, "qkv"),
        "o": (attention, "o"),
        "gate_up": (mlp, ["gate", "up"]),
        "down": (mlp, ["down"]),
    }
    for target, (name, parts) in stacks.items():
        stored = torch.cat([numbers[f"mtp.layers.0.{name.format(part)}.weight"] for part in parts])
        torch.testing.assert_close(head.head.weights[f"layers.0.{target}.weight"], stored, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "drafter", "options"),
    [
        ("float32", "mtp", {}),
        pytest.param("float32", "hybrid", {"speculation_width": 3}, marks=pytest.mark.slow),
        ("bf16", "mtp", {"num_speculative_tokens": 1}),
        ("bf16", "hybrid", {"num_speculative_tokens": "auto"}),
        ("int8", "mtp", {}),
        ("int8", "mtp", {"speculation_width": 3}),
        ("int8", "hybrid", {"speculation_width": 2}),
        ("int4", "mtp", {"num_speculative_tokens": 3}),
        ("int4", "feature", {}),
    ],
)
def test_answers_equal_plain_decoding(checkpoint: Path, kind: str, drafter: str, options: dict[str, Any]) -> None:
    check_answers(checkpoint, kind, drafter, options)


OF_EXPERTS = [maker for maker in MAKERS if maker != "dense"]
NATIVE_WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("int8", "mtp", {}),
    ("bf16", "mtp", {"num_speculative_tokens": 1}),
    ("int8", "hybrid", {"speculation_width": 2}),
    ("int4", "hybrid", {"num_speculative_tokens": "auto"}),
]


@pytest.mark.parametrize(
    ("maker", "kind", "drafter", "options"),
    [
        *((maker, "float32", "mtp", {}) for maker in OF_EXPERTS),
        *((maker, *way) for maker, way in in_turn(OF_EXPERTS, NATIVE_WAYS)),
    ],
)
def test_answers_with_a_head_of_experts_equal_plain_decoding(
    maker: str, kind: str, drafter: str, options: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    check_answers(saved(maker), kind, drafter, options)


def check_answers(checkpoint: Path, kind: str, drafter: str, options: dict[str, Any]) -> None:
    target, head = loaded(checkpoint, kind)
    engine = make_engine(target, head, drafter=drafter, prefill_chunk=7, **options)
    if not options:
        engine.use_policy(RandomCaps())
    outputs = run(engine, PROMPTS, PARAMS)
    assert answers(outputs) == plain_answers(checkpoint, kind)
    drafted = sum(one.metrics.drafted for each in outputs for one in each.outputs)
    assert drafted > 20 or options.get("num_speculative_tokens") == "auto"  # which finds that nothing pays here


def first_drafts(checkpoint: Path, kind: str) -> list[list[int]]:
    """Four draft tokens after each of some prompts."""
    target, head = loaded(checkpoint, kind)
    engine = make_engine(target, head, drafter="mtp", max_batch_size=8)
    engine.use_policy(FixedLength(0))
    for prompt in PROMPTS_TO_COMPARE:
        engine.add(make_request(prompt, SamplingParams(temperature=0, max_tokens=9)))
    engine.step()
    return engine.parts.drafter.propose(engine.batch, SpeculationPlan(4)).draft_tokens


@pytest.mark.parametrize("maker", MAKERS)
def test_the_native_head_drafts_what_its_reference_drafts(maker: str, saved: Callable[[str], Path]) -> None:
    checkpoint = saved(maker)
    drafts = zip(first_drafts(checkpoint, "float32"), first_drafts(checkpoint, "bf16"), strict=True)
    same = [one == other for pair in drafts for one, other in zip(*pair, strict=True)]
    assert sum(same) >= 0.8 * len(same), "rounding changes few draft tokens; another head would agree on 1 of 23"


@pytest.mark.parametrize("maker", ["dense", "deepseek_v3"])
def test_an_llm_drafts_with_the_head_in_the_files_by_default(maker: str, saved: Callable[[str], Path]) -> None:
    llm = LLM(str(saved(maker)), dtype="float32", device="cpu", max_batch_size=2, max_model_len=90, use_tqdm=False)
    assert llm.config.drafter == "hybrid"
    assert "own head" in llm.engine.describe()
    plain = llm.plain().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    found = llm.with_options(drafter="mtp", num_speculative_tokens=2)
    outputs = found.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.drafted for each in outputs) > 0


def test_a_model_without_a_head_refuses_it(tmp_path: Path) -> None:
    tiny_qwen3_5().save_pretrained(tmp_path)
    assert not has_own_head(tmp_path)
    with pytest.raises(ParameterError, match="a draft head in the model's own files"):
        LLM(str(tmp_path), drafter="mtp", device="cpu")
