"""Write a drafter: what followed the row's last token before will follow it again.

A drafter cannot change the output: the target verifies what it proposes. docs/extending.md explains more.
"""

import torch

from paceline import LLM, SamplingParams
from paceline.batch import Batch, SpeculationPlan
from paceline.draft import Draft
from paceline.drafters import Drafter


class AsBefore(Drafter):
    """Proposes the tokens that followed the last occurrence of the row's last token."""

    name = "as before"

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        """At most plan.k draft tokens per row, as tokens [rows, k] and the number of real ones [rows]."""
        tokens, lengths = batch.tokens[: batch.rows], batch.live_length
        draft, counts = torch.zeros(batch.rows, plan.k, dtype=tokens.dtype), torch.zeros_like(lengths)
        for row, length in enumerate(lengths.tolist()):
            text = tokens[row, :length].tolist()
            before = [place for place in range(length - 1) if text[place] == text[-1]]
            found = text[before[-1] + 1 :][: plan.k] if before else []
            draft[row, : len(found)] = torch.tensor(found, dtype=tokens.dtype)
            counts[row] = len(found)
        return Draft(draft, counts)


def main() -> None:
    """Answer two prompts with this drafter and without: the texts are equal."""
    llm = LLM("smollm2-135m", drafter=AsBefore, num_speculative_tokens=4, max_batch_size=2, max_model_len=256)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["red, green, blue, red, green, blue, red,", "The capital of France is"]

    results = llm.generate(prompts, greedy, use_tqdm=False)
    plain = llm.plain().generate(prompts, greedy, use_tqdm=False)
    for result, reference in zip(results, plain, strict=True):
        answer = result.outputs[0]
        print(f"{answer.text!r}: {answer.metrics.accepted} of {answer.metrics.drafted} draft tokens accepted")
        assert answer.token_ids == reference.outputs[0].token_ids


if __name__ == "__main__":  # so that commands can read the class: --drafter own_drafter.py:AsBefore
    main()
