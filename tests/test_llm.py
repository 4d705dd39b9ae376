"""Offline Python API on loaded models, mostly with token ids."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from kernels.tools import random_spec
from model_support import NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.chat.values import AssistantMessage
from paceline.config import MIN_TEMPERATURE
from paceline.config.limits import MAX_COUNT, MAX_REFERENCE_CHARACTERS
from paceline.core.cpus import Node
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.engine.engine import Request
from paceline.engine.requests import encoded
from paceline.errors import (
    EmptyPromptError,
    ModelFormatError,
    ModelNotFoundError,
    PacelineError,
    ParameterError,
    RequestError,
)
from paceline.kernels import native
from paceline.models.native.model import NativeModel
from paceline.models.text.tokenizer import Tokenizer
from server_support import byte_tokenizer
from toy import VOCAB, make_engine, run, slow_answer, tiny_llama, tiny_llama_of_transformers
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread", "no_requests")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def make(draft: bool = True, **options: Any) -> LLM:
    common = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "attention": "padded", "threads": 1}
    draft_tokens = {"num_speculative_tokens": 4} if draft or options.get("drafter") else {}
    options = common | draft_tokens | options
    return LLM(tiny_llama_of_transformers(), tiny_llama_of_transformers(1) if draft else None, **options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [slow_answer(tiny_llama(), prompt, GREEDY) for prompt in PROMPTS]


def test_a_bare_model_continues_token_ids_without_a_tokenizer(llm: LLM, expected: list[list[int]]) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert all(output.prompt is None and output.outputs[0].text == "" for output in outputs)


@pytest.mark.parametrize("attention", ["padded", "native"])
def test_an_llm_made_in_inference_mode_runs_in_and_outside_of_it(attention: str) -> None:
    if attention == "native" and not native.available():
        pytest.skip(f"no kernels here: {native.why_none()}")
    model = tiny(*NATIVE["llama"][:1], NATIVE["llama"][1] | {"head_dim": 16})  # the kernels' minimum
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "attention": attention, "threads": 1}
    wanted = tokens(LLM(model, **options).generate(PROMPTS, GREEDY, use_tqdm=False))
    with torch.inference_mode():
        llm = LLM(model, **options)
        other = llm.with_options(max_batch_size=2)
    for made in (llm, other):
        assert tokens(made.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
        with torch.inference_mode():
            assert tokens(made.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted
        assert made.score([[1, 2]], [[3]], use_tqdm=False)[0].token_ids == [3]
        assert tokens(made.generate(PROMPTS, GREEDY, use_tqdm=False)) == wanted


OVERRIDES: dict[str, Callable[[ExitStack], object]] = {
    "bfloat16": lambda _: torch.set_default_dtype(torch.bfloat16),
    "float64": lambda _: torch.set_default_dtype(torch.float64),
    "meta": lambda _: torch.set_default_device("meta"),
    "autocast": lambda stack: stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
}


@pytest.fixture(params=OVERRIDES)
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], object]]:
    """Function that overrides a default of torch until the test ends, as users of bfloat16 or GPUs often do."""
    with ExitStack() as stack:
        yield lambda: OVERRIDES[request.param](stack)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


MIXED_PARAMS = [
    SamplingParams(temperature=1, seed=1, max_tokens=10, logprobs=2, top_p=0.9, presence_penalty=0.5),
    SamplingParams(temperature=1, seed=2, max_tokens=10, min_p=0.05, repetition_penalty=1.2, logit_bias={3: 1.0}),
    SamplingParams(temperature=0, max_tokens=10, min_tokens=3, stop_token_ids=(4, 5)),
]


@pytest.mark.parametrize("attention", ["padded", "native"])
def test_results_do_not_depend_on_torchs_defaults_and_autocast(default: Callable[[], object], attention: str) -> None:
    """The kernels write float32 to raw addresses, so tensors of another dtype would corrupt memory."""
    if attention == "native" and not native.available():
        pytest.skip(f"no kernels here: {native.why_none()}")
    model = tiny(*NATIVE["llama"][:1], NATIVE["llama"][1] | {"head_dim": 16})  # the kernels' minimum

    def results() -> list[object]:
        dtype = "bfloat16" if attention == "native" else "float32"
        options: dict[str, Any] = {"dtype": dtype, "device": "cpu", "attention": attention, "threads": 1}
        llm = LLM(model, model, max_batch_size=2, num_speculative_tokens=2, **options)
        outputs = llm.generate(PROMPTS, MIXED_PARAMS, use_tqdm=False)
        outputs += llm.with_options(acceptance="rejection").generate(PROMPTS, MIXED_PARAMS, use_tqdm=False)
        answers = [(answer.token_ids, answer.logprobs) for output in outputs for answer in output.outputs]
        return [answers, llm.score([[1, 2]], [[3, 4]], use_tqdm=False)]

    expected = results()
    default()
    assert results() == expected


def test_a_bare_model_equals_transformers_own_greedy_generate(expected: list[list[int]]) -> None:
    model = tiny_llama_of_transformers()
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        with torch.no_grad():
            full = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=10,
                do_sample=False,
                pad_token_id=0,
                attention_mask=torch.ones(1, len(prompt)),
            )
        assert full[0, len(prompt) :].tolist() == answer


def test_one_prompt_is_a_batch_of_one(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == expected[:1]


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_token_ids_may_be_numpys_or_torchs(llm: LLM, expected: list[list[int]]) -> None:
    prompts: list[Any] = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[1]), tuple(PROMPTS[2])]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == PROMPTS


@pytest.mark.parametrize("one", [np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2], [torch.tensor(1), 2]])
def test_one_prompt_may_be_an_array(llm: LLM, one: Any) -> None:
    (output,) = llm.generate(one, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [1, 2]
    assert all(type(token) is int for token in output.prompt_token_ids)


def test_an_array_of_two_dimensions_is_a_batch(llm: LLM) -> None:
    outputs = llm.generate(torch.tensor([[1, 2], [3, 4]]), GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3, 4]]


INVALID_PROMPTS: list[Any] = [
    *(b"ab", [b"ab"], bytearray(b"ab"), [[b"a"]]),
    *({"a": 1}, {1, 2}, None, 5, object(), iter([[1]])),
    *([None], [5, None], [[True]], [[1.5]], [["a"]], [[[1]]], np.array([1.5]), torch.tensor([True]), torch.tensor(1)),
    *("a\ud800", ["\udfff", "a"]),
]


@pytest.mark.parametrize("prompts", INVALID_PROMPTS, ids=lambda value: repr(value).split(" at 0x")[0])
def test_an_invalid_prompt_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ParameterError, match=r"^prompts(\[0\])?=.* is not allowed: .*(token ids|half a character)"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("documents", ["abc", b"abc", 5, [5], {"a": "b"}, [[1.5]], [b"abc"]], ids=repr)
def test_an_invalid_list_of_documents_is_refused_by_name(documents: Any) -> None:
    with pytest.raises(ParameterError, match=r"^reference_documents="):
        make(draft=False, drafter="ngram", reference_documents=documents)


@pytest.mark.parametrize("params", [{"n": 1}, "greedy", 5, [{}], [None, GREEDY]], ids=repr)
def test_invalid_parameters_are_refused_by_name(llm: LLM, params: Any) -> None:
    with pytest.raises(ParameterError, match=r"^params=.*(from_mapping|one per prompt)"):
        llm.generate([[1]], params, use_tqdm=False)


@pytest.mark.parametrize("messages", ["hello", None, 5, [5], {"role": "user", "content": "x"}, ["hello"]], ids=repr)
def test_an_invalid_conversation_is_refused_by_name(llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match=r"^messages="):
        llm.chat(messages, use_tqdm=False)


@pytest.mark.parametrize("source", [5, b"x", "", "a\0b", "x" * 5000, "a/" + "x" * 300, ["a"]], ids=repr)
def test_an_invalid_model_source_is_refused_by_name(source: Any) -> None:
    with pytest.raises(ParameterError, match=r"^model="):
        LLM(source)
    with pytest.raises(ParameterError, match=r"^draft_model="):
        LLM(tiny_llama_of_transformers(), source)
    with pytest.raises(ParameterError, match=r"^tokenizer="):
        LLM(tiny_llama_of_transformers(), tokenizer=source, device="cpu")


def test_a_closed_llm_raises_and_may_be_closed_again() -> None:
    llm = make()
    llm.close()
    llm.close()
    for use in (lambda: llm.generate([1], use_tqdm=False), llm.plain, lambda: llm.config, lambda: llm.engine):
        with pytest.raises(PacelineError, match="was closed"):
            use()


def test_a_model_without_end_of_text_token_decodes_to_the_limit() -> None:
    model = tiny_llama_of_transformers()
    model.generation_config = None
    model.config.eos_token_id = None
    (output,) = LLM(model, device="cpu", dtype="float32").generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_the_callers_list_is_not_touched_and_not_kept(llm: LLM) -> None:
    prompt = [1, 2, 3]
    output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    prompt.append(9)
    assert output.prompt_token_ids == [1, 2, 3]


def test_params_are_one_for_all_or_one_a_prompt(llm: LLM, expected: list[list[int]]) -> None:
    each = [SamplingParams(temperature=0, max_tokens=size) for size in (1, 2, 3)]
    assert tokens(llm.generate(PROMPTS, each, use_tqdm=False)) == [e[: i + 1] for i, e in enumerate(expected)]
    with pytest.raises(ParameterError, match=r"params='2 entries'.*\(3\)"):
        llm.generate(PROMPTS, each[:2], use_tqdm=False)


EDGES: list[dict[str, Any]] = [
    {"top_k": MAX_COUNT},
    {"top_k": MAX_COUNT, "top_p": 0, "min_p": 1.0},
    {"temperature": MIN_TEMPERATURE},
    {"temperature": MIN_TEMPERATURE, "repetition_penalty": 0.01, "presence_penalty": 2},
    {"temperature": 100, "top_p": 1.0, "repetition_penalty": 100, "frequency_penalty": -2},
    {"temperature": MIN_TEMPERATURE, "logit_bias": {1: 100, 2: -100}, "min_p": 1e-40},
    {"max_tokens": MAX_COUNT, "seed": 2**64 - 1},
    {"max_tokens": MAX_COUNT, "min_tokens": MAX_COUNT, "seed": -(2**63)},
]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_parameters_at_the_ends_of_their_ranges_decode(acceptance: str) -> None:
    """They are exact in float32: the extremes decode greedily and nothing overflows, alone or in one batch."""
    llm = make(acceptance=acceptance, max_batch_size=len(EDGES), max_model_len=24)
    params = [SamplingParams(**{"max_tokens": 12, **edge}) for edge in EDGES]
    for output in llm.generate([PROMPTS[2]] * len(EDGES), params, use_tqdm=False):
        answer = output.outputs[0]
        assert all(0 <= token < VOCAB for token in answer.token_ids)
        assert answer.finish_reason == "length"
    likely = [SamplingParams(**{"max_tokens": 10, **edge}) for edge in EDGES[1:3]]
    greedy = SamplingParams(max_tokens=10, temperature=0)
    assert tokens(llm.generate([PROMPTS[2]] * 2, likely, use_tqdm=False)) == 2 * tokens(
        llm.generate(PROMPTS[2], greedy, use_tqdm=False)
    )


def test_a_text_prompt_and_a_chat_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="tokenizer"):
        llm.generate("hello", use_tqdm=False)
    with pytest.raises(ParameterError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)


def test_a_bad_prompt_leaves_the_next_call_alone(llm: LLM, expected: list[list[int]]) -> None:
    with pytest.raises(EmptyPromptError):
        llm.generate([[1], []], GREEDY, use_tqdm=False)
    with pytest.raises(ParameterError, match=f"prompt_token_ids={VOCAB}"):
        llm.generate([[1], [VOCAB]], GREEDY, use_tqdm=False)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_other_options_share_the_weights(llm: LLM, expected: list[list[int]]) -> None:
    plain, split = llm.plain(), llm.with_options(attention="split", num_speculative_tokens="bass", max_batch_size=1)
    assert plain.config.drafter is None
    assert split.config.attention == "split"
    assert llm.config.attention == "padded"
    assert plain.engine.models.target is split.engine.models.target is llm.engine.models.target
    assert tokens(plain.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert tokens(split.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert plain.generate(PROMPTS, GREEDY, use_tqdm=False)[0].outputs[0].metrics.drafted == 0
    assert split.generate(PROMPTS, GREEDY, use_tqdm=False)[0].outputs[0].metrics.drafted > 0
    assert "no speculation" in plain.engine.describe()
    assert "no speculation" not in plain.with_options(drafter="ngram").engine.describe(), (
        "a drafter brings lengths back"
    )


def test_options_of_the_weights_cannot_change(llm: LLM) -> None:
    for option in ({"dtype": "bfloat16"}, {"device": "cpu"}):
        with pytest.raises(ParameterError, match="make a new LLM"):
            llm.with_options(**option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "draft_dtype", "field"), [("float16", "float32", "dtype"), ("float32", "float16", "draft_dtype")]
)
def test_float16_is_refused_on_a_cpu_before_anything_is_loaded(
    dtype: str, draft_dtype: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.loading.load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ParameterError, match=f"{field}='float16'.*'float32' or 'bfloat16' on a CPU"):
        make(dtype=dtype, draft_dtype=draft_dtype)


@pytest.mark.parametrize(("attention", "rounds"), [("padded", "host"), ("ragged", "device")])
def test_a_float16_engine_gives_the_same_with_and_without_speculation(
    attention: str, rounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers GPUs without bfloat16."""
    if attention == "ragged":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("paceline.engine.loading.resolve_dtype", lambda *_: torch.float16)
    options = {"attention": attention, "rounds": rounds, "max_batch_size": 3}
    plain, speculating = make(draft=False, drafter=None, **options), make(drafter="model", **options)
    assert {model.dtype for model in (speculating.engine.models.target, speculating.engine.models.draft)} == {
        torch.float16
    }
    for params in (SamplingParams(temperature=0, max_tokens=3), SamplingParams(top_p=0.9, seed=3, max_tokens=3)):
        answers = [tokens(llm.generate(PROMPTS[:2], params, use_tqdm=False)) for llm in (plain, speculating)]
        assert answers[0] == answers[1]


def threads_of_rounds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of torch threads during the rounds of one call."""
    seen, original = set(), llm.engine._step

    def step() -> list[RequestOutput]:
        seen.add(torch.get_num_threads())
        return original()

    monkeypatch.setattr(llm.engine, "_step", step)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return seen


def test_every_engine_has_its_own_number_of_threads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = llm.with_options(threads=2), make(threads=3)
    assert torch.get_num_threads() == 1, "the process's own number stays"
    assert threads_of_rounds(two, monkeypatch) == {2}
    assert threads_of_rounds(three, monkeypatch) == {3}
    assert threads_of_rounds(llm, monkeypatch) == {1}
    assert torch.get_num_threads() == 1
    assert ", 2 threads;" in two.engine.describe()
    assert [each.engine.identity().threads for each in (llm, two, three)] == [1, 2, 3]


@pytest.mark.skipif(not native.available(), reason="needs the C++ kernels")
def test_the_kernels_of_one_model_run_on_each_engines_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, original = NativeModel(random_spec(), "tiny", threads=1), [], native.pool

    def pool(kernels: native.Kernels, threads: int, nodes: Sequence[Node] = ()) -> native.Pool:
        asked.append(threads)
        return original(kernels, threads, nodes)

    monkeypatch.setattr(native, "pool", pool)
    found = []
    for threads in (2, 1, 3):
        asked.clear()
        engine = make_engine(model, attention="auto", threads=threads)
        found.append(run(engine, [[1, 2, 3]], [SamplingParams(seed=1, max_tokens=5, top_k=5)])[0].outputs[0].token_ids)
        assert set(asked) == {threads}
    assert found[0] == found[1] == found[2]


def test_the_default_drafter_depends_on_the_draft_model_and_a_drafter_without_one_is_refused(llm: LLM) -> None:
    assert llm.config.drafter == "hybrid"
    with pytest.raises(ParameterError, match="draft_model"):
        make(draft=False, drafter="model")
    assert make(draft=False).config.drafter == "ngram"
    assert make(draft=False, drafter=None).config.drafter is None


@pytest.mark.parametrize("device", ["warp", "mps", "meta", "cpu:5", "cuda:-1", "cuda:" + "9" * 30])
def test_an_unknown_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ParameterError, match=f"device='{device}'"):
        make(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="device='cuda'"):
        make(device="cuda")


def test_draft_models_with_another_padding_of_the_vocabulary_are_fine(expected: list[list[int]]) -> None:
    for size in (VOCAB - 4, VOCAB + 8):
        llm = LLM(
            tiny_llama_of_transformers(),
            tiny_llama_of_transformers(1, size),
            dtype="float32",
            device="cpu",
            num_speculative_tokens=3,
        )
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_on_finished_is_called_once_a_request_in_the_order_of_ending(llm: LLM) -> None:
    ended: list[RequestOutput] = []
    each = [SamplingParams(temperature=0, max_tokens=size) for size in (30, 1, 2)]
    outputs = llm.generate(PROMPTS, each, use_tqdm=False, on_finished=ended.append)
    assert len(ended) == 3
    assert ended[0] is outputs[1]
    assert all(output.finished for output in ended)


def test_an_interrupt_reaches_the_caller_and_finished_answers_stay(llm: LLM, expected: list[list[int]]) -> None:
    ended: list[RequestOutput] = []

    def stop_after_two(output: RequestOutput) -> None:
        ended.append(output)
        if len(ended) == 2:
            raise KeyboardInterrupt

    each = [SamplingParams(temperature=0, max_tokens=size) for size in (30, 1, 2)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, each, use_tqdm=False, on_finished=stop_after_two)
    assert [output.outputs[0].token_ids for output in ended] == [expected[1][:1], expected[2][:2]]
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_a_streams_snapshots_are_prefixes_of_each_other(llm: LLM, expected: list[list[int]]) -> None:
    seen: dict[str, list[list[int]]] = {}
    for output in llm.stream(PROMPTS, GREEDY):
        seen.setdefault(output.request_id, []).append(list(output.outputs[0].token_ids))
    for snapshots, answer in zip(seen.values(), sorted(expected, key=expected.index), strict=True):
        assert snapshots[-1] == answer
        assert len(snapshots) > 1
        for before, after in itertools.pairwise(snapshots):
            assert len(before) < len(after)
            assert after[: len(before)] == before


def test_a_stream_that_is_left_early_frees_its_rows(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.busy
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_a_time_budget_ends_unfinished_answers(llm: LLM, expected: list[list[int]]) -> None:
    late = SamplingParams(temperature=0, max_tokens=80, time_budget=1e-9)
    output = llm.generate(PROMPTS[0], late, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "deadline"
    assert output.outputs[0].token_ids == []


def test_reference_documents_may_be_token_ids(expected: list[list[int]]) -> None:
    document = PROMPTS[0] + expected[0]
    llm = make(draft=False, drafter="ngram", reference_documents=[document])
    answer = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0]
    assert answer.token_ids == expected[0]
    assert answer.metrics.acceptance_rate == 1.0
    assert answer.metrics.rounds < 4


def test_the_engine_below_gives_the_same(expected: list[list[int]]) -> None:
    assert tokens(run(make_engine(tiny_llama()), PROMPTS, [GREEDY] * 3)) == expected
    assert Request(PROMPTS[0], GREEDY).request_id is None


def test_references_of_each_prompt_change_the_speed_and_nothing_else(expected: list[list[int]]) -> None:
    llm = make(draft=False, drafter="ngram")
    references = [[[*prompt, *answer]] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    without = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with_them = llm.generate(PROMPTS, GREEDY, references=[np.array(texts) for texts in references], use_tqdm=False)
    streamed = {output.request_id: output for output in llm.stream(PROMPTS, GREEDY, references=references)}
    assert tokens(without) == tokens(with_them) == tokens(list(streamed.values())) == expected
    for plain, copied in zip(without, with_them, strict=True):
        assert copied.outputs[0].metrics.rounds < plain.outputs[0].metrics.rounds


@pytest.mark.parametrize(
    "references",
    ["text", ["a", "b", "c"], [[[1]], [[2]]], [[[1]]] * 4, [[[1]], [[2]], [1.5]], [[[1]], [[2]], ["text"]], 7],
)
def test_references_are_a_list_of_texts_for_each_prompt(references: Any) -> None:
    llm = make(draft=False, drafter="ngram")
    with pytest.raises(ParameterError, match=r"^(prompts\[\d\]: )?(references|tokenizer)="):
        llm.generate(PROMPTS, GREEDY, references=references, use_tqdm=False)
    assert not llm.engine.busy


@pytest.mark.parametrize("blank", ["", " \n\t", [], np.array([], dtype=int)], ids=repr)
def test_blank_references_are_refused_by_name(blank: Any) -> None:
    llm = make(draft=False, drafter="ngram")
    with pytest.raises(ParameterError, match=r"^references=.*leave it out"):
        llm.generate(PROMPTS[0], GREEDY, references=[[[1, 2], blank]], use_tqdm=False)
    with pytest.raises(ParameterError, match=r"^reference_documents=.*leave it out"):
        make(draft=False, drafter="ngram", reference_documents=[[1, 2], blank])


def test_references_with_too_many_characters_are_refused_before_they_are_encoded() -> None:
    llm = make(draft=False, drafter="ngram")
    with pytest.raises(ParameterError, match=str(MAX_REFERENCE_CHARACTERS)):
        llm.generate(PROMPTS[0], GREEDY, references=[["a" * MAX_REFERENCE_CHARACTERS, "b"]], use_tqdm=False)


# Features that users of vLLM and transformers expect


def make_speller(tokenizer: Any) -> LLM:
    """LLM with a byte vocabulary and the given tokenizer."""
    fields = {"vocab_size": len(byte_tokenizer()), "max_position_embeddings": 256}
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "padded", "threads": 1}
    options |= {"num_speculative_tokens": 3, "drafter": "ngram", "max_batch_size": 4}
    return LLM(tiny("llama", NATIVE["llama"][1] | fields), tokenizer=tokenizer, **options)


@pytest.fixture
def speller() -> LLM:
    return make_speller(byte_tokenizer())


LONG = [1] * 200
REFUSED_PROMPTS: list[tuple[list[Any], dict[str, Any], int, str]] = [
    ([[1], [2], LONG], {}, 2, "the prompt has 200 tokens"),
    ([[1], []], {}, 1, "the prompt has no tokens"),
    ([[1], None], {}, 1, "prompts=None is not allowed"),
    ([[1], [VOCAB]], {}, 1, f"prompt_token_ids={VOCAB}"),
    ([[1], [2]], {"references": [[[3]], [[4], []]]}, 1, "references=.*blank"),
    (["a", [2]], {}, 0, "tokenizer=None"),
]


@pytest.mark.parametrize(
    ("prompts", "options", "place", "reason"), REFUSED_PROMPTS, ids=[reason for *_, reason in REFUSED_PROMPTS]
)
def test_a_prompt_that_cannot_be_served_is_named_or_skipped(
    llm: LLM, prompts: list[Any], options: dict[str, Any], place: int, reason: str
) -> None:
    named = rf"^prompts\[{place}\](: |){reason.removeprefix('prompts')}"
    with pytest.raises(PacelineError, match=named):
        llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    assert not llm.engine.busy
    ended: list[RequestOutput] = []
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="skip", on_finished=ended.append, **options)
    assert [output.error is not None for output in outputs] == [index == place for index in range(len(prompts))]
    bad = outputs[place]
    assert re.match(reason, str(bad.error))
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    served = [prompt for index, prompt in enumerate(prompts) if index != place]
    assert tokens([each for each in outputs if each is not bad]) == tokens(llm.generate(served, GREEDY, use_tqdm=False))
    assert {id(output) for output in ended} == {id(output) for output in outputs}
    last = {output.request_id: output for output in llm.stream(prompts, GREEDY, on_error="skip", **options)}
    assert sorted(tokens(list(last.values()))) == sorted(tokens(outputs))


def test_an_unknown_on_error_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"^on_error='ignore'.*'raise', 'skip'"):
        llm.generate([[1]], GREEDY, use_tqdm=False, on_error="ignore")  # type: ignore[arg-type]


def test_a_conversation_that_cannot_be_read_is_named_or_skipped(speller: LLM) -> None:
    said: list[Any] = [[{"role": "user", "content": "a"}], [{"role": "user"}]]
    with pytest.raises(RequestError, match=r"^prompts\[1\]: a message is"):
        speller.chat(said, GREEDY, use_tqdm=False)
    good, bad = speller.chat(said, GREEDY, use_tqdm=False, on_error="skip")
    assert len(good.outputs[0].token_ids) == 10
    assert isinstance(bad.error, RequestError)


def test_an_llm_is_closed_at_the_end_of_a_with_statement() -> None:
    with make() as llm:
        assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with pytest.raises(PacelineError, match="was closed"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_the_answer_of_a_chat_is_pickled_with_its_message() -> None:
    answer = CompletionOutput(0, "hello", read_message=lambda text: AssistantMessage(None, text, []))
    copied = pickle.loads(pickle.dumps(answer))
    assert copied == answer
    assert copied.message == answer.message == AssistantMessage(None, "hello", [])
    assert pickle.loads(pickle.dumps(CompletionOutput(0, "hello"))).message is None


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copying_an_llm_is_refused(llm: LLM, duplicate: Callable[[LLM], object]) -> None:
    with pytest.raises(PacelineError, match=r"cannot be copied or pickled.*in every process that uses it"):
        duplicate(llm)


def test_an_unknown_option_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.loading.load", lambda *_, **__: pytest.fail("it was loaded"))
    for given, said in (("enable_lora", "adapters"), ("draft_dtpe", "draft_dtype")):
        with pytest.raises(ParameterError, match=f"^unknown parameter {given}=4; .*{said}"):
            make(**{given: 4})
    with pytest.raises(ParameterError, match=r"^unknown parameter enforce_eager=4; .*rounds='host'"):
        toy_llm().with_options(enforce_eager=4)  # type: ignore[call-arg]


def bare(draft_model: Any = None, **options: Any) -> LLM:
    common = {"dtype": "float32", "device": "cpu", "attention": "padded", "threads": 1}
    return LLM(tiny_llama_of_transformers(), draft_model, **common, **options)


def test_options_have_other_engines_names_too() -> None:
    given = {"max_num_seqs": 3, "ctx_size": 64, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    config = bare(**given).config
    assert (config.max_batch_size, config.max_model_len, config.drafter) == (3, 64, "ngram")
    assert config.num_speculative_tokens == 2
    assert toy_llm().with_options(max_num_seqs=2).config.max_batch_size == 2
    limit = bare(gpu_memory_utilization=0.5).config.memory_limit
    assert limit is not None
    assert 0 < limit <= psutil.virtual_memory().total // 2
    with pytest.raises(ParameterError, match=r"^tensor_parallel=99"):
        bare(tensor_parallel_size=99)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_seqs": 3, "max_batch_size": 3}, "max_num_seqs=3 .*beside max_batch_size"),
        ({"max_num_seqs": 0}, "max_batch_size=0"),
        ({"speculative_config": {"method": "magic"}}, "speculative_config.method='magic'"),
        ({"speculative_config": {}, "drafter": None}, "speculative_config={} .*without drafter"),
        ({"speculative_config": {"model": "a"}, "draft_model": "b"}, "speculative_config='a' .*beside draft_model"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90 .*in .0.01, 1"),
        ({"gpu_memory_utilization": 0.9, "memory_limit": 9}, "gpu_memory_utilization=0.9 .*beside memory_limit"),
    ],
    ids=str,
)
def test_options_under_two_names_contradict_each_other(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=f"^{said}"):
        bare(**given)


def test_prompts_and_parameters_may_be_given_as_in_vllm(speller: LLM) -> None:
    text, ids = "abc", speller.get_tokenizer()("abc")["input_ids"]
    (expected,) = speller.generate(text, GREEDY, use_tqdm=False)
    given = [{"prompt": text}, {"prompt_token_ids": ids}]
    for output in speller.generate(given, sampling_params=GREEDY, use_tqdm=False):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    (one,) = speller.generate(given[1], GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == expected.outputs[0].token_ids
    (last,) = [output for output in speller.stream(given[0], sampling_params=GREEDY) if output.finished]
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    assert torch.equal(speller.embed(given, use_tqdm=False), speller.embed([text, text], use_tqdm=False))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"prompt": "a", "multi_modal_data": {}}], 'prompts=.*either "prompt"'),
        ([{"prompt": [1, 2]}], "prompts=.*prompt_token_ids"),
        ([{}], "prompts="),
        ([{"prompt_token_ids": "abc"}, "a"], "prompts.0.="),
    ],
    ids=str,
)
def test_an_object_that_is_no_prompt_is_refused(speller: LLM, given: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=f"^{said}"):
        speller.generate(given, GREEDY, use_tqdm=False)


def test_parameters_are_given_once_and_adapters_by_name(llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"^sampling_params=.*beside params"):
        llm.generate([[1]], GREEDY, sampling_params=GREEDY)
    for call in (llm.generate, llm.chat, llm.stream):
        with pytest.raises(ParameterError, match=r"^lora_request=.*SamplingParams\(adapter=NAME\)"):
            list(call([[1]], GREEDY, lora_request=object()))


def test_get_tokenizer_returns_the_hugging_face_tokenizer(llm: LLM, speller: LLM) -> None:
    assert speller.get_tokenizer().decode(speller.get_tokenizer()("abc")["input_ids"]) == "abc"
    with pytest.raises(ParameterError, match=r"^tokenizer=None"):
        llm.get_tokenizer()


def test_a_tokenizer_may_be_given_by_its_directory(speller: LLM, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    for named in (tmp_path, str(tmp_path)):
        (output,) = make_speller(named).generate("abc", GREEDY, use_tqdm=False)
        assert output.outputs[0].text == speller.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        make_speller("nowhere")


def test_chat_template_kwargs_reach_the_template(speller: LLM) -> None:
    said: list[Any] = [{"role": "user", "content": "hi"}]
    tokenizer = speller.get_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
    )
    speller.tokenizer = Tokenizer.load(tokenizer)

    def text(**given: Any) -> str:
        (output,) = speller.chat(said, GREEDY, use_tqdm=False, **given)
        assert output.prompt_token_ids == speller.tokens_of_chat(said, **given)
        return str(tokenizer.decode(output.prompt_token_ids))

    assert text() == "hi>"
    assert text(add_generation_prompt=False) == "hi"
    assert text(chat_template_kwargs={"mood": "!"}) == "hi!>"
    said[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text() == "ab>"
    said[0]["content"] = [{"type": "image_url", "image_url": "x"}]
    with pytest.raises(RequestError, match="no other kind of part"):
        text()
    said[0]["content"] = "hi"
    for wrong in ({"messages": []}, {"add_generation_prompt": False}, [1], {1: 2}):
        with pytest.raises(ParameterError, match=r"^chat_template_kwargs="):
            text(chat_template_kwargs=wrong)
    with pytest.raises(RequestError, match="JSON"):
        text(chat_template_kwargs={"mood": object()})


def test_restrictions_hold_in_texts_and_speculation_changes_nothing(speller: LLM) -> None:
    e, a, t, h = (encoded(speller.tokenizer, letter)[0] for letter in "eath")
    likely = SamplingParams(temperature=1, seed=1, max_tokens=40, logit_bias={e: 6, a: 6, t: 6, h: 6})
    params = [
        replace(likely, bad_words=["e", "th"]),
        replace(likely, allowed_token_ids=[e, t, h], bad_words="tt"),
        replace(likely, logits_processors=[lambda answer, logits: logits.roll(len(answer))]),
    ]
    prompts = ["the cat, the cat, the", "tetete", "xyxyxy"]
    outputs = speller.generate(prompts, params, use_tqdm=False)
    assert tokens(outputs) == tokens(speller.plain().generate(prompts, params, use_tqdm=False))
    free = speller.generate(prompts, likely, use_tqdm=False)
    assert all(word in free[0].outputs[0].text for word in ("e", "th"))
    assert not any(word in outputs[0].outputs[0].text for word in ("e", "th"))
    assert {*outputs[1].outputs[0].text} == {*"eth"}
    assert "tt" not in outputs[1].outputs[0].text
    assert tokens(free[2:]) != tokens(outputs[2:])


def test_prompt_logprobs_are_returned_on_request(llm: LLM) -> None:
    params = [replace(GREEDY, prompt_logprobs=2), GREEDY, replace(GREEDY, prompt_logprobs=0)]
    outputs = llm.generate([PROMPTS[2], PROMPTS[0], [4]], params, use_tqdm=False)
    told = outputs[0].prompt_logprobs
    assert told is not None
    (score,) = llm.score([PROMPTS[2][:1]], [PROMPTS[2][1:]], use_tqdm=False)
    assert told[0] is None
    assert [each.logprob for each in told[1:] if each] == score.logprobs
    assert [each.token_id for each in told[1:] if each] == PROMPTS[2][1:]
    assert {len(each.top) for each in told[1:] if each} == {2}
    assert outputs[1].prompt_logprobs is None
    assert outputs[2].prompt_logprobs == [None]
    *_, last = llm.stream(PROMPTS[2], params[0])
    assert last.prompt_logprobs == told
    request = llm.engine.add(llm.request(PROMPTS[2], params[0]))
    while llm.engine.busy:
        llm.engine.step()
    found = [each.logprob for each in (request.prompt_logprobs or [])[1:] if each]
    assert found == pytest.approx(score.logprobs, abs=1e-4)


def test_special_tokens_may_be_shown(speller: LLM) -> None:
    tokenizer = speller.get_tokenizer()
    special = tokenizer.all_special_ids[0]
    ids = [*encoded(speller.tokenizer, "ab"), special]
    for shown, text in ((True, "ab"), (False, tokenizer.decode(ids, skip_special_tokens=False))):
        params = SamplingParams(
            temperature=0,
            max_tokens=3,
            ignore_eos=True,
            skip_special_tokens=shown,
            logits_processors=[lambda answer, logits: logits.index_fill(0, torch.tensor(ids[len(answer)]), 1e9)],
        )
        (output,) = speller.generate("x", params, use_tqdm=False)
        assert output.outputs[0].token_ids == ids
        assert output.outputs[0].text == text


def test_a_terminal_shows_the_stages_of_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama", NATIVE["llama"][1] | {"head_dim": 16})
    options: dict[str, Any] = {"quantization": "int8", "device": "cpu", "max_batch_size": 2, "threads": 1}
    LLM(model, **options)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    LLM(model, **options)
    said = capsys.readouterr().err
    stages = ("reading and packing LlamaForCausalLM", "measuring what rounds cost")
    assert all(stage in said for stage in stages)
    make(draft=False)
    assert "packing" not in capsys.readouterr().err, "torch runs the weights as they are"
    LLM(model, use_tqdm=False, **options)
    assert capsys.readouterr().err == ""


def test_a_directory_without_a_model_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"no config\.json, so it is not a Hugging Face model directory"):
        LLM(tmp_path)
    (tmp_path / "little.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"little\.gguf: broken or truncated GGUF file"):
        LLM(tmp_path)


def test_rows_longer_than_the_short_factors_of_longrope_are_refused() -> None:
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    fields = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **factors}}
    model = tiny("phi3", NATIVE["llama"][1] | fields | {"original_max_position_embeddings": 32})
    with pytest.raises(ParameterError, match=r"^max_model_len=64 .*at most 32 .*longrope.*depend on other rows"):
        LLM(model, max_model_len=64, device="cpu", dtype="float32", drafter=None)
    assert LLM(model, device="cpu", dtype="float32", drafter=None).engine.max_model_len == 32
