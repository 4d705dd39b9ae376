"""Block drafters on the CPU kernels: near their torch implementation, and the same bits in any batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from block_support import block_config, published_block, random_block, tiny_block, tiny_native_block
from head_support import features_of
from model_support import NATIVE, tiny
from paceline import LLM
from paceline.config import SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.slots import Slots
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_decoder import BlockDecoder, BlockPass, TorchBlock, TorchBlockDecoder
from paceline.drafters.heads.block_native import NativeBlock, NativeBlockDecoder
from paceline.kernels import native
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import AnyModel
from paceline.models.native.model import NativeModel, Quantization
from toy import VOCAB, RandomLength, answers, make_engine, run, tiny_native

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]


def stored(decoder: BlockDecoder, features: Tensor, lengths: list[int], step: int) -> None:
    """Store the hidden states and the keys of rows of these lengths, ``step`` tokens at a time."""
    for row, length in enumerate(lengths):
        where = torch.full((length,), row), torch.arange(length)
        decoder.fused_states.read(*where, features[row, :length])
        for first in range(0, length, step):
            decoder.inject(where[0][first : first + step], where[1][first : first + step].contiguous())


def states(decoder: BlockDecoder, anchors: list[int], lengths: list[int], rows: list[int]) -> Tensor:
    slots = Slots.listed(rows, torch.device("cpu"))
    return decoder.run_block(torch.tensor(anchors), torch.tensor(lengths), max(lengths) + 1, slots)


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 0.02), ("int8", 0.06)])
@pytest.mark.parametrize(
    ("kind", "causal"), [("anchor first", None), ("anchor first", True), ("dflash2", False), ("dflash2", None)]
)
def test_a_block_is_that_of_torch_and_the_same_bits_in_any_batch(
    quantization: Quantization | None, tolerance: float, kind: str, causal: bool | None
) -> None:
    """The rows' texts are longer and shorter than a window, one is empty; one batch is larger than a pass."""
    config = block_config(kind, 61, 72, (0, 1), head_dim=16)
    assert config.block is not None
    config = replace(config, block=replace(config.block, causal=causal, embedding_scale=1.5))
    head = BlockHead(config)
    head.load_state_dict(random_block(config))
    head = head.requires_grad_(False).bfloat16()
    lengths = [5, 0, 40, 13] + [3] * 60
    features = torch.randn(len(lengths), 40, 2, 72, generator=torch.Generator().manual_seed(0))
    anchors = [(7 * row) % 61 for row in range(len(lengths))]
    model = NativeBlock(head, "drafter", (0, 1), 64, quantization=quantization)
    whole, chunked = (NativeBlockDecoder(model, ReferenceAttention(), len(lengths), 40) for _ in range(2))
    stored(whole, features, lengths, 1000)
    stored(chunked, features, lengths, 3)
    together = states(whole, anchors, lengths, list(range(len(lengths))))
    for row in (0, 1, 2, 3, 50):
        alone = states(chunked, anchors[row : row + 1], lengths[row : row + 1], [row])
        assert torch.equal(alone[0], together[row])
    exact = TorchBlock(head.float(), "drafter", (0, 1), 64)
    reference = TorchBlockDecoder(exact, ReferenceAttention(), 4, 40)
    stored(reference, features, lengths[:4], 1000)
    expected = states(reference, anchors[:4], lengths[:4], [0, 1, 2, 3])
    error = (together[:4] - expected).norm() / expected.norm()
    assert error < tolerance
    logits, near = whole.logits(together[:4]), exact.logits(expected)
    assert (logits - near).norm() / near.norm() < 2 * tolerance


def drafted_alone(target: AnyModel, model: NativeBlock, text: list[int], k: int) -> list[int]:
    """Greedy draft tokens after a text that a drafter of its own has read as a whole."""
    decoder = NativeBlockDecoder(model, ReferenceAttention(), 1, len(text))
    features = torch.stack(features_of(target, text[:-1], model.taps))[None]
    stored(decoder, features, [len(text) - 1], 1000)
    found = BlockPass(decoder, states(decoder, text[-1:], [len(text) - 1], [0]))
    path = text[-1:]
    for _ in range(k):
        path.append(int(found.logits(torch.tensor([0]), torch.tensor([path])).argmax()))
    return path[1:]


@pytest.mark.parametrize(("kind", "chunk"), [("dflash", 4), ("dspark", 256), ("dflash2", 7)])
def test_draft_tokens_do_not_depend_on_the_batch(kind: str, chunk: int) -> None:
    """Prompts in chunks, siblings that copy a prompt, rows that move, rounds with drafts of any length."""
    target = tiny_native(1)
    model = tiny_native_block(target, 72, kind, reduced=kind == "dflash")
    engine = make_engine(target, model, drafter="feature", prefill_chunk=chunk, max_batch_size=4)
    engine.use_policy(RandomLength(seed=chunk))
    compared, propose = Counter[str](), engine.parts.drafter.propose

    def check(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan).capped(plan.caps)
        for row, draft_tokens in enumerate(draft.draft_tokens):
            text = batch.tokens[row, : batch.lengths[row]].tolist()
            assert len(text) > 1 or not draft_tokens
            if draft_tokens and not batch.sampling.temperature[batch.slots[row]]:
                assert draft_tokens == drafted_alone(target, model, text, len(draft_tokens))
                compared["draft tokens"] += len(draft_tokens)
        return draft

    engine.parts.drafter.propose = check  # type: ignore[method-assign]
    prompts = [[(7 * i + 3 * row) % VOCAB for i in range(size)] for row, size in enumerate((1, 9, 2, 17, 5, 30))]
    params = [SamplingParams(temperature=0, max_tokens=5 + 2 * row, n=1 + 2 * (row == 3)) for row in range(6)]
    run(engine, prompts, params)
    assert compared["draft tokens"] > 60
    assert "rounds by the kernels" in engine.describe()


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize(("layout", "shares"), [("dflash", True), ("deepspec", False), ("dflash2", True)])
def test_a_drafter_beside_a_native_target_uses_its_packed_ends(tmp_path: Path, layout: str, shares: bool) -> None:
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "head_dim": 16, "num_hidden_layers": 2}
    target = tiny("llama", NATIVE["llama"][1] | sizes)
    path = published_block(tmp_path, layout, head_dim=16)
    options = {"tokenizer": None, "device": "cpu", "max_model_len": 32, "use_tqdm": False}
    llm = LLM(target, path, drafter="feature", num_speculative_tokens=3, quantization="int8", **options)
    model, own = llm.engine.models.draft, llm.engine.models.target
    assert isinstance(own, NativeModel)
    assert isinstance(model, NativeBlock)
    heads = (model._packed.model.head.weights, own.packed_decoder.model.head.weights)
    assert (heads[0] == heads[1]) == shares
    assert model.precision.startswith("int8")
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=2)
    (ours,), (plain,) = (each.generate([1, 2, 3, 4], params, use_tqdm=False) for each in (llm, llm.plain()))
    assert [answer.token_ids for answer in ours.outputs] == [answer.token_ids for answer in plain.outputs]
    assert sum(answer.metrics.drafted for answer in ours.outputs) > 0


@pytest.mark.parametrize("kind", ["dflash", "dspark", "torch"])
def test_a_drafter_may_score_a_part_of_its_vocabulary(kind: str) -> None:
    target = tiny_native(1)
    made = tiny_block(target, 72, "dspark") if kind == "torch" else tiny_native_block(target, 72, kind)
    engine = make_engine(target, made, drafter="feature", draft_vocab_size=8, num_speculative_tokens=3)
    (decoder,) = engine.parts.drafter.decoders
    assert decoder.vocabulary is not None
    drafted, propose = set[int](), engine.parts.drafter.propose

    def asked(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        for line in draft.draft_tokens:
            assert set(line) <= set(decoder.vocabulary.tokens.tolist())
            drafted.update(line)
        return draft

    engine.parts.drafter.propose = asked  # type: ignore[method-assign]
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    params = [SamplingParams(temperature=temperature, max_tokens=20, seed=1) for temperature in (0.0, 1.0)]
    ours, alone = (answers(run(each, prompts, params)) for each in (engine, make_engine(target)))
    assert ours == alone
    assert len(drafted) > 2


@pytest.mark.parametrize(("width", "own"), [(1, "int8"), (3, "int8"), (3, "torch")])
def test_rows_draft_up_to_the_end_of_their_cache(width: int, own: str) -> None:
    """The block lies behind the text, where the target has no slots."""
    target, options = tiny_native(1), {"max_model_len": 24}
    made = tiny_block(target, 72) if own == "torch" else tiny_native_block(target, 72)
    more = {"drafter": "feature", "speculation_width": width, "num_speculative_tokens": 4}
    engines = make_engine(target, made, **more, **options), make_engine(target, **options)
    prompts = [[1, 2, 3, 4, 5], list(range(1, 20)), [6, 7]]
    params = [SamplingParams(temperature=0, max_tokens=24 - len(prompt)) for prompt in prompts]
    ours, alone = (answers(run(engine, prompts, params)) for engine in engines)
    assert ours == alone
    assert [len(each[0]) for each in ours] == [24 - len(prompt) for prompt in prompts]
