"""Write a length policy: draft more after rounds that accepted everything, nothing after those that accepted nothing.

A policy cannot change the output either: it only says how many tokens are drafted. docs/extending.md explains more.
"""

from paceline import LLM, SamplingParams
from paceline.batch import Batch, SpeculationPlan
from paceline.draft import Verdict
from paceline.lengths import LengthPolicy


class Stairs(LengthPolicy):
    """One step up after a round in which a row accepted its whole draft, down to a pause after one without any."""

    name = "stairs"
    PAUSE = 4  # plain rounds after a round that accepted nothing

    def __init__(self, start: int = 2) -> None:
        self.k, self.rest = start, 0

    def choose(self, batch: Batch) -> SpeculationPlan:
        """Called before each round. The plan's k is the same for all rows here."""
        if self.rest:
            self.rest -= 1
            return SpeculationPlan(0)
        return SpeculationPlan(self.k)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Called after each round. verdict.drafted and verdict.accepted are lists with a number for each row."""
        if not any(verdict.drafted):
            return
        if not any(verdict.accepted):
            self.k, self.rest = 1, self.PAUSE
        elif any(a == d > 0 for a, d in zip(verdict.accepted, verdict.drafted, strict=True)):
            self.k = min(self.k + 1, self.max_draft_tokens)


def main() -> None:
    """Answer two prompts under this policy and without drafts: the texts are equal."""
    llm = LLM("smollm2-135m", drafter="ngram", num_speculative_tokens=Stairs(), max_batch_size=2, max_model_len=256)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["red, green, blue, red, green, blue, red,", "The capital of France is"]
    results = llm.generate(prompts, greedy, use_tqdm=False)
    plain = llm.plain().generate(prompts, greedy, use_tqdm=False)
    for result, reference in zip(results, plain, strict=True):
        answer = result.outputs[0]
        by_position = list(zip(answer.metrics.accepted_per_position, answer.metrics.drafted_per_position, strict=False))
        print(f"{answer.text!r}: {answer.metrics.rounds} rounds, accepted of drafted by position: {by_position}")
        assert answer.token_ids == reference.outputs[0].token_ids


if __name__ == "__main__":  # so that commands can read the class: -k own_length_policy.py:Stairs
    main()
