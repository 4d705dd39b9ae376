"""Ranks as threads of this process, running the same code as processes, and toy checkpoints for them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from paceline.config import SamplingParams
from paceline.kernels import native
from paceline.models.description.shards import ModelShard
from paceline.models.load.loading import load_shard, open_checkpoint
from paceline.models.native.division import division_of
from paceline.models.native.model import Quantization
from paceline.models.parallel.follower import NativeFollower, TorchFollower
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.model import LeadingPart, PartOfModel
from paceline.models.parallel.native import LeadingNative, NativePart
from paceline.models.parallel.plan import Op, Step, as_numbers

CPU = torch.device("cpu")
VOCAB, POSITIONS = 50, 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,  # not divisible by two ranks
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}
WIDER = {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 130, "head_dim": 16}  # a panel for each of 3 ranks
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
}


def toy(name: str, seed: int = 0) -> PreTrainedModel:
    """Random weights with such a large spread that near-ties are rare; biases and norms are random, too."""
    kind, changes = TOYS[name]
    config = AutoConfig.for_model(kind, **SHAPE | changes, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.35 if parameter.dim() > 1 else parameter + noise * 0.3)
    return model


def write(model: PreTrainedModel, path: Path) -> Path:
    """A checkpoint, with a tokenizer of the words w0, w1, ..."""
    model.save_pretrained(path)
    words = Backend(WordLevel({f"w{token}": token for token in range(model.config.vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Some repeat themselves, so that n-gram lookup finds drafts; two share a prefix."""
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 12, 40)))] for _ in range(count)]
    return [*texts[:-1], [*texts[-2], *texts[-2]]]


def params(tokens: int) -> list[SamplingParams]:
    """Greedy and sampled."""
    return [
        SamplingParams(temperature=0, max_tokens=tokens, seed=0),
        SamplingParams(temperature=1.0, max_tokens=tokens, seed=1, n=2),
        SamplingParams(temperature=0.7, max_tokens=tokens, seed=2, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=tokens, seed=3, presence_penalty=0.5, logprobs=2),
    ]


class NoProcesses:
    """``RankProcesses`` for ranks that are threads, which end by themselves."""

    def find_ended(self, patience: float = 0.0) -> str | None:
        return None

    def end(self, ranks: Ranks | None, *, orderly: bool) -> None: ...


@contextmanager
def in_threads(path: Path, count: int = 2) -> Iterator[LeadingPart]:
    """Rank 0's model; the other ranks run in threads until they are told to end."""
    store, failures = dist.HashStore(), []  # type: ignore[attr-defined]

    def part(rank: int) -> tuple[Any, Any, str, Ranks]:
        share = ModelShard(rank, count)
        config, weights = load_shard(path, share, dtype=torch.float32, device=CPU)
        return config, weights, str(path), Ranks(store, share, CPU)

    def follow(rank: int) -> None:
        try:
            TorchFollower(PartOfModel(*part(rank))).run()
        except BaseException as error:
            failures.append(error)
            raise

    with following(follow, count):
        leader = LeadingPart(*part(0), NoProcesses())
        try:
            yield leader
        finally:
            leader.ranks.broadcast_numbers(as_numbers([Step(Op.END)]))
    assert not failures


@contextmanager
def following(follow: Callable[[int], None], count: int) -> Iterator[None]:
    """Run the ranks other than 0 in threads, which have ended when the block has."""
    others = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, count)]
    for other in others:
        other.start()
    yield
    for other in others:
        other.join(30)
    assert not any(other.is_alive() for other in others)


@contextmanager
def native_in_threads(path: Path, quantization: Quantization | None, count: int = 2) -> Iterator[LeadingNative]:
    """The same on the CPU kernels. Every rank has threads of its own, as a process would."""
    store, whole = dist.HashStore(), open_checkpoint(path)  # type: ignore[attr-defined]
    assert whole is not None
    division = division_of(whole.spec, ModelShard(0, count))
    memory = torch.zeros(native.exchange_bytes(native.required(), division), dtype=torch.uint8)
    failures = []

    def part(kind: type[NativePart], rank: int) -> Any:
        return kind(whole, ModelShard(rank, count), memory, torch.float32, quantization)

    def follow(rank: int) -> None:
        try:
            with native.kernel_threads(rank + 1):
                NativeFollower(part(NativePart, rank), Ranks(store, ModelShard(rank, count), CPU)).run()
        except BaseException as error:
            failures.append(error)
            raise

    with following(follow, count):
        leader = part(LeadingNative, 0)
        leader.follow(Ranks(store, ModelShard(0, count), CPU), NoProcesses())
        try:
            yield leader
        finally:
            leader.ranks.broadcast_numbers(as_numbers([Step(Op.END)]))
    assert not failures
