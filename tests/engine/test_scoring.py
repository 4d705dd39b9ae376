"""Log-probabilities of texts equal those of transformers, whatever was read before; nothing is read twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from model_support import NATIVE, VOCABULARY, tiny
from models.test_tokenizer import byte_level_backend, wrap
from paceline.config import SamplingParams
from paceline.core.batch import Batch
from paceline.core.outputs import RequestOutput, TokenLogprob
from paceline.engine.chunks import PrefillSpeed, PromptSlice
from paceline.engine.engine import Engine, Request
from paceline.engine.scoring import PromptScores
from paceline.errors import (
    EmptyPromptError,
    ModelFormatError,
    NotFiniteError,
    ParameterError,
    PromptTooLongError,
    RequestError,
)
from paceline.llm import LLM
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.passes import PaddedPasses
from paceline.models.load import loading
from recurrent_support import tiny_config
from server_support import byte_tokenizer
from toy_llm import toy_llm

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
    pooling: Any, attention: str, dtype: str, near: float
) -> None:
    kind, fields = NATIVE["llama"]
    model = tiny(kind, fields | {"head_dim": 16})
    prompts = [*texts(6)[0], [3], [3] * 60]
    chunks = {"prefill_chunk": 16}  # long texts take several passes
    llm = LLM(model, **PLAIN | chunks | {"attention": attention, "dtype": dtype})  # type: ignore[arg-type]
    found = llm.embed(prompts, pooling=pooling, use_tqdm=False)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = states.mean(0) if pooling == "mean" else states[-1]
        torch.testing.assert_close(vector, pooled / pooled.norm(), rtol=near, atol=near)
    scores = llm.score(prompts, [[4]] * len(prompts), use_tqdm=False)
    assert scores == llm.with_options(max_batch_size=2).score(prompts, [[4]] * len(prompts), use_tqdm=False)


@torch.no_grad()
@pytest.mark.parametrize("source", ["one file", "shards", "loaded", "qwen3", "int8"])
def test_a_checkpoint_without_a_head_embeds_and_does_nothing_else(source: str, tmp_path: Path) -> None:
    """Embedding models are often saved from transformers' class without a head, whose names lack the prefix, too."""
    kind, fields = NATIVE["qwen3" if source == "qwen3" else "llama"]
    theirs = tiny(kind, fields | {"head_dim": 16, "tie_word_embeddings": False}).model
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if source == "shards" else "1GB")
    options: dict[str, Any] = PLAIN | ({"quantization": "int8", "dtype": "auto"} if source == "int8" else {})
    llm = LLM(theirs if source == "loaded" else tmp_path, tokenizer=byte_tokenizer(), **options)
    assert "embeddings only" in llm.engine.describe()
    prompts = texts(3)[0]
    for prompt, vector in zip(prompts, llm.embed(prompts, use_tqdm=False), strict=True):
        pooled = theirs(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        near = 0.1 if source == "int8" else 1e-4
        torch.testing.assert_close(vector, pooled / pooled.norm(), rtol=near, atol=near)
    uses: list[Callable[[], object]] = [
        lambda: llm.generate(prompts, use_tqdm=False),
        lambda: next(iter(llm.stream(prompts))),
        lambda: llm.score(prompts, prompts, use_tqdm=False),
        lambda: llm.with_options(max_batch_size=1).generate(prompts, use_tqdm=False),
    ]
    for use in uses:
        with pytest.raises(RequestError, match=r"no output head \(lm_head\), so it can embed texts"):
            use()
    with pytest.raises(ModelFormatError, match="no output head"):
        loading.load_output(theirs if source == "loaded" else tmp_path, dtype=torch.float32)


def test_a_draft_model_without_a_head_is_refused(tmp_path: Path) -> None:
    model = tiny(*NATIVE["llama"])
    model.model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelFormatError, match=r"no output head.*cannot draft"):
        LLM(model, tmp_path)


def test_a_checkpoint_that_should_have_a_head_and_has_none_is_incomplete(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"misses the weights head\.weight.*incomplete"):
        loading.load_model(tmp_path, dtype=torch.float32)


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
            score_all(engine, [PromptScores(list(range(3, 43)), first=begins)], params)
            may_copy = params.keep_prefix and engine.config.prefix_cache
            assert sum(read) <= 11 if again and may_copy else sum(read) == 39


@pytest.mark.parametrize("top", [0, 3])
def test_texts_that_share_passes_get_their_own_scores(top: int) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(6)
    whole = [(prompt + continuation + prompt)[:60] for prompt, continuation in zip(prompts, continuations, strict=True)]
    alone = [_scored(make(tiny(*NATIVE["llama"])).engine, tokens, top) for tokens in whole]
    shared = [PromptScores(tokens, top) for tokens in whole]
    others = [PromptScores(tokens, top + 2) for tokens in whole]
    score_all(engine, [text for pair in zip(shared, others, strict=True) for text in pair])
    again = [_scored(engine, tokens, top) for tokens in whole]  # told from what was scored before
    for one, other, third in zip(alone, map(told, shared), again, strict=True):
        assert [token.token_id for token in one] == [token.token_id for token in other]
        for these in (other, third):
            assert [token.logprob for token in one] == pytest.approx([token.logprob for token in these], abs=1e-4)
            assert [len(token.top) for token in these] == [top] * len(one)
    assert all(len(token.top) == top + 2 for text in others for token in told(text))


def add(engine: Engine, text: PromptScores, params: SamplingParams | None = None, **more: Any) -> RequestOutput:
    """Add the request that only scores a text."""
    params = replace(params or SamplingParams(), max_tokens=1)
    return engine.add(Request(text.token_ids, params, reading=text, only_read=True, **more))


def finished(text: PromptScores) -> bool:
    return None not in text.logprobs[text.first :]


def told(text: PromptScores) -> list[TokenLogprob]:
    return [token for token in text.logprobs if token is not None]


def score_all(engine: Engine, scored: Sequence[PromptScores], params: SamplingParams | None = None) -> None:
    engine.expect(final=True)
    outputs = [add(engine, text, params) for text in scored]
    while engine.busy:
        engine.step()
    engine.expect(final=False)
    assert all(map(finished, scored))
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert not any(output.outputs[0].token_ids for output in outputs)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of prompt tokens of every pass from now on."""
    counts: list[int] = []

    def count(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Decoder, batch: Batch, rows: list[int], starts: list[int], stops: list[int]) -> Any:
            counts.append(sum(stops) - sum(starts))
            return run(self, batch, rows, starts, stops)

        return counted

    for name in ("read", "prefill"):
        monkeypatch.setattr(Decoder, name, count(getattr(Decoder, name)))
    return counts


def _scored(engine: Engine, tokens: list[int], top: int) -> list[TokenLogprob]:
    text = PromptScores(tokens[:60], top)
    score_all(engine, [text])
    return told(text)


@pytest.mark.parametrize("top", [0, 1])
def test_known_log_probabilities_are_not_computed_again(monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    """Like the choices of a question: side by side, or one request after the other."""
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": 4}).engine  # type: ignore[arg-type]
    (context, *_), choices = texts(1)[0], [[5], [6, 7], [8], [9]]
    read = count_reads(monkeypatch)
    score_all(engine, [PromptScores(context + choice, top) for choice in choices])
    assert len(read) <= 3
    assert sum(read) <= len(context) + sum(map(len, choices)) + len(choices)
    read.clear()
    score_all(engine, [PromptScores([*context, 10, 11], top)])
    assert sum(read) <= 3


def test_a_long_text_does_not_keep_rows_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes what the last round has left of the pause: (80 - 30) ms at 10 ms per token are 5 tokens."""
    llm = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"longest_pause": 0.1})  # type: ignore[arg-type]
    engine, (prompts, _) = llm.engine, texts(2)
    read = count_reads(monkeypatch)
    for decoding, seconds, most in ((True, 0.03, 5), (True, 5.0, 2), (False, 0.0, 50)):
        engine.clear()
        if decoding:
            engine.add(Request(prompts[1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)))
            engine.step()
            assert engine.scheduler.running
        add(engine, PromptScores((prompts[0] * 3)[:60]))
        engine.chunks.speed = PrefillSpeed()
        engine.chunks.speed.learn([PromptSlice(0, 0, 100)], 1.0)
        engine.chunks.speed.learn = lambda parts, seconds: None  # type: ignore[method-assign]  # real passes
        engine.chunks.rounds.last = seconds
        read.clear()
        engine.step()
        assert read == [most]


def test_dropped_texts_are_not_read_and_delay_no_others() -> None:
    options = PLAIN | {"longest_pause": None, "prefill_chunk": 4}
    engine = LLM(tiny(*NATIVE["llama"]), **options).engine  # type: ignore[arg-type]
    (tokens, other, *_), _ = texts(3)
    expected = _scored(make(tiny(*NATIVE["llama"])).engine, tokens, 0)
    first, second, third = (PromptScores(given, 0) for given in (tokens, tokens, other))
    outputs = [add(engine, text) for text in (first, second, third)]
    engine.step()
    assert [sequence.waits for sequence in engine.scheduler.prefilling] == [False, True]
    for output in (outputs[0], outputs[2]):
        engine.abort(output.request_id)
    while engine.busy:
        engine.step()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length", "abort"]
    assert len(told(first)) == 4, "those of the only pass that it was in"
    assert not told(third)
    assert [token.logprob for token in told(second)] == pytest.approx([t.logprob for t in expected], abs=1e-4)


def test_texts_to_score_queue_by_priority_and_end_at_their_deadline() -> None:
    engine = LLM(tiny(*NATIVE["llama"]), **PLAIN | {"max_batch_size": 1}).engine  # type: ignore[arg-type]
    tokens, ended = texts(1)[0][0], list[RequestOutput]()
    for name, priority in (("late", 2), ("early", 1)):
        add(engine, PromptScores([*tokens, priority + 3]), request_id=name, priority=priority)
    overdue = add(engine, PromptScores(tokens), SamplingParams(time_budget=1e-9), request_id="overdue")
    while engine.busy:
        ended += engine.step()
    assert [output.request_id for output in ended] == ["overdue", "early", "late"]
    assert overdue.outputs[0].finish_reason == "deadline"


def test_a_fault_in_a_pass_leaves_no_text_half_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    prompts, continuations = texts(2)
    _scored(engine, prompts[0] + continuations[0], 0)
    forward = PaddedPasses.forward

    def fails(*given: Any, **named: Any) -> Tensor:
        forward(*given, **named)
        raise RuntimeError("mine")

    monkeypatch.setattr(PaddedPasses, "forward", fails)
    with pytest.raises(RuntimeError, match="mine"):
        _scored(engine, prompts[1] + continuations[1], 0)
    monkeypatch.setattr(PaddedPasses, "forward", forward)
    engine.clear_begun()
    fresh = make(tiny(*NATIVE["llama"])).engine
    for index in range(2):
        tokens = prompts[index] + continuations[index]
        found = [token.logprob for token in _scored(engine, tokens, 0)]
        assert found == pytest.approx([t.logprob for t in _scored(fresh, tokens, 0)], abs=1e-4)


@pytest.mark.parametrize("waits", [False, True])
def test_a_failed_copy_repeats_no_score(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """It ends the texts that had begun; the same text is then scored as if nothing had happened."""
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
    if not waits:
        _scored(engine, first, 0)
        add(engine, PromptScores(first, 0))  # in the slot that holds its text, from which the other copies
    failed = PromptScores(second, 0)
    with pytest.raises(KeyboardInterrupt):
        score_all(engine, [PromptScores(first, 0), failed] if waits else [failed])
    engine.clear_begun()
    ours = PromptScores(second, 0)
    score_all(engine, [ours])
    assert [token.token_id for token in told(ours)] == second[1:]
    assert [token.logprob for token in told(ours)] == pytest.approx([t.logprob for t in expected], abs=1e-4)


def test_scored_and_generated_texts_share_passes_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one chunk, longer than it, with prompt log-probabilities and several answers, as each alone."""
    kind, fields = NATIVE["llama"]
    model = tiny(kind, fields | {"head_dim": 16})
    options = PLAIN | {"attention": "native", "dtype": "bfloat16", "prefill_chunk": 16, "max_batch_size": 4}
    prompts, continuations = texts(6, seed=2)
    params = [SamplingParams(temperature=t, seed=5, max_tokens=9, prompt_logprobs=p, n=n) for t, p, n in KINDS]

    def answers(llm: LLM, *numbers: int) -> list[Any]:
        found = llm.generate([prompts[n] for n in numbers], [params[n] for n in numbers], use_tqdm=False)
        return [(output.prompt_logprobs, [answer.token_ids for answer in output.outputs]) for output in found]

    def scores(llm: LLM) -> list[list[float]]:
        return [score.logprobs for score in llm.score(prompts, continuations, use_tqdm=False)]

    def fresh() -> LLM:
        return LLM(model, **options)  # type: ignore[arg-type]

    alone = [answers(fresh(), number)[0] for number in range(3)]
    llm, read = fresh(), count_reads(monkeypatch)
    growing = llm.stream(prompts[:3], params)
    next(growing)
    assert scores(llm) == scores(fresh())
    ended = {output.request_id: output for output in growing if output.finished}
    found = [(output.prompt_logprobs, [a.token_ids for a in output.outputs]) for _, output in sorted(ended.items())]
    assert found == alone
    read.clear()
    assert answers(fresh(), 0, 1, 2) == alone
    assert sum(read) < 2 * sum(map(len, prompts[:3])), "a prompt is read once, for its log-probabilities and its answer"


KINDS = [(0.0, 2, 1), (0.8, None, 2), (0.7, 0, 2)]  # temperature, prompt_logprobs, n


def test_what_a_caller_does_to_its_list_changes_no_other_scores() -> None:
    engine = make(tiny(*NATIVE["llama"])).engine
    text, again = (PromptScores(list(range(3, 43))) for _ in range(2))
    score_all(engine, [text])
    kept = list(text.logprobs)
    text.logprobs.pop(0)
    score_all(engine, [again])
    assert again.logprobs[:-2] == kept[:-2]
    assert again.logprobs[0] is None


def test_scoring_changes_no_output() -> None:
    llm, prompts = make(tiny(*NATIVE["llama"])), texts(2)[0]
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    growing = llm.stream(prompts, params)
    next(growing)
    llm.score(*texts(4), use_tqdm=False)
    ended = {output.request_id: output for output in growing if output.finished}
    assert sorted(output.outputs[0].token_ids for output in ended.values()) == sorted(expected)


def test_one_prompt_that_is_not_in_a_list_belongs_to_all_continuations() -> None:
    llm = make(tiny(*NATIVE["llama"]))
    several, one = [[5], [6, 7]], torch.tensor([6, 7])
    for continuations, repeated in ((several, several), (one, [[6, 7]])):
        found = llm.score([3, 4], continuations, use_tqdm=False)
        wanted = llm.score([[3, 4]] * len(repeated), repeated, use_tqdm=False)
        assert [score.token_ids for score in found] == [score.token_ids for score in wanted] == repeated
        assert [score.logprob for score in found] == pytest.approx([score.logprob for score in wanted], abs=1e-4)
    assert llm.score([3, 4], [], use_tqdm=False) == []
    with pytest.raises(ParameterError, match="continuations"):
        llm.score([[3], [4]], [5], use_tqdm=False)
    assert torch.equal(llm.embed([3, 4], use_tqdm=False), llm.embed([[3, 4]], use_tqdm=False))


def test_what_cannot_be_scored_is_refused() -> None:
    llm = make(tiny(*NATIVE["llama"]))
    with pytest.raises(ParameterError, match="continuations"):
        llm.score([[3, 4]], [])
    with pytest.raises(ParameterError, match=r"^continuations=\[\]"):
        llm.score([[3, 4]], [[]])
    with pytest.raises(EmptyPromptError):
        llm.score([[]], [[3]])
    with pytest.raises(ParameterError, match="token_ids"):
        llm.score([[3]], [[VOCABULARY]])
    with pytest.raises(PromptTooLongError, match="max_model_len"):
        llm.score([[3] * 60], [[4] * 6])
    assert llm.score([], []) == []


@pytest.fixture(scope="module")
def joining() -> LLM:
    """An LLM whose tokens may span the end of a prompt and the beginning of its continuation."""
    return toy_llm(tokenizer=wrap(byte_level_backend([" Paris", " ==", "Answer"])), drafter=None)


@pytest.mark.parametrize(
    ("prompt", "continuation", "decided"),
    [
        ("is ", "Paris, yes", " Paris"),
        ("x =", "= 1", " =="),
        ("Is it Ans", "wer: yes", "Answer"),
        ("is", " Paris", " Paris"),
    ],
)
def test_a_continuation_is_scored_from_the_first_token_that_is_not_the_prompts(
    joining: LLM, prompt: str, continuation: str, decided: str
) -> None:
    tokenizer = joining.requests.tokenizer
    whole = tokenizer.encode(prompt + continuation)
    (score,) = joining.score(prompt, [continuation], use_tqdm=False)
    first = len(whole) - len(score.token_ids)
    assert whole[:first] == tokenizer.encode(prompt)[:first]
    assert tokenizer.token_text(score.token_ids[0]) == decided
    assert [score] == joining.score([whole[:first]], [whole[first:]], use_tqdm=False)


REFUSED = [("is", "", ParameterError), ("Ans", "wer: yes", RequestError), ("", "Paris", EmptyPromptError)]
REFUSED += [([3], [], ParameterError), ([3], [10**6], ParameterError), ([3] * 300, [4], PromptTooLongError)]


@pytest.mark.parametrize(("prompt", "continuation", "error"), [*REFUSED, ("is", None, ParameterError)])
def test_a_pair_that_cannot_be_scored_is_named_and_may_be_skipped(
    joining: LLM, prompt: Any, continuation: Any, error: type[Exception]
) -> None:
    prompts, continuations = ["is", prompt, [3, 4]], [" Paris", continuation, [5]]
    with pytest.raises(error, match=r"^continuations\[1\]"):
        joining.score(prompts, continuations, use_tqdm=False)
    first, skipped, last = joining.score(prompts, continuations, use_tqdm=False, on_error="skip")
    assert [first, last] == joining.score(prompts[::2], continuations[::2], use_tqdm=False)
    assert isinstance(skipped.error, error)
    assert (skipped.token_ids, skipped.logprob, skipped.greedy) == ([], -math.inf, False)


def test_a_text_whose_scores_are_nan_may_be_skipped(joining: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptScores, "is_nan", property(lambda scores: scores.token_ids == [3, 4]))
    with pytest.raises(NotFiniteError):
        joining.score([[3], [3]], [[4], [5]], use_tqdm=False)
    skipped, scored = joining.score([[3], [3]], [[4], [5]], use_tqdm=False, on_error="skip")
    assert isinstance(skipped.error, NotFiniteError)
    assert [scored] == joining.score([[3]], [[5]], use_tqdm=False)
