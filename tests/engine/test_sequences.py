"""Fixed slots: outputs equal plain decoding while sequences join, end and are aborted at random, each in its slot."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from head_support import tiny_native_head
from paceline.config import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.sequences import Sequence
from paceline.kernels import native
from toy import VOCAB, FlatToy, RandomCaps, RandomLength, ToyModel, answers, make_engine, make_request, run, tiny_native

pytestmark = pytest.mark.usefixtures("one_thread")

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")


@dataclass
class Kind:
    """A target, what drafts for it, and the options of its engine."""

    target: Callable[[], Any]
    draft: Callable[[], Any] | None = None
    options: dict[str, Any] | None = None

    def engine(self, seed: int) -> Engine:
        draft = None if self.draft is None else self.draft()
        options = {"attention": "auto", "prefill_chunk": 9, "prefix_cache": True} | (self.options or {})
        engine = make_engine(self.target(), draft, max_batch_size=5, **options)
        if options.get("rounds") != "device":
            engine.use_policy((RandomLength if seed % 2 else RandomCaps)(seed=seed))
        return engine


def head() -> Any:
    return tiny_native_head(tiny_native(1), 72)


KINDS = {
    "toy, model": Kind(ToyModel, lambda: ToyModel(blur=0.3), {"drafter": "model"}),
    "toy, trees": Kind(ToyModel, lambda: ToyModel(blur=0.3), {"drafter": "hybrid", "speculation_width": 2}),
    "flat, hybrid": Kind(FlatToy, lambda: FlatToy(blur=0.3), {"drafter": "hybrid"}),
    "toy on a device": Kind(ToyModel, lambda: ToyModel(blur=0.3), {"drafter": "model", "rounds": "device"}),
    "toy on a device, trees": Kind(
        ToyModel, lambda: ToyModel(blur=0.3), {"drafter": "model", "rounds": "device", "speculation_width": 2}
    ),
}
NATIVE_KINDS = {
    "native, ngram": Kind(lambda: tiny_native(1), None, {"drafter": "ngram"}),
    "native, model": Kind(lambda: tiny_native(1), lambda: tiny_native(1, 1), {"drafter": "model"}),
    "native, head": Kind(lambda: tiny_native(1), head, {"drafter": "feature"}),
    "native, trees of a head": Kind(lambda: tiny_native(1), head, {"drafter": "feature", "speculation_width": 3}),
}


def requests_of(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, with every kind of parameter that rows have."""
    beginning = [rng.randrange(1, VOCAB) for _ in range(20)]
    found = []
    for seed in range(14):
        prompt = [*beginning[: rng.choice([0, 7, 20])], *(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9)))]
        cuts = {"top_k": 5} if seed % 3 == 0 else {"repetition_penalty": 1.3} if seed % 3 == 1 else {"min_tokens": 2}
        heat = rng.choice([0.0, 0.8])
        found.append((prompt, SamplingParams(temperature=heat, max_tokens=rng.randint(2, 12), seed=seed, **cuts)))
    return found


def join_and_leave_at_random(kind: Kind, seed: int) -> int:
    """Compare with plain decoding, a request at a time. Return the number of rounds with gaps between live slots."""
    rng, gaps = random.Random(seed), 0
    requests = requests_of(rng)
    plain = make_engine(kind.target(), max_batch_size=1, num_speculative_tokens=0, attention="auto")
    expected = answers(run(plain, [prompt for prompt, _ in requests], [params for _, params in requests]))
    engine, outputs = kind.engine(seed), []
    slots: list[tuple[Sequence, int]] = []
    while engine.busy or len(outputs) < len(requests):
        if len(outputs) < len(requests) and (rng.random() < 0.6 or not engine.busy):
            outputs.append(engine.add(make_request(*requests[len(outputs)])))
        if engine.scheduler.running and rng.random() < 0.06:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        engine.step()
        engine.scheduler.check_integrity()
        known = {id(sequence): slot for sequence, slot in slots}
        for sequence in engine.scheduler.in_use:
            assert known.get(id(sequence), sequence.slot) == sequence.slot, "a sequence has changed its slot"
        slots += [(each, each.slot) for each in engine.scheduler.in_use if id(each) not in known]
        live = engine.batch.slots
        gaps += bool(live) and live != list(range(live[0], live[0] + len(live)))
    for output, (whole,) in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == whole[: len(answer.token_ids)]
        assert answer.finish_reason == "abort" or answer.token_ids == whole
    return gaps


@pytest.mark.parametrize(("seed", "name"), enumerate(KINDS))
def test_sequences_keep_their_slots_and_their_outputs(seed: int, name: str) -> None:
    assert join_and_leave_at_random(KINDS[name], seed) > 0


@needs_kernels
@pytest.mark.parametrize(("seed", "name"), enumerate(NATIVE_KINDS))
def test_sequences_keep_their_slots_and_their_outputs_on_the_kernels(seed: int, name: str) -> None:
    assert join_and_leave_at_random(NATIVE_KINDS[name], seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sequences_keep_their_slots_in_many_runs(name: str) -> None:
    assert sum(join_and_leave_at_random(KINDS[name], seed) for seed in range(5, 25)) > 50
