"""Real weights: what comes out is what transformers' greedy ``generate`` gives, token by token."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import PreTrainedModel

import real_models
from model_support import Runner
from paceline import LLM, RequestOutput, SamplingParams
from paceline.core.hardware import torch_threads
from paceline.core.sampling import sequence_seed
from paceline.models.base import Model
from paceline.models.load.loading import eos_token_ids
from paceline.models.text.tokenizer import Tokenizer
from toy import ScriptedTrees, sometimes

TOPICS = (
    "the sea", "a lighthouse", "prime numbers", "bread", "the moon", "a spider", "rain in spring", "chess",
)  # fmt: skip
OPENINGS = (
    "Write two sentences about {}.",
    "Repeat exactly: I like {}, {} and {}. I like",
    "def describe():\n    # about {}\n",
    "Three facts about {}:\n1.",
)
PROMPTS = [opening.replace("{}", topic) for topic in TOPICS for opening in OPENINGS]
SAMPLE = PROMPTS[::5]  # the first four have each kind of opening
STUBS = [
    'def fibonacci(n):\n    """The n-th Fibonacci number."""\n',
    'def is_prime(n):\n    """Whether n is a prime number."""\n',
    'def reverse_words(text):\n    """The words of text, last first."""\n',
    'def flatten(nested):\n    """A list of lists as one list."""\n',
    'def count_vowels(text):\n    """How many vowels text has."""\n',
    'def gcd(a, b):\n    """The greatest common divisor."""\n',
    'class Stack:\n    """A stack with push, pop and peek."""\n',
    'def binary_search(items, wanted):\n    """The index of wanted in sorted items, or -1."""\n',
]


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    """Divide the machine's cores among the test processes; other tests use one torch thread."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    with torch_threads(max(1, (os.cpu_count() or 1) // processes)):
        yield


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """Exactly ``tokens`` tokens of transformers' greedy continuation."""
    model.generation_config.eos_token_id = None  # nothing ends the text, nothing is forbidden
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0, len(prompt) :]]


@torch.inference_mode()
def likeliest(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[int]:
    """transformers' likeliest token at each place of the answer, given what stands before it."""
    logits = model(torch.tensor([prompt + answer])).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 : -1].argmax(-1)]


def answers_of(results: list[RequestOutput]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each."""
    return [(result.prompt_token_ids, result.outputs[0].token_ids) for result in results]


def check_each_token(results: list[RequestOutput], model: PreTrainedModel) -> None:
    """Each token is the likeliest after those before it: by induction the answer is the greedy one."""
    answers = answers_of(results)
    assert not [prompt for prompt, answer in answers if likeliest(model, prompt, answer) != answer]


def check_generate(results: list[RequestOutput], model: PreTrainedModel) -> None:
    """The same by transformers' own loop, which takes seconds an answer."""
    answers = answers_of(results)
    assert not [prompt for prompt, answer in answers if greedy(model, prompt, len(answer)) != answer]


def in_float32(path: Path) -> LLM:
    return LLM(path, drafter="ngram", num_speculative_tokens=4, dtype="float32", max_batch_size=8, max_model_len=256)


def with_and_without_speculation(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    spoken = llm.generate(prompts, params, use_tqdm=False)
    plain = llm.plain().generate(prompts, params, use_tqdm=False)
    assert [[answer.token_ids for answer in result.outputs] for result in spoken] == [
        [answer.token_ids for answer in result.outputs] for result in plain
    ]
    assert [[answer.text for answer in result.outputs] for result in spoken] == [
        [answer.text for answer in result.outputs] for result in plain
    ]
    return spoken


def greedy_params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def probes() -> torch.Tensor:
    """Two rows of twelve tokens, on which logits are compared."""
    return torch.randint(49152, (2, 12), generator=torch.Generator().manual_seed(0))


KEPT = Path(__file__).with_name("smollm2_in_transformers.json")


def kept() -> tuple[list[list[int]], torch.Tensor]:
    """Return transformers' recorded greedy answers to SAMPLE, 24 tokens each, and its logits of every 997th token after
    each probe. Reading the file takes transformers 15 s, so only the slow test below runs it.
    """
    said = json.loads(KEPT.read_text())
    return said["answers"], torch.tensor(said["logits"])


@pytest.mark.usefixtures("no_requests")
@pytest.mark.timeout(300)
@torch.no_grad()
def test_smollm2_equals_transformers_in_float32_with_and_without_speculation() -> None:
    """Greedy texts are transformers', and sampled ones do not depend on speculation."""
    path = real_models.find("smollm2-135m")
    assert eos_token_ids(path) == (2, 0)
    answers, logits = kept()
    llm = in_float32(path)
    ours = Runner(cast(Model, llm.engine.models.target), 2)(probes(), torch.arange(12).expand(2, -1))
    assert (ours[..., ::997] - logits).abs().max() < 1e-3
    spoken = with_and_without_speculation(llm, SAMPLE[:4], greedy_params(16))
    assert [answer for _, answer in answers_of(spoken)] == [answer[:16] for answer in answers[:4]]
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=11, n=2, max_tokens=12, repetition_penalty=1.1)
    with_and_without_speculation(llm, PROMPTS[1:3], sampled)


@pytest.mark.slow
@torch.no_grad()
def test_what_is_kept_of_transformers_is_what_it_says() -> None:
    """And no token of it is a near tie, which another processor's sums could turn."""
    path = real_models.find("smollm2-135m")
    answers, logits = kept()
    theirs, tokenizer = real_models.load_in_transformers(path), Tokenizer.load(path)
    assert (theirs(probes()).logits[..., ::997] - logits).abs().max() < 1e-3
    for prompt, answer in zip(map(tokenizer.encode, SAMPLE), answers, strict=True):
        after = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        first, second = after.topk(2).values.unbind(-1)
        assert after.argmax(-1).tolist() == answer
        assert (first - second).min() > 0.002  # sums in another order move logits by 0.0002


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_equals_transformers_generate_in_float32_with_and_without_speculation() -> None:
    path = real_models.find("smollm2-135m")
    spoken = with_and_without_speculation(in_float32(path), PROMPTS, greedy_params(64))
    model = real_models.load_in_transformers(path)
    check_each_token(spoken, model)
    check_generate(spoken, model)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quantization", ["int8", None])
def test_smollm2_answers_as_without_speculation_with_trees(quantization: str | None) -> None:
    """Through the CPU kernels a node's bits are plain decoding's: so is every token, drawn or greedy."""
    path = real_models.find("smollm2-135m")
    llm = LLM(path, drafter="ngram", num_speculative_tokens=9, quantization=quantization, max_batch_size=4)
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=40, repetition_penalty=1.2, logprobs=1, ignore_eos=True)
        for seed, t in enumerate((0, 0.8, 1.0, 0.6, 0))
    ]
    plain = llm.plain().generate(SAMPLE[:5], params, use_tqdm=False)
    truth = {
        sequence_seed(seed, 0): [*one.prompt_token_ids, *one.outputs[0].token_ids] for seed, one in enumerate(plain)
    }
    llm.engine.parts.drafter = ScriptedTrees(truth, sometimes, ragged=True)
    spoken = llm.generate(SAMPLE[:5], params, use_tqdm=False)
    assert answers_of(spoken) == answers_of(plain)
    assert [one.outputs[0].logprobs for one in spoken] == [one.outputs[0].logprobs for one in plain]
    assert sum(one.outputs[0].metrics.accepted for one in spoken) > 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_qwen_pair_equals_transformers_greedy_in_float32() -> None:
    target, draft = real_models.find("qwen-coder-1.5b"), real_models.find("qwen-coder-0.5b")
    llm = LLM(
        target, draft, drafter="model", num_speculative_tokens=3, dtype="float32", max_batch_size=8, max_model_len=256
    )
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    spoken, model = llm.generate(STUBS, params, use_tqdm=False), real_models.load_in_transformers(target)
    check_each_token(spoken, model)
    check_generate(spoken, model)


@pytest.mark.usefixtures("caches_of_the_run")
def test_smollm2_drafts_with_the_head_that_comes_with_it() -> None:
    path = real_models.find("smollm2-135m")
    llm = LLM(path, draft_model="smollm2-135m-head", quantization="int8", max_batch_size=4, max_model_len=256)
    assert "drafter ngram or head " in llm.engine.describe()
    params = [SamplingParams(temperature=t, seed=5, max_tokens=32, ignore_eos=True) for t in (0, 0.8, 0, 1.0)]
    truth = llm.plain().generate(SAMPLE[:4], params, use_tqdm=False)
    assert answers_of(llm.generate(SAMPLE[:4], params, use_tqdm=False)) == answers_of(truth)
    spoken = llm.with_options(drafter="feature", num_speculative_tokens=3).generate(SAMPLE[:4], params, use_tqdm=False)
    assert answers_of(spoken) == answers_of(truth)
    metrics = [result.outputs[0].metrics for result in spoken]
    rounds = sum(each.rounds for each in metrics)
    assert rounds < 0.8 * sum(each.output_tokens for each in metrics)  # a random head gains nothing


def gemma_texts(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """40 greedy tokens for each prompt, which are those of plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    spoken = llm.generate(prompts, params, use_tqdm=False)
    assert answers_of(llm.plain().generate(prompts, params, use_tqdm=False)) == answers_of(spoken)
    return spoken


@pytest.fixture(scope="module")
def gemma3_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of safetensors with the weights that transformers reads from the GGUF file."""
    path = tmp_path_factory.mktemp("gemma3")
    real_models.load_in_transformers(real_models.find("gemma3-270m")).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [0, 8, 16])
def test_gemma3_equals_transformers_in_float32_from_gguf_and_from_safetensors(
    first: int, gemma3_directory: Path
) -> None:
    """24 prompts of 40 tokens in three parts."""
    path = real_models.find("gemma3-270m")
    prompts = [Tokenizer.load(path).encode(prompt) for prompt in PROMPTS[first : first + 8]]
    options = {"drafter": "ngram", "num_speculative_tokens": 4, "max_batch_size": 8, "max_model_len": 128}
    spoken = gemma_texts(LLM(path, dtype="float32", **options), prompts)  # type: ignore[arg-type]
    check_each_token(spoken, real_models.load_in_transformers(path))
    directory = LLM(gemma3_directory, dtype="float32", tokenizer=path, **options)  # type: ignore[arg-type]
    assert answers_of(gemma_texts(directory, prompts)) == answers_of(spoken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_gemma3_on_the_kernels_answers_as_without_speculation(quantization: str) -> None:
    """24 prompts of 40 tokens, eight at once with n-gram drafts and with trees, and alone."""
    path = real_models.find("gemma3-270m")
    prompts = [Tokenizer.load(path).encode(prompt) for prompt in PROMPTS[:24]]
    llm = LLM(
        path, drafter="ngram", num_speculative_tokens=4, quantization=quantization, max_batch_size=8, max_model_len=128
    )
    assert quantization in llm.engine.describe()
    spoken = gemma_texts(llm, prompts)
    assert sum(one.outputs[0].metrics.accepted for one in spoken) > 100
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=seed) for seed in range(24)]
    alone = llm.plain().with_options(max_batch_size=1).generate(prompts[:3], params[:3], use_tqdm=False)
    assert answers_of(alone) == answers_of(spoken)[:3]
    truth = {sequence_seed(seed, 0): [*prompt, *answer] for seed, (prompt, answer) in enumerate(answers_of(spoken))}
    llm.engine.parts.drafter = ScriptedTrees(truth, sometimes, ragged=True)
    trees = llm.generate(prompts, params, use_tqdm=False)
    assert answers_of(trees) == answers_of(spoken)
    assert sum(one.outputs[0].metrics.accepted for one in trees) > 100
