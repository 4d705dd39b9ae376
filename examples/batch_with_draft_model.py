"""Decode a batch with a draft model, and compare it with plain decoding.

    python examples/batch_with_draft_model.py [TARGET DRAFT]

DRAFT is a smaller model with TARGET's vocabulary, such as Qwen/Qwen2.5-Coder-0.5B-Instruct for
Qwen/Qwen2.5-Coder-1.5B-Instruct, or a trained head. Without arguments: SmolLM2 and the head that comes with paceline.
"""

import sys

from paceline import LLM, SamplingParams

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else ("smollm2-135m", "smollm2-135m-head")
prompts = ["Why is the sky blue?", "Name three rivers.", "How do I boil an egg?", "What is a prime number?"]
conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
params = SamplingParams(temperature=0.8, seed=1, max_tokens=24)

# Three draft tokens in every round; without num_speculative_tokens paceline chooses.
llm = LLM(target, draft_model=draft, num_speculative_tokens=3, max_batch_size=4, max_model_len=256)
print(llm.engine.describe())

results = llm.chat(conversations, params, use_tqdm=False)
plain = llm.plain().chat(conversations, params, use_tqdm=False)
for prompt, result, reference in zip(prompts, results, plain, strict=True):
    answer, expected = result.outputs[0], reference.outputs[0]
    print(f"{prompt} {answer.text!r}")
    rounds = f"{answer.metrics.rounds} rounds instead of {expected.metrics.rounds}"
    print(f"  {rounds}, mean acceptance length {answer.metrics.mean_acceptance_length:.2f}")
    assert answer.token_ids == expected.token_ids, "the same seed gives the same text, with speculation and without"
