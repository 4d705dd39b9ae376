"""Rounds of a model with random weights at a published acceptance: tokens per second by rows and draft tokens.

    python -m benchmarks.random_models DIRECTORY --shape qwen3.5-0.8b
    python -m benchmarks.published_acceptance DIRECTORY --quantization int8 --rows 1 4 8 --lengths 1 2 3

The acceptance is SYNTHETIC. The model's own head drafts; then its draft tokens are replaced: at each position, the
    given fraction by the target's own tokens, the others by wrong ones, so drafting, verification and acceptance take
    their true time, and the texts are those of plain decoding, which is checked. The last line is one JSON document.
    With ``--drafter free`` drafting takes no time: for models without a head, to see what verification costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.phases import FreeDrafter

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.sampling import sequence_seed
from paceline.drafters.base import Drafter, Wrapper
from paceline.tools.bench.offline import Ids, OfflineResult, Paceline, machine, measure, prompts_for


class ReplacedDrafts(Wrapper):
    """A drafter's drafts with other tokens: at position i a fraction ``rates[i]`` is right where all before are.

    truth: seed of a row -> its prompt and the target's answer. rates: the last one also counts for later positions.
    """

    name = "synthetic acceptance"

    def __init__(self, inner: Drafter, truth: Mapping[int, Sequence[int]], rates: Sequence[float]) -> None:
        super().__init__(inner)
        self.truth, self.rates = truth, rates
        self._due = [0.0] * MAX_SPECULATION_LENGTH

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        drafted = self.inner.propose(batch, plan).draft_tokens
        return Draft([self._of_row(batch, row, len(tokens)) for row, tokens in enumerate(drafted)])

    def _of_row(self, batch: Batch, row: int, count: int) -> list[int]:
        text, length = self.truth[int(batch.sampling.seed[batch.slots[row]])], batch.lengths[row]
        tokens, is_right = [], True
        for place, token in enumerate([*text[length : length + count], *[0] * count][:count]):
            is_right = is_right and self._is_next_right(place)
            tokens.append(token if is_right else (token + 1) % batch.vocab_size)
        return tokens

    def _is_next_right(self, place: int) -> bool:
        """Whether the next token at a position is right: evenly spread, so that a short answer has the rate, too."""
        self._due[place] += self.rates[min(place, len(self.rates) - 1)]
        is_right = self._due[place] >= 1
        self._due[place] -= is_right
        return is_right


def answers_of(llm: LLM, prompts: Sequence[Ids], tokens: int) -> list[Ids]:
    """Greedy answers of a length, with the seeds of ``Paceline.time``."""
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=seed) for seed in range(len(prompts))
    ]
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


def run(
    llm: LLM, rows: int, lengths: Sequence[str], rates: Sequence[float], tokens: int, repeats: int, free: bool
) -> list[OfflineResult]:
    """Time plain decoding and each number of draft tokens on one batch. Exits if a text is not plain decoding's.

    free: whether drafts take no time, in place of those of the model's own head.
    """
    prompts, _ = prompts_for(llm, "open", rows)
    plain = llm.plain().with_options(max_batch_size=rows)
    wanted = answers_of(plain, prompts, tokens)
    texts = zip(prompts, wanted, strict=True)
    truth = {sequence_seed(seed, 0): [*prompt, *answer] for seed, (prompt, answer) in enumerate(texts)}
    sides = [Paceline("k=0", plain)]
    for k in lengths:
        side = llm.with_options(max_batch_size=rows, num_speculative_tokens=k if k == "auto" else int(k))
        parts = side.engine.parts
        parts.drafter = ReplacedDrafts(FreeDrafter() if free else parts.drafter, truth, rates)
        if answers_of(side, prompts, tokens) != wanted:
            sys.exit(f"{rows} rows, k={k}: a text is not that of plain decoding")
        sides.append(Paceline(f"k={k}", side))
    return list(measure(sides, prompts, tokens, repeats))


def more_rows_carry(results: Sequence[OfflineResult]) -> float:
    """Tokens per second of the most rows over those of the fewest, each at its fastest number of draft tokens."""
    speeds: dict[int, float] = {}
    for result in results:
        if result.side != "k=0":
            speeds[result.batch_size] = max(speeds.get(result.batch_size, 0.0), result.tokens_per_second)
    return speeds[max(speeds)] / speeds[min(speeds)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", choices=("mtp", "free"), default="mtp", help="the model's own head, or no time")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--lengths", nargs="+", default=["1", "2", "3"], help="draft tokens per row and round: numbers, or auto"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.82], help="acceptance by position; the last goes on"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    free = options.drafter == "free"
    llm = LLM(
        options.model,
        drafter="ngram" if free else "mtp",
        quantization=options.quantization,
        dtype="bfloat16",
        max_model_len=1024,
        speculation_width=1,
    )
    results = []
    for rows in options.rows:
        for result in run(llm, rows, options.lengths, options.rates, options.max_tokens, options.repeats, free):
            results.append(result)
            accepted = result.median.acceptance_rate
            share = "" if accepted is None else f", {accepted:.0%} accepted"
            print(f"{rows} rows, {result.side}: {result.tokens_per_second:.1f} tokens/s{share}", flush=True)
    document: dict[str, Any] = {
        "model": Path(options.model).name,
        "quantization": options.quantization,
        "acceptance": "synthetic",
        "drafter": options.drafter,
        "rates": options.rates,
        "machine": machine(llm.engine.threads),
        "more_rows_carry": round(more_rows_carry(results), 3),
        "results": [result.as_document() for result in results],
    }
    end(document, options.output)


if __name__ == "__main__":
    main()
