"""What the host hands to native rounds, and what it keeps for them. That they change no answer: test_lossless.py."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.batch import Batch, Wish
from paceline.draft import Draft, ReadDraft
from paceline.drafters import Drafter
from paceline.engine import Engine
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.lengths.auto import AutoLength
from paceline.lengths.cost import CostModel
from paceline.memory import plan_memory
from paceline.native_round import NativeRound, kept_bytes
from paceline.params import EngineConfig, SamplingParams
from simulation import linear_costs
from toy import POSITIONS, VOCAB, ToyModel, answers, make_engine, run, tiny_native

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]

PROMPTS = [[1, 5, 9, 3, 5, 9], [2, 7, 7, 2, 7], [4, 4, 4], [9, 1, 8]]
PARAMS = [SamplingParams(temperature=0, max_tokens=12, seed=row) for row in range(len(PROMPTS))]

Guess = Callable[[int, int], Draft]  # rows, k


class Guesses(Drafter):
    """A drafter made of one function."""

    name = "scripted"

    def __init__(self, guess: Guess) -> None:
        self._guess = guess

    def propose(self, batch: Batch, wish: Wish) -> Draft:
        return self._guess(batch.rows, wish.k)


def engine_with(guess: Guess, **options: Any) -> Engine:
    engine = make_engine(tiny_native(1), drafter="ngram", num_speculative_tokens=3, **options)
    engine.parts.drafter = Guesses(guess)
    return engine


@functools.cache
def plain() -> list[list[int]]:
    return answers(run(make_engine(tiny_native(1)), PROMPTS, PARAMS))


def tokens(rows: int, k: int) -> torch.Tensor:
    return torch.arange(rows * k).view(rows, k) % VOCAB


def counts(rows: int, k: int) -> torch.Tensor:
    return torch.full((rows,), k)


LAYOUTS: dict[str, Guess] = {
    "counts that are one number": lambda rows, k: Draft(tokens(rows, k), torch.tensor(k).expand(rows)),
    "every second count": lambda rows, k: Draft(tokens(rows, k), torch.full((2 * rows,), k)[::2]),
    "counts of 32 bits": lambda rows, k: Draft(tokens(rows, k), counts(rows, k).int()),
    "the same line for all": lambda rows, k: Draft(tokens(1, k).expand(rows, k), counts(rows, k)),
    "columns first": lambda rows, k: Draft(tokens(k, rows).T, counts(rows, k)),
    "tokens of 32 bits": lambda rows, k: Draft(tokens(rows, k).int(), counts(rows, k)),
    "every second token": lambda rows, k: Draft(tokens(rows, 2 * k)[:, ::2], counts(rows, k)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_may_lie_in_memory_as_they_like(layout: str) -> None:
    assert answers(run(engine_with(LAYOUTS[layout]), PROMPTS, PARAMS)) == plain()


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("count", [-1, 2])
def test_a_drafter_that_counts_wrongly_is_told_so(count: int, natively: bool) -> None:
    """Nothing may be read beyond its guesses."""
    engine = engine_with(lambda rows, _: Draft(tokens(rows, 1), counts(rows, count)))
    if not natively:
        engine.parts.native = None
    with pytest.raises(ParameterError, match="counts"):
        run(engine, PROMPTS, PARAMS)
    assert engine.batch.length.tolist() == list(map(len, PROMPTS)), "no row has gained anything"


def player_of(engine: Engine) -> NativeRound:
    assert engine.parts.native is not None
    return engine.parts.native


def test_the_kernels_write_no_logits_beyond_the_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k)))
    monkeypatch.setattr(player_of(engine), "_make_room", lambda _: None)
    with pytest.raises(ParameterError, match="no room"):
        run(engine, PROMPTS, PARAMS)


def test_room_for_logits_is_kept_from_round_to_round_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the player's, whoever plays its rounds; memory that is never written to is not taken from the system."""
    engine = engine_with(lambda rows, k: Draft(tokens(rows, k), counts(rows, k)))
    player, rooms = player_of(engine), list[int]()
    make_room = player._make_room

    def watched(count: int) -> None:
        make_room(count)
        assert player._call.room >= count
        rooms.append(player._call.logits)

    player._make_room = watched  # type: ignore[method-assign]
    run(engine, PROMPTS, PARAMS)
    assert len(set(rooms)) < len(rooms) / 2
    written = 4 * len(PROMPTS) * (engine.models.target.vocab_size + player._model.width) * 4
    assert kept_bytes(engine.models.target, 4 * len(PROMPTS)) == written
    config = EngineConfig(num_speculative_tokens=3)
    plan = functools.partial(plan_memory, engine.models.target, None, config, len(PROMPTS), POSITIONS)
    with_room = plan().workspace
    monkeypatch.setattr(player._model, "_packed", None)  # as on a machine without the kernels
    assert with_room - plan().workspace == written
    assert kept_bytes(ToyModel(), 100) == 0


def modes_of(engine: Engine, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every round: rows that decode, and whether torch was in its mode for inference; and who has what threads."""
    modes, choose, pools = [], engine.parts.policy.choose, set[int | None]()
    current_pool = native.current_pool

    def watched(batch: Batch) -> Wish:
        modes.append((batch.rows, torch.is_inference_mode_enabled()))
        return choose(batch)

    def counted(kernels: native.Kernels, threads: int | None = None) -> native.Pool:
        pool = current_pool(kernels, threads)
        pools.add(pool.threads)
        return pool

    engine.parts.policy.choose = watched  # type: ignore[method-assign]
    monkeypatch.setattr(native, "current_pool", counted)
    run(engine, PROMPTS[: len(params)], params)
    assert pools == {engine.threads}, "the model was loaded for another number"
    return modes


def test_rounds_without_torch_set_none_of_its_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the kernels and of copies: unless a row comes, or somebody wants what the host alone can do."""
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


def test_no_tensor_is_made_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the search, by the length policy or by the kernels' player: an operator takes 20 to 50 us there."""
    engine = make_engine(tiny_native(1), drafter="ngram")
    engine.parts.policy = AutoLength(CostModel(linear_costs(token=0.01)), clock=itertools.count(step=1e-3).__next__)
    asked, drafted, make = list[str](), list[int](), ReadDraft.__getattr__
    select = engine.parts.policy.select

    def noted(draft: ReadDraft, name: str) -> torch.Tensor:
        asked.append(name)
        return make(draft, name)

    def watched(batch: Batch, draft: Draft) -> Draft:
        drafted.append(draft.k)
        return select(batch, draft)

    monkeypatch.setattr(ReadDraft, "__getattr__", noted)
    monkeypatch.setattr(engine.parts.policy, "select", watched)
    run(engine, [[1, 2, 3, 4, 5] * 6] * 4, PARAMS)
    assert any(drafted)
    assert not asked
