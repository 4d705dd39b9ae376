"""Log-probabilities of given texts: transformers' own, whatever was read before, and nothing read twice in vain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_support import NATIVE, VOCABULARY, tiny
from paceline.decoder import Decoder
from paceline.engine import Engine
from paceline.errors import EmptyPromptError, ParameterError, PromptTooLongError
from paceline.llm import LLM
from paceline.outputs import TokenLogprob
from paceline.params import SamplingParams

PLAIN = {"drafter": None, "num_speculative_tokens": 0, "max_batch_size": 2, "dtype": "float32"}


def make(model: PreTrainedModel) -> LLM:
    return LLM(model, **PLAIN)  # type: ignore[arg-type]


def texts(count: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of three kinds that share their beginnings, and continuations of one to five tokens."""
    generator = torch.Generator().manual_seed(seed)

    def some(size: int) -> list[int]:
        found: list[int] = torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()
        return found

    beginning = some(12)
    stems = [beginning + some(9), beginning + some(30), some(5)]
    return [stems[index % 3] for index in range(count)], [some(1 + index % 5) for index in range(count)]


@torch.no_grad()
def law_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    law: Tensor = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return law


def test_scores_are_those_of_transformers() -> None:
    model = tiny(*NATIVE["llama"])
    prompts, continuations = texts(15)
    best = law_of(model, prompts[0])[-1].argmax()
    continuations[0] = [int(best)]
    for prompt, continuation, score in zip(
        prompts, continuations, make(model).score(prompts, continuations, use_tqdm=False), strict=True
    ):
        law = law_of(model, prompt + continuation)[len(prompt) - 1 : -1]
        wanted = law.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), wanted, rtol=1e-4, atol=1e-4)
        assert score.token_ids == continuation
        assert score.logprob == pytest.approx(float(wanted.sum()), abs=1e-3)
        assert score.greedy == bool((law.argmax(-1) == torch.tensor(continuation)).all())


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_what_texts_begin_with_is_read_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    llm, read = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": rows}), []  # type: ignore[arg-type]
    read_rows = Decoder.read_rows

    def counted(self: Decoder, parts: list[tuple[int, int, list[int]]]) -> list[Tensor]:
        read.append(sum(len(tokens) for *_, tokens in parts))
        return read_rows(self, parts)

    monkeypatch.setattr(Decoder, "read_rows", counted)
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
    """The kernels', that is: elsewhere bits depend on the shapes of passes."""
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
def test_who_may_not_copy_a_prompt_reads_it_anew_where_it_is_scored(
    monkeypatch: pytest.MonkeyPatch, first: SamplingParams, second: SamplingParams | None, begins: int
) -> None:
    """By the time it takes nobody learns what another client has sent."""
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN, prefix_cache=second is not None).engine  # type: ignore[arg-type]
    read, forward = [0], Decoder.forward

    def counted(self: Decoder, tokens: Tensor, *rest: object) -> Tensor:
        read[0] += tokens.numel()
        return forward(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", counted)
    for params in (first, second or first):
        read[0] = 0
        scorer = engine.scorer(list(range(3, 43)), 1, engine.scope_of(params), begins)
        while not scorer.finished:
            engine.score_some(scorer)
    assert read[0] == 39


@pytest.mark.parametrize("top", [0, 3])
def test_texts_that_take_turns_in_the_row_get_their_own(top: int) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(6)
    whole = [prompt + continuation + prompt for prompt, continuation in zip(prompts, continuations, strict=True)]
    alone = [_scored(make(tiny(*NATIVE["llama"])).engine, tokens, top) for tokens in whole]
    scorers = [engine.scorer(tokens[:60], top, engine.scope_of(SamplingParams())) for tokens in whole]
    while not all(scorer.finished for scorer in scorers):
        for scorer in scorers:
            if not scorer.finished:
                engine.score_some(scorer)
    again = [_scored(engine, tokens, top) for tokens in whole]  # told from what was scored before
    for one, other, third in zip(alone, (scorer.logprobs for scorer in scorers), again, strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
        for these in (other, third):
            assert [token.logprob for token in one] == pytest.approx([token.logprob for token in these], abs=1e-4)
            assert [len(token.top) for token in these] == [top] * len(one)


def _scored(engine: Engine, tokens: list[int], top: int) -> list[TokenLogprob]:
    scorer = engine.scorer(tokens[:60], top, engine.scope_of(SamplingParams()))
    while not scorer.finished:
        engine.score_some(scorer)
    return scorer.logprobs


def test_a_fault_in_the_middle_leaves_nothing_half_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(2)
    _scored(engine, prompts[0] + continuations[0], 0)
    broken = Decoder.forward

    def fails(*_: object) -> Tensor:
        raise RuntimeError("mine")

    monkeypatch.setattr(Decoder, "forward", fails)
    with pytest.raises(RuntimeError, match="mine"):
        _scored(engine, prompts[1] + continuations[1], 0)
    monkeypatch.setattr(Decoder, "forward", broken)
    fresh = make(tiny(*NATIVE["llama"])).engine
    for index in range(2):
        tokens = prompts[index] + continuations[index]
        found = [token.logprob for token in _scored(engine, tokens, 0)]
        assert found == pytest.approx([t.logprob for t in _scored(fresh, tokens, 0)], abs=1e-4)


def test_scoring_disturbs_no_answer() -> None:
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
