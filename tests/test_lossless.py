"""Losslessness: speculation changes the speed and no output.

Greedy and coupled decoding equal plain decoding token by token, with any drafter and in any batch. The rejection rule
keeps the distribution.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from block_support import tiny_block, tiny_native_block
from covering import in_turn, pairwise
from gemma4_support import SIZES as GEMMA4_SIZES
from gemma4_support import tiny_assistant, tiny_native_gemma4
from head_support import tiny_chimera_head, tiny_head, tiny_native_head, tiny_transfer_head
from paceline.config import SamplingParams, StructuredOutputs
from paceline.core import cache, eight_bits, rules
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.cache import KVCache
from paceline.core.draft import Draft, RoundTiming, Verdict
from paceline.core.draft_tensors import DraftTensors
from paceline.core.outputs import RequestOutput
from paceline.core.rows import RowState
from paceline.core.sampling import noise_key, noisy_argmax
from paceline.core.values import Accepted, Purpose
from paceline.drafters import Drafter
from paceline.drafters.heads.decoder import HeadModel
from paceline.engine import slot_memory
from paceline.engine.engine import Engine, Request
from paceline.engine.slot_memory import SlotMemory
from paceline.errors import ParameterError
from paceline.kernels import cpu, native
from paceline.lengths import LengthPolicy
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FixedLength, ProfiledLength
from paceline.lengths.cost import CostModel
from paceline.models.base import AnyModel, Model
from recurrent_support import (
    SIZES,
    in_torch,
    on_kernels,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_mtp,
    tiny_native_recurrent,
    tiny_qwen3_5,
)
from shared import once
from simulation import linear_costs
from toy import (
    SHAPES,
    VOCAB,
    FlatToy,
    RandomCaps,
    RandomLength,
    RandomSelection,
    RandomSources,
    RandomStops,
    Scripted,
    ScriptedTrees,
    ToyModel,
    always,
    answers,
    kernels_of,
    logits_after,
    make_engine,
    make_request,
    never,
    run,
    slow_adjust,
    slow_answer,
    slow_distribution,
    sometimes,
    tiny_llama,
    tiny_native,
    tiny_native_experts,
    tiny_native_latent,
    tiny_native_narrow,
    tiny_native_parallel,
    truth_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = (0, 22)
SAMPLE_PACKAGE = Path(__file__).parent / "sample_package"  # brings a drafter and a length policy
TARGETS: dict[str, Callable[[], Model]] = {"toy": ToyModel, "flat": FlatToy, "llama": tiny_llama}
DRAFTS: dict[str, Callable[[], Model]] = {
    "toy": lambda: ToyModel(blur=0.3),
    "flat": lambda: FlatToy(blur=0.3),
    "llama": lambda: tiny_llama(1),
}
MODELS = {**TARGETS, "native": lambda: tiny_native(1)}  # "native" runs rounds in the kernels
MODELS |= {
    "experts": functools.cache(tiny_native_experts),  # mixtures of experts in the kernels
    "experts int4": functools.cache(lambda: tiny_native_experts("int4")),
    "experts bf16": functools.cache(lambda: tiny_native_experts(None)),
}
MIXTURES = ["experts", "experts int4", "experts bf16"]
MODELS["recurrent"] = functools.cache(tiny_native_recurrent)  # the same, with states in place of most keys and values
MODELS |= {  # the same of another kind: short convolutions
    "lfm2": functools.cache(lambda: on_kernels(tiny_lfm2())),
    "lfm2 int4": functools.cache(lambda: on_kernels(tiny_lfm2(1), "int4")),
    "lfm2 bf16": functools.cache(lambda: on_kernels(tiny_lfm2(), None)),
}
SHORT_CONVOLUTIONS = ["lfm2", "lfm2 int4", "lfm2 bf16"]
MODELS |= {  # the same, with heads of two widths and keys that layers share, or with experts between norms of their own
    "gemma4": functools.cache(tiny_native_gemma4),
    "gemma4 experts": functools.cache(functools.partial(tiny_native_gemma4, 5, **GEMMA4_SIZES["experts and vectors"])),
}
MODELS["latent"] = functools.cache(tiny_native_latent)  # the same, with one key for all heads, which is the value, too
MODELS["narrow values"] = functools.cache(tiny_native_narrow)
CACHED = {  # models whose caches, and those of their draft models, have 8 bits
    **dict.fromkeys(("llama in int8", "llama in fp8"), tiny_llama),
    "native in int8": MODELS["native"],
    "latent in int8": MODELS["latent"],
    "gemma4 in int8": MODELS["gemma4"],
}
KV_DTYPES = {model: model.rpartition(" ")[2] for model in CACHED}
MODELS |= CACHED
BESIDE = {  # the same, with MLPs beside attention, or experts
    "in parallel": functools.cache(lambda: tiny_native_parallel(experts=False)),
    "experts in parallel": functools.cache(lambda: tiny_native_parallel(experts=True)),
}
MODELS |= BESIDE
OTHER_STATES: dict[str, Callable[[], Model]] = {  # kinds of states that run in torch only
    "mamba2": functools.cache(lambda: in_torch(tiny_granite_hybrid(kinds="mf"))),
    "mamba2 beside attention": functools.cache(lambda: in_torch(tiny_falcon_h1())),
    "delta nets in torch": functools.cache(lambda: in_torch(tiny_qwen3_5(**SIZES["ungrouped"] | {"kinds": "fd"}))),
}
MODELS |= OTHER_STATES
DRAFTS["native"] = lambda: tiny_native(1, 1)
DRAFTS |= dict.fromkeys(
    ["recurrent", "gemma4", "gemma4 experts", "latent", "narrow values", *MIXTURES, *SHORT_CONVOLUTIONS, *BESIDE],
    DRAFTS["native"],
)
DRAFTS |= dict.fromkeys((*OTHER_STATES, "llama in int8", "llama in fp8"), lambda: tiny_llama(1))
DRAFTS |= dict.fromkeys(("native in int8", "latent in int8", "gemma4 in int8"), DRAFTS["native"])
HEADS: dict[str, Callable[[], HeadModel]] = {
    "toy": lambda: tiny_head(ToyModel(), 8),
    "flat": lambda: tiny_head(FlatToy(), 8),
    **dict.fromkeys(("llama", "llama in int8"), lambda: tiny_head(tiny_llama(), 32)),
    **dict.fromkeys(("native", "native in int8"), lambda: tiny_native_head(tiny_native(1), 72)),
    "recurrent": lambda: tiny_mtp(MODELS["recurrent"]()),
    "experts": lambda: tiny_native_head(MODELS["experts"](), 72),
    "lfm2": lambda: tiny_native_head(MODELS["lfm2"](), 48),
    **dict.fromkeys(("gemma4", "gemma4 in int8"), lambda: tiny_native_head(MODELS["gemma4"](), 40)),
    "gemma4 experts": lambda: tiny_native_head(MODELS["gemma4 experts"](), 64),
    **dict.fromkeys(("latent", "latent in int8"), lambda: tiny_native_head(MODELS["latent"](), 72)),
    "delta nets in torch": lambda: tiny_head(MODELS["delta nets in torch"](), 48),
}
ASSISTANTS = dict.fromkeys(("gemma4", "gemma4 in int8"), lambda: tiny_assistant(MODELS["gemma4"]()))
DRAFTERS = ["model", "self", "ngram", "documents", "never", "always", "sometimes", "ragged", "short", "hybrid"]
PARALLEL_HEADS: dict[str, Callable[[], HeadModel]] = {
    "toy": lambda: tiny_head(ToyModel(), 8, parallel=True),
    "flat": lambda: tiny_head(FlatToy(), 8, parallel=True),
    "llama": lambda: tiny_head(tiny_llama(), 32, parallel=True),
    "native": lambda: tiny_native_head(tiny_native(1), 72, parallel=True),
}
IN_TORCH: dict[str, Callable[[AnyModel, int], HeadModel]] = {
    "transfer": tiny_transfer_head,
    "chimera": tiny_chimera_head,
    "dflash": functools.partial(tiny_block, reduced=True),
    "dspark": functools.partial(tiny_block, kind="dspark"),
    "dflash2": functools.partial(tiny_block, kind="dflash2"),
}
BLOCKS = ["dflash", "dspark", "dflash2"]
ON_KERNELS: dict[str, Callable[[AnyModel, int], HeadModel]] = {  # beside targets on the CPU kernels
    "dflash": functools.partial(tiny_native_block, reduced=True),
    "dspark": functools.partial(tiny_native_block, kind="dspark", quantization=None),
    "dflash2": functools.partial(tiny_native_block, kind="dflash2"),
}
WIDTHS = {
    "toy": 8,
    "flat": 8,
    "llama": 32,
    "llama in int8": 32,
    "native": 72,
    "native in int8": 72,
    "experts": 72,
    "lfm2": 48,
}
WIDTHS |= {**dict.fromkeys(OTHER_STATES, 64), "delta nets in torch": 48}


def torch_head(kind: str, model: str) -> HeadModel:
    if kind in ON_KERNELS and model in ("native", "native in int8", "experts", "lfm2"):
        return ON_KERNELS[kind](MODELS[model](), WIDTHS[model])
    return IN_TORCH[kind](MODELS[model](), WIDTHS[model])


TORCH_HEADS: dict[str, dict[str, Callable[[], HeadModel]]] = {
    kind: {model: functools.partial(torch_head, kind, model) for model in WIDTHS} for kind in IN_TORCH
}
DRAFTERS += ["head", "head hybrid", "parallel", *IN_TORCH]
LENGTHS = [1, 4, "bass", "auto", "profiled", "random", "caps", "selection", "stops", "confident"]
_rng = random.Random(5)
PROMPTS = [[_rng.randrange(1, VOCAB) for _ in range(size)] for size in (1, 9, 2, 17, 5, 1, 30, 4, 3, 11)]
REGEX = StructuredOutputs(regex="toy")  # the content is ignored: toy.ToyConstraint restricts the row
GREEDY = [SamplingParams(temperature=0, max_tokens=16, seed=seed) for seed in range(len(PROMPTS))]
MIXED = [
    SamplingParams(temperature=0, max_tokens=16, seed=0),
    SamplingParams(temperature=1.0, max_tokens=11, seed=1, n=3, logprobs=2),
    SamplingParams(temperature=0.7, max_tokens=11, seed=2, top_k=5, presence_penalty=1.0, num_speculative_tokens=2),
    SamplingParams(temperature=1.3, max_tokens=11, seed=3, top_p=0.7, frequency_penalty=0.7, typical_p=0.9),
    SamplingParams(temperature=0, max_tokens=12, seed=4, repetition_penalty=1.5, logit_bias={3: 2.0, 7: -4.0}),
    SamplingParams(temperature=0.9, max_tokens=9, seed=5, min_p=0.2, min_tokens=8, logit_bias={0: 3.0}),
    SamplingParams(temperature=2.0, max_tokens=10, seed=6, top_k=8, top_p=0.8, min_p=0.05, n=2, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=9, seed=7, stop_token_ids=(4, 5), num_speculative_tokens=0),
    SamplingParams(temperature=0, max_tokens=12, seed=8, structured_outputs=REGEX),
    SamplingParams(
        temperature=1.1, max_tokens=11, seed=9, structured_outputs=REGEX, n=2, top_p=0.9, presence_penalty=1
    ),
]
FAMILIES = {"greedy": GREEDY, "mixed": MIXED}
EVERYTHING = [  # every row has every parameter
    SamplingParams(
        temperature=(0.6, 1.0, 1.7)[row % 3],
        top_k=(3, 12, 20, VOCAB)[row % 4],
        top_p=(0.95, 0.5, 0.8)[row % 3],
        min_p=(0.01, 0.1)[row % 2],
        typical_p=(0.9, 1.0)[row % 2],
        epsilon_cutoff=(0.0, 0.01, 0.0)[row % 3],
        eta_cutoff=(0.05, 0.0, 0.0, 0.0)[row % 4],
        top_n_sigma=(0.0, 2.0)[row % 2],
        presence_penalty=(0.5, -0.3)[row % 2],
        frequency_penalty=(-0.2, 0.4, 0.1)[row % 3],
        repetition_penalty=(1.1, 0.9)[row % 2],
        logit_bias={row: 1.5, 22: 1.0},
        min_tokens=row % 4 + 1,
        max_tokens=15,
        stop_token_ids=(row + 1,),
        logprobs=row % 3,
        seed=row,
    )
    for row in range(len(PROMPTS))
]
SIBLINGS = [
    SamplingParams(temperature=(0, 0.6, 1.0)[row % 3], max_tokens=(7, 3)[row % 2], seed=row, n=4, top_p=1 - row / 20)
    for row in range(len(PROMPTS))
]


def no_repeats(answer: list[int], logits: Tensor) -> Tensor:
    """Logits processor that forbids the last three tokens."""
    return logits.index_fill(0, torch.tensor(answer[-3:], dtype=torch.int64), -torch.inf)


def climbing(answer: list[int], logits: Tensor) -> Tensor:
    """Logits processor that lowers the largest logit in proportion to the length of the answer."""
    logits[logits.argmax()] -= 0.3 * len(answer)
    return logits


def best_three(answer: list[int], logits: Tensor) -> Tensor:
    """Logits processor that keeps the three largest logits, before bias and penalties."""
    return logits.masked_fill(logits < logits.topk(3).values[-1], -torch.inf)


PROCESSED = [  # rows whose tokens are restricted, and one that is free
    SamplingParams(temperature=(0, 0.8, 1.2)[row % 3], max_tokens=15, seed=row, **restricted)
    for row, restricted in enumerate(
        (
            {"bad_words": ["a", "c", "fg"]},
            {"bad_words": [" bc", "db", "e"], "n": 3, "logprobs": 1},
            {"allowed_token_ids": [0, 2, 3, 5, 8, 13, 21, 22]},
            {"allowed_token_ids": [1, 2, 3, 4], "bad_words": ["ab", "cc"], "presence_penalty": 0.5},
            {"logits_processors": [no_repeats]},
            {"logits_processors": [best_three, climbing], "logit_bias": {3: 5.0}, "presence_penalty": 2, "n": 2},
            {"allowed_token_ids": range(20), "logits_processors": [climbing], "top_k": 5, "min_tokens": 4},
            {"bad_words": "b", "min_tokens": 8, "top_p": 0.9, "stop_token_ids": (4, 5)},
            {},
            {"bad_words": ["aa", "bb", "cc"], "logits_processors": [climbing], "num_speculative_tokens": 2},
        )
    )
]
ALL_LONG = [
    replace(params, max_tokens=60, ignore_eos=row > 1 and params.structured_outputs is None)
    for row, params in enumerate(MIXED)
]
# Answers of two prompts need a second page.
LONG = [
    replace(each, max_tokens=68 - len(prompt) if row in (3, 6) else 8)
    for row, (prompt, each) in enumerate(zip(PROMPTS, ALL_LONG, strict=True))
]
PARAMS = {**FAMILIES, "long": LONG, "everything": EVERYTHING, "siblings": SIBLINGS, "processed": PROCESSED}


def unranked(params: SamplingParams) -> SamplingParams:
    """The same parameters for all samples, without ranking."""
    return replace(params, n=params.answers, best_of=None, rank_by=None)


def some_of(*case: object, others: int = 3) -> list[int]:
    """Some of the ten prompts: one with a structure, others by the case, one whose answer may need a second page.

    The last ones run without the structure, which needs rounds by the host.
    """
    rng = random.Random(str(case))
    return [rng.choice([8, 9]), *rng.sample([0, 1, 2, 4, 5, 7], others), rng.choice([3, 6])]


needs_kernels = pytest.mark.skipif(not native.available(), reason=f"needs rounds in the kernels: {native.why_none()}")


@functools.cache
def plain(model: str, family: str) -> list[list[list[int]]]:
    """Answers of plain decoding, all prompts in one batch, which one process of a run computes for all.

    ``test_plain_decoding_in_a_batch_equals_each_prompt_alone`` compares them with those of one prompt per batch.
    """

    def compute() -> list[list[list[int]]]:
        found = decoded(model, PROMPTS, PARAMS[family], max_batch_size=2 * len(PROMPTS))
        assert any(answer[-1] in EOS for each in found for answer in each), "the tests need answers that end early"
        return found

    shared: list[list[list[int]]] = once(f"plain, {model}, {family}", compute)
    return shared


def decoded(
    model: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any
) -> list[list[list[int]]]:
    """Answers of plain decoding, none of which goes on from another's prefix."""
    options |= {"prefix_cache": False, "kv_cache_dtype": KV_DTYPES.get(model, "auto")}
    engine = make_engine(MODELS[model](), eos=EOS, **options)
    engine.rounds.choice.kernels = None
    return answers(run(engine, prompts, [unranked(each) for each in params]))


def cheap_budget() -> AutoLength:
    """Policy for which draft tokens cost almost nothing, so nearly all are verified."""
    return AutoLength(CostModel(linear_costs(token=0.01)))


def cheap_confident(engine: Engine) -> AutoLength:
    """Policy for which drafting is cheap; draft tokens that are almost surely wrong are not verified."""
    costs = CostModel(linear_costs(token=0.3, draft_step=0.1))
    return AutoLength(costs, engine.parts.drafter.decoders, copies=False)


def cheap_hybrid(engine: Engine) -> AutoLength:
    """Policy with the same costs, under which some rounds use n-gram drafts and others the draft model."""
    return AutoLength(CostModel(linear_costs(token=0.3, draft_step=0.1)), engine.parts.drafter.decoders)


def nearly_the_answers(model: str, family: str) -> list[list[int]]:
    """Documents for n-gram lookup: the answers with an error in every 17th token."""
    texts = [[*prompt, *one] for prompt, each in zip(PROMPTS, plain(model, family), strict=True) for one in each]
    return [[(token + 1) % VOCAB if place % 17 == 16 else token for place, token in enumerate(text)] for text in texts]


def speculative_engine(model: str, drafter: str, length: int | str, family: str, **options: Any) -> Engine:
    """An engine with any drafter and length policy of this file."""
    drafts = {"model": DRAFTS, "hybrid": DRAFTS, "self": MODELS, "head": HEADS, "head hybrid": HEADS}
    drafts |= dict.fromkeys(("assistant", "assistant hybrid"), ASSISTANTS)
    drafts |= {"parallel": PARALLEL_HEADS, "parallel hybrid": PARALLEL_HEADS, **TORCH_HEADS}
    drafts["dspark hybrid"] = TORCH_HEADS["dspark"]
    draft = drafts[drafter][model]() if drafter in drafts else None
    same = {"model": "model", "ngram": "ngram", "hybrid": "hybrid", "head": "feature", "head hybrid": "hybrid"}
    same |= {"assistant": "feature", "assistant hybrid": "hybrid", "dspark hybrid": "hybrid"}
    same |= {"parallel": "feature", "parallel hybrid": "hybrid", **dict.fromkeys(IN_TORCH, "feature")}
    scripts = {"never": never, "always": always, "sometimes": sometimes, "ragged": sometimes, "short": sometimes}
    others = {"self": "model", "documents": "ngram"} | dict.fromkeys(scripts, "ngram")  # replaced by a script below
    named = (same | others).get(drafter)
    documents = [[*PROMPTS[3], *plain(model, family)[3][0]], [5], []] if drafter == "documents" else []
    if drafter.endswith("hybrid") and options.get("rounds") != "device":  # where it searches the rows' own texts
        documents = nearly_the_answers(model, family)
    policies: dict[str, Callable[[], LengthPolicy]] = {
        "random": lambda: RandomLength(seed=len(drafter)),
        "caps": lambda: RandomCaps(seed=len(drafter)),
        "selection": lambda: RandomSelection(seed=len(drafter)),
        "stops": lambda: RandomStops(seed=len(drafter)),
        "sources": lambda: RandomSources(seed=len(drafter)),
        "budget": cheap_budget,
        "confident": lambda: cheap_confident(engine),
        "hybrid": lambda: cheap_hybrid(engine),
        "profiled": lambda: ProfiledLength({1: 5, 2: 0, 3: 3, 4: 1}),
    }
    options |= {"num_speculative_tokens": 4 if length in policies else length}
    options |= {"kv_cache_dtype": KV_DTYPES.get(model, "auto")}
    engine = make_engine(MODELS[model](), draft, eos=EOS, documents=documents, drafter=named, **options)
    if drafter in scripts:
        truth = truth_of(PROMPTS, PARAMS[family], plain(model, family))
        engine.parts.drafter = Scripted(
            truth, scripts[drafter], ragged=drafter == "ragged", short=drafter in ("short", "ragged")
        )
    if length in policies:
        engine.use_policy(policies[str(length)]())
    return engine


@functools.cache
def slow(model: str, family: str) -> list[list[list[int]]]:
    """Answers of a model without a cache and a sampler in plain Python."""
    target = TARGETS[model]()
    return [
        [slow_answer(target, prompt, params, index, EOS) for index in range(params.n)]
        for prompt, params in zip(PROMPTS, PARAMS[family], strict=True)
    ]


@pytest.mark.parametrize(
    ("model", "family"), [*itertools.product(TARGETS, FAMILIES), ("toy", "processed"), ("llama", "processed")]
)
def test_plain_decoding_equals_a_model_without_a_cache_and_a_sampler_in_plain_python(model: str, family: str) -> None:
    assert plain(model, family) == slow(model, family)


@pytest.mark.parametrize(
    ("model", "family"), dict.fromkeys([*in_turn(MODELS, PARAMS), *itertools.product(["native"], PARAMS)])
)
def test_plain_decoding_in_a_batch_equals_each_prompt_alone(model: str, family: str) -> None:
    some = some_of(model, family)
    alone = decoded(model, [PROMPTS[i] for i in some], [PARAMS[family][i] for i in some], max_batch_size=1)
    assert [plain(model, family)[i] for i in some] == alone


@pytest.mark.parametrize(
    ("drafter", "model", "kernels"),
    pairwise({"drafter": ["model", "sometimes", "ragged"], "model": ["toy", "flat"], "kernels": ["auto", "off"]}),
)
def test_rows_with_every_parameter_in_one_batch_equal_a_sampler_in_plain_python(
    model: str, drafter: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", kernels)
    engine = speculative_engine(model, drafter, "random", "everything", max_batch_size=len(PROMPTS), prefill_chunk=40)
    assert answers(run(engine, PROMPTS, EVERYTHING)) == slow("toy", "everything")


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_restricted_rows_in_one_batch_equal_a_sampler_in_plain_python(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", kernels)
    engine = speculative_engine("toy", "sometimes", "random", "processed", max_batch_size=len(PROMPTS))
    assert answers(run(engine, PROMPTS, PROCESSED)) == slow("toy", "processed")


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "drafter", "width", "model"),
    pairwise(
        {
            "kind": ["feature", "parallel", *IN_TORCH],
            "drafter": ["feature", "hybrid"],
            "width": [1, 3],
            "model": ["native", "experts", "lfm2"],
        },
        {("model", "experts"): {"kind": ["dflash"]}, ("model", "lfm2"): {"kind": ["dspark"]}},
    ),
)
def test_a_torch_head_on_a_native_target_equals_plain_decoding(drafter: str, kind: str, width: int, model: str) -> None:
    target = MODELS[model]()
    documents = nearly_the_answers(model, "mixed") if drafter == "hybrid" else []
    options = {"drafter": drafter, "documents": documents, "prefill_chunk": 7, "speculation_width": width}
    make = IN_TORCH.get(kind, functools.partial(tiny_head, parallel=kind == "parallel"))
    engine = make_engine(target, make(target, WIDTHS[model]), eos=EOS, **options)
    engine.use_policy(RandomLength(seed=4))
    some = some_of(drafter, kind, width, model)
    found = answers(run(engine, [PROMPTS[i] for i in some], [MIXED[i] for i in some]))
    assert found == [plain(model, "mixed")[i] for i in some]
    assert "rounds by the host (the drafter reads the target's hidden states)" in engine.describe()


@needs_kernels
@pytest.mark.parametrize(
    ("memory", "drafter", "model"),
    pairwise(
        {
            "memory": [None, 1, 0],
            "drafter": ["ngram", "hybrid", "head"],
            "model": ["native", "recurrent", "lfm2", "gemma4", "latent"],
        }
    ),
)
def test_texts_that_go_on_from_kept_prefixes_equal_plain_decoding(memory: int | None, drafter: str, model: str) -> None:
    """Ten texts on two rows, twice: from slots beside the rows, from what their memory leaves, or from rows."""
    options = {"max_batch_size": 2, "prefill_chunk": 9, "prefix_memory": memory}
    engine = speculative_engine(model, drafter, "random", "mixed", **options)
    order = list(range(len(PROMPTS)))
    for turn in range(2):
        found = dict(
            zip(order, answers(run(engine, [PROMPTS[i] for i in order], [MIXED[i] for i in order])), strict=True)
        )
        assert [found[index] for index in range(len(PROMPTS))] == plain(model, "mixed")
        random.Random(turn).shuffle(order)
    assert engine.slots.free.counts.reused > 0 or memory is not None


@functools.cache
def plain_and_long(model: str) -> list[list[list[int]]]:
    return decoded(model, PROMPTS, ALL_LONG, max_batch_size=2 * len(PROMPTS))


@needs_kernels
@pytest.mark.parametrize(
    ("model", "drafter", "memory"),
    pairwise(
        {
            "model": ["native", "recurrent", "gemma4 experts", "latent in int8"],
            "drafter": ["model", "head"],
            "memory": [None, 0],
        }
    ),
)
def test_rows_that_give_way_and_are_read_again_equal_plain_decoding(
    model: str, drafter: str, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten requests on five rows, in memory for one row at its longest and two short ones."""
    monkeypatch.setattr(slot_memory, "STRETCH", 1)
    monkeypatch.setattr(SlotMemory, "growth", lambda *_: 0)  # rows begin that cannot grow beside others
    options = {"max_batch_size": 5, "prefill_chunk": 9, "prefix_memory": memory}
    engine = speculative_engine(model, drafter, "random", "long", **options)
    bytes_for = engine.room.bytes_for
    engine.slots.memory.room = replace(engine.room, limit=bytes_for(engine.max_model_len) + 2 * bytes_for(60))
    engine.slots.forget()  # it sets the slots' sizes
    assert engine.slots.memory.room.is_short
    outputs = run(engine, PROMPTS, ALL_LONG)
    assert answers(outputs) == plain_and_long(model)
    alone = make_engine(MODELS[model](), eos=EOS, kv_cache_dtype=KV_DTYPES.get(model, "auto"))
    scored = run(alone, PROMPTS[1:2], ALL_LONG[1:2])[0]
    assert [each.logprobs for each in outputs[1].outputs] == [each.logprobs for each in scored.outputs]
    costs = [answer.metrics for output in outputs for answer in output.candidates]
    assert engine.scheduler.preemptions == sum(cost.preempted for cost in costs) > 1
    assert engine.scheduler.prefill.recomputed_tokens == sum(cost.recomputed_tokens for cost in costs) > 0


@needs_kernels
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("drafter", ["self", "ngram", "sometimes", "hybrid"])
def test_the_description_names_draft_tokens_that_host_rounds_verify(drafter: str, rule: str) -> None:
    engine = speculative_engine("native", drafter, 3, "mixed", acceptance=rule)
    rounds_by = count_native_rounds(engine)
    run(engine, PROMPTS, [SamplingParams(seed=seed, max_tokens=8) for seed in range(len(PROMPTS))])
    assert engine.describe().count("rounds by the kernels") == 1
    assert bool(rounds_by["by the host"]) == ("(step by step: draft tokens with probabilities)" in engine.describe())


@needs_kernels
def test_the_description_names_a_rule_without_native_kernel() -> None:
    engine = speculative_engine("native", "self", 3, "mixed", acceptance="synthetic:0.8", benchmark=True)
    assert engine.rounds.choice.kernels is None
    assert "rounds by the host (the kernels do not have this acceptance rule)" in engine.describe()


def count_native_rounds(engine: Engine) -> Counter[str]:
    """Counter of rounds, "natively" or "by the host", that grows as rounds run."""
    native, parts, rounds_by = kernels_of(engine).native, engine.parts, Counter[str]()
    run_natively, verify = native.run, parts.verify_and_commit

    def natively(draft: Draft) -> Verdict:
        rounds_by["natively"] += 1
        return run_natively(draft)

    def by_the_host(batch: Batch, draft: Draft) -> Verdict:
        rounds_by["by the host"] += 1
        return verify(batch, draft)

    native.run, parts.verify_and_commit = natively, by_the_host  # type: ignore[method-assign]
    return rounds_by


@needs_kernels
def test_a_rule_that_replaces_the_engines_own_is_called() -> None:
    engine = speculative_engine("native", "ngram", 4, "greedy")
    asked, rule = [], engine.parts.accept

    def watched(draft: DraftTensors, logits: torch.Tensor, batch: Batch) -> Accepted:
        asked.append(draft.k)
        return rule(draft, logits, batch)

    engine.parts.accept = watched
    assert answers(run(engine, PROMPTS, GREEDY)) == plain("native", "greedy")
    assert asked


@pytest.mark.parametrize(
    ("model", "drafter", "deterministic", "prompts"),
    [
        ("toy", "model", False, [5, 7]),
        ("llama", "model", True, [5, 7]),
        *(pytest.param(*case, range(5), marks=pytest.mark.slow) for case in pairwise(
            {"model": ["toy", "llama"], "drafter": ["model", "ragged"], "deterministic": [False, True]}
        )),
    ],
)  # fmt: skip
def test_ragged_attention_equals_plain_decoding(
    model: str, drafter: str, deterministic: bool, prompts: Sequence[int]
) -> None:
    """Through Triton's interpreter where there is no GPU: slow."""
    pytest.importorskip("triton", reason="triton is not installed")
    options = {"attention": "ragged", "deterministic": deterministic, "max_batch_size": 7}
    engine = speculative_engine(model, drafter, "random", "mixed", prefill_chunk=40, **options)
    found = answers(run(engine, [PROMPTS[i] for i in prompts], [MIXED[i] for i in prompts]))
    assert found == [plain(model, "mixed")[i] for i in prompts]


@pytest.mark.parametrize(
    ("drafter", "length", "model", "family"),
    [("echo", 4, "toy", "mixed"), ("ngram", "careful", "native", "greedy"), ("echo", "careful", "native", "mixed")],
)
def test_drafters_and_lengths_of_another_package_equal_plain_decoding(
    model: str, drafter: str, length: int | str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SAMPLE_PACKAGE)
    engine = make_engine(MODELS[model](), eos=EOS, drafter=drafter, num_speculative_tokens=length, prefill_chunk=7)
    outputs = run(engine, PROMPTS, PARAMS[family])
    assert answers(outputs) == plain(model, family)
    assert any(answer.metrics.drafted for output in outputs for answer in output.candidates)


# --- any drafter, length, rule, backend and family --------------------------------------------------------------------

ON_DEVICE = {"rounds": "device", "attention": "padded"}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {  # a model, and options that decide how its rounds run
    "toy": ("toy", {"attention": "padded"}),
    "toy, split": ("toy", {"attention": "split"}),
    "toy on the device": ("toy", ON_DEVICE),
    "flat": ("flat", {"attention": "auto"}),  # it asserts that it is fed exactly the real tokens
    "llama": ("llama", {"attention": "padded"}),
    "llama, split": ("llama", {"attention": "split"}),
    "native by the host": ("native", {}),
    "delta nets on the device": ("delta nets in torch", ON_DEVICE),
    **{model: (model, {}) for model in MODELS if model not in TARGETS},
}
IN_TORCH_ONLY = {*TARGETS, "toy, split", "toy on the device", "llama, split", "delta nets on the device", *OTHER_STATES}
IN_TORCH_ONLY |= {model for model in KV_DTYPES if "native" not in model}
IN_ONE_CALL = PLACES.keys() - IN_TORCH_ONLY - {"native by the host"}
OF_A_MODEL = ["model", "self", "head", "parallel", *IN_TORCH, "assistant"]  # drafters that give likelihoods
HYBRIDS = ["hybrid", "head hybrid", "parallel hybrid", "assistant hybrid"]
CERTAIN = {"ngram", "documents", "never", "always", "sometimes", "ragged", "short"}  # without distributions
OTHER_LAYERS = ["documents", "ragged", "hybrid", "head"]
ALIKE = ["experts int4", "experts bf16", "lfm2 int4", "lfm2 bf16", "narrow values", *BESIDE, "llama in fp8"]
DRAFTERS_OF = {
    "toy": DRAFTERS,
    "flat": [each for each in DRAFTERS if each not in ("never", "always", "short", "sometimes", "ngram")],
    "llama": ["self", "ragged", "hybrid", "head", "parallel", *IN_TORCH],
    "toy, split": ["model", "ragged", "hybrid", "head", "chimera", "dspark"],
    "toy on the device": ["model", "self", "ngram", "head", "hybrid", "head hybrid", *BLOCKS, "dspark hybrid", "none"],
    "llama, split": ["model", "ragged", "head hybrid"],
    "native": [*(each for each in DRAFTERS if each not in IN_TORCH), *ON_KERNELS, "parallel hybrid"],
    "native by the host": ["model", "head hybrid", "parallel", "parallel hybrid"],
    **dict.fromkeys(("recurrent", "gemma4 experts", "latent", "native in int8"), OTHER_LAYERS),
    "lfm2": [*OTHER_LAYERS, "dspark"],
    "gemma4": [*OTHER_LAYERS, "assistant", "assistant hybrid"],
    "experts": [*OTHER_LAYERS, "dflash"],
    **dict.fromkeys(ALIKE, ("model", "ragged")),
    **dict.fromkeys(OTHER_STATES, ("model", "documents", "hybrid", "dspark")),
    "delta nets on the device": ["model", "head hybrid", "dspark", "none"],
    "llama in int8": [*OTHER_LAYERS, "dflash"],
    "latent in int8": ["documents", "head"],
    "gemma4 in int8": ["sometimes", "head", "assistant"],
}
BY_BATCH = ("model", "ngram", "sometimes", "head")  # drafters for lengths that depend on the number of rows alone
DRAFTERS_FOR = {
    **dict.fromkeys((1, "bass", "profiled"), BY_BATCH),
    **dict.fromkeys(("stops", "confident", "budget"), (*OF_A_MODEL, *HYBRIDS, "ngram")),
    **dict.fromkeys(("hybrid", "sources"), (*HYBRIDS, "ragged")),  # these weigh n-gram drafts against a model's
}
DEVICE_LENGTHS = [1, 4, "bass", "auto", "random", "caps", "selection"]
DEVICE_FAMILIES = ["greedy", "mixed", "siblings", "processed"]  # rows that need the host take the others with them
FEW_LENGTHS = ["random", "caps", "confident", "sources"]  # where lengths are not the point
FEW_FAMILIES = ["mixed", "siblings", "long"]  # where parameters are not the point
FACTORS = {
    "place": PLACES,
    "drafter": [*DRAFTERS, "parallel hybrid", "dspark hybrid", "assistant", "assistant hybrid", "none"],
    "length": [*LENGTHS, "budget", "hybrid", "sources"],
    "family": [*PARAMS],
    "rule": ["coupled", "rejection"],
    "rows": [4, 3, len(PROMPTS)],
    "chunk": [7, 3, 1000],
}
ONLY: dict[tuple[str, Any], dict[str, Collection[Any]]] = {
    **{("place", place): {"drafter": drafters} for place, drafters in DRAFTERS_OF.items()},
    **{("length", length): {"drafter": drafters} for length, drafters in DRAFTERS_FOR.items()},
    ("drafter", "none"): {"length": [4], "rule": ["coupled"]},  # without a drafter there is no choice of either
    ("rule", "rejection"): {"family": ["greedy", "mixed", "siblings", "processed"]},  # families with greedy rows
}
for _place in PLACES:
    if "device" in _place:
        ONLY["place", _place] |= {"length": DEVICE_LENGTHS, "family": DEVICE_FAMILIES}
    elif _place not in ("toy", "native"):
        ONLY["place", _place] |= {"length": FEW_LENGTHS, "family": FEW_FAMILIES}
ONLY["place", "flat"] |= {"family": [*PARAMS]}
ONLY["place", "llama"] |= {"length": [*FEW_LENGTHS, "stops"]}
for _place in ALIKE:
    ONLY["place", _place] |= {"length": ["random", "caps"], "family": ["mixed", "long"]}
for _place in (*OTHER_STATES, "delta nets on the device"):  # whose rounds take ten times as long
    ONLY["place", _place] |= {"rows": [len(PROMPTS)]}
ONLY["place", "delta nets on the device"] |= {"length": [4, "auto", "random"], "chunk": [7]}


def on_kernels_where_needed(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Test parameters that begin with a place of ``PLACES``."""
    return [pytest.param(*case, marks=() if case[0] in IN_TORCH_ONLY else needs_kernels) for case in cases]


def engine_in(place: str, drafter: str, length: int | str, family: str, **options: Any) -> Engine:
    """An engine whose rounds run in a place of ``PLACES``."""
    model, own = PLACES[place]
    engine = speculative_engine(model, drafter, length, family, **own, **options)
    if place == "native by the host":
        engine.rounds.choice.kernels = None
    return engine


@pytest.mark.parametrize(tuple(FACTORS), on_kernels_where_needed(pairwise(FACTORS, ONLY)))
def test_answers_equal_plain_decoding(
    place: str, drafter: str, length: int | str, family: str, rule: str, rows: int, chunk: int
) -> None:
    """Under the rejection rule draft tokens with distributions change sampled answers, and no greedy one."""
    engine = engine_in(place, drafter, length, family, acceptance=rule, max_batch_size=rows, prefill_chunk=chunk)
    rounds_by = count_native_rounds(engine) if place in IN_ONE_CALL and "assistant" not in drafter else None
    some, alone = some_of(place, drafter, length, family), plain(PLACES[place][0], family)
    outputs = run(engine, [PROMPTS[i] for i in some], [PARAMS[family][i] for i in some])
    for index, output, answer in zip(some, outputs, answers(outputs), strict=True):
        params, expected = PARAMS[family][index], alone[index]
        assert answer == expected or (rule == "rejection" and drafter not in CERTAIN and not params.greedy)
        most = params.num_speculative_tokens  # of each round
        assert most is None or all(own.metrics.drafted <= most * own.metrics.rounds for own in output.candidates)
    if rounds_by is not None and rule == "coupled":  # rows of some families need rounds by the host
        assert rounds_by["natively"] > 0 or family in ("everything", "processed") or rows > 4
        assert family != "greedy" or not rounds_by["by the host"]
        assert "rounds by the kernels" in engine.describe()
    if "device" in place and family == "greedy" and length != "selection":  # this policy reads draft tokens on the host
        assert engine.rounds.counts["device"] > 10
        assert not engine.rounds.counts["host"]


def references_of(kind: str, model: str, family: str) -> list[list[list[int]]]:
    """References of each prompt.

    right: one of its answers. nearly: an answer with errors, some of them where matches begin. wrong: another prompt's
    answers. hostile: texts in which nearly every short match exists and continues wrongly.
    """
    rng, right = random.Random(7), [each[-1] for each in plain(model, family)]
    if kind == "right":
        return [[[*prompt, *answer], [5]] for prompt, answer in zip(PROMPTS, right, strict=True)]
    if kind == "nearly":
        return [[[(t + (i % 5 == 4)) % VOCAB for i, t in enumerate(each)], each[3:9] or [5]] for each in right]
    if kind == "wrong":
        return [[right[(row + 1) % len(right)], [VOCAB - 1] * 50] for row in range(len(right))]
    return [[[rng.randrange(VOCAB) for _ in range(2000)], [*each[::-1], *each] * 3, [each[0]] * 99] for each in right]


@pytest.mark.parametrize(
    ("kind", "drafter", "length", "family"),
    pairwise(
        {
            "kind": ["right", "nearly", "wrong", "hostile"],
            "drafter": ["ngram", "hybrid"],
            "length": ["selection", "caps", 4, "auto"],
            "family": ["siblings", "mixed"],
        },
        {("length", "auto"): {"kind": ["nearly", "hostile"]}, ("length", 4): {"kind": ["right", "wrong"]}},
    ),
)
def test_references_and_siblings_change_no_answer(kind: str, drafter: str, length: int | str, family: str) -> None:
    rule = (
        "rejection" if drafter == "ngram" and kind in ("right", "hostile") else "coupled"
    )  # both rules are the same for n-gram drafts
    engine = speculative_engine("flat", drafter, length, family, acceptance=rule, max_batch_size=5, prefill_chunk=7)
    outputs = []
    for prompt, params, texts in zip(PROMPTS, PARAMS[family], references_of(kind, "toy", family), strict=True):
        copied = [] if params.num_speculative_tokens == 0 else texts  # references would be refused
        outputs.append(engine.add(replace(make_request(prompt, params), references=copied)))
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    assert answers(outputs) == plain("toy", family)


@pytest.mark.parametrize(("model", "rows"), [("toy", 1), ("flat", 3), ("llama", 3), ("llama", 16)])
def test_four_samples_drafted_from_each_other_equal_four_alone(model: str, rows: int) -> None:
    engine = speculative_engine(model, "ngram", 4, "siblings", max_batch_size=rows, prefill_chunk=7)
    assert answers(run(engine, PROMPTS, SIBLINGS)) == plain(model, "siblings")


@pytest.mark.parametrize(("rows", "chunk"), [(1, 3), (2, 1), (3, 1000), (5, 1), (16, 3)])
def test_batch_composition_and_order_change_no_answer(rows: int, chunk: int) -> None:
    order = random.Random(10 * rows + chunk).sample(range(len(PROMPTS)), len(PROMPTS))
    engine = speculative_engine("toy", "model", "random", "mixed", max_batch_size=rows, prefill_chunk=chunk)
    found = answers(run(engine, [PROMPTS[i] for i in order], [MIXED[i] for i in order]))
    assert found == [plain("toy", "mixed")[i] for i in order]


LEAVING = {
    "toy": ["model", "self", "ngram", "hybrid", "head", "head hybrid", "parallel", "transfer", "chimera", "dspark"],
    "toy on the device": ["self", "head", "ngram", "head hybrid", "dspark hybrid", "none"],
    "flat": ["hybrid", "head"],
    "native": ["self", "ngram", "hybrid", "head", "head hybrid", "parallel"],
    **dict.fromkeys(("recurrent", "lfm2"), ("ngram", "head")),
}


@pytest.mark.parametrize(
    ("place", "drafter", "family"),
    on_kernels_where_needed(
        (place, *case) for place, drafters in LEAVING.items() for case in in_turn(drafters, ("greedy", "mixed"))
    ),
)
def test_random_arrivals_cancellations_and_time_outs_change_no_answer(place: str, drafter: str, family: str) -> None:
    """Slots pass from one sequence to the next while others decode; an answer cut short begins as the whole one."""
    rng, model = random.Random(f"{place}, {drafter}, {family}"), PLACES[place][0]
    engine = engine_in(place, drafter, "random", family, max_batch_size=3, prefill_chunk=4)
    waiting = rng.sample(range(len(PROMPTS)), len(PROMPTS)) * 2
    outputs: list[tuple[int, RequestOutput]] = []
    while waiting or engine.busy:
        if waiting and rng.random() < 0.4:
            index = waiting.pop()
            outputs.append((index, engine.add(make_request(PROMPTS[index], PARAMS[family][index]))))
        in_use = engine.scheduler.in_use
        if in_use and rng.random() < 0.1:
            engine.abort(rng.choice(in_use).request_id)
        if in_use and rng.random() < 0.1:
            rng.choice(in_use).deadline = 0.0
        engine.step()
        engine.scheduler.check_integrity()
    cut = Counter[str]()
    for index, output in outputs:
        unaware = "device" in place and PARAMS[family][index].structured_outputs is not None  # drafts have no grammar
        for answer, whole in zip(output.candidates, plain(model, family)[index], strict=True):
            reason, found = str(answer.finish_reason), answer.token_ids
            assert found == (whole[: len(found)] if reason in ("abort", "deadline") else whole)
            assert drafter != "self" or unaware or answer.metrics.accepted == answer.metrics.drafted, (
                "its caches are the target's"
            )
            cut[reason] += 1
    assert cut["abort"] > 0
    assert cut["deadline"] > 0


def test_an_engine_used_again_gives_the_same_answers() -> None:
    engine = speculative_engine("toy", "model", "random", "mixed")
    first = answers(run(engine, PROMPTS, MIXED))
    assert answers(run(engine, PROMPTS[::-1], MIXED[::-1])) == first[::-1] == plain("toy", "mixed")[::-1]


@functools.cache
def turns(model: str, family: str) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts that begin like others, and the answers of plain decoding without a cache.

    In turn: the next turn of a chat, a question about a part of a text, and a question about all of it.
    """
    texts, document = zip(PROMPTS, plain(model, family), strict=True), PROMPTS[6]
    said = [[*prompt, *each[0], 3, 1 + i] for i, (prompt, each) in enumerate(texts)]
    prompts = [(said[i], [*document[: 20 + i], 5 + i, 2], [*document, 5 + i, 2])[i % 3] for i in range(len(PROMPTS))]
    return prompts, decoded(model, prompts, PARAMS[family], max_batch_size=2 * len(prompts))


REUSING = [("model", 3), ("hybrid", 6)]  # drafters and rows
KINDS_OF_CACHES = [*TARGETS, "native", "recurrent", "lfm2", "gemma4", "latent", "narrow values"]
KINDS_OF_CACHES += ["llama in int8", "native in int8", "delta nets in torch"]


@pytest.mark.parametrize(
    ("model", "drafter", "rows"), [(model, *case) for model, case in in_turn(KINDS_OF_CACHES, REUSING)]
)
def test_cached_prefixes_change_no_answer(model: str, drafter: str, rows: int) -> None:
    """Next chat turns and prompts with a common prefix, some of them aborted, in rows that move."""
    rng, family = random.Random(rows), "mixed"
    more = {"max_batch_size": rows, "prefill_chunk": rng.choice([4, 1000])}
    engine = speculative_engine(model, drafter, "random", family, attention="auto", **more)
    first = range(0, len(PROMPTS), 3)  # which the later prompts begin like
    found = answers(run(engine, [PROMPTS[i] for i in first], [PARAMS[family][i] for i in first]))
    assert found == [plain(model, family)[i] for i in first]
    prompts, expected = turns(model, family)
    outputs = []
    again = [0, 4, 8]
    for index in (*range(len(prompts)), *again):
        outputs.append(engine.add(make_request(prompts[index], PARAMS[family][index])))
        given_up = engine.add(replace(make_request(prompts[index][:-1], PARAMS[family][index]), request_id="up"))
        for step in range(rng.choice([0, 2, 9])):
            engine.step()
            engine.scheduler.check_integrity()
            if step == 1:
                engine.abort("up")
        engine.abort("up")
        assert given_up.finished
    while engine.busy:
        engine.step()
    assert answers(outputs) == [*expected, *(expected[i] for i in again)]
    assert sum(output.cached_tokens for output in outputs) > 40


@pytest.mark.parametrize("drafter", ["model", "sometimes", "ngram"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_logprobs_are_the_models_own_with_any_drafter(drafter: str, rule: str) -> None:
    params = [
        SamplingParams(temperature=t, max_tokens=12, seed=i, logprobs=3) for i, t in enumerate((0, 1.0, 0.5, 2.0))
    ]
    prompts = PROMPTS[1:5]
    engine = speculative_engine("toy", "model" if drafter == "model" else "ngram", 4, "mixed", acceptance=rule)
    if drafter == "sometimes":
        alone = answers(run(make_engine(ToyModel(), eos=EOS), prompts, params))
        engine.parts.drafter = Scripted(truth_of(prompts, params, alone), sometimes)
    for prompt, output in zip(prompts, run(engine, prompts, params), strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for place, entry in enumerate(answer.logprobs):
            distribution = torch.tensor(logits_after(ToyModel(), prompt + answer.token_ids[:place])).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(distribution[entry.token_id]), abs=1e-5)
            values, ids = distribution.topk(3)
            assert [token for token, _ in entry.top] == ids.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


RANKED = [
    replace(params, n=2, best_of=4, rank_by=("mean_logprob", "logprob")[place % 2])
    for place, params in enumerate(MIXED)
]
PARAMS["ranked"] = RANKED


def own_logprobs(prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of an answer, computed from the whole text before it."""
    distributions = [torch.tensor(logits_after(ToyModel(), [*prompt, *answer[:place]])) for place in range(len(answer))]
    return [
        float(distribution.log_softmax(-1)[token]) for distribution, token in zip(distributions, answer, strict=True)
    ]


@functools.cache
def by_rank() -> list[list[int]]:
    """Indices of each prompt's best answers, best first, ranked in plain Python."""
    ranks = []
    for prompt, params, each in zip(PROMPTS, RANKED, plain("toy", "ranked"), strict=True):
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
        keys = []
        for index, answer in enumerate(each):
            own = own_logprobs(prompt, answer)
            score = sum(own) / len(own) if params.rank_by == "mean_logprob" else sum(own)
            keys.append((answer[-1] not in stops, -score, index))
        ranks.append([index for *_, index in sorted(keys)][: params.n])
    assert any(rank != sorted(rank) for rank in ranks), "the test needs an order that is not that of sampling"
    return ranks


def ranked_answers(outputs: list[RequestOutput]) -> list[list[int]]:
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        for answer in output.outputs if output.rank_by else ():
            assert answer is output.candidates[answer.index]
            own = own_logprobs(prompt, answer.token_ids)
            assert answer.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)
            assert answer.mean_logprob == pytest.approx(sum(own) / len(own), abs=1e-5)
    return [[answer.index for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("drafter", "model", "kernels"),
    [
        ("model", "toy", "auto"),
        ("ngram", "flat", "auto"),
        ("ragged", "flat", "off"),
        ("none", "toy", "auto"),
    ],
)
def test_ranking_changes_no_answer_and_speculation_no_rank(
    drafter: str, model: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "chosen", lambda: native.select(kernels))
    engine = speculative_engine(model, drafter, "random", "ranked", attention="auto", prefill_chunk=7)
    outputs = run(engine, PROMPTS, RANKED)
    assert ranked_answers(outputs) == by_rank()
    left = 0
    for output, each in zip(outputs, plain("toy", "ranked"), strict=True):
        for answer, whole in zip(output.candidates, each, strict=True):
            outranked = answer.finish_reason == "outranked"
            assert answer.token_ids == (whole[: len(answer.token_ids)] if outranked else whole)
            assert not (outranked and answer in output.outputs)
            left += outranked
    assert left > 0, "some answer leaves its row before its end"


@pytest.mark.parametrize("length", [0, "auto", "random"])
def test_ranking_stays_on_the_device(length: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No round moves to the host for ranking, also with unranked requests in the batch."""
    params = [
        SamplingParams(
            temperature=t, max_tokens=12, seed=i, n=3, best_of=3 + i % 2, rank_by="logprob" if i % 3 else None
        )
        for i, t in enumerate((0.7, 1.0, 0, 1.5, 1.0))
    ]
    prompts = PROMPTS[: len(params)]
    expected = run(make_engine(ToyModel(), eos=EOS), prompts, params)
    drafter = "none" if length == 0 else "model"
    engine = speculative_engine(
        "toy", drafter, 4 if length == 0 else length, "mixed", rounds="device", attention="padded"
    )
    outputs = run(engine, prompts, params)
    assert engine.rounds.counts["host"] == 0, "a round was taken off the device"
    for output, host in zip(outputs, expected, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in host.outputs]
    assert ranked_answers(outputs) == [[answer.index for answer in output.outputs] for output in expected]
    assert any(rank != sorted(rank) for rank in ranked_answers(outputs))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_answers_are_ranked_by_their_own_logprobs_under_both_rules(rule: str) -> None:
    engine = speculative_engine("toy", "model", 4, "ranked", acceptance=rule)
    outputs = run(engine, PROMPTS, RANKED)
    for output in outputs:
        scores = [
            answer.score(output.rank_by or "logprob") for answer in output.outputs if answer.finish_reason == "stop"
        ]
        assert scores == sorted(scores, reverse=True)
    ranked_answers(outputs)


# --- trees ------------------------------------------------------------------------------------------------------------


def tree_engine(
    model: str, script: str, shape: str, family: str, length: int | str = "random", **options: Any
) -> Engine:
    """An engine whose scripted drafter proposes trees."""
    engine = speculative_engine(model, "never", length, family, **options)
    truth = truth_of(PROMPTS, PARAMS[family], plain(model, family))
    scripts = {"never": never, "always": always, "sometimes": sometimes}
    ragged = shape in ("random", "two roots")
    engine.parts.drafter = ScriptedTrees(truth, scripts[script], ragged=ragged, short=ragged, shape=SHAPES[shape])
    if length == "random":
        engine.use_policy(RandomLength(seed=len(shape), longest=14))
    return engine


TREES = {
    "place": ["toy", "toy, split", "flat", "llama", "llama, split", "llama in int8", "native", "native in int8"],
    "shape": SHAPES,
    "script": ["never", "always", "sometimes"],
    "length": ["random", 1, 8, "bass", "auto", "profiled", "caps", "selection", "budget"],
    "family": ["mixed", "greedy"],
    "kernels": ["auto", "off"],
}
ANY_LENGTH = {
    ("length", length): {"shape": ["random", "binary"], "place": ["toy", "flat", "native"]}
    for length in TREES["length"]
    if length != "random"
}


@pytest.mark.parametrize(
    tuple(TREES),
    on_kernels_where_needed(
        pairwise(
            TREES,
            {
                **ANY_LENGTH,
                **{("place", place): {"kernels": ["auto"]} for place in TREES["place"] if "native" in place},
            },
        )
    ),
)
def test_trees_equal_plain_decoding(
    place: str, shape: str, script: str, length: int | str, family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "chosen", lambda: native.select(kernels))
    model, options = PLACES[place]
    engine = tree_engine(model, script, shape, family, length, **options, prefill_chunk=7)
    rounds_by = count_native_rounds(engine) if place == "native" else None
    some = some_of(place, shape, script, length, family)
    found = answers(run(engine, [PROMPTS[i] for i in some], [PARAMS[family][i] for i in some]))
    assert found == [plain(model, family)[i] for i in some]
    if rounds_by is not None:
        assert rounds_by["natively"] > 0
        assert family != "greedy" or not rounds_by["by the host"]
        assert "rounds by the kernels" in engine.describe()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_likely_parts_of_trees_equal_plain_decoding(shape: str) -> None:
    """In trees with scores ``auto`` selects the best draft tokens and reorders them."""
    engine = tree_engine("flat", "always", shape, "mixed", "budget", attention="auto")
    drafter, policy = engine.parts.drafter, engine.parts.policy
    assert isinstance(drafter, ScriptedTrees)
    drafter.scored, select, moved = True, policy.select, []

    def watched(batch: Batch, draft: Draft) -> Draft:
        chosen = select(batch, draft)
        moved.append(chosen.k > 1 and chosen.draft_tokens != draft.first(chosen.drafted).draft_tokens)
        return chosen

    policy.select = watched  # type: ignore[method-assign]
    assert answers(run(engine, PROMPTS, MIXED)) == plain("toy", "mixed")
    assert (sum(moved) > 3) == (shape != "chain")


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("model", ["toy", "flat"])
def test_every_parameter_applies_along_the_path_of_a_tree(
    model: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "chosen", lambda: native.select(kernels))
    engine = tree_engine(model, "sometimes", "random", "everything", max_batch_size=len(PROMPTS))
    assert answers(run(engine, PROMPTS, EVERYTHING)) == plain("toy", "everything")


@pytest.mark.parametrize(("model", "deterministic"), [("toy", False), ("llama", True)])
def test_trees_through_ragged_attention_equal_plain_decoding(model: str, deterministic: bool) -> None:
    """Through Triton's interpreter where there is no GPU: slow."""
    pytest.importorskip("triton", reason="triton is not installed")
    options = {"attention": "ragged", "deterministic": deterministic, "prefill_chunk": 40}
    engine = tree_engine(model, "sometimes", "random", "mixed", **options)
    found = answers(run(engine, [PROMPTS[i] for i in (5, 7)], [MIXED[i] for i in (5, 7)]))
    assert found == [plain(model, "mixed")[i] for i in (5, 7)]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "chain"])
def test_correct_draft_tokens_of_trees_are_accepted(shape: str) -> None:
    """Every round accepts a path to a leaf, so the number of rounds is bounded by the number of tokens and depth."""
    engine = tree_engine("flat", "always", shape, "greedy", 6, attention="auto")
    engine.parts.drafter.ragged = engine.parts.drafter.short = False  # type: ignore[attr-defined]
    depth = {"two roots": 3, "chain and siblings": 3, "binary": 2, "star": 1, "random": 1}[shape]
    for output in run(engine, PROMPTS, GREEDY):
        metrics = output.outputs[0].metrics
        assert metrics.rounds <= -(-metrics.output_tokens // (depth + 1)) + 3
        assert metrics.accepted >= metrics.output_tokens - metrics.rounds


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("model", ["toy", "flat"])
def test_logprobs_along_a_path_are_the_models_own(model: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "chosen", lambda: native.select(kernels))
    params = [replace(one, logprobs=3) for one in GREEDY]
    engine = tree_engine(model, "sometimes", "random", "greedy", 6)
    for prompt, output in zip(PROMPTS, run(engine, PROMPTS, params), strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        for place, entry in enumerate(answer.logprobs):
            distribution = torch.tensor(logits_after(ToyModel(), prompt + answer.token_ids[:place])).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(distribution[answer.token_ids[place]]), abs=1e-5)
            assert [token for token, _ in entry.top] == distribution.topk(3).indices.tolist()


@pytest.mark.parametrize("shape", ["star", "binary"])
@pytest.mark.parametrize("model", ["toy", "flat"])
def test_trees_at_the_end_of_the_cache_equal_plain_decoding(model: str, shape: str) -> None:
    """A short row gets many draft tokens while a long row has few cache slots left: siblings need one slot each."""
    prompts = [PROMPTS[i] for i in (3, 5, 7, 8)]
    params = [SamplingParams(temperature=0, max_tokens=30, seed=seed, ignore_eos=True) for seed in range(4)]
    alone = answers(run(make_engine(TARGETS[model](), max_model_len=24), prompts, params))
    engine = make_engine(TARGETS[model](), drafter="ngram", num_speculative_tokens=16, max_model_len=24)
    truth = truth_of(prompts, params, alone)
    engine.parts.drafter = ScriptedTrees(truth, always, shape=SHAPES[shape])
    assert answers(run(engine, prompts, params)) == alone


@pytest.mark.parametrize("rule", ["rejection", "synthetic:0.5"])
def test_other_rules_refuse_trees_by_name(rule: str) -> None:
    benchmark = {"benchmark": True} if rule.startswith("synthetic") else {}
    engine = tree_engine("toy", "always", "binary", "greedy", 4, acceptance=rule, **benchmark)
    with pytest.raises(ParameterError, match=f"acceptance='{rule}'.*trees"):
        run(engine, PROMPTS[:1], GREEDY[:1])


def test_a_scale_that_positions_share_fails_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """All tokens of a pass [B, heads, L, dim] by one scale, which a rejected draft token may set."""
        largest = vectors.abs().amax((2, 3), keepdim=True).expand(*vectors.shape[:3], 1)
        table = eight_bits.stored(torch.cat((vectors, largest), -1), dtype)
        return torch.cat((table[..., :-5], table[..., -4:]), -1)

    monkeypatch.setattr(cache, "stored", shared)
    found = [
        answers(run(speculative_engine("llama in int8", drafter, 4, "greedy"), PROMPTS, GREEDY))
        for drafter in ("none", "never")
    ]
    assert found[0] != found[1]


def test_a_cache_that_does_not_keep_the_path_fails_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "keep", lambda *_: None)
    engine = tree_engine("flat", "always", "star", "greedy", 6)
    assert answers(run(engine, PROMPTS, GREEDY)) != plain("toy", "greedy")


# --- trees that are drafted -------------------------------------------------------------------------------------------


def count_siblings(engine: Engine) -> Counter[str]:
    """Counter of accepted paths: "nothing", "first" (the first draft tokens) or "sibling", and of rounds with trees."""
    observe, kept = engine.parts.drafter.observe, Counter[str]()

    def counted(batch: Batch, verdict: Verdict) -> None:
        for row, taken in enumerate(verdict.accepted):
            path = list(range(taken)) if verdict.path is None else verdict.path[row]
            kept["nothing" if not path else "first" if path == list(range(taken)) else "sibling"] += 1
        kept["trees"] += verdict.parents is not None
        observe(batch, verdict)

    engine.parts.drafter.observe = counted  # type: ignore[method-assign]
    return kept


BRANCHING = ["ngram", "documents", "model", "hybrid"]  # drafters whose draft tokens may be trees
BRANCHING_OF = {
    "toy": [*BRANCHING, "head", "head hybrid", "parallel", *IN_TORCH],
    "flat": ["documents", "hybrid", "head", "chimera", "dspark"],
    "toy, split": ["documents", "head"],
    "toy on the device": ["self", "head", "dspark", "dflash2"],
    "llama": ["hybrid", "head", "parallel", *IN_TORCH],
    "llama, split": ["head hybrid"],
    "native": [*BRANCHING, "head", "head hybrid", "parallel", "parallel hybrid", *ON_KERNELS],
    "native by the host": ["head", "parallel hybrid"],
    **dict.fromkeys(("recurrent", "lfm2", "gemma4 experts", "experts", "latent"), ("documents", "hybrid", "head")),
    "gemma4": ["documents", "hybrid", "head", "assistant", "assistant hybrid"],
    **dict.fromkeys(("experts int4", "lfm2 int4", "lfm2 bf16", "narrow values"), ("documents",)),
    "mamba2": ["hybrid", "dspark"],
    "delta nets in torch": ["documents"],
    "delta nets on the device": ["model"],
}
ALWAYS_TREES = (1, 4, "random", "caps", "selection", "stops")  # other policies may reduce a tree to chains
DRAFTED_TREES = {
    "place": BRANCHING_OF,
    "drafter": [*BRANCHING, "self", *OF_A_MODEL[2:], *HYBRIDS[1:]],
    "length": [*ALWAYS_TREES, "auto", "budget", "hybrid", "sources"],
    "width": [2, 3, "auto"],
    "family": FACTORS["family"],
}
ONLY_TREES: dict[tuple[str, Any], dict[str, Collection[Any]]] = {
    **{("place", place): {"drafter": drafters} for place, drafters in BRANCHING_OF.items()},
    **{("length", length): {"family": FEW_FAMILIES} for length in ("caps", "selection", "auto")},
    ("length", 1): {"drafter": ["model", "ngram"], "family": FEW_FAMILIES},
    **{("length", length): {"drafter": HYBRIDS, "family": FEW_FAMILIES} for length in ("hybrid", "sources")},
    ("length", "stops"): {"drafter": ["model", "head", "head hybrid", "parallel", "dspark"], "family": FEW_FAMILIES},
    ("length", "budget"): {"drafter": ["model", "head"], "family": FEW_FAMILIES},
    **{
        ("drafter", drafter): {"length": [4, "random", "sources"], "family": ["mixed"]}
        for drafter in ("parallel", *IN_TORCH, *HYBRIDS[1:], "assistant")
    },
    ("drafter", "documents"): {"length": [4, "random"], "family": ["mixed", "siblings", "everything"]},
    ("drafter", "hybrid"): {"length": ["random", "auto", "hybrid", "sources"], "family": FEW_FAMILIES},
    ("drafter", "head"): {"length": [4, "random", "stops", "budget"], "family": [*FEW_FAMILIES, "greedy"]},
    ("width", "auto"): {"place": ["native"], "length": [4]},
}
for _place in BRANCHING_OF:
    if "device" in _place:
        ONLY_TREES["place", _place] |= {"length": [4, "auto", "random"], "family": ["greedy", "mixed"]}
    elif _place not in ("toy", "native"):
        ONLY_TREES["place", _place] |= {"length": [4, "random", "sources"], "family": ["mixed", "siblings"]}


@pytest.mark.parametrize(tuple(DRAFTED_TREES), on_kernels_where_needed(pairwise(DRAFTED_TREES, ONLY_TREES)))
def test_drafted_trees_equal_plain_decoding(
    place: str, drafter: str, length: int | str, width: int | str, family: str
) -> None:
    engine = engine_in(place, drafter, length, family, speculation_width=width, prefill_chunk=7)
    kept, in_one_call = count_siblings(engine), place in IN_ONE_CALL and "assistant" not in drafter
    rounds_by = count_native_rounds(engine) if in_one_call else None
    some, alone = some_of(place, drafter, length, width, family, others=5), plain(PLACES[place][0], family)
    outputs = run(engine, [PROMPTS[i] for i in some], [PARAMS[family][i] for i in some])
    assert answers(outputs) == [alone[i] for i in some]
    assert width == "auto" or f", width {width}," in engine.describe()
    if "device" not in place:
        assert (kept["trees"] > 0) == (engine.parts.drafter.width > 1) or length not in ALWAYS_TREES
        assert kept["sibling"] > 0 or (length, width, family) != (4, 3, "mixed") or drafter == "ngram"
    if rounds_by is not None:
        assert rounds_by["natively"] > 0 or family in ("everything", "processed")
        assert family != "greedy" or not rounds_by["by the host"]
        assert "rounds by the kernels" in engine.describe()


@pytest.mark.parametrize("model", [*TARGETS, "native"])  # the others cannot draft
def test_a_tree_that_a_model_drafts_for_itself_is_accepted_to_its_depth(model: str) -> None:
    """The first candidate of each depth must extend the path before it, and the cache must hold the accepted path."""
    rounds, k = {}, 4
    for width in (1, 3):
        engine = speculative_engine(model, "self", k, "greedy", speculation_width=width, prefill_chunk=7)
        outputs = run(engine, PROMPTS, GREEDY)
        assert answers(outputs) == plain(model, "greedy")
        rounds[width] = [output.outputs[0].metrics.rounds for output in outputs]
    assert rounds[3] == rounds[1]
    assert max(rounds[1]) <= -(-GREEDY[0].max_tokens // (k + 1)) + 1


@pytest.mark.parametrize("rule", ["rejection", "synthetic:0.5"])
def test_other_rules_draft_chains_and_refuse_a_width(rule: str) -> None:
    benchmark = {"benchmark": True} if rule.startswith("synthetic") else {}
    engine = speculative_engine("toy", "ngram", 4, "greedy", acceptance=rule, **benchmark)
    assert engine.parts.drafter.width == 1
    with pytest.raises(ParameterError, match=f"speculation_width=2.*acceptance='{rule}'"):
        speculative_engine("toy", "ngram", 4, "greedy", acceptance=rule, speculation_width=2, **benchmark)


# --- acceptance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "model", "rule"),
    pairwise(
        {"length": LENGTHS, "model": TARGETS, "rule": ["coupled", "rejection"]},
        {("model", model): {"length": ["random"]} for model in ("flat", "llama")}
        | {("length", length): {"rule": ["rejection"]} for length in LENGTHS if length != "random"},
    ),
)
def test_a_model_that_drafts_for_itself_is_always_accepted(model: str, rule: str, length: int | str) -> None:
    engine = speculative_engine(model, "self", length, "mixed", acceptance=rule, prefill_chunk=7)
    for output in run(engine, PROMPTS, MIXED):
        for answer in output.outputs:
            assert answer.metrics.accepted == answer.metrics.drafted
            assert "recovered" not in answer.token_kinds


@pytest.mark.parametrize(("drafter", "rate"), [("always", 1.0), ("never", 0.0)])
def test_scripted_drafters_have_the_scripted_acceptance_rate(drafter: str, rate: float) -> None:
    engine = speculative_engine("toy", drafter, 4, "mixed")
    given = [answer.metrics for output in run(engine, PROMPTS, MIXED) for answer in output.outputs]
    assert {metrics.acceptance_rate for metrics in given if metrics.drafted} == {rate}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_many_plain_rounds_leave_nothing_stale_in_the_draft_cache(rule: str) -> None:
    positions = 320
    toy = functools.partial(ToyModel, max_positions=positions)
    engine = make_engine(toy(), toy(blur=0.15), drafter="model", acceptance=rule, max_model_len=positions)
    drafter, policy = engine.parts.drafter, engine.parts.policy

    class Phases(LengthPolicy):
        name, round = "phases", 0

        def choose(self, batch: Batch) -> SpeculationPlan:
            self.round += 1
            return SpeculationPlan(0) if 10 < self.round <= 210 else policy.choose(batch)

        def observe(self, batch: Batch, verdict: Verdict) -> None:
            accepted, drafted = verdict.accepted, verdict.drafted
            tally["before" if self.round <= 10 else "after"].append((sum(accepted), sum(drafted)))

    tally: dict[str, list[tuple[int, int]]] = {"before": [], "after": []}
    engine.use_policy(Phases())
    assert drafter.decoders
    outputs = [
        engine.add(Request([seed, 2, 3], SamplingParams(seed=seed, max_tokens=300, temperature=0.5)))
        for seed in range(4)
    ]
    for _ in range(222):
        engine.step()
    rates = {phase: sum(a for a, _ in t) / max(1, sum(d for _, d in t)) for phase, t in tally.items()}
    alone = make_engine(toy(), max_model_len=positions)
    expected = answers(
        run(
            alone,
            [[seed, 2, 3] for seed in range(4)],
            [SamplingParams(seed=s, max_tokens=300, temperature=0.5) for s in range(4)],
        )
    )
    if rule == "coupled":
        assert all(
            o.outputs[0].token_ids == e[0][: len(o.outputs[0].token_ids)]
            for o, e in zip(outputs, expected, strict=True)
        )
    assert rates["before"] > 0.4
    assert rates["after"] > rates["before"] - 0.2


def test_a_draft_model_that_is_the_target_is_always_accepted_after_plain_rounds() -> None:
    """With the target as its own draft model, a single stale key would cause rejections."""
    engine = make_engine(ToyModel(), ToyModel(), drafter="model")
    rng = random.Random(0)
    engine.use_policy(RandomLength())
    engine.parts.policy.choose = lambda batch: SpeculationPlan(rng.choice([0, 0, 0, 0, 0, 0, 3]))  # type: ignore[method-assign]
    params = [SamplingParams(seed=i, max_tokens=40) for i in range(9)]
    for output in run(engine, [[1 + i % 5] * (1 + 3 * (i % 4)) for i in range(9)], params):
        assert output.outputs[0].metrics.accepted == output.outputs[0].metrics.drafted


# --- the distribution -------------------------------------------------------------------------------------------------

SMALL = 4
SMALL_PROMPT = [1, 3, 0, 2, 2]
SMALL_DOCUMENT = [*SMALL_PROMPT, 1, 2, 0, 3]
SMALL_TARGET = functools.partial(ToyModel, SMALL, scale=0.9)
SMALL_DRAFT = functools.partial(ToyModel, SMALL, scale=0.9, blur=0.8)  # so far off that a wrong rule is seen
SMALL_PARAMS = {
    "temperature only": {"temperature": 1.0},
    "every knob": {
        "temperature": 1.4,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {2: 0.5},
    },
    "truncation": {
        "temperature": 1.4,
        "typical_p": 0.8,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.1,
        "top_n_sigma": 1.2,
        "top_p": 0.9,
    },
    "a structure": {"temperature": 1.2, "structured_outputs": REGEX},
}
SAMPLES = 1000
SLOW_COUPLED = pytest.param("coupled", marks=pytest.mark.slow)  # tests above show equality with plain decoding


def exact_distribution(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every three-token answer, by enumeration."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in distribution.items():
            logits = logits_after(SMALL_TARGET(), [*SMALL_PROMPT, *answer])
            each = slow_distribution(slow_adjust(logits, params, SMALL_PROMPT, answer, frozenset()), params)
            longer |= {(*answer, token): chance * p for token, p in enumerate(each)}
        distribution = longer
    return distribution


def p_value(engine: Engine, params: SamplingParams) -> float:
    """p-value of a chi-squared test that the engine's three-token answers follow the exact distribution."""
    output = run(engine, [SMALL_PROMPT], [params])[0]
    return p_value_of(Counter(tuple(answer.token_ids) for answer in output.outputs), exact_distribution(params))


def p_value_of(found: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    assert found.keys() <= {answer for answer, chance in distribution.items() if chance > 0}, "an impossible answer"
    frequent = [answer for answer, chance in distribution.items() if chance * SAMPLES >= 8]
    rest = max(1e-9, 1 - sum(distribution[a] for a in frequent))
    observed = [found[a] for a in frequent] + [SAMPLES - sum(found[a] for a in frequent)]
    expected = [distribution[a] * SAMPLES for a in frequent] + [rest * SAMPLES]
    if expected[-1] < 8:  # a remainder with too few samples joins the last cell
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    return float(chisquare(observed, [e * SAMPLES / sum(expected) for e in expected]).pvalue)


def small_engine(drafter: str, rule: str, k: int, rows: int = 50) -> Engine:
    draft: AnyModel | None = SMALL_DRAFT() if drafter in ("model", "hybrid") else None
    if drafter == "feature":
        draft = tiny_native_head(SMALL_TARGET(), 8)  # its vocabulary has two of the four tokens
    if drafter == "parallel":
        draft = tiny_head(SMALL_TARGET(), 8, parallel=True)
    if drafter in IN_TORCH:
        draft = IN_TORCH[drafter](SMALL_TARGET(), 8)
    named = {"parallel": "feature", **dict.fromkeys(IN_TORCH, "feature")}.get(
        drafter, drafter if drafter in ("model", "ngram", "hybrid", "feature") else None
    )
    engine = make_engine(
        SMALL_TARGET(),
        draft,
        documents=[SMALL_DOCUMENT] if drafter == "hybrid" else (),  # n-gram lookup matches it at first
        drafter=named,
        acceptance=rule,
        num_speculative_tokens=k,
        max_batch_size=rows,
        max_model_len=16,
        prefix_cache=False,  # a search in fifty free slots for every sample
    )
    if drafter == "independent draft":
        engine.parts.drafter = IndependentDrafter()
    return engine


class IndependentDrafter(Drafter):
    """Draws draft tokens from fixed distributions that are independent of the target, with random counts."""

    name = "independent"

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.distribution = torch.tensor([[0.7, 0.1, 0.2, 0.0], [0.0, 0.5, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]])

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        k = plan.k
        q = self.distribution[:k].expand(batch.rows, -1, -1)
        flat = q.reshape(-1, SMALL).multinomial(1, generator=self.generator)
        counts = torch.randint(0, k + 1, (batch.rows,), generator=self.generator)
        return Draft(flat.view(batch.rows, k), counts, q.clone())


# One case per code path: the target's draws, distributions with all parameters, distributions that differ by row.
FAST_CASES = [
    ("model", "coupled", 2, "every knob"),
    *(("model", "rejection", 2, knobs) for knobs in SMALL_PARAMS),
    ("hybrid", "rejection", 2, "temperature only"),
    ("parallel", "rejection", 2, "every knob"),
    ("dspark", "rejection", 2, "every knob"),
    ("independent draft", "rejection", 2, "temperature only"),
]
MORE_CASES = [
    ("none", "coupled", 1),
    ("model", "coupled", 2),
    ("model", "rejection", 1),
    ("model", "rejection", 3),
    ("ngram", "rejection", 2),
    ("hybrid", "coupled", 2),
    ("hybrid", "rejection", 2),
    ("parallel", "coupled", 2),
    ("parallel", "rejection", 2),
    ("transfer", "rejection", 2),
    ("chimera", "rejection", 2),
    *((kind, "rejection", 2) for kind in BLOCKS),
    ("independent draft", "rejection", 2),
]
SLOW_CASES = [
    (*distribution, knobs)
    for distribution in MORE_CASES
    for knobs in SMALL_PARAMS
    if (*distribution, knobs) not in FAST_CASES
]


@pytest.mark.parametrize(
    ("drafter", "rule", "k", "knobs"),
    [*FAST_CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_three_tokens_follow_the_exact_distribution(drafter: str, rule: str, k: int, knobs: str) -> None:
    params = SamplingParams(n=SAMPLES, max_tokens=3, seed=20, **SMALL_PARAMS[knobs])
    assert p_value(small_engine(drafter, rule, k), params) > 1e-3


@needs_kernels
@pytest.mark.parametrize(
    ("rule", "knobs"),
    [
        ("rejection", "temperature only"),
        *(pytest.param("rejection", knobs, marks=pytest.mark.slow) for knobs in [*SMALL_PARAMS][1:]),
        pytest.param("coupled", "temperature only", marks=pytest.mark.slow),
    ],
)
def test_tokens_outside_of_a_heads_vocabulary_keep_the_distribution(rule: str, knobs: str) -> None:
    params = SamplingParams(n=SAMPLES, max_tokens=3, seed=23, **SMALL_PARAMS[knobs])
    engine = small_engine("feature", rule, 2)
    assert p_value(engine, params) > 1e-3


@pytest.mark.parametrize("rule", [SLOW_COUPLED, "rejection"])
@pytest.mark.parametrize("policy", ["stops", "confident"])
def test_drafts_whose_length_depends_on_their_tokens_keep_the_distribution(policy: str, rule: str) -> None:
    """Whether drafting stops depends on the draft tokens so far and their likelihoods."""
    engine = small_engine("model", rule, 3)
    engine.use_policy(StopWhenUnsure() if policy == "stops" else cheap_confident(engine))
    assert p_value(engine, SamplingParams(n=SAMPLES, max_tokens=3, seed=22)) > 1e-3


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("hybrid", "rejection"),
        ("by the first token", "rejection"),
        ("row by row", "rejection"),
        pytest.param("row by row", "coupled", marks=pytest.mark.slow),
    ],
)
def test_ngram_drafts_between_drafts_of_a_model_keep_the_distribution(policy: str, rule: str) -> None:
    engine = small_engine("hybrid", rule, 3, rows=125)  # enough rows to have rounds in which many find no match
    engine.use_policy(cheap_hybrid(engine) if policy == "hybrid" else CopyByFirstToken(policy == "row by row"))
    observe = engine.parts.policy.observe
    engine.parts.policy.observe = lambda batch, verdict: observe(batch, steady(verdict))  # type: ignore[method-assign]
    drafter, of_model = engine.parts.drafter, list[set[bool]]()
    propose = drafter.propose

    def recorded(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        last = len(drafter.sources) - 1
        of_model.append({kinds[0] == last for kinds in draft.kinds or [] if len(kinds) > 0})
        return draft

    drafter.propose = recorded  # type: ignore[method-assign]
    assert p_value(engine, SamplingParams(n=SAMPLES, max_tokens=3, seed=22)) > 1e-3
    assert {True} in of_model or {True, False} in of_model
    assert ({True, False} in of_model) == (policy == "row by row" and rule == "coupled")
    assert {False} in of_model or policy != "by the first token"


def steady(verdict: Verdict) -> Verdict:
    """The verdict of a round that took a fixed time, so that the policy does the same in every run."""
    return replace(verdict, timing=RoundTiming(1.0, 10.0))


class CopyByFirstToken(FixedLength):
    """Uses the n-gram draft of a row if its first token is small, else the draft model.

    by_row: whether each row decides for itself, or the first for all.
    """

    def __init__(self, by_row: bool) -> None:
        super().__init__(3)
        self.by_row = by_row

    def choose(self, batch: Batch) -> SpeculationPlan:
        return SpeculationPlan(3, fallback=self._fallback)

    def _fallback(self, batch: Batch, copies: Draft) -> list[int]:
        counts = [0 if line and line[0] < SMALL // 2 else 2 for line in copies.draft_tokens]
        return counts if self.by_row else [counts[0]] * batch.rows


class StopWhenUnsure(FixedLength):
    """Three draft tokens, or fewer if one has a confidence below 0.3."""

    def __init__(self) -> None:
        super().__init__(3)

    def choose(self, batch: Batch) -> SpeculationPlan:
        return SpeculationPlan(3, stop_drafting=lambda _batch, scores: min(line[-1] for line in scores) < 0.3)


def test_many_requests_with_own_seeds_follow_the_exact_distribution() -> None:
    engine = small_engine("model", "rejection", 2)
    params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(SAMPLES)]
    found = Counter(tuple(o.outputs[0].token_ids) for o in run(engine, [SMALL_PROMPT] * SAMPLES, params))
    assert p_value_of(found, exact_distribution(params[0])) > 1e-3


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        pytest.param("coupled", "model", marks=pytest.mark.slow),
        *(("rejection", d) for d in ("model", "hybrid", "dspark")),
    ],
)
def test_device_rounds_keep_the_distribution(rule: str, drafter: str) -> None:
    draft = IN_TORCH[drafter](SMALL_TARGET(), 8) if drafter in IN_TORCH else SMALL_DRAFT()
    engine = make_engine(
        SMALL_TARGET(), draft, drafter="feature" if drafter in IN_TORCH else drafter, acceptance=rule,
        num_speculative_tokens=2, rounds="device", attention="padded", max_batch_size=50, max_model_len=16,
    )  # fmt: skip
    assert p_value(engine, SamplingParams(n=SAMPLES, max_tokens=3, seed=21)) > 1e-3


def _wrong_last_draw(wrong: str) -> Callable[..., Tensor]:
    def last(p: Tensor, q: Tensor, accepted: Tensor, counts: Tensor, rows: RowState) -> Tensor:
        place = accepted[:, None, None].expand(-1, 1, p.shape[-1])
        p_here, q_here = p.gather(1, place).squeeze(1), q.gather(1, place.clamp(max=q.shape[1] - 1)).squeeze(1)
        residual = (p_here - q_here).clamp(min=0)
        kept_all = (accepted == counts)[:, None]
        distributions = {
            "bonus from the draft": torch.where(kept_all, q_here, residual),
            "recovered from the target": p_here,
        }
        key = noise_key(rows.values.seed, rows.length + accepted, Purpose.RECOVER)
        return noisy_argmax(distributions[wrong].log(), key)

    return last


@pytest.mark.parametrize(
    "wrong", ["recovered from the target", pytest.param("bonus from the draft", marks=pytest.mark.slow)]
)
def test_a_wrong_rule_fails_the_test_of_the_distribution(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_last_draw", _wrong_last_draw(wrong))
    params = SamplingParams(n=SAMPLES, max_tokens=3, seed=20)
    assert p_value(small_engine("model", "rejection", 2), params) < 1e-6


def test_a_rule_that_shares_noise_with_the_draft_fails_the_test_of_the_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = functools.partial(noise_key, purpose=Purpose.DRAFT)
    monkeypatch.setattr(rules, "noise_key", lambda seed, position, purpose: shared(seed, position))
    params = SamplingParams(n=SAMPLES, max_tokens=3, seed=20)
    assert p_value(small_engine("model", "rejection", 2), params) < 1e-6
