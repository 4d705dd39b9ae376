"""Log-probabilities of texts equal those of transformers, whatever was read before; nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from model_support import NATIVE, VOCABULARY, tiny
from paceline.config import SamplingParams
from paceline.core.cache_budget import KVCacheBudget
from paceline.core.outputs import TokenLogprob
from paceline.engine.chunks import PrefillSpeed, PromptSlice
from paceline.engine.engine import Engine, Request
from paceline.engine.scoring import ScoredText
from paceline.errors import EmptyPromptError, ParameterError, PromptTooLongError
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.passes import PaddedPasses
from recurrent_support import tiny_config

PLAIN = {"drafter": None, "num_speculative_tokens": 0, "max_batch_size": 2, "dtype": "float32"}


def make(model: PreTrainedModel) -> LLM:
    return LLM(model, **PLAIN)  # type: ignore[arg-type]


def texts(count: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of three kinds with common prefixes, and continuations of one to five tokens."""
    generator = torch.Generator().manual_seed(seed)

    def some(size: int) -> list[int]:
        found: list[int] = torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()
        return found

    beginning = some(12)
    stems = [beginning + some(9), beginning + some(30), some(5)]
    return [stems[index % 3] for index in range(count)], [some(1 + index % 5) for index in range(count)]


@torch.no_grad()
def distribution_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    distribution: Tensor = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return distribution


def test_scores_are_those_of_transformers() -> None:
    model = tiny(*NATIVE["llama"])
    prompts, continuations = texts(15)
    best = distribution_of(model, prompts[0])[-1].argmax()
    continuations[0] = [int(best)]
    for prompt, continuation, score in zip(
        prompts, continuations, make(model).score(prompts, continuations, use_tqdm=False), strict=True
    ):
        distribution = distribution_of(model, prompt + continuation)[len(prompt) - 1 : -1]
        wanted = distribution.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=1e-4, atol=1e-4)
        assert score.token_ids == continuation
        assert score.logprob == pytest.approx(float(wanted.sum()), abs=1e-3)
        assert score.greedy == bool((distribution.argmax(-1) == torch.tensor(continuation)).all())


@pytest.mark.parametrize(("attention", "dtype", "near"), [("native", "bfloat16", 0.02), ("padded", "float32", 1e-4)])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_pool_the_hidden_states_of_transformers(
    monkeypatch: pytest.MonkeyPatch, pooling: Any, attention: str, dtype: str, near: float
) -> None:
    monkeypatch.setattr("paceline.engine.engine.WIDEST_PASS", 16)  # long texts take several passes
    kind, fields = NATIVE["llama"]
    model = tiny(kind, fields | {"head_dim": 16})
    prompts = [*texts(6)[0], [3], [3] * 60]
    llm = LLM(model, **PLAIN | {"attention": attention, "dtype": dtype})  # type: ignore[arg-type]
    found = llm.embed(prompts, pooling=pooling, use_tqdm=False)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = states.mean(0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(vector, pooled / pooled.norm(), rtol=near, atol=near)
    scores = llm.score(prompts, [[4]] * len(prompts), use_tqdm=False)
    assert scores == llm.with_options(max_batch_size=2).score(prompts, [[4]] * len(prompts), use_tqdm=False)


def test_what_cannot_be_embedded_is_refused() -> None:
    llm = make(tiny(*NATIVE["llama"]))
    with pytest.raises(EmptyPromptError, match="to embed"):
        llm.embed([[]], use_tqdm=False)
    with pytest.raises(PromptTooLongError, match="shorten it"):
        llm.embed([[3] * (llm.engine.max_model_len + 1)], use_tqdm=False)
    with pytest.raises(ParameterError, match="pooling='max'"):
        llm.embed([[3]], pooling="max", use_tqdm=False)  # type: ignore[arg-type]
    assert llm.embed([[3] * llm.engine.max_model_len], use_tqdm=False).shape[0] == 1
    assert llm.embed([], use_tqdm=False).shape[0] == 0


@pytest.mark.parametrize(("rows", "most"), [(1, 64), (2, 85), (7, 144)])
def test_a_recurrent_state_is_reused_only_where_it_can_be_cut(
    monkeypatch: pytest.MonkeyPatch, rows: int, most: int
) -> None:
    """The choices of a question start from the state before them, once one choice has been read."""
    model = Qwen3_5ForCausalLM(tiny_config()).eval()
    llm = LLM(model, **PLAIN | {"max_batch_size": rows})  # type: ignore[arg-type]
    read = count_reads(monkeypatch)
    context = [3 + index % 20 for index in range(30)]
    prompts = [context, context, context, context[:20], context]
    continuations = [[5, 6], [5, 7], [9], [8, 9], [5, 6]]
    scores = llm.score(prompts, continuations, use_tqdm=False)
    for prompt, continuation, score in zip(prompts, continuations, scores, strict=True):
        distribution = distribution_of(model, prompt + continuation)[len(prompt) - 1 : -1]
        wanted = distribution.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=1e-4, atol=1e-4)
    assert sum(read) <= most


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_common_prefix_of_texts_is_read_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    llm = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": rows})  # type: ignore[arg-type]
    read = count_reads(monkeypatch)
    prompts, continuations = texts(30)
    llm.score(prompts, continuations, use_tqdm=False)
    different = len(set(map(tuple, prompts)))
    assert different == 3
    once = 12 + 9 + 30 + 5 + sum(map(len, continuations))
    assert 0 < sum(read) <= once + 30  # the token before a continuation is read with it
    assert sum(read) < sum(map(len, prompts)) / 2
    assert len(read) <= 30 / rows * 3, "rows are read together"


@pytest.mark.parametrize("attention", ["native", "padded"])
def test_scores_are_the_same_to_the_bit_one_at_a_time_and_in_any_batch(attention: str) -> None:
    """Holds on the CPU kernels; elsewhere bits depend on the shapes of passes."""
    kind, fields = NATIVE["llama"]
    model = tiny(kind, fields | {"head_dim": 16})  # as the kernels want it
    prompts, continuations = texts(20, seed=1)
    continuations[3] = continuations[0] + continuations[3]  # they begin alike, too
    continuations[4] = list(continuations[1])
    prompts[4] = list(prompts[1])

    def scores(rows: int) -> list[list[float]]:
        dtype = "bfloat16" if attention == "native" else "float32"
        options = PLAIN | {"max_batch_size": rows, "attention": attention, "dtype": dtype}
        llm = LLM(model, **options)  # type: ignore[arg-type]
        return [score.logprobs for score in llm.score(prompts, continuations, use_tqdm=False)]

    one = scores(1)
    for rows in (2, 3, 16, 64):
        if attention == "native":
            assert scores(rows) == one
        else:
            for some, others in zip(scores(rows), one, strict=True):
                assert some == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SamplingParams(cache_salt="one"), SamplingParams(cache_salt="other")),
        (SamplingParams(cache_salt="one"), SamplingParams()),
        (SamplingParams(keep_prefix=False), SamplingParams()),
        (SamplingParams(), None),  # without prefix_cache
    ],
)
@pytest.mark.parametrize("begins", [1, 30])  # what was told of a text is kept, too, and what is only read
def test_a_private_prompt_is_read_again_to_be_scored(
    monkeypatch: pytest.MonkeyPatch, first: SamplingParams, second: SamplingParams | None, begins: int
) -> None:
    """The time it takes must not reveal what another client has sent."""
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN, prefix_cache=second is not None).engine  # type: ignore[arg-type]
    read = count_reads(monkeypatch)
    for params in (first, second or first):
        for again in (False, True):
            read.clear()
            score_all(engine, [ScoredText(list(range(3, 43)), scope=engine.scope_of(params), first=begins)])
            may_copy = engine.scope_of(params).may_copy(engine.scope_of(params))
            assert sum(read) <= 11 if again and may_copy else sum(read) == 39


@pytest.mark.parametrize("top", [0, 3])
def test_texts_that_share_passes_get_their_own_scores(top: int) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(6)
    whole = [(prompt + continuation + prompt)[:60] for prompt, continuation in zip(prompts, continuations, strict=True)]
    alone = [_scored(make(tiny(*NATIVE["llama"])).engine, tokens, top) for tokens in whole]
    shared = [text_of(engine, tokens, top) for tokens in whole]
    others = [text_of(engine, tokens, top + 2) for tokens in whole]
    score_all(engine, [text for pair in zip(shared, others, strict=True) for text in pair])
    again = [_scored(engine, tokens, top) for tokens in whole]  # told from what was scored before
    for one, other, third in zip(alone, (text.logprobs for text in shared), again, strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
        for these in (other, third):
            assert [token.logprob for token in one] == pytest.approx([token.logprob for token in these], abs=1e-4)
            assert [len(token.top) for token in these] == [top] * len(one)
    assert all(len(token.top) == top + 2 for text in others for token in text.logprobs)


def text_of(engine: Engine, tokens: list[int], top: int = 1, **more: Any) -> ScoredText:
    return ScoredText(tokens, top, engine.scope_of(SamplingParams()), **more)


def score_all(engine: Engine, scored: Sequence[ScoredText]) -> None:
    engine.scorer.add(scored)
    while engine.scorer.busy:
        engine.score_some(awaited=False)
    assert all(text.finished for text in scored)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens of every scoring pass from now on."""
    read: list[int] = []
    read_rows = Decoder.read_rows

    def counted(self: Decoder, parts: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        read.append(sum(len(tokens) for *_, tokens in parts))
        return read_rows(self, parts)

    monkeypatch.setattr(Decoder, "read_rows", counted)
    return read


def _scored(engine: Engine, tokens: list[int], top: int) -> list[TokenLogprob]:
    text = text_of(engine, tokens[:60], top)
    score_all(engine, [text])
    return text.logprobs


@pytest.mark.parametrize("top", [0, 1])
def test_known_log_probabilities_are_not_computed_again(monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    """Like the choices of a question: side by side, or one request after the other."""
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": 4}).engine  # type: ignore[arg-type]
    (context, *_), choices = texts(1)[0], [[5], [6, 7], [8], [9]]
    read = count_reads(monkeypatch)
    score_all(engine, [text_of(engine, context + choice, top) for choice in choices])
    assert len(read) <= 3
    assert sum(read) <= len(context) + sum(map(len, choices)) + len(choices)
    read.clear()
    score_all(engine, [text_of(engine, [*context, 10, 11], top)])
    assert sum(read) <= 3


def test_a_long_text_does_not_keep_rows_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes what the last round has left of the pause: (80 - 30) ms at 10 ms per token are 5 tokens."""
    llm = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"longest_pause": 0.1})  # type: ignore[arg-type]
    engine, (prompts, _) = llm.engine, texts(2)
    read = count_reads(monkeypatch)
    for decoding, seconds, most in ((True, 0.03, 5), (True, 5.0, 2), (False, 0.0, 50)):
        engine.scorer.add([text_of(engine, (prompts[0] * 3)[:60])])
        engine.scorer.chunks.speed = PrefillSpeed()
        engine.scorer.chunks.speed.learn([PromptSlice(0, 0, 100)], 1.0)
        engine.scorer.chunks.speed.learn = lambda parts, seconds: None  # type: ignore[method-assign]  # real passes
        read.clear()
        with torch.inference_mode():
            engine.scorer.step(decoding, seconds)
        assert read == [most]
        engine.scorer.drop(engine.scorer.begun)
        engine.scorer._row_texts, engine.scorer._last_start = [None] * 2, [-1] * 2
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    output = engine.add(Request(prompts[1], params))
    engine.scorer.add([text_of(engine, (prompts[0] * 3)[:60])])
    while not output.finished:
        engine.step()
        assert engine._step_seconds > 0
        engine.score_some()
    assert engine.scorer.chunks.rounds.last == engine._step_seconds, "of the step before"


def test_dropped_texts_are_not_read_and_delay_no_others() -> None:
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"longest_pause": None}).engine  # type: ignore[arg-type]
    (tokens, other, *_), _ = texts(3)
    expected = _scored(make(tiny(*NATIVE["llama"])).engine, tokens, 0)
    first, second, third = (text_of(engine, given, 0) for given in (tokens, tokens, other))
    engine.scorer.add([first, second, third])
    engine.scorer.chunks.speed.learn([PromptSlice(0, 0, 100)], 10.0)
    engine.scorer._copy()
    engine.scorer._begin()
    assert second.waits
    engine.scorer.drop([first, third])
    while engine.scorer.busy:
        engine.score_some()
    assert second.finished
    assert not first.logprobs
    assert not third.logprobs
    assert [token.logprob for token in second.logprobs] == pytest.approx([t.logprob for t in expected], abs=1e-4)


def test_scoring_caches_fit_the_texts_and_stay_within_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.engine.scoring._LEAST_POSITIONS", 8)
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": 16}).engine  # type: ignore[arg-type]
    scorer, made = engine.scorer, list[tuple[int, int]]()
    assert scorer._room.limit >= scorer._room.bytes_for(engine.max_model_len)
    room = scorer._room = KVCacheBudget(150, rows=16, positions=64, bytes_for=lambda positions: positions)
    make_rows = scorer._make

    def counted(rows: int, positions: int) -> Decoder:
        made.append((rows, positions))
        assert rows * room.bytes_for(positions) <= room.limit
        return make_rows(rows, positions)

    scorer._make = counted
    assert scorer.bytes_held == 0
    for size in (10, 60, 50, 30, 40, 65, 5):
        wanted = [text_of(engine, [3 + n, *[4] * (size - 1)]) for n in range(9)]
        scorer.add(wanted)
        while scorer.busy:
            engine.score_some(awaited=False)
            assert 0 < scorer.bytes_held <= room.limit
        assert all(len(text.logprobs) == size - 1 for text in wanted)
    assert [rows for rows, _ in made] == [9, 2, 4, 2, 16]


def test_a_fault_in_a_pass_leaves_no_text_half_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(2)
    _scored(engine, prompts[0] + continuations[0], 0)
    forward = PaddedPasses.forward

    def fails(*given: object) -> Tensor:
        forward(*given)  # type: ignore[arg-type]
        raise RuntimeError("mine")

    monkeypatch.setattr(PaddedPasses, "forward", fails)
    with pytest.raises(RuntimeError, match="mine"):
        _scored(engine, prompts[1] + continuations[1], 0)
    monkeypatch.setattr(PaddedPasses, "forward", forward)
    engine.scorer.drop(engine.scorer.begun)
    fresh = make(tiny(*NATIVE["llama"])).engine
    for index in range(2):
        tokens = prompts[index] + continuations[index]
        found = [token.logprob for token in _scored(engine, tokens, 0)]
        assert found == pytest.approx([t.logprob for t in _scored(fresh, tokens, 0)], abs=1e-4)


@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_copy_loses_no_text_and_repeats_no_score(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The caller that ran the pass gets the error; the next pass scores the other's text."""
    engine = make(tiny(*NATIVE["llama"])).engine
    first, second = (texts(1)[0][0] + behind for behind in ([5, 6, 7], [8, 9]))
    expected = _scored(make(tiny(*NATIVE["llama"])).engine, second, 0)
    copy_row, failures = Decoder.copy_row, [1]

    def fails_once(*given: Any) -> None:
        copy_row(*given)
        if failures:
            failures.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "copy_row", fails_once)
    ours = text_of(engine, second, 0)
    if not waits:
        _scored(engine, first, 0)
    with pytest.raises(KeyboardInterrupt):
        score_all(engine, [text_of(engine, first, 0), ours] if waits else [ours])
    for _ in range(10):
        engine.score_some(awaited=False)
    assert [token.token_id for token in ours.logprobs] == second[1:]
    assert [token.logprob for token in ours.logprobs] == pytest.approx([t.logprob for t in expected], abs=1e-4)


def test_scoring_changes_no_output() -> None:
    llm, prompts = make(tiny(*NATIVE["llama"])), texts(2)[0]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    growing = llm.stream(prompts, params)
    next(growing)
    llm.score(*texts(4), use_tqdm=False)
    ended = {output.request_id: output for output in growing if output.finished}
    assert sorted(output.outputs[0].token_ids for output in ended.values()) == sorted(expected)


def test_what_cannot_be_scored_is_refused() -> None:
    llm = make(tiny(*NATIVE["llama"]))
    with pytest.raises(ParameterError, match="continuations"):
        llm.score([[3, 4]], [])
    with pytest.raises(ParameterError, match="continuations"):
        llm.score([[3, 4]], [[]])
    with pytest.raises(EmptyPromptError):
        llm.score([[]], [[3]])
    with pytest.raises(ParameterError, match="token_ids"):
        llm.score([[3]], [[VOCABULARY]])
    with pytest.raises(PromptTooLongError, match="max_model_len"):
        llm.score([[3] * 60], [[4] * 6])
    assert llm.score([], []) == []
