"""Arguments and memory of native rounds. That outputs do not change is tested in test_lossless.py."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covering import in_pairs
from head_support import tiny_feature_head
from kernels.tools import random_spec
from paceline.config import EngineConfig, SamplingParams
from paceline.core.acceptance import RULES
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict, branching, depths_of, empty_draft
from paceline.core.draft_tensors import DraftTensors
from paceline.drafters import Drafter
from paceline.drafters.heads.native import NativeFusedStates, NativeHead
from paceline.engine import memory
from paceline.engine.engine import Engine, Request
from paceline.engine.memory import plan_memory
from paceline.engine.rounds.choice import why_no_kernels_for
from paceline.engine.rounds.kernels import NativeRound, workspace_bytes
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.lengths.auto import AutoLength
from paceline.lengths.cost import CostModel
from paceline.models.native.model import NativeModel, Quantization
from simulation import linear_costs
from toy import (
    POSITIONS,
    SHAPES,
    VOCAB,
    ToyConstraint,
    ToyModel,
    answers,
    kernels_of,
    make_engine,
    make_request,
    run,
    tiny_native,
    truth_of,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]

PROMPTS = [[1, 5, 9, 3, 5, 9], [2, 7, 7, 2, 7], [4, 4, 4], [9, 1, 8]]
PARAMS = [SamplingParams(temperature=0, max_tokens=12, seed=row) for row in range(len(PROMPTS))]

ProposeFunction = Callable[[int, int], Draft]  # rows, k


class FunctionDrafter(Drafter):
    """A drafter made from one function."""

    name = "scripted"

    def __init__(self, propose: ProposeFunction) -> None:
        self._propose = propose

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return self._propose(batch.rows, plan.k)


def engine_with(propose: ProposeFunction, **options: Any) -> Engine:
    engine = make_engine(tiny_native(1), drafter="ngram", num_speculative_tokens=3, **options)
    engine.parts.drafter = FunctionDrafter(propose)
    engine.expect(watched=False)  # first tokens come from a round, too
    return engine


@functools.cache
def plain() -> list[list[int]]:
    return answers(run(make_engine(tiny_native(1)), PROMPTS, PARAMS))


def tokens(rows: int, k: int) -> torch.Tensor:
    return torch.arange(rows * k).view(rows, k) % VOCAB


def counts(rows: int, k: int) -> torch.Tensor:
    return torch.full((rows,), k)


class FreeAfterOdd(ToyConstraint):
    """Constraint whose sum rule holds only after an even token; after an odd one any token may come."""

    def forbids(self, answer: Sequence[int], token: int) -> bool:
        return self._is_bound(answer) and super().forbids(answer, token)

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        answers = ([*self.answer, *draft_tokens[:place]] for place in range(len(draft_tokens) + 1))
        return not any(map(self._is_bound, answers))

    def _is_bound(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] % 2 == 0


def rounds_of_both_kinds(acceptance: str, k: int, natively: bool) -> tuple[list[list[list[int]]], Counter[bool]]:
    """Answers of bound and unbound rows, and the number of rounds that ran natively (True) and by the host."""
    engine = make_engine(tiny_native(1), drafter="ngram", num_speculative_tokens=k, acceptance=acceptance)
    native, parts, rounds = native_round_of(engine), engine.parts, Counter[bool]()
    run_natively, verify = native.run, parts.verify_and_commit

    def by_kernels(draft: Draft) -> Verdict:
        rounds[True] += 1
        return run_natively(draft)

    def by_steps(batch: Batch, draft: Draft) -> Verdict:
        rounds[False] += 1
        return verify(batch, draft)

    native.run, parts.verify_and_commit = by_kernels, by_steps  # type: ignore[method-assign]
    if not natively:
        engine.rounds.choice.kernels = None
    outputs = []
    for row, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.8 * (row > 1), max_tokens=40, seed=row, presence_penalty=row / 4)
        make = FreeAfterOdd if row % 2 == 0 else None
        outputs.append(engine.add(Request(list(prompt), params, make_constraint=make)))
    while engine.busy:
        engine.step()
    return answers(outputs), rounds


@pytest.mark.parametrize("k", [1, 3])
def test_rounds_in_which_constraints_allow_any_token_run_natively(k: int) -> None:
    """Tokens are those of the host's rounds, under both rules, and of plain decoding."""
    plainly, _ = rounds_of_both_kinds("coupled", 0, natively=False)
    for rule in ("coupled", "rejection"):
        by_host, _ = rounds_of_both_kinds(rule, k, natively=False)
        found, rounds = rounds_of_both_kinds(rule, k, natively=True)
        assert min(rounds[True], rounds[False]) > 3, rounds
        assert found == by_host
        assert found == plainly or rule == "rejection"
    for answer in (found[0][0], found[2][0]):
        bound = [place for place in range(1, len(answer)) if answer[place - 1] % 2 == 0]
        assert bound
        assert all(sum(answer[: place + 1]) % 4 != 1 for place in bound)


LAYOUTS: dict[str, ProposeFunction] = {
    "counts that are one number": lambda rows, k: Draft(tokens(rows, k), torch.tensor(k).expand(rows)),
    "every second count": lambda rows, k: Draft(tokens(rows, k), torch.full((2 * rows,), k)[::2]),
    "counts of 32 bits": lambda rows, k: Draft(tokens(rows, k), counts(rows, k).int()),
    "the same line for all": lambda rows, k: Draft(tokens(1, k).expand(rows, k), counts(rows, k)),
    "columns first": lambda rows, k: Draft(tokens(k, rows).T, counts(rows, k)),
    "tokens of 32 bits": lambda rows, k: Draft(tokens(rows, k).int(), counts(rows, k)),
    "every second token": lambda rows, k: Draft(tokens(rows, 2 * k)[:, ::2], counts(rows, k)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_tensors_may_have_any_memory_layout(layout: str) -> None:
    assert answers(run(engine_with(LAYOUTS[layout]), PROMPTS, PARAMS)) == plain()


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("count", [-1, 2])
def test_a_draft_with_wrong_counts_is_refused(count: int, natively: bool) -> None:
    """Nothing may be read beyond the draft tokens."""
    engine = engine_with(lambda rows, _: Draft(tokens(rows, 1), counts(rows, count)))
    if not natively:
        engine.rounds.choice.kernels = None
    with pytest.raises(ParameterError, match="counts"):
        run(engine, PROMPTS, PARAMS)
    assert engine.batch.length[: len(PROMPTS)].tolist() == list(map(len, PROMPTS)), "no row has gained anything"


def native_round_of(engine: Engine) -> NativeRound:
    return kernels_of(engine).native


def test_the_kernels_write_no_logits_beyond_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k)))
    monkeypatch.setattr(native_round_of(engine), "_make_room", lambda _: None)
    with pytest.raises(ParameterError, match="logits' memory is too small"):
        run(engine, PROMPTS, PARAMS)


def test_memory_for_logits_is_kept_between_rounds_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is never written to is not taken from the system."""
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k)))
    runner, rooms = native_round_of(engine), list[int]()
    make_room = runner._make_room

    def watched(count: int) -> None:
        make_room(count)
        assert runner._call.room >= count
        rooms.append(runner._call.logits)

    runner._make_room = watched  # type: ignore[method-assign]
    run(engine, PROMPTS, PARAMS)
    assert len(set(rooms)) < len(rooms) / 2
    written = 4 * len(PROMPTS) * (engine.models.target.vocab_size + runner._model.width) * 4
    assert workspace_bytes(engine.models.target, 4 * len(PROMPTS)) == written
    config = EngineConfig(num_speculative_tokens=3)
    plan = functools.partial(plan_memory, engine.models.target, None, config, len(PROMPTS), POSITIONS)
    with_room = plan().workspace
    monkeypatch.setattr(memory, "workspace_bytes", lambda *_: 0)
    assert with_room - plan().workspace == written
    assert workspace_bytes(ToyModel(), 100) == 0


def modes_of(engine: Engine, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return, for every round, the decoding rows and whether torch's inference mode was set; check the threads, too."""
    modes, choose, pools = [], engine.parts.policy.choose, set[int | None]()
    current_pool = native.current_pool

    def watched(batch: Batch) -> SpeculationPlan:
        modes.append((batch.rows, torch.is_inference_mode_enabled()))
        return choose(batch)

    def counted(kernels: native.Kernels, threads: int | None = None) -> native.Pool:
        pool = current_pool(kernels, threads)
        pools.add(pool.threads)
        return pool

    engine.parts.policy.choose = watched  # type: ignore[method-assign]
    monkeypatch.setattr(native, "current_pool", counted)
    engine.expect(watched=False)  # first tokens come from a round, too
    run(engine, PROMPTS[: len(params)], params)
    assert pools == {engine.threads}, "the model was loaded for another number"
    return modes


def test_rounds_without_torch_set_none_of_its_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of the kernels with n-gram drafts, unless a row starts or a request needs the host."""
    options: dict[str, Any] = {"drafter": "ngram", "threads": 2}
    modes = modes_of(make_engine(tiny_native(1), **options), PARAMS, monkeypatch)
    assert modes[0] == (4, True), "they have just come"
    assert not any(mode for _, mode in modes[1:])
    waiting = modes_of(make_engine(tiny_native(1), max_batch_size=3, **options), PARAMS, monkeypatch)
    assert (3, False) in waiting, "one waits, and there is no row for it"
    assert [mode for _, mode in waiting].count(True) == 2
    scored = [SamplingParams(temperature=0, max_tokens=6, logprobs=0)]
    assert all(mode for _, mode in modes_of(make_engine(tiny_native(1), **options), scored, monkeypatch))
    tensors = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k)), threads=2)
    assert all(mode for _, mode in modes_of(tensors, PARAMS, monkeypatch))
    plain = modes_of(make_engine(tiny_native(1), threads=2), PARAMS, monkeypatch)
    assert not any(mode for _, mode in plain[1:])


def test_ngram_drafts_make_no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup, length policy and native rounds make none: an operator takes 20 to 50 us there."""
    engine = make_engine(tiny_native(1), drafter="ngram")
    engine.expect(watched=False)  # first tokens come from a round, too
    engine.use_policy(AutoLength(CostModel(linear_costs(token=0.01))))
    asked, drafted, select = list[Draft](), list[int](), engine.parts.policy.select

    def watched(batch: Batch, draft: Draft) -> Draft:
        drafted.append(draft.k)
        return select(batch, draft)

    monkeypatch.setattr(DraftTensors, "of", lambda draft, _device: asked.append(draft))
    monkeypatch.setattr(engine.parts.policy, "select", watched)
    run(engine, [[1, 2, 3, 4, 5] * 6] * 4, PARAMS)
    assert any(drafted)
    assert not asked


# --- trees ------------------------------------------------------------------------------------------------------------


MANY = 6  # more than rows, so that rows leave and others start while trees are verified
TREE_PROMPTS = [[(3 * row + 5 * i * i) % VOCAB for i in range(2 + 3 * row)] for row in range(MANY)]
SAMPLING: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda row: SamplingParams(temperature=0, max_tokens=14 + row, seed=row),
    "penalties and cuts": lambda row: SamplingParams(
        temperature=(0.0, 0.6, 1.4)[row % 3],
        top_k=(0, 7)[row % 2],
        top_p=(1.0, 0.8)[row % 2],
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={row: 1.5},
        min_tokens=4,
        stop_token_ids=(row,),
        max_tokens=12 + row,
        seed=row,
    ),
}


class SomeRight:
    """Drafts random trees, whose tokens are often right for their depth, at any parent, and equal to their siblings."""

    def __init__(self, truth: Mapping[int, Sequence[int]], shape: str) -> None:
        self._truth, self._shape, self._rng = truth, SHAPES[shape], random.Random(shape)

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        draft_tokens, follows, rng = [], [], self._rng
        for seed, length in zip(batch.sampling.seed[batch.slots].tolist(), batch.lengths, strict=True):
            right, parents = [*self._truth[seed][length:], *[0] * 32], self._shape(rng, rng.randint(0, plan.k))
            depths = [depth - 1 for depth in depths_of(parents)]
            draft_tokens.append([right[depth] if rng.random() < 0.7 else rng.randrange(VOCAB) for depth in depths])
            follows.append(parents)
        return branching(draft_tokens, follows)


def model_of(quantization: Quantization | None, cache: torch.dtype) -> NativeModel:
    spec = random_spec(vocab_size=VOCAB, max_positions=POSITIONS, tied=False, seed=1)
    model = NativeModel(spec, "tiny", quantization=quantization, threads=2)
    model.dtype = cache
    return model


def engine_with_trees(
    model: NativeModel, kept: torch.dtype | None, truth: Mapping[int, Sequence[int]], shape: str
) -> Engine:
    """An engine that drafts trees. kept: dtype of the hidden states that a head reads; None for no head.

    truth: see ``truth_of``.
    """
    head = None
    if kept is not None:
        head = NativeHead(tiny_feature_head(VOCAB, 72, (0, 1), dim=16).to(kept), "tiny head", (0, 1), POSITIONS)
    drafter = "ngram" if head is None else "feature"
    options: dict[str, Any] = {"num_speculative_tokens": 9, "prefill_chunk": 16, "max_model_len": 64}
    engine = make_engine(model, head, drafter=drafter, **options, prefix_memory=0)  # no slots beside the rows
    engine.parts.drafter.propose = SomeRight(truth, shape).propose  # type: ignore[method-assign]
    engine.expect(watched=False)  # a step is a round, the first one, too
    return engine


def assert_the_same(engine: Engine, other: Engine) -> None:
    """Compare the verdict of the last round and all per-row state."""
    verdicts = [each.last_verdict for each in (engine, other)]
    if verdicts[0] is not None and verdicts[1] is not None:
        assert replace(verdicts[0], timing=None) == replace(verdicts[1], timing=None)
    for one, another in zip(kept_of(engine), kept_of(other), strict=True):
        assert torch.equal(one, another)


def kept_of(engine: Engine) -> list[torch.Tensor]:
    target = engine.parts.target
    fused = [target.reader.fused] if isinstance(target.reader, NativeFusedStates) else []
    return [engine.batch.text, engine.batch.length, target.cache.keys, target.cache.values, *fused]


WEIGHTS_AND_CACHES: list[tuple[Quantization | None, torch.dtype]] = [
    ("int8", torch.bfloat16),
    ("int4", torch.float32),
    (None, torch.bfloat16),
    (None, torch.float32),
]


@in_pairs(
    sampling=SAMPLING,
    kept=[None, torch.bfloat16, torch.float32],
    stored=WEIGHTS_AND_CACHES,
    shape=["random", "chain and siblings"],
)
def test_native_tree_rounds_equal_step_by_step_rounds(
    shape: str, stored: tuple[Quantization | None, torch.dtype], kept: torch.dtype | None, sampling: str
) -> None:
    """Verdicts, texts, caches and hidden states are equal to the bit after every round, while rows come and go."""
    quantization, cache = stored
    model, params = model_of(quantization, cache), [SAMPLING[sampling](row) for row in range(MANY)]
    plain = run(make_engine(model, max_model_len=64), TREE_PROMPTS, params)
    truth = truth_of(TREE_PROMPTS, params, answers(plain))
    engine, parts = (engine_with_trees(model, kept, truth, shape) for _ in range(2))
    for prompt, each in zip(TREE_PROMPTS, params, strict=True):
        for one in (engine, parts):
            one.add(make_request(prompt, each))
    parts.rounds.choice.kernels, rounds = None, Counter[str]()
    native = native_round_of(engine)
    run_natively = native.run

    def counted(draft: Draft) -> Verdict:
        rounds["natively"] += draft.parents is not None
        return run_natively(draft)

    native.run = counted  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
        parts.step()
        assert_the_same(engine, parts)
        if engine.last_verdict is not None and engine.last_verdict.path is not None:
            rounds["moved"] += any(path != list(range(len(path))) for path in engine.last_verdict.path)
            rounds["deep"] += any(len(path) > 1 for path in engine.last_verdict.path)
    assert not parts.busy
    assert rounds["natively"] > rounds["moved"] > 2 < rounds["deep"]


WRONG = {
    "itself": [-1, 1, 0],
    "one that comes later": [-1, 2, 0],
    "none of the row's": [-1, 7, 0],
    "less than nothing": [-1, -2, 0],
}


@pytest.mark.parametrize("follows", WRONG)
def test_a_draft_token_before_its_parent_is_refused(follows: str) -> None:
    right, wrong = [-1, -1, 0], WRONG[follows]
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k), parents=torch.tensor([right, wrong])))
    with pytest.raises(ParameterError, match="a token comes before its parent"):
        run(engine, PROMPTS[:2], PARAMS[:2])
    assert engine.batch.length.tolist()[:2] == list(map(len, PROMPTS[:2])), "no row has gained anything"


def test_tree_draft_tokens_without_a_cache_slot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chain tokens beyond the cache are not written; a tree's token in any slot may be accepted."""
    star = torch.full((2, 12), -1)
    engine = engine_with(lambda rows, _: Draft(tokens(rows, 12), counts(rows, 12), parents=star), max_model_len=14)
    monkeypatch.setattr(engine.batch, "fitting", lambda draft: draft)
    with pytest.raises(ParameterError, match="outside the cache"):
        run(engine, PROMPTS[:2], PARAMS[:2])


def test_a_rule_without_trees_refuses_them_by_name() -> None:
    star = torch.full((4, 3), -1)
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k), parents=star), acceptance="rejection")
    assert why_no_kernels_for(empty_draft(4), RULES["rejection"], engine.batch) is None
    with pytest.raises(ParameterError, match=r"acceptance='rejection'.*trees"):
        run(engine, PROMPTS, PARAMS)


class Operators(TorchDispatchMode):
    """Counts torch operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_rounds_of_branching_ngram_drafts_use_no_torch_operators() -> None:
    engine = make_engine(tiny_native(1), drafter="ngram", speculation_width=3)
    params = SamplingParams(temperature=0.8, max_tokens=60, seed=2)
    for _ in range(4):
        engine.add(make_request([1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2], params))
    engine.expect(watched=False)  # all four rows begin, and end, in one round
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    trees = 0
    with Operators() as operators:
        for _ in range(30):
            assert engine._skips_torch()
            engine.step()
            assert engine.last_verdict is not None
            trees += engine.last_verdict.trees is not None
    assert trees > 3
    assert operators.count == 0
