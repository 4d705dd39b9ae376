"""``paceline verify``: it passes what is lossless, and notices what is not."""

import math
from typing import Any, get_args

import pytest
import torch

from paceline import LLM, RequestOutput, SamplingParams
from paceline.config import DtypeName
from paceline.tools.evaluation import lossless
from paceline.tools.evaluation.lossless import (
    TOLERANCE,
    chi_squared,
    compare_with_plain,
    count_cells,
    distribution_test,
    exact_distribution,
    first_divergence,
)

QUICK = ("--dtype", "float32", "--batch-sizes", "1,4", "--lengths", "1,3", "--max-tokens", "10", "--samples", "60")
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["abcabcabcabc", "hello", "x"]


@pytest.fixture(scope="module")
def llm(tiny: str, tiny_draft: str) -> LLM:
    return LLM(tiny, tiny_draft, dtype="float32", max_batch_size=64)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.requests.tokenizer.encode(text) for text in PROMPTS]


@pytest.mark.parametrize("who", ["draft model", "ngram"])
def test_a_lossless_pair_passes(paceline: Any, tiny: str, tiny_draft: str, who: str) -> None:
    draft = ["--draft-model", tiny_draft] if who == "draft model" else []
    result = paceline("verify", tiny, *draft, "-p", "abcabcabc", "-p", "hello", *QUICK)
    assert result.exit_code == 0, result.output
    assert "Lossless: every answer equals plain decoding's" in result.stdout
    assert all(word in result.stdout for word in ("greedy", "coupled, temperature 0.8", "rejection", "p-value"))


def test_trees_pass_although_one_rule_has_chains_only(paceline: Any, tiny: str, tiny_draft: str) -> None:
    options = ["--draft-model", tiny_draft, "--speculation-width", "2", "-p", "abcabcabc"]
    result = paceline("verify", tiny, *options, *QUICK)
    assert result.exit_code == 0, result.output
    assert "rejection" in result.stdout


def test_a_changed_output_is_found_and_fails(
    paceline: Any, tiny: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def lossy(self: LLM, *arguments: Any, **options: Any) -> list[RequestOutput]:
        outputs = generate(self, *arguments, **options)
        if self.config.drafter is not None:
            for output in outputs:
                output.outputs[0].token_ids[3] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", lossy)
    result = paceline("verify", tiny, "--draft-model", tiny_draft, "-p", "hello", *QUICK[:-1], "0")
    assert result.exit_code == 1
    assert "VIOLATED: greedy, coupled" in result.stdout
    assert "prompt 1, token 4" in result.stdout
    assert "(violation)" in result.stdout


def test_a_near_tie_is_reported_but_no_violation(
    llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lossless.TOLERANCE, "float32", math.inf)
    monkeypatch.setattr(lossless, "_answers", lambda side, *_: [[1 if side.config.drafter else 2]] * len(prompts))
    (comparison,) = compare_with_plain(llm, prompts, GREEDY, [1], [2])
    assert len(comparison.divergences) == len(prompts)
    assert not comparison.violated


def test_a_divergence_tells_position_tokens_and_gap(llm: LLM, prompts: list[list[int]]) -> None:
    logits = llm.engine.next_logits([*prompts[0], 7])
    best, second = logits.topk(2).indices.tolist()
    found = first_divergence(llm, 5, prompts[0], [7, second, 1], [7, best, 2], GREEDY)
    assert found is not None
    assert (found.prompt, found.position, found.expected, found.found) == (5, 1, best, second)
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)


def test_a_sampled_divergence_counts_the_noise(llm: LLM, prompts: list[list[int]]) -> None:
    """With the noise of that position added, the token that was drawn is the best one: its gap is zero."""
    params = SamplingParams(temperature=0.8, max_tokens=6, seed=3, ignore_eos=True)
    drawn = llm.plain().generate([prompts[0]], params, use_tqdm=False)[0].outputs[0].token_ids
    for position, token in enumerate(drawn):
        scores = lossless._scores(llm, [*prompts[0], *drawn[:position]], params)
        assert int(scores.argmax()) == token


def test_an_answer_that_ends_early_is_a_violation(llm: LLM, prompts: list[list[int]]) -> None:
    found = first_divergence(llm, 0, prompts[0], [1, 2], [1, 2, 3], GREEDY)
    assert found is not None
    assert found.gap == math.inf


def test_the_exact_distribution_sums_to_one_and_has_a_cell_for_everything(llm: LLM, prompts: list[list[int]]) -> None:
    distribution = exact_distribution(llm, prompts[0])
    assert sum(distribution.values()) == pytest.approx(1.0)
    vocabulary = llm.engine.models.target.vocab_size
    continuations = torch.randint(0, vocabulary, (200, 3), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(count_cells(continuations, distribution)) == 200
    followed = [list(cell) for cell in distribution if lossless.REST not in cell]
    assert count_cells(followed, distribution) == [int(lossless.REST not in cell) for cell in distribution]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_samples_follow_the_distribution(llm: LLM, prompts: list[list[int]], rule: Any) -> None:
    found = distribution_test(llm, prompts[0], rule, samples=600)
    assert found.cells > 3
    assert found.drafted > 600
    assert 0 < found.accepted < found.drafted
    assert not found.violated


def test_a_wrong_distribution_is_noticed(llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = exact_distribution(llm, prompts[0])
    flat = {cell: p**0.7 for cell, p in distribution.items()}
    wrong = {cell: p / sum(flat.values()) for cell, p in flat.items()}
    monkeypatch.setattr(lossless, "exact_distribution", lambda *_: wrong)
    assert distribution_test(llm, prompts[0], "rejection", samples=600).violated


def test_chi_squared_is_scipys() -> None:
    from scipy import stats

    observed, probabilities = [48, 35, 15, 2], [0.4, 0.4, 0.15, 0.05]
    statistic, cells, p_value = chi_squared(observed, probabilities)
    expected = stats.chisquare(observed, [40, 40, 15, 5])
    assert cells == 4
    assert (statistic, p_value) == pytest.approx((expected.statistic, expected.pvalue))


def test_rare_cells_are_counted_together_and_the_impossible_is_noticed() -> None:
    _, cells, _ = chi_squared([50, 47, 2, 1], [0.5, 0.46, 0.02, 0.02])
    assert cells == 3
    assert chi_squared([99, 1], [1.0, 0.0])[2] == 0.0


def test_every_precision_has_its_near_ties() -> None:
    assert {*TOLERANCE, "auto"} == {*get_args(DtypeName)}
