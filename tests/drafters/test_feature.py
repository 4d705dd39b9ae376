"""Trained heads as drafters: draft tokens equal a reference implementation's, whatever happened to the row before."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_support import SIZE, BlockReading, tiny_block
from head_support import (
    SHAPE,
    TAPS,
    TRANSFERS,
    features_of,
    published,
    published_chimera,
    published_transfer,
    random_head,
    reading_of,
    speculators_config,
    tiny_chimera_head,
    tiny_head,
    tiny_transfer_head,
    write,
)
from model_support import NATIVE, tiny
from paceline import LLM
from paceline.config import EngineConfig, SamplingParams
from paceline.core import hardware
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.draft_tensors import DraftTensors
from paceline.drafters.heads.block_decoder import BlockDecoder, TorchBlock
from paceline.drafters.heads.decoder import HeadDecoder, TorchHead, TorchHeadDecoder
from paceline.drafters.heads.native import NativeHead
from paceline.engine.engine import Engine
from paceline.engine.memory import plan_memory
from paceline.engine.rounds.device_drafters import ChainDrafter, RoundRows
from paceline.errors import ModelFormatError, ParameterError, VocabularyMismatchError
from paceline.kernels import native
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.lengths import FixedLength
from paceline.lengths.auto import AutoLength
from paceline.models.base import AnyModel
from paceline.models.load.loading import load_embedding
from paceline.models.native.model import NativeModel
from toy import (
    POSITIONS,
    VOCAB,
    RandomLength,
    make_engine,
    make_request,
    run,
    tiny_llama,
    tiny_llama_of_transformers,
    tiny_native,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[(7 * i + 3 * row) % VOCAB for i in range(size)] for row, size in enumerate((1, 9, 2, 17, 5))]
PARAMS = [SamplingParams(temperature=0, max_tokens=5 + 2 * row, n=1 + 2 * (row == 3)) for row in range(len(PROMPTS))]


def draft_tokens_of(head: TorchHead, features: list[Tensor], text: list[int], k: int) -> list[int]:
    """Draft tokens after a text, computed from the format's description."""
    if isinstance(head, TorchBlock):
        return BlockReading(head.head.config, head.head.state_dict()).draft(text, features, k)
    reading = reading_of(head.head.state_dict())
    state, logits = reading.text(text[1:], features)
    draft_tokens: list[int] = []
    for step in range(k):
        best = int(logits.argmax())
        draft_tokens.append(best + int(head.head.d2t[best]))
        state, logits = reading.after(draft_tokens[-1], state, len(text) - 1 + step)
    return draft_tokens


class Watched:
    """Compares the head's draft tokens of every greedy row with the reference."""

    def __init__(self, engine: Engine, target: AnyModel, head: TorchHead) -> None:
        self.target, self.head, self.compared = target, head, Counter[str]()
        self.drafter = engine.parts.drafter
        self.propose, self.drafter.propose = self.drafter.propose, self.check  # type: ignore[method-assign]

    def check(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = self.propose(batch, plan).capped(plan.caps)
        for row, draft_tokens in enumerate(draft.draft_tokens):
            text = batch.tokens[row, : batch.lengths[row]].tolist()
            if len(text) < 2:
                assert draft_tokens == []
                self.compared["short"] += 1
            elif not batch.sampling.temperature[batch.slots[row]]:
                features = features_of(self.target, text[:-1], self.head.taps)
                assert draft_tokens == draft_tokens_of(self.head, features, text, len(draft_tokens))
                self.compared["draft tokens"] += len(draft_tokens)
        return draft


def logits_after(head: TorchHead, features: list[Tensor], text: list[int]) -> Callable[[Sequence[int]], Tensor]:
    """A head's logits after a text and a path of a tree, computed from the format's description."""
    if isinstance(head, TorchBlock):
        block = BlockReading(head.head.config, head.head.state_dict())
        rows = block.rows(text[-1], features)
        return lambda way: block.logits(rows, [text[-1], *way])

    def after(way: Sequence[int]) -> Tensor:
        reading = reading_of(head.head.state_dict())
        state, logits = reading.text(text[1:], features)
        for step, draft_token in enumerate(way):
            state, logits = reading.after(draft_token, state, len(text) - 1 + step)
        return logits

    return after


TARGETS: dict[str, tuple[Callable[[], AnyModel], int]] = {
    "llama": (tiny_llama, 32),
    "native": (lambda: tiny_native(1), 72),
}


KINDS: dict[str, Callable[[AnyModel, int], TorchHead]] = {
    "feature": tiny_head,
    "parallel": partial(tiny_head, parallel=True),
    "hidden_transfer": tiny_transfer_head,
    "chimera": tiny_chimera_head,
    "dflash": partial(tiny_block, reduced=True),
    "dspark": partial(tiny_block, kind="dspark", reduced=True),
    "dflash2": partial(tiny_block, kind="dflash2"),
}
LONGEST = {"hidden_transfer": TRANSFERS, "chimera": TRANSFERS, "dflash": SIZE - 1, "dspark": SIZE, "dflash2": SIZE - 1}


@pytest.mark.parametrize(
    ("kind", "model", "chunk"),
    [
        *(("feature", "llama", 4), ("parallel", "native", 256), ("hidden_transfer", "native", 4)),
        *(("chimera", "llama", 256), ("dflash", "llama", 4), ("dspark", "native", 256), ("dflash2", "llama", 7)),
    ],
)
def test_draft_tokens_equal_the_reference_whatever_the_other_rows(model: str, chunk: int, kind: str) -> None:
    """Prompts in chunks, siblings that copy a prompt, rows that move, rounds without draft tokens, for some rows
    only."""
    make, width = TARGETS[model]
    target = make()
    head = KINDS[kind](target, width)
    engine = make_engine(target, head, drafter="feature", prefill_chunk=chunk, max_batch_size=4)
    engine.use_policy(RandomLength(seed=chunk))
    watched = Watched(engine, target, head)
    run(engine, PROMPTS, PARAMS)
    assert watched.compared["draft tokens"] > 50
    assert watched.compared["short"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_in_a_tree_are_the_best_tokens_after_their_path(kind: str) -> None:
    target = tiny_llama()
    head = KINDS[kind](target, 32)
    engine = make_engine(target, head, drafter="feature", speculation_width=3, num_speculative_tokens=3)
    compared, propose = Counter[tuple[int, int]](), engine.parts.drafter.propose

    def check(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan).capped(plan.caps)
        paths = DraftTensors.of(draft, batch.device).paths
        for row, count in enumerate(draft.drafted):
            text = batch.tokens[row, : batch.lengths[row]].tolist()
            assert count == 0 or len(text) > 1, "without hidden states there are no draft tokens"
            if count == 0:
                continue
            after = logits_after(head, features_of(target, text[:-1], head.taps), text)
            beside = defaultdict[tuple[int, ...], list[int]](list)
            for *way, draft_token in paths[row][1:]:
                beside[tuple(way)].append(draft_token)
            for way, draft_tokens in beside.items():
                best = after(way).topk(len(draft_tokens)).indices
                assert draft_tokens == (best + head.head.d2t[best]).tolist()
                compared[len(way), len(draft_tokens)] += 1
        return draft

    engine.parts.drafter.propose = check  # type: ignore[method-assign]
    run(engine, PROMPTS[:5], [SamplingParams(temperature=0, max_tokens=6)] * 5)
    assert all(compared[depth, 2] + compared[depth, 3] > 5 for depth in range(3))


@pytest.mark.parametrize(
    ("kind", "drafter", "rounds", "fed"),
    [
        ("feature", "feature", "every round", None),
        ("feature", "feature", "now and then", 2),
        ("dspark", "feature", "every round", None),
        ("dflash", "feature", "now and then", 3),
        ("dflash2", "hybrid", "now and then", None),
    ],
)
def test_a_device_draws_what_the_reference_does(
    kind: str, drafter: str, rounds: str, fed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of all lengths, none included: the head reads its missing tokens beforehand, or in the round itself.

    Nine of ten draft tokens are accepted, so the head misses many tokens. A block drafter's tokens depend neither on
    the length of the round nor on the other rows.
    """
    if fed is not None:
        monkeypatch.setattr(HeadDecoder if kind == "feature" else BlockDecoder, "fed_tokens", fed)
    target = tiny_llama()
    head = KINDS[kind](target, 32)
    device = {"rounds": "device", "attention": "padded", "acceptance": "synthetic:0.9", "benchmark": True}
    engine = make_engine(target, head, drafter=drafter, prefill_chunk=7, **device)
    engine.use_policy(FixedLength(4) if rounds == "every round" else RandomLength(seed=3))
    assert engine._device_round is not None
    draft_chain, compared = ChainDrafter.draft, Counter[str]()

    def check(drafter: ChainDrafter, rows: RoundRows, k: int, span: int) -> DraftTensors:
        found, state, before = draft_chain(drafter, rows, k, span), rows.state, rows.before
        for row, count in enumerate(found.counts[: engine.batch.rows].tolist() if k else ()):
            text = state.text[state.slots.index[row], : int(before[row])].tolist()
            if len(text) < 2:
                assert count == 0
                compared["short"] += 1
            elif state.values.temperature[row] == 0:
                features = features_of(target, text[:-1], head.taps)
                assert found.tokens[row, :count].tolist() == draft_tokens_of(head, features, text, count)
                compared["draft tokens"] += count
        return found

    monkeypatch.setattr(ChainDrafter, "draft", check)
    run(engine, PROMPTS, PARAMS)
    assert compared["draft tokens"] > 50
    assert compared["short"] > 0


@pytest.mark.parametrize("kind", ["feature", "chimera", "dspark"])  # each reads its missing tokens in its own way
def test_a_head_that_has_not_drafted_for_long_reads_its_missing_tokens(kind: str) -> None:
    target = tiny_llama()
    head = KINDS[kind](target, 32)
    engine = make_engine(target, head, drafter="feature")
    watched, lengths = Watched(engine, target, head), [0] * 12 + [3] * 3 + [0] * 2 + [3] * 100

    class Scheduled(FixedLength):
        def choose(self, batch: Batch) -> SpeculationPlan:
            return SpeculationPlan(lengths.pop(0))

    engine.use_policy(Scheduled(3))
    run(engine, [[1, 2, 3], [4, 5]], [SamplingParams(temperature=0, max_tokens=25)] * 2)
    assert watched.compared["draft tokens"] > 25


@pytest.mark.parametrize(("kind", "passes"), [("feature", 3), *((kind, 1) for kind in [*KINDS][1:])])
def test_some_heads_draft_in_one_pass(kind: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_llama()
    head = KINDS[kind](target, 32)
    engine = make_engine(target, head, drafter="feature", num_speculative_tokens=3)
    run(engine, PROMPTS[1:3], [SamplingParams(max_tokens=4)] * 2)
    calls, rounds, propose, made = Counter[str](), Counter[str](), engine.parts.drafter.propose, type(head.head)
    step = made.step

    def counted(*arguments: Any) -> Any:
        calls["step"] += 1
        return step(*arguments)

    def asked(batch: Batch, plan: SpeculationPlan) -> Draft:
        rounds["asked"] += 1
        return propose(batch, plan)

    for prompt in PROMPTS[1:3]:
        engine.add(make_request(prompt, SamplingParams(temperature=0, max_tokens=20)))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    monkeypatch.setattr(made, "step", counted)
    monkeypatch.setattr(engine.parts.drafter, "propose", asked)
    for _ in range(3):
        engine.step()
    assert rounds["asked"] == 3
    assert calls["step"] == passes * 3


@pytest.mark.parametrize("kind", LONGEST)
def test_heads_with_a_longest_draft_make_no_more(kind: str) -> None:
    target = tiny_llama()
    engine = make_engine(target, KINDS[kind](target, 32), drafter="feature", num_speculative_tokens=8)
    drafted, propose = set(), engine.parts.drafter.propose

    def asked(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        drafted.add((plan.k > LONGEST[kind], draft.k))
        return draft

    engine.parts.drafter.propose = asked  # type: ignore[method-assign]
    run(engine, PROMPTS[1:3], [SamplingParams(max_tokens=20)] * 2)
    assert {k for more, k in drafted if more} == {LONGEST[kind]}


def test_tokens_outside_the_heads_vocabulary_have_probability_0() -> None:
    target = tiny_llama()
    head = tiny_head(target, 32)
    distributions = head.logits(torch.randn(5, head.width)).softmax(-1)
    assert bool((distributions[:, ~head.head.t2d] == 0).all())
    assert distributions.sum(-1).tolist() == pytest.approx([1.0] * 5)
    own = head.head.logits(torch.zeros(1, head.width))
    assert head.logits(torch.zeros(1, head.width))[0, head.head.targets].tolist() == own[0].tolist()


def test_the_hidden_states_of_a_tree_follow_the_accepted_path() -> None:
    target = tiny_llama()
    decoder = TorchHeadDecoder(tiny_head(target, 32), ReferenceAttention(), 3, 20)
    decoder.fused_states.fused[1, 5:9] = torch.arange(4.0)[:, None]
    decoder.fused_states.keep_paths(torch.tensor([1]), torch.tensor([5]), torch.tensor([[1, 3, 2]]))
    assert decoder.fused_states.fused[1, 5:8, 0].tolist() == [1.0, 3.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_runs_beside_a_callers_autocast(kind: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run(
            make_engine(tiny_llama(), KINDS[kind](tiny_llama(), 32), drafter="feature"), PROMPTS[:3], PARAMS[:3]
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 7, 9]


@pytest.mark.parametrize("kind", ["feature", "chimera", "dflash"])
def test_memory_counts_the_stored_hidden_states(kind: str) -> None:
    target = tiny_llama()
    head = KINDS[kind](target, 32)
    config = EngineConfig(drafter="feature", max_batch_size=3, max_model_len=POSITIONS, dtype="float32", device="cpu")
    engine = make_engine(target, head, drafter="feature", max_batch_size=3)
    (decoder,) = engine.parts.drafter.decoders
    assert isinstance(decoder, HeadDecoder)
    plan, alone = (plan_memory(target, draft, config, 3, POSITIONS) for draft in (head, None))
    states, cache = decoder.fused_states.fused, (decoder.cache.keys, decoder.cache.values)
    used = sum(POSITIONS * table.nbytes // table.shape[-2] for table in cache)  # rows take whole pages
    longest = sum(table.nbytes for table in (*cache, states))
    assert used < plan.caches - alone.caches <= longest
    assert used <= plan.caches - alone.caches - 3 * head.fused_bytes(POSITIONS) <= sum(table.nbytes for table in cache)
    assert 0 < 3 * POSITIONS * states[0, 0].nbytes <= 3 * head.fused_bytes(POSITIONS) <= states.nbytes


def llm_with(head: Path, **options: Any) -> LLM:
    common = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "attention": "padded", "threads": 1}
    return LLM(tiny_llama_of_transformers(), head, **(common | {"num_speculative_tokens": 3} | options))


def accepted(llm: LLM) -> tuple[list[list[int]], int, int]:
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3, n=2)
    (output,) = llm.generate([1, 2, 3, 4], params, use_tqdm=False)
    metrics = [answer.metrics for answer in output.outputs]
    tokens = [answer.token_ids for answer in output.outputs]
    return tokens, sum(each.drafted for each in metrics), sum(each.accepted for each in metrics)


@pytest.mark.usefixtures("no_requests")
def test_a_heads_directory_is_a_draft_model_in_either_layout(tmp_path: Path) -> None:
    one = llm_with(published(tmp_path / "one"), drafter="feature")
    other = llm_with(published(tmp_path / "other", flat=True), drafter="feature")
    found = accepted(one)
    assert found == accepted(other)
    assert found[0] == accepted(one.plain())[0]
    assert found[1] > 0
    assert "drafter head " in one.engine.describe()


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize("drafter", ["feature", "hybrid"])
def test_auto_knows_up_to_which_batch_size_a_head_was_measured_to_pay(tmp_path: Path, drafter: str) -> None:
    head = published(tmp_path, paceline={"paying_rows": {"cpu": 2, "cuda": 7}})
    llm = llm_with(head, drafter=drafter, num_speculative_tokens="auto")
    assert isinstance(policy := llm.engine.parts.policy, AutoLength)
    assert policy.paying_rows == 2
    assert ", length auto (drafts for up to 2 rows)," in llm.engine.describe()
    unknown = llm_with(published(tmp_path), drafter=drafter, num_speculative_tokens="auto").engine
    assert ", length auto," in unknown.describe()


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_parallel_heads_directory_is_a_draft_model(tmp_path: Path, rule: str) -> None:
    llm = llm_with(published(tmp_path, parallel=True), drafter="feature", acceptance=rule)
    found = accepted(llm)
    assert found[1] > 0
    assert rule == "rejection" or found[0] == accepted(llm.plain())[0]
    assert "drafter parallel head " in llm.engine.describe()


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize(
    ("publish", "called"), [(published_transfer, "hidden-transfer head"), (published_chimera, "Chimera head")]
)
def test_a_directory_of_a_head_of_our_own_kinds_is_a_draft_model(
    tmp_path: Path, publish: Callable[[Path], Path], called: str
) -> None:
    llm = llm_with(publish(tmp_path), drafter="feature")
    found = accepted(llm)
    assert found[1] > 0
    assert found[0] == accepted(llm.plain())[0]
    assert f"drafter {called} " in llm.engine.describe()


@pytest.mark.usefixtures("no_requests")
@pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")
def test_by_default_heads_are_in_bfloat16_where_the_kernels_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors without instructions for bfloat16."""
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {"avx2"})
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "head_dim": 16, "num_hidden_layers": 2}
    target = tiny("llama", NATIVE["llama"][1] | sizes)
    tensors = random_head(width=32, target_width=32, tap_count=2, vocabulary=VOCAB, dim=16)
    config = speculators_config(SHAPE | {"head_dim": 16}, draft_vocab_size=17, **TAPS)
    heads = {
        "feature": write(tmp_path / "feature", config, tensors),
        "narrow": published(tmp_path / "narrow"),
        "chimera": published_chimera(tmp_path / "chimera"),
    }
    found = {}
    for kind, path in heads.items():
        llm = LLM(target, path, drafter="feature", tokenizer=None, device="cpu", max_model_len=32, use_tqdm=False)
        assert isinstance(llm.engine.models.target, NativeModel)
        assert isinstance(llm.engine.models.draft, NativeHead) == (kind == "feature")
        found[kind] = llm.engine.models.draft.dtype
    assert found == {"feature": torch.bfloat16, "narrow": torch.float32, "chimera": torch.float32}


@pytest.mark.usefixtures("no_requests")
def test_by_default_a_head_drafts_beside_ngram_lookup(tmp_path: Path) -> None:
    llm = llm_with(published(tmp_path))
    assert llm.config.drafter == "hybrid"
    assert "drafter ngram or head " in llm.engine.describe()
    with pytest.raises(ParameterError, match="'feature' or 'hybrid': the draft model is a trained head"):
        llm.with_options(drafter="model")
    draft = LLM(tiny_llama_of_transformers(), tiny_llama_of_transformers(1), dtype="float32", device="cpu")
    with pytest.raises(ParameterError, match="is not a trained head"):
        draft.with_options(drafter="feature")


@pytest.mark.usefixtures("no_requests")
def test_a_head_without_an_embedding_takes_its_targets(tmp_path: Path) -> None:
    target = tiny_llama_of_transformers()
    llm = llm_with(published(tmp_path / "head", own_embedding=False))
    head = llm.engine.models.draft
    assert isinstance(head, TorchHead)
    assert torch.equal(head.head.embed_tokens.weight, target.get_input_embeddings().weight)
    target.save_pretrained(tmp_path / "target")
    assert torch.equal(load_embedding(tmp_path / "target", dtype=torch.float32), head.head.embed_tokens.weight)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"target_hidden_size": 48}, r"hidden states of width 48, .* has 32: .* another model \(someone/target\)"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"layers \(0, 2\); this target has 2"),
    "the usual layers": ({"eagle_aux_hidden_state_layer_ids": None}, r"layers \(2, 1, -1\)"),
}


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize("name", WRONG)
def test_a_head_of_another_target_is_refused(tmp_path: Path, name: str) -> None:
    fields, said = WRONG[name]
    with pytest.raises(ModelFormatError, match=said):
        llm_with(published(tmp_path, **fields))


@pytest.mark.usefixtures("no_requests")
def test_a_head_of_another_vocabulary_or_class_is_refused_and_another_name_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = published(tmp_path)
    llm_with(path)
    assert "was made for someone/target" in caplog.text
    config = json.loads((path / "config.json").read_text())
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match=r"made for a Qwen3ForCausalLM .* is a LlamaForCausalLM"):
        llm_with(path)
    config["transformer_layer_config"]["vocab_size"] = 99
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VocabularyMismatchError, match=r"made for 99 tokens, .* has 24"):
        llm_with(path)


@pytest.mark.usefixtures("no_requests")
def test_a_head_in_8_bits_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"draft_quantization='int8' .* trained head"):
        llm_with(published(tmp_path), draft_quantization="int8")
