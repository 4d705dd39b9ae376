"""Qwen3.5 and LFM2 on the CPU kernels: sequences, batched and speculated at random, equal plain decoding alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.random_models import write

from paceline import LLM
from paceline.config import SamplingParams
from paceline.core.sampling import sequence_seed
from paceline.drafters.heads.loading import has_own_head
from paceline.kernels import native
from recurrent_support import LFM2_SIZES, save_tokenizer, tiny_lfm2
from toy import SHAPES, VOCAB, RandomCaps, Scripted, ScriptedTrees, sometimes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}"),
]

TOKENS = 32
OPTIONS: dict[str, Any] = {"device": "cpu", "max_batch_size": 16, "max_model_len": 160, "use_tqdm": False}


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    if request.param == "qwen3_5":
        write(path, "qwen3.5-tiny")
    else:
        theirs = tiny_lfm2(3, **LFM2_SIZES["other"])
        theirs.config.max_position_embeddings = OPTIONS["max_model_len"]
        theirs.save_pretrained(path)
        save_tokenizer(path)
    return path


def requests_of(count: int, chance: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random lengths, half of which begin with one text; greedy and sampled."""
    beginning = [chance.randrange(VOCAB) for _ in range(40)]
    prompts, params = [], []
    for seed in range(count):
        own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 60))]
        prompts.append([*beginning, *own] if seed % 2 else own)
        params.append(SamplingParams(temperature=(0, 0.8)[seed % 4 // 2], max_tokens=TOKENS, seed=seed))
    return prompts, params


def token_ids(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
@pytest.mark.parametrize("count", [pytest.param(12, id="few"), pytest.param(256, id="many", marks=pytest.mark.slow)])
def test_sequences_equal_plain_decoding_alone(precision: str, count: int, checkpoint: Path) -> None:
    chance = random.Random(count)
    drafter = "mtp" if has_own_head(checkpoint) else "ngram"
    quantization: Any = "int8" if precision == "int8" else None
    llm = LLM(str(checkpoint), dtype="bfloat16", quantization=quantization, drafter=drafter, **OPTIONS)
    prompts, params = requests_of(count, chance)
    wanted = token_ids(llm.plain().with_options(max_batch_size=1, prefix_cache=False), prompts, params)
    truth = {
        sequence_seed(seed, 0): [*prompt, *answer]
        for seed, (prompt, answer) in enumerate(zip(prompts, wanted, strict=True))
    }
    equal, accepted, order = 0, 0, chance.sample(range(count), count)
    while order:
        group = [order.pop() for _ in range(min(len(order), chance.randint(2, 16)))]
        mixed = llm.with_options(prefill_chunk=chance.choice([16, 64]), max_batch_size=chance.randint(1, 16))
        mixed.engine.use_policy(RandomCaps(chance.randrange(2**31)))
        shape, seed = chance.choice([*SHAPES, None, "own"]), chance.randrange(2**31)
        if shape is None:
            mixed.engine.parts.drafter = Scripted(truth, sometimes, ragged=True, seed=seed)
        elif shape != "own":  # else the head in the checkpoint, or n-grams
            mixed.engine.parts.drafter = ScriptedTrees(truth, sometimes, shape=SHAPES[shape], seed=seed)
        results = mixed.generate([prompts[each] for each in group], [params[each] for each in group])
        for each, result in zip(group, results, strict=True):
            equal += result.outputs[0].token_ids == wanted[each]
            accepted += result.outputs[0].metrics.accepted
    assert equal == count
    assert accepted > 5 * count, "states go on from accepted draft tokens"
    print(f"{precision}: {equal} of {count} equal, {accepted} draft tokens accepted")
