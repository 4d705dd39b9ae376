"""``auto`` with n-gram lookup in first answers, replayed on recorded texts and simulated time.

    PYTHONPATH=src:.:tests python -m benchmarks.replay_auto replay
    PYTHONPATH=src:.:tests python -m benchmarks.replay_auto record MODEL.gguf

``record`` adds a model's greedy answers to the file of texts. ``replay`` runs the real search and ``auto`` on them, in
batches that drain, each with a policy that has learned nothing. Costs are those that ``instruction_sets`` measured.
The policy sees noisy times; the speed over plain decoding is of the true ones. A case is a model, an instruction set, a
kind of prompts and a number of rows; its speed is that of all its batches and seeds together.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import geometric_mean, harmonic_mean

import numpy as np
import torch

from paceline.config import SamplingParams
from paceline.drafters.lookup import SearchedRows, make_lookup
from paceline.drafters.ngram import CONFIDENCE
from paceline.lengths.auto import AutoLength
from paceline.lengths.cost import CostModel, CostTable, interpolate
from paceline.lengths.scores import LONGEST_AUTO
from paceline.llm import LLM
from paceline.tools.bench.offline import prompts_for
from simulation import DraftSimulation

_RESULTS = Path(__file__).parent / "results"
TEXTS, COSTS = _RESULTS / "replay-auto-texts.json", _RESULTS / "sets-epyc-zen4.json"
SHAPES = {"smollm2-135m": "smollm2-135m", "qwen-coder-1.5b": "qwen2.5-1.5b"}  # model -> its name in the costs
KERNELS = ("avx2", "avx512-bw", "avx512-vnni")
KINDS = ("stubs", "chat")
PROMPTS, TOKENS = 16, 96  # of each kind; of each answer
SIZES, LENGTHS = (1, 2, 4, 8, 16), (0, 1, 3, 7)  # of the cost tables, as an engine calibrates them
SEARCH_MS, NOISE = 0.25, 0.05  # of a search for n-gram drafts; sigma of a round's lognormal time


def record(model: Path, file: Path) -> None:
    """Add the model's answers to ``file``."""
    document = json.loads(file.read_text()) if file.exists() else {}
    llm = LLM(model, drafter=None, quantization="int8", max_batch_size=PROMPTS, max_model_len=1024, prefix_cache=False)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for kind in KINDS:
        prompts, _ = prompts_for(llm, kind, PROMPTS)
        answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        texts = zip(prompts, answers, strict=True)
        document.setdefault(model.stem, {})[kind] = [{"prompt": ids, "answer": list(answer)} for ids, answer in texts]
    file.write_text(json.dumps(document, separators=(",", ":")) + "\n")


@dataclass
class Text:
    """A prompt and its recorded answer. ``draft``: what the search finds after a given number of its tokens."""

    prompt: list[int]
    answer: list[int]
    _drafts: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)

    def draft(self, place: int) -> list[tuple[float, bool]]:
        """Each draft token's score, and whether it is right."""
        if place not in self._drafts:
            length, text = len(self.prompt) + place, torch.tensor([self.prompt + self.answer])
            found = make_lookup([]).find(SearchedRows(text, torch.tensor([length]), [0]), LONGEST_AUTO)
            follow = [*self.answer[place:], *[-1] * LONGEST_AUTO]
            right = [token == true for token, true in zip(found.draft_tokens[0], follow, strict=False)]
            self._drafts[place] = list(zip(CONFIDENCE[found.matched[0]], right, strict=False))
        return self._drafts[place]


class Replay(DraftSimulation):
    """Rounds of recorded texts. ``seconds`` are true times, without noise."""

    def _spike(self) -> bool:
        return False

    @property
    def seconds(self) -> float:
        rounds = zip(self.verified, self.asked, strict=True)
        return sum(
            self.costs.verify_ms(len(counts), sum(counts) / len(counts)) + (self.look if k else 0.0)
            for counts, k in rounds
        )


def costs_of(measured: Path, shape: str, kernels: str) -> CostTable:
    """Costs of int8 rounds, by the number of tokens that they run, from the result of ``instruction_sets``."""
    steps = {
        each["rows"] * (4 if each["step"] == "verify 3" else 1): each["ms"]
        for each in json.loads(measured.read_text())["results"]
        if (each["shape"], each["format"], each["kernels"]) == (shape, "int8", kernels)
    }
    tokens = sorted(steps)
    ms = np.minimum.accumulate([steps[count] for count in reversed(tokens)])[::-1].tolist()  # noise only adds time
    verify = tuple(tuple(interpolate(tokens, ms, rows * (k + 1)) for k in LENGTHS) for rows in SIZES)
    return CostTable(SIZES, LENGTHS, 96, verify, (0.0,) * len(SIZES), (0.0,) * len(SIZES))


def speed(batch: Sequence[Text], costs: CostTable, seed: int) -> float:
    """Speed of ``auto`` over plain decoding in first answers."""
    simulation = Replay(
        costs, lambda row: batch[row].draft(simulation.place(row)), len(batch), TOKENS, NOISE, seed, look=SEARCH_MS
    )
    simulation.play(AutoLength(CostModel(costs)), draining=True)
    return TOKENS * costs.verify_ms(len(batch), 0) / simulation.seconds


def replay(texts: Path, costs: Path, rows: Sequence[int], seeds: Sequence[int]) -> None:
    """Print the speed of each case, then the mean and the worst of each number of rows."""
    of_rows: dict[int, list[tuple[float, str]]] = {count: [] for count in rows}
    worst_batch = math.inf
    recorded = json.loads(texts.read_text())
    for model, kernels, kind in product(SHAPES, KERNELS, KINDS):
        table, answers, line = costs_of(costs, SHAPES[model], kernels), [Text(**t) for t in recorded[model][kind]], []
        for count in rows:
            batches = [answers[first : first + count] for first in range(0, PROMPTS - count + 1, count)]
            found = [
                speed(batch, table, seed * PROMPTS + place) for seed in seeds for place, batch in enumerate(batches)
            ]
            line.append(harmonic_mean(found))
            worst_batch = min(worst_batch, *found)
            of_rows[count].append((line[-1], f"{model} {kernels} {kind}"))
        print(f"{model:15} {kernels:11} {kind:5}", *(f"{each:6.3f}" for each in line), flush=True)
    for count, cases in of_rows.items():
        worst, name = min(cases)
        print(f"{count} rows: mean {geometric_mean(each for each, _ in cases):.4f}, worst {worst:.3f} ({name})")
    everything = [each for cases in of_rows.values() for each, _ in cases]
    print(f"all: mean {geometric_mean(everything):.4f}, worst {min(everything):.3f}, worst batch {worst_batch:.3f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Record or replay."""
    parser = argparse.ArgumentParser(description="auto with n-gram lookup in first answers, on simulated time.")
    commands = parser.add_subparsers(dest="command", required=True)
    recorder, player = commands.add_parser("record"), commands.add_parser("replay")
    for command in (recorder, player):
        command.add_argument("--texts", type=Path, default=TEXTS)
    player.add_argument("--costs", type=Path, default=COSTS)
    recorder.add_argument("model", type=Path)
    player.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    player.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options.model, options.texts)
    else:
        replay(options.texts, options.costs, options.rows, options.seeds)


if __name__ == "__main__":
    main()
