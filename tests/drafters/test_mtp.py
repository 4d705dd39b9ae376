"""The head in Qwen3.5's own checkpoint, against transformers' own code and plain decoding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from model_support import packed
from paceline import LLM
from paceline.config import SamplingParams
from paceline.core.batch import SpeculationPlan
from paceline.drafters.heads.decoder import HeadModel, TorchHead
from paceline.drafters.heads.layers import UnrolledAttention
from paceline.drafters.heads.loading import has_own_head, load_own_head
from paceline.errors import ParameterError
from paceline.lengths.base import FixedLength
from paceline.models.base import AnyModel
from paceline.models.load.loading import load_model
from paceline.models.native.model import Quantization
from quantised_support import CONVERTERS, convert_files
from recurrent_support import save_with_head, tiny_qwen3_5
from toy import VOCAB, RandomCaps, answers, make_engine, make_request, run

pytestmark = pytest.mark.usefixtures("one_thread")

_rng = random.Random(4)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(size)] for size in (1, 9, 2, 30, 5)]
PROMPTS_TO_COMPARE = [[_rng.randrange(VOCAB) for _ in range(12)] for _ in range(8)]
PARAMS = [
    SamplingParams(temperature=(0, 0.9)[seed % 2], max_tokens=20, seed=seed, n=1 + seed % 2)
    for seed in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_with_head(path)
    return path


def loaded(checkpoint: Path, kind: str) -> tuple[AnyModel, HeadModel]:
    """The target and its head: in torch ("float32"), or on the CPU kernels."""
    target: AnyModel = load_model(checkpoint, dtype=torch.float32)
    if kind != "float32":
        quantization: dict[str, Quantization | None] = {"bf16": None, "int8": "int8", "int4": "int4"}
        target = packed(checkpoint, quantization[kind], threads=1)
    return target, load_own_head(target, checkpoint)


def test_the_head_equals_that_of_transformers(tmp_path: Path) -> None:
    theirs, their_head = save_with_head(tmp_path, seed=3)
    _, head = loaded(tmp_path, "float32")
    assert isinstance(head, TorchHead)
    tokens = torch.randint(VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(23)[None]
    with torch.inference_mode():
        hidden = theirs.model(tokens).last_hidden_state
        wanted = their_head.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
        step = head.head.step(tokens[:, 1:], head.head.fuse(hidden[:, :-1, None]), positions, UnrolledAttention())
    torch.testing.assert_close(step.normed, wanted, atol=1e-4, rtol=1e-4)


def test_the_head_of_a_quantised_checkpoint_is_dequantised(tmp_path: Path) -> None:
    save_with_head(tmp_path)
    numbers = convert_files(tmp_path, CONVERTERS["float8 in small blocks"])
    head = loaded(tmp_path, "float32")[1]
    assert isinstance(head, TorchHead)
    found = {f"mtp.{name}": weight for name, weight in head.head.state_dict().items()}
    own = [name for name in numbers if name.startswith("mtp.")]
    assert len(own) == 7, "q, k, v, o, gate, up and down"
    for name in own:
        torch.testing.assert_close(found[name], numbers[name], rtol=0, atol=0)


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
    target, head = loaded(checkpoint, kind)
    plain = answers(run(make_engine(target, max_batch_size=1), PROMPTS, PARAMS))
    engine = make_engine(target, head, drafter=drafter, prefill_chunk=7, **options)
    if not options:
        engine.use_policy(RandomCaps())
    outputs = run(engine, PROMPTS, PARAMS)
    assert answers(outputs) == plain
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


def test_the_native_head_drafts_what_its_reference_drafts(checkpoint: Path) -> None:
    drafts = zip(first_drafts(checkpoint, "float32"), first_drafts(checkpoint, "bf16"), strict=True)
    same = [one == other for pair in drafts for one, other in zip(*pair, strict=True)]
    assert sum(same) >= 0.8 * len(same), "rounding changes few draft tokens; another head would agree on 1 of 23"


def test_an_llm_drafts_with_the_head_in_the_files_by_default(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", max_batch_size=2, max_model_len=90, use_tqdm=False)
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
