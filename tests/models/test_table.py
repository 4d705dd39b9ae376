"""The table of families: text of transformers in float32, bits of int8 on the kernels, GGUF beside safetensors.

``pytest tests/models/test_table.py`` proves every row of docs/models.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from gemma4_support import SIZES, tiny_gemma4
from gemma4_support import write_gguf as written_gemma4
from model_support import NATIVE, best_tokens, random_tokens, tiny
from models.test_families import _written
from models.test_latent_gguf import write as written_latent
from models.test_lfm2_gguf import write as written_lfm2
from models.test_mamba2_gguf import write as written_mamba2
from models.test_mimo_gguf import tiny_mimo
from models.test_mimo_gguf import write as written_mimo
from models.test_qwen3_5_gguf import write as written_qwen3_5
from models.test_sinks_and_shared_experts import _PUBLISHED, _gpt_oss
from models.test_sinks_and_shared_experts import _written as written_gpt_oss
from paceline import LLM, SamplingParams
from paceline.kernels import native
from paceline.models.families import FAMILIES
from paceline.models.load.loading import load_model
from recurrent_support import (
    GRANITE_SIZES,
    tiny_bamba,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_lfm3,
    tiny_nemotron,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
)
from toy import answers, make_engine
from toy import run as run_engine

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")

ROWS, TOKENS = 4, 7
PARAMS = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 48, "tokenizer": None}
LATENT = ("youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
PUBLISHED_MINICPM3 = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": False}
HEADS = {"head_dim": 16, "tie_word_embeddings": False}  # the kernels' narrowest heads
LAYERS = {
    "gemma3_text": 6,
    "smollm3": 4,
    "exaone4": 4,
    "cohere2": 4,
    "exaone_moe": 4,
    "afmoe": 4,
}  # whose kinds GGUF files do not tell: those of the family
UNTOLD = ("layer_types", "no_rope_layer_interval")


def of_table(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of ``NATIVE``, with the kernels' narrowest heads, and layers that a GGUF file can have."""
    kind, fields = NATIVE[name]
    untold = {key: value for key, value in fields.items() if kind not in LAYERS or key not in UNTOLD}
    return tiny(kind, untold | ({"num_hidden_layers": LAYERS[kind]} if kind in LAYERS else {}) | changes)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        name: functools.partial(of_table, name, **HEADS)
        for name in (
            *("llama", "llama with llama3 rope", "mistral", "mistral with a window", "ministral3"),
            *("qwen2", "qwen3", "phi3", "granite", "olmo2", "smollm3", "exaone4 with windows"),
            *("qwen3_moe", "granitemoe"),
        )
    },
    **{
        name: functools.partial(of_table, name, **HEADS, hidden_size=64)
        for name in (
            *("mixtral", "ministral", "cwm", "exaone", "gemma", "vaultgemma", "glm", "glm4", "helium", "seed_oss"),
            *("sarvam_moe", "solar_open", "dots1", "exaone_moe", "hy_v3", "minimax_m2", "afmoe", "glm4_moe"),
            *("cohere", "cohere2", "hunyuan_v1_dense", "hunyuan_v1_moe", "ernie4_5", "ernie4_5_moe", "mellum"),
            *(
                "qwen2_moe",
                "qwen3_moe with dense layers",
                "flex_olmo",
                "granite_swa",
                "granitemoe_swa",
                "starcoder2",
                "phi",
                "arcee",
                "apertus",
            ),
            *("jais2", "nemotron", "stablelm", "stablelm in parallel", "olmo", "nanochat", "gpt_neox", "hyperclovax"),
            *("aria_text", "cohere2_moe", "phimoe"),
        )
    },
    "gemma2": functools.partial(of_table, "gemma2", **HEADS, query_pre_attn_scalar=16),
    "olmo3": functools.partial(of_table, "olmo3", **HEADS),
    "olmoe": functools.partial(of_table, "olmoe", **HEADS, hidden_size=64),  # as wide as its heads together
    "phi3 with a partial rotation": functools.partial(of_table, "phi3 with a partial rotation", **HEADS),
    "gemma3": functools.partial(of_table, "gemma3", **HEADS, query_pre_attn_scalar=16),
    "gemma4": tiny_gemma4,
    "gemma4 with experts": functools.partial(tiny_gemma4, **SIZES["experts"]),
    "gpt_oss": functools.partial(_gpt_oss, **_PUBLISHED),
    "qwen3_5": tiny_qwen3_5,
    "qwen3_5_moe": tiny_qwen3_5_moe,
    "qwen3_next": tiny_qwen3_next,
    "lfm2": tiny_lfm2,
    "lfm2_moe": tiny_lfm2_moe,
    "lfm3": tiny_lfm3,
    "granitemoehybrid": tiny_granite_hybrid,
    "granitemoehybrid with experts": functools.partial(tiny_granite_hybrid, **GRANITE_SIZES["experts"]),
    "bamba": tiny_bamba,
    "falcon_h1": tiny_falcon_h1,
    "nemotron_h": functools.partial(tiny_nemotron, kinds="me-fmme"),
    "nemotron_h with latent experts": functools.partial(tiny_nemotron, kinds="mefme", moe_latent_size=40),
    **{name: functools.partial(of_table, name, tie_word_embeddings=False) for name in LATENT},
    "minicpm3": functools.partial(of_table, "minicpm3", **PUBLISHED_MINICPM3),
    "mimo_v2_flash": tiny_mimo,
    "opt": functools.partial(of_table, "opt", hidden_size=64),
    **{name: functools.partial(of_table, name, n_embd=64) for name in ("gpt2", "gpt_bigcode", "gptj")},
}
# Factors that test_gguf.py writes; a window, refused in GGUF files; layers that files do not tell; limits of steps and
# MLPs among experts
UNWRITTEN = {"llama with llama3 rope", "phi3", "qwen3_moe with dense layers"}
UNWRITTEN |= {"nemotron_h", "nemotron_h with latent experts"}
WRITERS: dict[str, Callable[[Path, PreTrainedModel], Path]] = {  # of families whose GGUF files are tested apart, too
    "gemma4_text": written_gemma4,
    "gpt_oss": lambda path, theirs: written_gpt_oss(path, theirs, gguf.GGMLQuantizationType.F32),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
        lambda path, theirs: written_qwen3_5(path, theirs.state_dict(), theirs.config, 0),
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), written_lfm2),
    **dict.fromkeys(("granitemoehybrid", "falcon_h1"), written_mamba2),
    "mimo_v2_flash": written_mimo,
    **dict.fromkeys(("minicpm3", "youtu", "deepseek_v2", "deepseek_v3"), written_latent),
}


@functools.lru_cache(maxsize=1)
def subject(name: str) -> PreTrainedModel:
    return MODELS[name]()


# All tests of a model run in turn, so that it is built once.
with_each_model = pytest.mark.parametrize("name", MODELS, scope="module")


def prompts_of(theirs: PreTrainedModel) -> list[list[int]]:
    return [(random_tokens(1, 2 + 3 * row, seed=row)[0] % theirs.config.vocab_size).tolist() for row in range(ROWS)]


@functools.lru_cache(maxsize=4 * ROWS)
def best_of(name: str, row: int, text: tuple[int, ...]) -> list[int]:
    theirs = subject(name)
    return best_tokens(theirs, prompts_of(theirs)[row], text)


def check_greedy(name: str, texts: Sequence[list[int]], way: object) -> None:
    """Check that each text is transformers' greedy one."""
    assert [len(text) for text in texts] == [TOKENS] * len(texts)
    for row, text in enumerate(texts):
        assert text == best_of(name, row, tuple(text)), (way, row)


@functools.cache
def draft_model(vocab_size: int) -> PreTrainedModel:
    kind, fields = NATIVE["llama"]
    return tiny(kind, fields | {"head_dim": 16, "vocab_size": vocab_size}, seed=5)


def ways(theirs: PreTrainedModel, **options: Any) -> dict[str, LLM]:
    """Plain decoding of one row, and speculation in four, on the same weights.

    The draft model is another random model of the same vocabulary.
    """
    draft = draft_model(theirs.config.vocab_size)
    llm = LLM(theirs, draft, drafter="model", num_speculative_tokens=2, max_batch_size=ROWS, **OPTIONS, **options)
    return {
        "plain": llm.plain().with_options(max_batch_size=1),
        "ngram": llm.with_options(drafter="ngram"),
        "model": llm,
    }


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[tuple[list[int], Any]]:
    """Tokens and log-probabilities of every prompt."""
    outputs = (result.outputs[0] for result in llm.generate(list(prompts), PARAMS, use_tqdm=False))
    return [(list(output.token_ids), output.logprobs) for output in outputs]


def test_every_family_has_a_row() -> None:
    assert {MODELS[name]().config.model_type for name in MODELS} == FAMILIES.keys()


@with_each_model
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    """In float32: plain decoding of one row, and speculation in four with a draft model; n-grams are tried below."""
    theirs = subject(name)
    plain, _, speculating = ways(theirs, dtype="float32").items()
    for way, llm in (plain, speculating):
        prompts = prompts_of(theirs)[: llm.config.max_batch_size]
        found = run(llm, prompts)
        assert len(found) == len(prompts)
        check_greedy(name, [tokens for tokens, _ in found], way)


@needs_kernels
@with_each_model
def test_bits_in_int8_on_the_kernels_do_not_depend_on_batch_or_drafter(name: str) -> None:
    """Tokens and log-probabilities of four rows are those of plain decoding, one by one."""
    theirs = subject(name)
    plain, *others = ways(theirs, quantization="int8").values()
    assert plain.engine.rounds.choice.kernels is not None, "the kernels run whole rounds"
    speculating = others[[*MODELS].index(name) % 2]  # the drafters in turn
    assert run(speculating, prompts_of(theirs)) == run(plain, prompts_of(theirs)), speculating.config.drafter


@with_each_model
def test_a_directory_of_safetensors_and_a_gguf_file_give_that_text(name: str, tmp_path: Path) -> None:
    """With n-gram drafts. Families that llama.cpp does not have, or not under this name, have a directory only."""
    theirs = subject(name)
    theirs.save_pretrained(tmp_path / "safetensors")
    paths = [tmp_path / "safetensors"]
    if FAMILIES[theirs.config.model_type].gguf is not None and name not in UNWRITTEN:
        write = WRITERS.get(theirs.config.model_type, _written)
        paths.append(write(tmp_path / "tiny.gguf", theirs))
    for path in paths:
        model = load_model(path, dtype=torch.float32)
        engine = make_engine(model, drafter="ngram", max_batch_size=ROWS, max_model_len=48)
        found = run_engine(engine, prompts_of(theirs), [PARAMS] * ROWS)
        assert len(found) == ROWS
        check_greedy(name, [tokens for (tokens,) in answers(found)], path.name)
