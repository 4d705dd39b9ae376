"""Qwen3.5 against transformers' own code, and states of its kind and of LFM2's on the kernels under speculation."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from benchmarks.state_memory import resident
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from covering import in_turn, named, pairwise
from kernels.reference_model import ReferenceModel
from model_support import packed, packed_at_once
from paceline.config import SamplingParams
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import WINDOW, RecurrentStates, StatefulCache, StateShape
from paceline.core.row_tables import GROWS
from paceline.kernels import native
from paceline.kernels.spec import NativeSpec
from paceline.models.base import AnyModel, FlatModel, cache_of
from paceline.models.load.loading import open_checkpoint
from paceline.models.native import matrices as module
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import spec_of
from quantised_support import CONVERTERS, convert_files
from recurrent_support import (
    GRANITE_SIZES,
    LFM2_SIZES,
    SIZES,
    in_torch,
    on_kernels,
    reference_of,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_lfm3,
    tiny_native_recurrent,
    tiny_nemotron,
    tiny_qwen3_5,
    tiny_qwen3_next,
    tiny_recurrent,
)
from toy import SHAPES, VOCAB, answers, make_engine, run, script_drafts, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, Callable[[], AnyModel]] = {
    "torch": lambda: in_torch(tiny_qwen3_5()),
    "bf16": lambda: tiny_native_recurrent(quantization=None),
    "int8": lambda: tiny_native_recurrent(**SIZES["wide"]),
    "int4": lambda: tiny_native_recurrent(quantization="int4"),
    "lfm2 bf16": lambda: on_kernels(tiny_lfm2(), None),
    "lfm2 int8": lambda: on_kernels(tiny_lfm2(**LFM2_SIZES["other"])),
    "lfm2 int4": lambda: on_kernels(tiny_lfm2(1), "int4"),
    "lfm3 int4": lambda: on_kernels(tiny_lfm3(1), "int4"),
    "lfm3 bf16": lambda: on_kernels(tiny_lfm3(), None),
    "granite bf16": lambda: on_kernels(tiny_granite_hybrid(), None),
    "granite int8": lambda: on_kernels(tiny_granite_hybrid(**GRANITE_SIZES["grouped"])),
    "nemotron int8": lambda: on_kernels(tiny_nemotron(kinds="mefme", moe_latent_size=40)),
    "falcon bf16": lambda: on_kernels(tiny_falcon_h1(), None),
    "falcon int4": lambda: on_kernels(tiny_falcon_h1(), "int4"),
}
MODELS = {kind: functools.cache(make) for kind, make in MODELS.items()}
THEIRS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: functools.partial(tiny_qwen3_5, **sizes) for name, sizes in SIZES.items()},
    **{f"lfm2 {name}": functools.partial(tiny_lfm2, **sizes) for name, sizes in LFM2_SIZES.items()},
    **{f"granite {name}": functools.partial(tiny_granite_hybrid, **sizes) for name, sizes in GRANITE_SIZES.items()},
    "nemotron": functools.partial(tiny_nemotron, kinds="m-fm-"),
    "falcon": functools.partial(tiny_falcon_h1, mamba_rms_norm=True),
    "falcon without norm": tiny_falcon_h1,
}
_rng = random.Random(2)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(size)] for size in (1, 5, 40, 2, 19, 7)]
PARAMS = [SamplingParams(temperature=0, max_tokens=18, seed=seed) for seed in range(len(PROMPTS))]


def chain(tokens: Sequence[int], start: int = 0, row: int = 0) -> Nodes:
    size = len(tokens)
    return Nodes(torch.tensor(tokens), torch.full((size,), row), torch.arange(start, start + size))


def assert_greedy(model: Qwen3_5ForCausalLM, prompt: list[int], answer: list[int]) -> None:
    """Check that each token is the most likely one after those before it, by one pass of transformers' model."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_equal_those_of_transformers(sizes: str) -> None:
    for seed in range(2):
        theirs = tiny_qwen3_5(seed, **SIZES[sizes])
        model = reference_of(theirs)
        tokens = [(7 * place + seed) % VOCAB for place in range(70)]
        with torch.inference_mode():
            wanted = theirs(torch.tensor([tokens])).logits[0]
            found = model.logits(model.forward(chain(tokens), cache_of(model, 1, 80)).hidden)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("sizes", "rows"), zip(SIZES, (6, 1, 6), strict=True))
def test_greedy_answers_equal_those_of_transformers(sizes: str, rows: int) -> None:
    theirs = tiny_qwen3_5(1, **SIZES[sizes])
    engine = make_engine(in_torch(theirs), drafter="ngram", max_batch_size=rows, prefill_chunk=7)
    for prompt, (answer,) in zip(PROMPTS, answers(run(engine, PROMPTS, PARAMS)), strict=True):
        assert_greedy(theirs, prompt, answer)


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize(
    ("stored", "quantization"), [("plain", None), ("plain", "int4"), ("float8 in small blocks", "int8")]
)
def test_a_checkpoint_read_while_it_is_packed_gives_the_weights_of_one_read_at_once(
    stored: str, quantization: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_NUMBERS", 0)  # parts are read by threads
    for number, theirs in enumerate(THEIRS.values()):
        tmp_path = tmp_path / str(number)
        theirs().save_pretrained(tmp_path)
        if stored != "plain":
            convert_files(tmp_path, CONVERTERS[stored])
        models = packed(tmp_path, quantization), packed_at_once(tmp_path, quantization)
        straight, at_once = (model.packed() for model in models)  # the models' memory
        assert straight is not None
        assert at_once is not None
        assert torch.equal(straight, at_once)


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
@pytest.mark.parametrize(("make", "more"), [(tiny_qwen3_5, 0), (tiny_qwen3_next, 0), (tiny_falcon_h1, 2)])
def test_stored_codes_are_kept_also_where_their_rows_are_in_another_order_or_multiplied(
    make: Callable[[], PreTrainedModel], more: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gates lie between the queries, and Qwen3-Next has the rows of a key head together.

    more: stored matrices that become two parts, as the first one of Mamba-2.
    """
    caplog.set_level("INFO", "paceline")
    make().save_pretrained(tmp_path)
    matrices = convert_files(tmp_path, CONVERTERS["compressed-tensors W8A8"])
    models = packed(tmp_path, "int8"), packed_at_once(tmp_path, "int8")
    straight, at_once = (model.packed() for model in models)  # the models' memory
    assert straight is not None
    assert at_once is not None
    first = slice(0, 1 << 14)  # bytes of the first layer's first matrix
    assert (straight[first] == at_once[first]).float().mean() > 0.9, "rows in another order give 0.1"
    assert f"{len(matrices) + more} int8 as stored" in caplog.messages[-1]
    assert any("q_proj" in name for name in matrices)


@functools.cache
def plain_answers(kind: str) -> list[list[list[int]]]:
    """Answers of plain decoding, one prompt at a time."""
    return answers(run(make_engine(MODELS[kind](), max_batch_size=1), PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("kind", "shape"),
    in_turn(MODELS, ["caps", *SHAPES]),
)
def test_rejected_draft_tokens_and_other_branches_leave_no_trace(kind: str, shape: str) -> None:
    plain = plain_answers(kind)
    engine = make_engine(MODELS[kind](), drafter="ngram", max_batch_size=4, prefill_chunk=5)
    assert (engine.rounds.choice.kernels is not None) == (kind != "torch"), "the kernels run whole rounds"
    script_drafts(engine, truth_of(PROMPTS, PARAMS, plain), shape)
    outputs = run(engine, PROMPTS, PARAMS)
    assert answers(outputs) == plain
    assert sum(output.outputs[0].metrics.accepted for output in outputs) > 10


def test_a_state_does_not_depend_on_how_its_text_was_fed() -> None:
    model, tokens = tiny_recurrent(), [3 * place % VOCAB for place in range(60)]
    pieces = {"whole": [60], "chunks": [7, 1, 30, 22], "one by one": [1] * 60}
    found = {}
    for name, sizes in pieces.items():
        cache, start = cache_of(model, 2, 64), 0
        for number, size in enumerate(sizes):
            feed = model.fill if number % 2 else model.forward  # text, or tokens that might be rejected
            feed(chain(tokens[start : start + size], start, row=1), cache)
            start += size
        model.fill(chain([5], 60, row=1), cache)
        assert isinstance(cache, StatefulCache)
        found[name] = cache.states.state[:, 1]
    torch.testing.assert_close(found["chunks"], found["whole"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found["one by one"], found["whole"], atol=1e-5, rtol=1e-5)


def test_a_slot_continues_only_where_its_state_is_known() -> None:
    model = tiny_recurrent()
    cache = cache_of(model, 2, 64)
    assert isinstance(cache, StatefulCache)
    states = cache.states
    model.fill(chain(range(20)), cache)
    model.forward(chain(range(4), 20), cache)
    assert [states.reusable(0, tokens) for tokens in (5, 20, 21, 22, 24, 30)] == [0, 0, 21, 22, 24, 24]
    cache.copy_row(0, 1, 22)
    assert states.reusable(1, 30) == 22
    for start in (20, 25):
        with pytest.raises(ValueError, match=f"cannot go on at token {start}"):
            model.forward(chain([1], start), cache)
    continued = [model.forward(chain([1], 22, row=row), cache).hidden for row in (0, 1)]
    torch.testing.assert_close(*continued, rtol=0, atol=0)
    model.forward(chain([1] * (WINDOW + 5), 0), cache)  # more than a window: the first of them are certain
    assert (int(states.base[0]), int(states.count[0])) == (5, WINDOW)


@pytest.mark.skipif(not GROWS, reason="elsewhere memory is allocated as a whole")
def test_memory_is_taken_by_the_inputs_that_were_kept_and_by_no_others() -> None:
    page = PAGESIZE // 4  # numbers of four bytes: the input of a token fills a page
    states = RecurrentStates(StateShape(layers=2, taps=2, channels=page), slots=3)
    tables = states.state, states.tail, states.inputs
    assert [resident(table) for table in tables] == [0, 0, 0]
    states.inputs[:, 0, :4] = 1
    states.base[0], states.count[0] = 5, 4
    states.copy(0, 2, 8)
    assert resident(states.inputs) == 2 * (4 + 3) * 4 * page, "of four tokens, and of three that were copied"


def test_accepted_paths_are_moved_in_rows_that_ran_and_in_no_idle_one() -> None:
    """A round of a device also gives a path for each row whose answer is complete."""
    states = RecurrentStates(StateShape(layers=1, taps=2, channels=1), slots=3)
    states.inputs[0, :, :3, 0] = torch.arange(9.0).view(3, 3)
    states.base.copy_(torch.tensor([4, 5, 6]))
    paths = torch.tensor([[1, 2, 0]] * 2)
    states.keep(torch.tensor([2, 0]), torch.tensor([6, 9]), paths)
    assert states.inputs[0, :, :3, 0].tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 6]]


@functools.cache
def unpacked(name: str) -> NativeSpec:
    """What the kernels compute, with a model's weights in float32."""
    checkpoint = open_checkpoint(THEIRS[name]())
    assert checkpoint is not None
    return spec_of(checkpoint.spec, checkpoint.tensors(torch.float32, torch.device("cpu")))


EVERY = (*native.available(), *native.emulated())
ON_EVERY = ("wide", "lfm2 other", "granite grouped", "falcon")  # each kind of state, in sizes that no vector divides


@pytest.mark.parametrize(
    ("kernels", "quantization", "name"),
    pairwise(
        {"kernels": EVERY, "quantization": [None, "int8", "int4"], "name": THEIRS},
        {
            ("name", name): {"kernels": [kernels], "quantization": [quantization]}
            for (name, kernels), quantization in in_turn(in_turn(THEIRS, EVERY), ("int8", "int4", None, "int4"))
            if name not in ON_EVERY
        },
    ),
    ids=named,
)
def test_kernels_agree_with_their_reference_and_bits_do_not_depend_on_the_pass(
    name: str, quantization: Quantization | None, kernels: native.Kernels
) -> None:
    spec, tokens = unpacked(name), [5 * place % VOCAB for place in range(50)]
    fast = NativeModel(spec, "tiny", quantization=quantization, threads=2, kernels=kernels)
    slow = ReferenceModel(spec, "tiny", quantization=quantization)
    found = in_pieces(fast, tokens, [50])
    torch.testing.assert_close(found[:4], in_pieces(slow, tokens[:4], [4]), atol=2e-3, rtol=2e-3)
    for pieces in ([1] * 50, [3, 23, 24]):
        torch.testing.assert_close(in_pieces(fast, tokens, pieces), found, rtol=0, atol=0)


def in_pieces(model: FlatModel, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Hidden states of a text that is fed in pieces."""
    cache, start, found = cache_of(model, 1, 128), 0, []
    for size in sizes:
        found.append(model.forward(chain(tokens[start : start + size], start), cache).hidden)
        start += size
    return torch.cat(found)


def test_saved_states_let_another_text_begin_with_a_part_of_this_one() -> None:
    model = tiny_recurrent()
    cache = cache_of(model, 2, 64)
    assert isinstance(cache, StatefulCache)
    states, tokens = cache.states, [7 * place % VOCAB for place in range(40)]
    for start, stop in ((0, 20), (20, 25), (25, 40)):
        model.fill(chain(tokens[start:stop], start), cache)
        states.save(0, apart=10)
    model.forward(chain([1, 2, 3], 40), cache)
    assert [states.reusable(0, size) for size in (19, 24, 30, 40, 42)] == [0, 20, 20, 40, 42], "the oldest stays of 2"
    cache.copy_row(0, 1, 20)
    copied = model.forward(chain(tokens[20:40], 20, row=1), cache).hidden[-1]
    fresh = model.forward(chain(tokens), cache_of(model, 1, 64)).hidden[-1]
    torch.testing.assert_close(copied, fresh, atol=1e-5, rtol=1e-5)
    states.cut(0, 20)
    assert [states.reusable(0, size) for size in (19, 40)] == [0, 20]


@pytest.mark.parametrize("kind", ["torch", "int8", "lfm2 int8", "granite int8", "falcon int4"])
def test_prompts_with_a_common_beginning_reuse_states_and_answers_stay_the_same(kind: str) -> None:
    rng = random.Random(3)
    document = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [document, *([*document, *(rng.randrange(VOCAB) for _ in range(9))] for _ in range(5))]
    params = [SamplingParams(temperature=0, max_tokens=8, seed=seed) for seed in range(len(prompts))]
    alone = answers(run(make_engine(MODELS[kind](), max_batch_size=1, prefix_cache=False), prompts, params))
    engine = make_engine(MODELS[kind](), drafter="ngram", max_batch_size=2, prefill_chunk=16)
    outputs = [run(engine, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert answers(outputs) == alone
    cached = [output.outputs[0].metrics.cached_tokens for output in outputs]
    assert cached[0] == 0
    assert all(count == len(document) - 1 for count in cached[1:])


def test_a_chat_goes_on_from_the_state_in_its_slot() -> None:
    engine, text, cached = make_engine(MODELS["torch"](), max_batch_size=2), [5, 6, 7] * 7, []
    for turn in range(4):
        (output,) = run(engine, [text], [SamplingParams(temperature=0, max_tokens=6, seed=turn)])
        cached.append(output.outputs[0].metrics.cached_tokens)
        (plain,) = run(make_engine(MODELS["torch"]()), [text], [SamplingParams(temperature=0, max_tokens=6, seed=turn)])
        assert answers([output]) == answers([plain])
        text = [*text, *output.outputs[0].token_ids, 3, 4, turn]
    assert cached == [0, 26, 35, 44], "all but the last token of each answer"


@pytest.mark.parametrize("kind", ["torch", "int8", "lfm2 int8", "granite int8"])
def test_parallel_samples_read_their_prompt_once(kind: str) -> None:
    params = [SamplingParams(temperature=1, max_tokens=12, seed=1, n=4)]
    prompt = [PROMPTS[2]]
    alone = answers(run(make_engine(MODELS[kind](), max_batch_size=1, prefix_cache=False), prompt, params))
    outputs = run(make_engine(MODELS[kind](), drafter="ngram", max_batch_size=4, prefill_chunk=9), prompt, params)
    assert answers(outputs) == alone
    assert [one.metrics.cached_tokens for one in outputs[0].outputs] == [0, 39, 39, 39]
