"""What drafts from a part of the vocabulary lose and save: counted on recorded answers, and timed.

    python -m benchmarks.tree_gain record qwen-coder-1.5b.gguf --quantization int8 --output answers.json
    python -m benchmarks.short_vocabulary --answers answers.json --vocabulary 151936 --output coverage.json
    python -m benchmarks.short_vocabulary qwen-coder-0.5b.gguf --quantization int8 --answers answers.json
    python -m benchmarks.short_vocabulary qwen3.5-0.8b --quantization int8 --rows 1 4 8

covered: fraction of the answers' tokens that are in the subset when they come, answers one after the other, shuffled;
    fixed: the subset keeps the smallest ids; following: it follows prompts and answers, as in an engine.
accepted: fraction of places at which the draft model's first draft token is the target's own draw, under the target's
    noise, after the true text before it.
mib: of weights that a draft pass reads.
first_ms: of the first draft token of all rows, which also reads what the last round accepted. ms: of one more. Sizes
    take turns, and the median counts. Size 0: the whole vocabulary. plain_round_ms: of a round without drafts.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.tree_gain import SEED, Answer, read
from torch import Tensor

from paceline.cli.document import end
from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.sampling import Choices, sequence_seed
from paceline.lengths.calibration import Grid
from paceline.lengths.cost import CostTable
from paceline.llm import LLM
from paceline.models.base import Shortenable
from paceline.models.decoding.draft_vocabulary import NEVER, DraftVocabulary
from paceline.tools.bench.offline import machine
from paceline.tools.bench.sets import SetName

SIZES = (4096, 8192, 16384, 32768, 65536)
DRAFTED = (0, 3)  # draft tokens of the rounds that a draft pass is timed by


class Listing:
    """A short head that scores nothing: the subset is only listed."""

    def __init__(self, size: int) -> None:
        self.size = size

    def put(self, places: Tensor, tokens: Tensor) -> None:
        """Nothing to do."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Refuse: there is no model."""
        raise NotImplementedError


def shuffled(answers: Sequence[Answer]) -> list[Answer]:
    """The answers in a fixed order in which kinds alternate."""
    found = list(answers)
    random.Random(0).shuffle(found)
    return found


def stretches(answer: Answer, subset: DraftVocabulary, follows: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Places of an answer, first and stop, with the tokens [S] of the subset there. The answer is counted meanwhile."""
    if follows:
        subset.count(answer.prompt)
    first, version = 0, subset.version
    tokens = subset.tokens.clone()
    for place, token in enumerate(answer.answer):
        if subset.version != version:
            yield first, place, tokens
            first, version, tokens = place, subset.version, subset.tokens.clone()
        if follows:
            subset.count([token])
            subset.choose_if_due()
    yield first, len(answer.answer), tokens


def coverage(answers: Sequence[Answer], vocabulary: int) -> list[dict[str, Any]]:
    """Fractions by size and set of prompts."""
    results = []
    for size in (size for size in SIZES if size < vocabulary):
        line: dict[str, Any] = {"size": size}
        for name, follows in (("fixed", False), ("following", True)):
            subset, found, places = DraftVocabulary(Listing(size), vocabulary), Counter[str](), Counter[str]()
            for answer in shuffled(answers):
                for first, stop, tokens in stretches(answer, subset, follows):
                    inside = torch.isin(torch.tensor(answer.answer[first:stop]), tokens).sum()
                    found[answer.prompts] += int(inside)
                places[answer.prompts] += len(answer.answer)
            line[name] = {kind: round(found[kind] / places[kind], 4) for kind in sorted(places)}
            line[name]["all"] = round(found.total() / places.total(), 4)
        results.append(line)
    return results


def logits_of(llm: LLM, answer: Answer) -> tuple[Tensor, Batch]:
    """Logits [places, V] of a model after the true text before each place, and the places as a batch."""
    decoder, text, size = llm.engine.parts.target, [*answer.prompt, *answer.answer], len(answer.prompt)
    hidden = decoder.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.int64), len(text))
    batch = Batch(1, len(text) + 1, decoder.vocab_size)
    params = SamplingParams(temperature=answer.temperature)
    batch.set_row(0, RowStart(text[:size], params, sequence_seed(SEED, 0)))
    batch.set_live(range(1))
    places = batch.after([(0, answer.answer[:place]) for place in range(len(answer.answer))])
    return decoder.logits(hidden[0, size - 1 : -1]), places


def right(logits: Tensor, places: Batch, answer: Answer) -> Tensor:
    """Whether the draft token at each place is the answer's, [places] bool."""
    return Choices(logits[:, None], places).draw()[:, 0] == torch.tensor(answer.answer)


def acceptance(answers: Sequence[Answer], llm: LLM) -> list[dict[str, Any]]:
    """First draft tokens that are accepted, by size, and bytes that a pass reads. Size 0: the whole vocabulary."""
    model = llm.engine.models.target
    assert isinstance(model, Shortenable)
    cost = model.pass_bytes
    assert cost is not None
    sizes = [size for size in SIZES if size < model.vocab_size]
    subsets = {size: DraftVocabulary(Listing(size), model.vocab_size) for size in sizes}
    hits: dict[int, Counter[str]] = {size: Counter() for size in (0, *sizes)}
    totals = Counter[str]()
    for answer in shuffled(answers):
        with torch.inference_mode():
            logits, places = logits_of(llm, answer)
            whole = right(logits, places, answer)
            totals[answer.prompts] += len(answer.answer)
            hits[0][answer.prompts] += int(whole.sum())
            for size, subset in subsets.items():
                masked = torch.full_like(logits, NEVER)
                for first, stop, tokens in stretches(answer, subset, True):
                    masked[first:stop, tokens] = logits[first:stop, tokens]
                hits[size][answer.prompts] += int(right(masked, places, answer).sum())
    results = []
    for size, found in hits.items():
        read_bytes = cost.layers + (size or model.vocab_size) * cost.token
        accepted = {kind: round(found[kind] / totals[kind], 4) for kind in sorted(totals)}
        accepted["all"] = round(found.total() / totals.total(), 4)
        results.append({"size": size, "accepted": accepted, "mib": round(read_bytes / 2**20, 1)})
    return results


def passes(llm: LLM, rows: Sequence[int], sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of drafting by size of the subset, for each number of rows. ``llm`` drafts with a model or head."""
    grid = Grid(tuple(sorted(rows)), DRAFTED)
    sides = {
        size: llm.with_options(draft_vocab_size=size, max_batch_size=max(rows), num_speculative_tokens=max(DRAFTED))
        for size in (0, *sizes)
    }
    costs: dict[int, list[CostTable]] = {size: [] for size in sides}
    for _ in range(repeats):
        for size, side in sides.items():
            costs[size].append(side.engine.measure_costs(grid))
    return [{"size": size, "rows": list(grid.batch_sizes), **_medians(found)} for size, found in costs.items()]


def _medians(costs: Sequence[CostTable]) -> dict[str, list[float]]:
    """Medians of several measurements, by number of rows."""
    first = [[once + step for once, step in zip(each.draft_once, each.draft_step, strict=True)] for each in costs]
    plain = [[line[0] for line in each.verify] for each in costs]
    times: dict[str, Sequence[Sequence[float]]] = {
        "first_ms": first,
        "ms": [each.draft_step for each in costs],
        "plain_round_ms": plain,
    }
    return {
        name: [round(statistics.median(of_rows), 3) for of_rows in zip(*of_all, strict=True)]
        for name, of_all in times.items()
    }


def main() -> None:
    """Count, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the draft model, or with --rows the target")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--answers", type=Path, help="recorded answers, to count on")
    parser.add_argument("--sets", nargs="+", default=list(get_args(SetName)), choices=get_args(SetName))
    parser.add_argument("--vocabulary", type=int, help="of the target, for coverage")
    parser.add_argument("--rows", type=int, nargs="+", help="time drafts of so many rows")
    parser.add_argument("--draft-model", help="whose drafts are timed; without it, those of the target's own head")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384, 32768], help="sizes that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.answers is not None:
        found |= _counted(options)
    if options.rows is not None:
        found |= _timed(options)
    end(found, options.output)


def _counted(options: argparse.Namespace) -> dict[str, Any]:
    answers = [each for each in read(options.answers) if each.prompts in options.sets]
    found: dict[str, Any] = {"answers": len(answers), "tokens": sum(len(each.answer) for each in answers)}
    if options.model is not None:
        llm = LLM(options.model, quantization=options.quantization, max_batch_size=1, max_model_len=2048, drafter=None)
        found |= {
            "draft": Path(options.model).name,
            "quantization": options.quantization,
            "sizes": acceptance(answers, llm),
        }
    if options.vocabulary is not None:
        found |= {"vocabulary": options.vocabulary, "coverage": coverage(answers, options.vocabulary)}
    return found


def _timed(options: argparse.Namespace) -> dict[str, Any]:
    draft = options.draft_model
    llm = LLM(
        options.model,
        draft_model=draft,
        drafter="mtp" if draft is None else "model",
        quantization=options.quantization,
        dtype="bfloat16",
        max_model_len=1024,
    )
    return {
        "model": Path(options.model).name,
        "drafter": "mtp" if draft is None else Path(draft).name,
        "quantization": options.quantization,
        "machine": machine(llm.engine.threads),
        "passes": passes(llm, options.rows, options.sizes, options.repeats),
    }


if __name__ == "__main__":
    main()
