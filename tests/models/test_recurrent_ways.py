"""Tiny random models of many shapes and all kinds of states: answers equal transformers' own, however they are run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from transformers import PreTrainedModel

from model_support import best_tokens
from paceline.config import SamplingParams
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.loading import load_own_head
from paceline.engine.engine import Engine
from paceline.models.base import AnyModel
from paceline.models.load.loading import load_model
from recurrent_support import (
    GRANITE_SIZES,
    LFM2_SIZES,
    save_with_head,
    tiny_falcon_h1,
    tiny_granite_hybrid,
    tiny_lfm2,
    tiny_lfm2_moe,
    tiny_nemotron,
    tiny_qwen3_5_moe,
    tiny_qwen3_next,
)
from toy import VOCAB, RandomLength, ScriptedTrees, answers, make_engine, make_request, run, sometimes, truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

WITH_HEAD = ("mtp", "hybrid")  # drafters that read one
ROWS = 5
TOKENS = 9
DOCUMENT = 17  # tokens that all prompts of a prefix test begin with
ON_DEVICE: dict[str, Any] = {"rounds": "device", "attention": "padded"}
GREEDY = [SamplingParams(temperature=0, max_tokens=TOKENS, seed=row) for row in range(ROWS)]


@dataclass
class Subject:
    """A model of transformers, ours made of it, its draft head if it has one, prompts and transformers' answers."""

    theirs: PreTrainedModel
    target: AnyModel
    head: HeadModel | None
    chance: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    truth: list[list[list[int]]] = field(default_factory=list)

    def engine(self, rows: int, drafter: str | None = None, **options: Any) -> Engine:
        """An engine with a number of rows, and with the head for those drafters that read one."""
        return make_engine(
            self.target, self.head if drafter in WITH_HEAD else None, drafter=drafter, max_batch_size=rows, **options
        )


Way: TypeAlias = Callable[[Subject], None]


def random_qwen3_5(chance: random.Random, seed: int, path: Path) -> Subject:
    """A Qwen3.5 of a random shape, with its head."""
    theirs, _ = save_with_head(path, seed, **random_sizes(chance))
    target = load_model(path, dtype=torch.float32)
    return Subject(theirs, target, load_own_head(target, path), chance)


def random_mixture(chance: random.Random, seed: int, path: Path) -> Subject:
    """A Qwen3.5 with experts or a Qwen3-Next, with its head."""
    make = chance.choice([tiny_qwen3_5_moe, tiny_qwen3_next])
    theirs, _ = save_with_head(path, seed, make, kinds="".join(chance.sample("ddf", 3)))
    target = load_model(path, dtype=torch.float32)
    return Subject(theirs, target, load_own_head(target, path), chance)


def random_lfm2(chance: random.Random, seed: int, path: Path) -> Subject:
    return of_other_kind(tiny_lfm2(seed, **chance.choice(list(LFM2_SIZES.values()))), chance, path)


def random_lfm2_moe(chance: random.Random, seed: int, path: Path) -> Subject:
    return of_other_kind(tiny_lfm2_moe(seed, "".join(chance.sample("ccf", 3))), chance, path)


def random_granite(chance: random.Random, seed: int, path: Path) -> Subject:
    sizes = [sizes for sizes in GRANITE_SIZES.values() if not sizes.get("experts")]
    return of_other_kind(tiny_granite_hybrid(seed, **chance.choice(sizes)), chance, path)


def random_granite_moe(chance: random.Random, seed: int, path: Path) -> Subject:
    return of_other_kind(tiny_granite_hybrid(seed, **GRANITE_SIZES["experts"]), chance, path)


def random_nemotron(chance: random.Random, seed: int, path: Path) -> Subject:
    return of_other_kind(tiny_nemotron(seed, "".join(chance.sample("mef-", 4)) + "m"), chance, path)


def random_falcon(chance: random.Random, seed: int, path: Path) -> Subject:
    normed = chance.random() < 0.5
    return of_other_kind(tiny_falcon_h1(seed, chance.randint(1, 3), mamba_rms_norm=normed), chance, path)


def of_other_kind(theirs: PreTrainedModel, chance: random.Random, path: Path) -> Subject:
    theirs.save_pretrained(path)
    return Subject(theirs, load_model(path, dtype=torch.float32), None, chance)


def random_sizes(chance: random.Random) -> dict[str, Any]:
    """Heads, taps and an order of layers that has both kinds."""
    keys = chance.randint(1, 3)
    kinds = "".join(chance.choice("ddf") for _ in range(chance.randint(1, 3)))
    return {
        "key_heads": keys,
        "value_heads": keys * chance.randint(1, 3),
        "key_dim": chance.choice([16, 32]),
        "value_dim": chance.choice([16, 32, 48]),
        "taps": chance.randint(2, 5),
        "kinds": "".join(chance.sample(["d", "f"], 2)) + kinds,
        "tied": chance.random() < 0.5,
    }


KINDS = {
    "qwen3_5": random_qwen3_5,
    "qwen3_5_moe": random_mixture,
    "lfm2": random_lfm2,
    "lfm2_moe": random_lfm2_moe,
    "granite": random_granite,
    "granite_moe": random_granite_moe,
    "nemotron": random_nemotron,
    "falcon": random_falcon,
}
WITH_OWN_HEAD = "qwen3_5", "qwen3_5_moe"
WITH_EXPERTS = "qwen3_5_moe", "lfm2_moe", "granite_moe", "nemotron"  # which no device runs whole rounds of


def subject_of(kind: str, seed: int, path: Path) -> Subject:
    """A random model of a random shape, with prompts of random lengths, half of which begin with one document.

    Its answers are those of our plain decoding, once they are found to be transformers' greedy ones.
    """
    chance = random.Random(seed)
    found = KINDS[kind](chance, seed, path)
    document = [chance.randrange(VOCAB) for _ in range(DOCUMENT)]
    for row in range(ROWS):
        own = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))]
        found.prompts.append([*document, *own] if row % 2 else own)
    found.truth = answers(run(found.engine(ROWS), found.prompts, GREEDY))
    for prompt, (answer,) in zip(found.prompts, found.truth, strict=True):
        assert len(answer) == TOKENS
        assert answer == best_tokens(found.theirs, prompt, answer)
    return found


def decoded(rows: int, drafter: str | None = None, **options: Any) -> Way:
    """A way to run all prompts at once."""

    def check(subject: Subject) -> None:
        engine = subject.engine(rows, drafter, **options)
        assert answers(run(engine, subject.prompts, GREEDY)) == subject.truth
        assert (engine.rounds.counts["host"] == 0) == ("rounds" in options)

    return check


def along_trees(subject: Subject) -> None:
    engine = subject.engine(ROWS, "ngram", prefill_chunk=6)
    truth = truth_of(subject.prompts, GREEDY, subject.truth)
    engine.parts.drafter = ScriptedTrees(truth, sometimes, seed=subject.chance.randrange(1000))
    outputs = run(engine, subject.prompts, GREEDY)
    assert answers(outputs) == subject.truth
    assert sum(output.outputs[0].metrics.accepted for output in outputs) > 10


def after_prefixes(**options: Any) -> Way:
    """One prompt after the other in two slots, after the document alone: they go on from the state at its end."""

    def check(subject: Subject) -> None:
        engine, cached = subject.engine(2, "ngram", prefill_chunk=8, **options), 0
        run(engine, [subject.prompts[1][:DOCUMENT]], GREEDY[:1])
        for prompt, params, (truth,) in zip(subject.prompts, GREEDY, subject.truth, strict=True):
            (output,) = run(engine, [prompt], [params])
            assert output.outputs[0].token_ids == truth
            cached += output.cached_tokens
        assert cached >= 2 * (DOCUMENT - 1)

    return check


def joining_and_leaving(drafter: str, **options: Any) -> Way:
    """A way in which rows join at random rounds, and some are aborted; the others' answers must not notice."""

    def check(subject: Subject) -> None:
        chance, engine = subject.chance, subject.engine(3, drafter, prefill_chunk=5, **options)
        engine.use_policy(RandomLength(chance.randrange(1000), longest=4))
        waiting, begun, aborted = [*range(ROWS), *range(ROWS)], {}, set()
        chance.shuffle(waiting)
        while waiting or engine.busy:
            if waiting and (not engine.busy or chance.random() < 0.4):
                row = waiting.pop()
                output = engine.add(make_request(subject.prompts[row], GREEDY[row]))
                begun[output.request_id] = row, output
            if begun and chance.random() < 0.1:
                leaving = chance.choice(list(begun))
                if engine.abort(leaving) is not None:
                    aborted.add(leaving)
            engine.step()
            engine.scheduler.check_integrity()
        for name, (row, output) in begun.items():
            found, (truth,) = output.outputs[0].token_ids, subject.truth[row]
            assert found == (truth[: len(found)] if name in aborted else truth)

    return check


def ways(**options: Any) -> dict[str, Way]:
    """Ways in which the host and the device can run rounds. options: of the engine."""
    return {
        "plain, alone": decoded(1, **options),
        "plain, together": decoded(ROWS, **options),
        "n-gram, together": decoded(ROWS, "ngram", prefill_chunk=5, **options),
        "prefixes": after_prefixes(**options),
        "joins and leaves, n-gram": joining_and_leaving("ngram", **options),
    }


def ways_with_head(**options: Any) -> dict[str, Way]:
    """The same with a model's own head."""
    return {
        "head, alone": decoded(1, "mtp", num_speculative_tokens=3, **options),
        **{f"head, k {k}": decoded(ROWS, "mtp", num_speculative_tokens=k, **options) for k in (1, 4)},
        "head, trees": decoded(ROWS, "mtp", num_speculative_tokens=3, speculation_width=2, **options),
        "joins and leaves, head": joining_and_leaving("mtp", **options),
    }


def ways_of(kind: str) -> dict[str, Way]:
    """All ways to run a kind of ``KINDS``."""
    found = ways() | {"trees": along_trees}
    found.pop("plain, together")  # which is how the truth is found
    on_device = {} if kind in WITH_EXPERTS else ways(**ON_DEVICE)
    if kind in WITH_OWN_HEAD:
        found |= ways_with_head()
        found["hybrid, in chunks"] = decoded(4, "hybrid", num_speculative_tokens=2, prefill_chunk=4)
        on_device |= {} if kind in WITH_EXPERTS else ways_with_head(**ON_DEVICE)
    return found | {f"{name}, on the device": way for name, way in on_device.items()}


KINDS_BY_WAY: dict[str, list[str]] = {}
for _kind in KINDS:
    for _way in ways_of(_kind):
        KINDS_BY_WAY.setdefault(_way, []).append(_kind)
# Each way with one kind, the kinds in turn; the slow test below has all of them.
CASES = [(kinds[number % len(kinds)], way) for number, (way, kinds) in enumerate(KINDS_BY_WAY.items())]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """Makes a subject of a kind, once; a process that runs some of the tests needs some of them."""
    return functools.cache(lambda kind: subject_of(kind, 0, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_answers_equal_transformers_own_greedy_decoding(kind: str, way: str, subject: Callable[[str], Subject]) -> None:
    ways_of(kind)[way](subject(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1, 21))
def test_answers_of_twenty_models_equal_transformers_own(seed: int, kind: str, tmp_path: Path) -> None:
    subject = subject_of(kind, seed, tmp_path)
    for check in ways_of(kind).values():
        check(subject)
