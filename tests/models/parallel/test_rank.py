"""Several ranks give one process's results, with any drafter. They are threads here; see test_launch.py."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from head_support import tiny_head
from model_support import FOREIGN, NATIVE, random_tokens, tiny
from models.parallel.ranks import POSITIONS, TOYS, in_threads, params, prompts, toy, write
from paceline import LLM
from paceline.config import EngineConfig, EngineOptions, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.engine.scoring import PromptScores
from paceline.errors import ParameterError, RankError
from paceline.kernels.attention.padded import PaddedAttention
from paceline.lengths import FixedLength
from paceline.models.base import Model
from paceline.models.decoding.decoder import Decoder
from paceline.models.description.shards import ModelShard
from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from paceline.models.load.loading import check_shardable, load_model
from paceline.models.parallel.launch import interface_of
from paceline.models.parallel.plan import Op
from toy import SHAPES, ScriptedTrees, always, answers, make_engine, run, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": None},
    "ngram": {"drafter": "ngram"},
    "model": {"drafter": "model"},
    "hybrid": {"drafter": "hybrid"},
    "rounds of the device": {"drafter": "model", "rounds": "device"},
    "trees of the device": {"drafter": "model", "rounds": "device", "speculation_width": 2},
    "split": {"drafter": "ngram", "attention": "split"},
}
QUICK = [("llama", "hybrid"), ("qwen2", "rounds of the device"), ("llama", "trees of the device")]


def generate(target: Model, draft: Model, tokens: int, **options: Any) -> list[RequestOutput]:
    """Four prompts, five answers, four rows; prompts share prefixes, so rows are copied, too."""
    wanted = draft if options["drafter"] in ("model", "hybrid") else None
    engine = make_engine(target, wanted, max_model_len=POSITIONS, prefill_chunk=16, **options)
    return run(engine, prompts(4), params(tokens))


def assert_equal_to_one_process(path: Path, name: str, tokens: int, ranks: int, **options: Any) -> None:
    whole, draft = load_model(path, dtype=torch.float32), load_model(toy(name, seed=0), dtype=torch.float32)
    expected = generate(whole, draft, tokens, **options)
    with in_threads(path, ranks) as part:
        found = generate(part, draft, tokens, **options)
    assert answers(found) == answers(expected)
    assert all(len(answer) == tokens for each in answers(found) for answer in each)
    speculating = options["drafter"] is not None
    assert speculating == any(answer.metrics.accepted > 0 for each in found for answer in each.candidates)


@pytest.mark.parametrize(("name", "drafter"), QUICK)
def test_answers_equal_those_of_one_process(tmp_path: Path, name: str, drafter: str) -> None:
    assert_equal_to_one_process(write(toy(name), tmp_path), name, 24, 2, **DRAFTERS[drafter])


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "ranks"), [*((drafter, 2) for drafter in DRAFTERS), ("hybrid", 3)])
@pytest.mark.parametrize("name", TOYS)
def test_200_tokens_equal_those_of_one_process(tmp_path: Path, name: str, drafter: str, ranks: int) -> None:
    assert_equal_to_one_process(write(toy(name), tmp_path), name, 200, ranks, **DRAFTERS[drafter])


@torch.inference_mode()
def read(model: Model) -> torch.Tensor:
    """Logits of three rows, computed in two pieces, the second of them with padding."""
    decoder, tokens = Decoder(model, PaddedAttention(), 3, 32), random_tokens(3, 20)
    first = decoder.forward(tokens[:, :11], torch.zeros(3, dtype=torch.int64), 11)
    second = decoder.forward(tokens[:, 11:], torch.full((3,), 11), 20)
    return decoder.logits(torch.cat([first, second], 1))


FAMILIES = [
    "llama with wide heads and one key head",
    "qwen3 with biases",
    "opt with norms after",
    "gpt2 with scales by layer",
    "phi",
    "gpt_neox",
    "apertus",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_give_the_logits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    check_logits(tmp_path, name, 2)


# norms over all heads, experts, heads of two widths, sinks
_WHOLE = (
    *("olmo2", "olmo3", "olmoe", "qwen3_moe", "granitemoe", "gemma4", "gemma4 with keys as values", "granite_swa"),
    *("mixtral", "glm4_moe", "sarvam_moe", "solar_open", "dots1", "exaone_moe", "hy_v3", "minimax_m2", "afmoe"),
    *("hunyuan_v1_moe", "ernie4_5_moe", "mellum", "qwen3_moe with dense layers", "qwen2_moe", "flex_olmo"),
    *("granitemoe_swa", "phimoe", "aria_text", "cohere2_moe", "mimo_v2_flash"),
)


@pytest.mark.parametrize("name", _WHOLE)
def test_what_cannot_be_divided_is_refused(name: str, tmp_path: Path) -> None:
    tiny(*NATIVE[name]).save_pretrained(tmp_path)
    with pytest.raises(ParameterError, match=r"tensor_parallel=2.* 1 with"):
        check_shardable(tmp_path, ModelShard(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(NATIVE.keys() - {*_WHOLE}))
def test_every_family_gives_the_logits_of_the_whole_model(tmp_path: Path, name: str, ranks: int) -> None:
    check_logits(tmp_path, name, ranks)


def check_logits(tmp_path: Path, name: str, ranks: int) -> None:
    model = tiny(*NATIVE[name])
    model.save_pretrained(tmp_path)
    whole = load_model(model, dtype=torch.float32)
    with in_threads(tmp_path, ranks) as part:
        torch.testing.assert_close(read(part), read(whole), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (12, 3), (8, 2), (7, 1), (9, 3), (32, 8)])
def test_every_head_and_every_column_has_one_owner(ranks: int, heads: int, groups: int) -> None:
    attention = AttentionSpec(heads, groups, 8)
    spec = DecoderSpec("llama", 101, 64, 64, (LayerSpec(attention, MLPSpec(150)),), NormSpec(), 64)
    shares = ModelShard(0, ranks).all()
    assert [head for share in shares for head in share.heads(attention)[0]] == list(range(heads))
    for share in shares:
        queries, own = share.heads(attention)
        assert {head * groups // heads for head in queries} == set(own), "it has the key heads that its queries read"
        assert len(queries) % len(own) == 0, "as many queries a key head"
        assert len(share.local(spec).layers) == len(spec.layers)
    for size in (101, 150, 64 * ranks, 8192):
        assert [column for share in shares for column in share.of(size)] == list(range(size))
        assert all(share.of(size) for share in shares)


def test_the_caches_of_all_ranks_follow_rows_that_move_and_trees_that_are_kept(tmp_path: Path) -> None:
    """A scripted drafter knows the answers: lower-ranked siblings come first, so accepted nodes move."""
    path = write(toy("llama"), tmp_path)
    whole = load_model(path, dtype=torch.float32)
    requests, each = prompts(6), [replace(s, seed=seed) for seed, s in enumerate([*params(24), *params(9)[:2]])]
    expected = run(make_engine(whole, max_model_len=POSITIONS, max_batch_size=3), requests, each)
    with in_threads(path) as part:
        engine = make_engine(part, max_model_len=POSITIONS, max_batch_size=3)
        engine.use_policy(FixedLength(4))
        engine.parts.drafter = ScriptedTrees(
            truth_of(requests, each, answers(expected)), always, shape=SHAPES["random"]
        )
        found = run(engine, requests, each)
    assert answers(found) == answers(expected)
    assert any(answer.metrics.accepted > 3 for each in found for answer in each.candidates)


def test_a_trained_head_reads_the_hidden_states_of_rank_0(tmp_path: Path) -> None:
    path, requests, each = write(toy("llama"), tmp_path), prompts(3), params(12)[:3]
    whole = load_model(path, dtype=torch.float32)
    expected = run(make_engine(whole, max_model_len=POSITIONS), requests, each)
    with in_threads(path) as part:
        engine = make_engine(part, tiny_head(part, 48), max_model_len=POSITIONS, drafter="feature")
        found = run(engine, requests, each)
    assert answers(found) == answers(expected)
    assert any(answer.metrics.drafted > 0 for output in found for answer in output.candidates)


def test_texts_are_scored_and_single_passes_run(tmp_path: Path) -> None:
    path = write(toy("qwen3"), tmp_path)
    expected = make_engine(load_model(path, dtype=torch.float32), max_model_len=POSITIONS)
    with in_threads(path) as part:
        engine = make_engine(part, max_model_len=POSITIONS)
        torch.testing.assert_close(engine.next_logits(range(9)), expected.next_logits(range(9)), rtol=2e-4, atol=2e-4)
        told = []
        for each in (engine, expected):
            text = PromptScores(list(range(40)))
            each.add(Request(text.token_ids, SamplingParams(), reading=text, only_read=True))
            while each.busy:
                each.step()
            told.append([token.logprob for token in text.logprobs if token is not None])
            assert len(told[-1]) == 39
    assert told[0] == pytest.approx(told[1], abs=1e-4)


def test_a_pass_that_fails_ends_the_model_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_threads(write(toy("llama"), tmp_path)) as part:
        engine = make_engine(part)
        monkeypatch.setattr(part.ranks, "broadcast_numbers", broken)
        for _ in range(2):
            with pytest.raises(RankError, match=r"OverflowError: too much.*make a new LLM"):
                engine.next_logits([1, 2])
        monkeypatch.undo()


def broken(*_: object) -> None:
    raise OverflowError("too much")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore Ctrl-C, which processes started in the background by a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_deferred_to_the_end_of_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks stay in step, and the model continues."""
    with in_threads(write(toy("llama"), tmp_path)) as part:
        engine = make_engine(part)
        expected, add_up = engine.next_logits([1, 2]), part.ranks.add_up

        def interrupted(x: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            return add_up(x)

        monkeypatch.setattr(part.ranks, "add_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.next_logits([1, 2])
        monkeypatch.undo()
        assert torch.equal(engine.next_logits([1, 2]), expected)


def test_unused_caches_are_dropped_on_all_ranks(tmp_path: Path) -> None:
    with in_threads(write(toy("llama"), tmp_path)) as part:
        engine = make_engine(part)
        for _ in range(3):
            engine.next_logits([1, 2])
        gc.collect()
        assert [step.op for step in part._pending] == [Op.DROP_CACHE]


class Recording:
    """Stands for a CUDA graph: captured programs run at once, and replays are counted."""

    replays = 0
    kept: ClassVar[weakref.WeakSet[Recording]] = weakref.WeakSet()

    def __init__(self) -> None:
        Recording.kept.add(self)

    def replay(self) -> None:
        Recording.replays += 1

    def pool(self) -> None:
        return None


def test_other_ranks_capture_and_replay_with_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph, **_: nullcontext())
    monkeypatch.setattr(Recording, "replays", 0)
    with in_threads(write(toy("llama"), tmp_path)) as part:
        engine = make_engine(part)
        with part.capturing() as number:
            captured = engine.next_logits([1, 2])
        for _ in range(3):
            with part.replaying(number):
                pass
        assert len(Recording.kept) == 1
        part.forget(number)
        assert torch.equal(engine.next_logits([1, 2]), captured)
        gc.collect()
        assert not Recording.kept
    assert Recording.replays == 3


@pytest.mark.parametrize("kind", FOREIGN)
def test_models_run_by_transformers_are_refused(tmp_path: Path, kind: str) -> None:
    tiny(*FOREIGN[kind]).save_pretrained(tmp_path)
    with pytest.raises(ParameterError, match=r"tensor_parallel=2 is not allowed.*only models of the families llama"):
        check_shardable(tmp_path, ModelShard(0, 2))


def test_unsupported_divisions_are_refused_by_name(tmp_path: Path) -> None:
    path = write(toy("llama"), tmp_path)
    with pytest.raises(
        ParameterError, match="tensor_parallel=7 is not allowed: at most 6: each rank needs at least one head"
    ):
        LLM(path, tensor_parallel=7, device="cpu")
    with pytest.raises(ParameterError, match=r"tensor_parallel=2 is not allowed: 1 with .*which is loaded already"):
        LLM(toy("llama"), tensor_parallel=2, device="cpu")
    refused: list[EngineOptions] = [{"kv_cache_dtype": "int8"}, {"prefix_dir": "/tmp"}, {"deterministic": True}]
    for options in refused:
        with pytest.raises(ParameterError, match=f"{next(iter(options))}=.*tensor_parallel=2"):
            EngineConfig(tensor_parallel=2, **options)
    for options in ({"quantization": "fp8"}, {"dtype": "float32", "attention": "native"}):
        with pytest.raises(ParameterError, match=r"(quantization|attention)=.* with several ranks here: "):
            LLM(path, tensor_parallel=2, device="cpu", **options)


def test_launched_ranks_listen_on_the_given_interface() -> None:
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert interface_of(here) is None
    assert interface_of(here | {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth1"}) == "eth1"
    with pytest.raises(ParameterError, match="GLOO_SOCKET_IFNAME=None is not allowed: the network interface"):
        interface_of(here | {"LOCAL_WORLD_SIZE": "1"})
