"""Load a model and answer two prompts in one batch."""

from paceline import LLM, SamplingParams

llm = LLM("smollm2-135m", max_batch_size=2, max_model_len=256)
greedy = SamplingParams(temperature=0, max_tokens=16)

for result in llm.generate(["The capital of France is", "1, 2, 3, 4, 5,"], greedy, use_tqdm=False):
    answer = result.outputs[0]
    print(repr(answer.text))
    print(f"  {answer.metrics.output_tokens} tokens in {answer.metrics.rounds} rounds, ended by {answer.finish_reason}")

(chat,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy, use_tqdm=False)
print(repr(chat.outputs[0].text))
