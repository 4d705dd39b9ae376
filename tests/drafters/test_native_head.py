"""Heads on the CPU kernels: one call drafts what a reference implementation does, whatever the other rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from batches import filled
from covering import in_pairs
from head_support import SWITCHES, Reading, tiny_feature_head, tiny_head, tiny_native_head
from paceline.config import EngineConfig, SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.rows import Constraint
from paceline.drafters.branches import DraftTree
from paceline.drafters.feature import FeatureDrafter
from paceline.drafters.growth import Growth
from paceline.drafters.heads.decoder import TorchHead
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.loading import prepare_head
from paceline.drafters.heads.native import NativeHead, NativeHeadDecoder
from paceline.engine.engine import Engine
from paceline.engine.memory import plan_memory
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.kernels.abi import INPUT_MULTIPLE
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.kernels.pack import Format, dequantise, quantise
from paceline.models.decoding.decoder import Decoder
from paceline.models.native.model import HEAD_FORMAT, LAYER_FORMAT, Quantization
from toy import POSITIONS, VOCAB, RandomLength, answers, make_engine, make_request, run, tiny_llama, tiny_native

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]

TARGET_WIDTH = 72  # the width of the tiny target
TAPS = (0, 1)
TEXTS = [[(5 * i + 2 * row) % VOCAB for i in range(size)] for row, size in enumerate((1, 12, 2, 31))]
PLAIN = SamplingParams(temperature=1.0, max_tokens=20, seed=1)


def feature_head(**options: Any) -> FeatureHead:
    return tiny_feature_head(VOCAB, TARGET_WIDTH, TAPS, dim=16, **options)


def natively(head: FeatureHead, quantization: Quantization | None = None) -> NativeHead:
    return NativeHead(head, "tiny head", TAPS, POSITIONS, quantization=quantization)


def features_of(texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Hidden states that a target might have for each token, [text, taps, width]."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(len(text), len(TAPS), TARGET_WIDTH, generator=generator) for text in texts]


FEATURES = features_of(TEXTS)


def decoder_of(head: NativeHead, rows: Sequence[int]) -> NativeHeadDecoder:
    """A decoder with these texts in its rows: hidden states are stored, and nothing is read yet."""
    decoder = NativeHeadDecoder(head, ReferenceAttention(), len(rows), POSITIONS, VOCAB)
    for row, which in enumerate(rows):
        places = torch.arange(len(TEXTS[which]) - 1)
        decoder.fused_states.read(torch.full_like(places, row), places, FEATURES[which][:-1])
    return decoder


def batch_of(rows: Sequence[int], params: SamplingParams = PLAIN) -> Batch:
    return filled([RowStart(TEXTS[which], params, seed=which) for which in rows], POSITIONS, VOCAB)


def _rounded(tensor: Tensor, to: Format, parts: int) -> Tensor:
    """Pad each of the parts of the inputs, which decides which weights share a scale."""
    width = tensor.shape[1] // parts
    wide = torch.cat([pad(part, (0, -width % INPUT_MULTIPLE)) for part in tensor.chunk(parts, dim=1)], dim=1)
    values = dequantise(quantise(wide, to), wide.shape[1])
    return torch.cat([part[:, :width] for part in values.chunk(parts, dim=1)], dim=1)


def rounded(head: FeatureHead, quantization: Quantization | None) -> dict[str, Tensor]:
    """The head with its tensors rounded as in the kernels."""
    formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
    state = dict(head.state_dict())
    for name, tensor in state.items():
        if name.endswith("_proj.weight") or name in ("fc.weight", "lm_head.weight"):
            parts = 2 if name.startswith("layers.0.self_attn") and "o_proj" not in name else 1
            state[name] = _rounded(tensor, formats[name == "lm_head.weight"], parts)
    state["embed_tokens.weight"] = state["embed_tokens.weight"].bfloat16().float()
    return state


def distributions_of(
    tensors: dict[str, Tensor], switches: Sequence[str], which: int, draft_tokens: Sequence[int]
) -> Tensor:
    """Distributions [k, V] of the reference for each of these draft tokens, given those before it."""
    text, targets = TEXTS[which], tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    reading = Reading(tensors, switches)
    for place, token in enumerate(text[1:]):
        state, logits = reading.step(token, reading.fused(FEATURES[which][place]), place)
    distributions = torch.zeros(len(draft_tokens), VOCAB)
    for step, draft_token in enumerate(draft_tokens):
        distributions[step, targets] = logits.softmax(-1)
        state, logits = reading.after(draft_token, state, len(text) - 1 + step)
    return distributions


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{name: {"switches": [name]} for name in SWITCHES},
    "query and key norms": {"qk_norm": True},
    "two layers": {"depth": 2},
    "parallel": {"parallel": True},
    "parallel, a norm for each tap": {"parallel": True, "switches": ["fc_norm"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_equal_the_reference_step_by_step(kind: str) -> None:
    options = KINDS[kind]
    head = feature_head(**options)
    rows, counts = [0, 1, 2, 3], [3, 4, 0, 2]
    draft = decoder_of(natively(head), rows).native.draft(batch_of(rows), counts, None, distributions=True)
    assert draft.drafted == [0, 4, 0, 2], "a text of one token has no hidden states yet"
    assert draft.probabilities is not None
    for row, draft_tokens in enumerate(draft.draft_tokens):
        if draft_tokens:
            expected = distributions_of(rounded(head, None), options.get("switches", ()), rows[row], draft_tokens)
            found = draft.probabilities[row, : len(draft_tokens)]
            assert bool((found[:, ~head.t2d] == 0).all())
            assert float((found - expected).abs().max()) < 0.02
            assert float((found - expected).abs().mean()) < 0.002


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.06), ("int4", 0.06)])
def test_weights_may_have_fewer_bits(quantization: Quantization, most: float) -> None:
    head = feature_head()
    drafting, batch = decoder_of(natively(head, quantization), [1, 3]).native, batch_of([1, 3])
    draft = drafting.draft(batch, [3, 3], None, distributions=True)
    assert draft.probabilities is not None
    for row, which in enumerate((1, 3)):
        expected = distributions_of(rounded(head, quantization), (), which, draft.draft_tokens[row])
        assert float((draft.probabilities[row] - expected).abs().max()) < most


@pytest.mark.parametrize("parallel", [False, True], ids=["one by one", "parallel"])
def test_a_row_has_the_same_bits_whatever_the_other_rows_and_however_its_text_was_read(parallel: bool) -> None:
    head = natively(feature_head(parallel=parallel))
    rows = [3, 0, 1, 2]
    batch, decoder = batch_of(rows), decoder_of(head, rows)
    for row, (start, stop) in enumerate([(0, 9), (0, 1), (0, 12), (0, 0)]):
        decoder.prefill(batch, [row], [start], [stop])
    decoder.prefill(batch, [0, 2], [9, 12], [20, 12])
    together = decoder.native.draft(batch, [4, 2, 1, 3], None, distributions=True)
    assert together.drafted == [4, 0, 1, 3]
    assert decoder.num_computed_tokens.tolist() == [31, 1, 12, 2]
    for row, which in enumerate(rows):
        if together.drafted[row]:
            own, sole = batch_of([which]), decoder_of(head, [which])
            alone = sole.native.draft(own, [together.drafted[row]], None, distributions=True)
            assert alone.draft_tokens[0] == together.draft_tokens[row]
            assert alone.probabilities is not None
            assert together.probabilities is not None
            k = len(alone.draft_tokens[0])
            assert torch.equal(alone.probabilities[0, :k], together.probabilities[row, :k])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_has_no_effect(dtype: torch.dtype) -> None:
    head = natively(feature_head())

    def distributions() -> Tensor | None:
        draft = decoder_of(head, [1, 3]).native.draft(batch_of([1, 3]), [4, 2], None, distributions=True)
        return draft.probabilities

    wanted = distributions()
    torch.set_default_dtype(dtype)
    try:
        found = distributions()
    finally:
        torch.set_default_dtype(torch.float32)
    assert wanted is not None
    assert found is not None
    assert torch.equal(found, wanted)


def test_a_draft_that_the_length_policy_stops_ends_there_with_scores() -> None:
    decoder, batch, asked = decoder_of(natively(feature_head()), [1, 3]), batch_of([1, 3]), []

    def enough(_: Batch, scores: Sequence[Sequence[float]], follows: object = None) -> bool:
        asked.append([len(line) for line in scores])
        return len(asked) == 2

    draft = decoder.native.draft(batch, [4, 1], enough, distributions=False)
    assert asked == [[1, 1], [2, 1]]
    assert draft.drafted == [2, 1]
    whole = decoder_of(natively(feature_head()), [1, 3]).native.draft(batch, [2, 1], None, distributions=True)
    assert draft.confidence is not None
    distributions = distributions_of(rounded(feature_head(), None), (), 1, draft.draft_tokens[0])
    chances = [
        float(distribution[draft_token])
        for distribution, draft_token in zip(distributions, draft.draft_tokens[0], strict=True)
    ]
    assert list(draft.confidence[0]) == pytest.approx(chances, abs=0.02)
    assert whole.drafted == [2, 1]


def test_an_error_of_the_length_policy_is_raised_after_the_call() -> None:
    decoder, batch = decoder_of(natively(feature_head()), [1]), batch_of([1])

    def broken(*_: object) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        decoder.native.draft(batch, [4], broken, distributions=False)


def test_rows_with_a_constraint_draft_what_it_allows() -> None:
    """The rows beside them draft as without them."""
    rows, counts = [1, 3, 3], [3, 2, 4]
    free = decoder_of(natively(feature_head()), rows).native.draft(batch_of(rows), counts, None, distributions=True)
    batch, asked = batch_of(rows), []

    class Even:
        """Allows even tokens only."""

        def __init__(self, row: int) -> None:
            self.row = row

        def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
            asked.append((self.row, len(draft_tokens), first, len(logits)))
            logits[:, 1::2] = -torch.inf

        def advance(self, tokens: Sequence[int]) -> None:
            raise AssertionError("nothing is gained here")

        def is_free(self, draft_tokens: Sequence[int]) -> bool:
            return False

    batch.sampling.constraints[:2] = [Even(0), Even(1)]
    batch.sampling.any_constraint = True
    held = decoder_of(natively(feature_head()), rows).native.draft(batch, counts, None, distributions=True)
    assert asked[:2] == [(0, 0, 0, 1), (1, 0, 0, 1)]
    assert asked[-1] == (0, 2, 2, 1)
    assert held.drafted == counts
    assert held.draft_tokens[2] == free.draft_tokens[2]
    assert not any(draft_token % 2 for line in held.draft_tokens[:2] for draft_token in line)
    assert any(draft_token % 2 for line in free.draft_tokens[:2] for draft_token in line)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    decoder, batch = decoder_of(natively(feature_head()), [1]), batch_of([1])
    batch.text[0, 3] = VOCAB
    draft = decoder.native.draft(batch, [2], None, distributions=False)
    with pytest.raises(ParameterError, match="outside the vocabulary"):
        _ = draft.draft_tokens


# In the engine

PROMPTS = [[(7 * i + 3 * row) % VOCAB for i in range(size)] for row, size in enumerate((1, 9, 2, 17, 5, 30, 3))]
PARAMS = [
    SamplingParams(temperature=row % 2, max_tokens=5 + 2 * row, n=1 + 2 * (row == 3), seed=row) for row in range(7)
]


class Anew:
    """Compares every draft of an engine with that of a decoder that sees the rows for the first time."""

    def __init__(self, engine: Engine, target: Any, head: NativeHead) -> None:
        self.target, self.head, self.compared = target, head, 0
        self.drafter = engine.parts.drafter
        self.propose, self.drafter.propose = self.drafter.propose, self.check  # type: ignore[method-assign]

    def check(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = self.propose(batch, plan).capped(plan.caps)
        for row, draft_tokens in enumerate(draft.draft_tokens):
            if draft_tokens:
                assert draft_tokens == self.anew(batch, row, len(draft_tokens))
                self.compared += len(draft_tokens)
        return draft

    def anew(self, batch: Batch, row: int, count: int) -> list[int]:
        engine = make_engine(self.target, self.head, drafter="feature", max_batch_size=1)
        (decoder,) = engine.parts.drafter.decoders
        text = batch.tokens[row, : batch.lengths[row]].tolist()
        seed = int(batch.sampling.seed[batch.slots[row]])
        own = filled([RowStart(text, batch.sampling.params[row], seed)], POSITIONS, VOCAB)
        own.sampling.prompt_length[0] = batch.sampling.prompt_length[batch.slots[row]]
        engine.parts.target.prefill(own, [0], [0], [len(text) - 1])
        assert isinstance(decoder, NativeHeadDecoder)
        return decoder.native.draft(own, [count], None, distributions=False).draft_tokens[0]


@pytest.mark.parametrize(("rounds", "chunk"), [("kernels", 4), ("host", 256), ("kernels, parallel", 4)])
def test_draft_tokens_do_not_depend_on_what_happened_to_their_rows(chunk: int, rounds: str) -> None:
    """Prompts in chunks, siblings that copy a prompt, rows that move, rounds without draft tokens, for some rows
    only."""
    target = tiny_native(1)
    head = tiny_native_head(target, TARGET_WIDTH, parallel="parallel" in rounds)
    engine = make_engine(target, head, drafter="feature", prefill_chunk=chunk, max_batch_size=4)
    engine.use_policy(RandomLength(seed=chunk))
    if rounds == "host":
        engine.rounds.choice.kernels = None
    watched = Anew(engine, target, head)
    run(engine, PROMPTS, PARAMS)
    assert watched.compared > 100


class Late(RandomLength):
    """Reads no prompt beforehand, and drafts late."""

    rounds = 0

    def expects_to_draft(self, rows: int) -> bool:
        return False

    def choose(self, batch: Batch) -> SpeculationPlan:
        self.rounds += 1
        return SpeculationPlan(3 if self.rounds > 5 else 0)


def test_a_prompt_that_was_not_read_is_read_for_one_of_its_answers() -> None:
    target = tiny_native(1)
    head = tiny_native_head(target, TARGET_WIDTH)
    engine = make_engine(target, head, drafter="feature", max_batch_size=4)
    engine.expect(watched=False)  # all rows begin in one round
    (decoder,), engine.parts.policy, read = engine.parts.drafter.decoders, Late(seed=1), list[int]()
    original = decoder.prefill

    def prefill(batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        read.append(sum(stops) - sum(starts))
        original(batch, rows, starts, stops)

    decoder.prefill = prefill  # type: ignore[method-assign]
    watched = Anew(engine, target, head)
    run(engine, [TEXTS[3]], [SamplingParams(temperature=1.0, n=4, max_tokens=20, seed=1, ignore_eos=True)])
    assert sum(read) == 29 + 4 * 5, "the prompt but for its first and last token, and what each row gained meanwhile"
    assert watched.compared > 20


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of each function of the library."""
    calls, library = Counter[str](), native.available()[0].library
    for name in ("pl_draft", "pl_round", "pl_forward", "pl_logits", "pl_keep_fused", "pl_draw", "pl_accept"):
        monkeypatch.setattr(library, name, _counting(calls, name, getattr(library, name)))
    return calls


def _counting(calls: Counter[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        calls[name] += 1
        return function(*arguments)

    return call


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["feature", "model"])
def test_a_round_with_a_head_or_draft_model_is_one_native_call_and_no_tensor_operator(
    drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_native(1)
    draft = tiny_native(2) if drafter == "model" else tiny_native_head(target, TARGET_WIDTH)
    engine = make_engine(target, draft, drafter=drafter, num_speculative_tokens=3)
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=2)
    for prompt in PROMPTS[1:4]:
        engine.add(make_request(prompt, params))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    assert "rounds by the kernels" in engine.describe()
    assert engine._skips_torch()
    calls = counted(monkeypatch)
    for _ in range(5):
        engine.step()
    assert calls == {"pl_round": 5}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copied_prompts_give_the_same_bits_as_prompts_read_anew(temperature: float) -> None:
    """Answers and draft tokens: the head reads the hidden states of copied prompts."""
    target = tiny_native(1)
    head = tiny_native_head(target, TARGET_WIDTH)
    first = [(3 * i) % VOCAB for i in range(40)]
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=9)

    def found(*, reuse: bool) -> tuple[list[list[list[int]]], list[tuple[int, int]], int]:
        engine = make_engine(target, head, drafter="feature", max_batch_size=2, prefix_cache=reuse)
        engine.expect(watched=False)  # first tokens come from a round, whatever is read
        watched = Anew(engine, target, head)
        outputs = run(engine, [first], [params])
        turn = [*first, *outputs[0].outputs[0].token_ids, 5, 6, 7]
        outputs += run(engine, [turn], [params])
        outputs += run(engine, [[*first[:30], 2, 2], turn], [params] * 2)
        metrics = [output.outputs[0].metrics for output in outputs]
        copied = sum(output.cached_tokens for output in outputs)
        assert watched.compared > 50
        return answers(outputs), [(each.drafted, each.accepted) for each in metrics], copied

    cold, warm = found(reuse=False), found(reuse=True)
    assert warm[:2] == cold[:2]
    assert (cold[2], warm[2] > 80) == (0, True)


def test_a_head_runs_where_its_target_does() -> None:
    target, half = tiny_native(1), feature_head().bfloat16()
    head = prepare_head(half, "head", TAPS, target)
    assert isinstance(head, NativeHead)
    engine = make_engine(target, head, drafter="feature")
    assert f"head head (int8 on the CPU kernels {native.available()[0].name})" in engine.describe()
    obstacle = native.faster_obstacle(target.kernels)
    assert f"{target.kernels}){f' ({obstacle})' if obstacle else ''}, " in engine.describe()
    assert target.kernels in engine.identity().precision  # part of the key of measured costs
    assert "rounds by the kernels" in engine.describe()
    assert isinstance(prepare_head(half, "head", TAPS, target, "int4"), NativeHead)
    assert isinstance(prepare_head(half, "head", TAPS, target, None), NativeHead)
    assert isinstance(prepare_head(feature_head(), "head", TAPS, target, None), TorchHead), "float32 was asked for"
    with pytest.raises(ParameterError, match="fp8 weights need a CUDA device"):
        prepare_head(half, "head", TAPS, target, "fp8")
    with pytest.raises(ParameterError, match="its target does not run on the CPU kernels"):
        prepare_head(half, "head", TAPS, tiny_llama(), "int8")
    small = tiny_feature_head(VOCAB, TARGET_WIDTH, TAPS, dim=4).bfloat16()
    assert isinstance(prepare_head(small, "head", TAPS, target), TorchHead)
    with pytest.raises(ParameterError, match="a head width that is a multiple of 16"):
        prepare_head(small, "head", TAPS, target, "int8")


def test_only_rounds_with_distributions_need_torch() -> None:
    target = tiny_native(1)
    head, slow = tiny_native_head(target, TARGET_WIDTH), tiny_head(target, TARGET_WIDTH)
    needs = {
        (rule, kind): make_engine(target, draft, drafter=kind, acceptance=rule).parts.drafter.uses_torch
        for rule in ("coupled", "rejection")
        for kind, draft in (("feature", head), ("hybrid", head))
    }
    assert needs == {(rule, kind): rule == "rejection" for rule, kind in needs}
    assert make_engine(target, slow, drafter="feature").parts.drafter.uses_torch


def test_memory_counts_what_a_native_head_stores() -> None:
    target = tiny_native(1)
    head = tiny_native_head(target, TARGET_WIDTH)
    config = EngineConfig(drafter="feature", max_batch_size=3, max_model_len=POSITIONS, dtype="float32", device="cpu")
    engine = make_engine(target, head, drafter="feature", max_batch_size=3)
    drafter = engine.parts.drafter
    assert isinstance(drafter, FeatureDrafter)
    (decoder,) = drafter.decoders
    assert isinstance(decoder, NativeHeadDecoder)
    plan, alone = (plan_memory(target, draft, config, 3, POSITIONS) for draft in (head, None))
    tables = decoder.cache.keys, decoder.cache.values, decoder.fused_states.fused
    used, most = 3 * POSITIONS * 4 * (2 * 2 * 16 + 16), sum(table.nbytes for table in tables)  # rows take whole pages
    assert used <= plan.caches - alone.caches <= most
    assert used / 5 <= 3 * head.fused_bytes(POSITIONS) <= decoder.fused_states.fused.nbytes
    torchs = plan_memory(target, tiny_head(target, TARGET_WIDTH), config, 3, POSITIONS)
    tokens = 3 * (config.max_draft_tokens + 1)
    assert plan.workspace - torchs.workspace == 4 * (3 * VOCAB + tokens * len(TAPS) * TARGET_WIDTH)


# --- trees: what ``Growth`` grows from the same logits, node by node --------------------------------------------------

ROWS_OF_TREES, COUNTS = [0, 1, 2, 3, 3], [3, 4, 1, 2, 0]  # the first text is a single token: it gets no draft token
TREE_PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "sampled": SamplingParams(temperature=0.8, max_tokens=20),
    "penalties": SamplingParams(
        temperature=0.8,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={3: 2.0},
        max_tokens=20,
    ),
    "cuts": SamplingParams(temperature=1.0, top_k=7, top_p=0.8, max_tokens=20),
}


class Along:
    """A constraint that allows one path only, and stores the logits of each step."""

    def __init__(self, way: list[int]) -> None:
        self._way = way
        self.seen: dict[int, Tensor] = {}

    def mask(self, draft_tokens: list[int], first: int, logits: Tensor) -> None:
        step = len(draft_tokens)
        self.seen[step] = logits.clone()
        if step < len(self._way):
            token = self._way[step]
            kept = logits[:, token].clone()
            logits.fill_(-torch.inf)
            logits[:, token] = kept


def logits_after(head: NativeHead, which: int, way: list[int], k: int) -> Tensor:
    """Logits of a chain that is forced along ``way``. The tests of chains compare these with a reference."""
    along, batch = Along(way), batch_of([which], SamplingParams(temperature=0))
    batch.sampling.constraints[0] = cast(Constraint, along)
    batch.sampling.any_constraint = True
    decoder_of(head, [which]).native.draft(batch, [k], None, distributions=False)
    return along.seen[len(way)]


def grown(head: NativeHead, which: int, params: SamplingParams, width: int, depth: int, k: int) -> DraftTree:
    cache = cast(Decoder, SimpleNamespace(cache=SimpleNamespace(positions=POSITIONS)))
    growth = Growth(cache, batch_of([which], params), width)
    for _ in range(depth):
        if growth.new:
            ways = [growth.rows[0].tokens_to(node) for _, node in growth.new]
            growth.spread(torch.cat([logits_after(head, which, way, k) for way in ways]))
    return growth.rows[0]


@in_pairs(kind=["plain", "two layers", "parallel"], params=TREE_PARAMS, width=[2, 4])
def test_trees_equal_those_of_growth(kind: str, params: str, width: int) -> None:
    head = natively(feature_head(**KINDS[kind]))
    decoder, batch = decoder_of(head, ROWS_OF_TREES), batch_of(ROWS_OF_TREES, TREE_PARAMS[params])
    decoder.prefill(batch, [3], [0], [9])  # rows lag by different numbers of tokens
    for _ in range(2):  # the second time over what the first has left in the cache
        draft = decoder.native.draft(batch, COUNTS, None, distributions=False, width=width)
        assert draft.kinds is not None
        assert draft.confidence is not None
        for row, (which, depth) in enumerate(zip(ROWS_OF_TREES, COUNTS, strict=True)):
            if which == 0 or depth == 0:
                assert draft.drafted[row] == 0
                continue
            reference = grown(head, which, TREE_PARAMS[params], width, depth, max(COUNTS))
            chain = list(range(-1, draft.drafted[row] - 1))
            assert draft.draft_tokens[row] == reference.tokens
            follows = chain if draft.parents is None else draft.parents[row]
            assert follows == reference.parents
            assert list(draft.kinds[row]) == reference.kinds
            assert draft.confidence[row] == pytest.approx(reference.scores, abs=1e-6)


def test_a_tree_ends_when_stop_drafting_says_so_and_reports_its_shape() -> None:
    head = natively(feature_head())
    decoder, batch, asked = decoder_of(head, [1, 3]), batch_of([1, 3], TREE_PARAMS["sampled"]), []

    def enough(_batch: Any, scores: list[list[float]], follows: list[list[int]]) -> bool:
        asked.append([list(line) for line in follows])
        assert [len(line) for line in scores] == [len(line) for line in follows]
        return len(asked) == 2

    draft = decoder.native.draft(batch, [5, 5], enough, distributions=False, width=2)
    assert len(asked) == 2
    assert draft.parents == asked[-1]
    assert draft.drafted == [4, 4]


def test_a_tree_fits_the_cache() -> None:
    head = natively(feature_head())
    decoder = decoder_of(head, [3])
    batch = batch_of([3], TREE_PARAMS["sampled"])
    room = decoder.cache.positions - batch.lengths[0]
    draft = decoder.native.draft(batch, [16], None, distributions=False, width=4)
    assert 0 < draft.drafted[0] <= min(32, room)
