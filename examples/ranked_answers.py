"""Sample eight answers within two seconds, and return the three best by mean log-probability."""

from paceline import LLM, SamplingParams

llm = LLM("smollm2-135m", quantization="int8", max_batch_size=8, max_model_len=256)
params = SamplingParams(
    n=3,
    best_of=8,
    rank_by="mean_logprob",
    time_budget=2.0,  # seconds from the request's arrival, prefill included
    temperature=0.8,
    seed=1,
    max_tokens=32,
)

(result,) = llm.generate("def is_prime(n):", params, use_tqdm=False)
for place, answer in enumerate(result.outputs, start=1):
    print(f"{place}. mean log-probability {answer.mean_logprob:.2f}, ended by {answer.finish_reason}")
    print(answer.text)
