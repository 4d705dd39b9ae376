"""The possible gain of draft trees, counted without timing on recorded answers; the last line is one document.

    python -m benchmarks.tree_gain record qwen-coder-1.5b.gguf --quantization int8 --output answers.json
    python -m benchmarks.tree_gain ngram --answers answers.json --output trees-ngram.json
    python -m benchmarks.tree_gain draft qwen-coder-0.5b.gguf --answers answers.json --quantization int8 --output d.json
    python -m benchmarks.tree_gain rounds qwen-coder-0.5b.gguf --quantization int8 --answers answers.json --output r
    python -m benchmarks.tree_gain rounds HEAD --target MODEL --answers answers.json --output r.json

record: answers to the bench's sets of prompts, greedy and at temperature 0.8; they do not depend on the drafter.
ngram: each answer is replayed, round by round, with chains and with trees of n-gram drafts.
draft: how often the target's own draw is the draft model's first, second, third ... candidate under the same noise, all
    before it being right; and tokens per round of chains and of chains with leaves beside their tokens. Leaves are the
    part of a tree that is known without drafting behind wrong tokens: full trees can do better.
rounds: trees drafted in full at every place of an answer, 4 wide and 6 deep, by a draft model, by a trained head (run
    by torch) or, without a model, by n-gram lookup. Verified are chains of a fixed length; chains and trees of the
    draft tokens whose acceptance probability exceeds a limit; and EAGLE-2's shape (2406.16858; theirs is 10 wide): a
    fixed number per round, the best by the product of the draft's probabilities, among its most likely tokens instead
    of those ranked first under the target's noise. All are interpolated at equal mean numbers of verified draft tokens.
    Results that --output already holds are kept: the command may be interrupted and resumed.

Draft tokens are ranked by what ``auto``'s belief has learned so far. Per round the best n are verified ("apart": each
row by itself), or all whose acceptance probability exceeds a limit ("together": a large batch, whose draft tokens
compete); for the latter, tokens per round are interpolated at equal mean numbers of draft tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from paceline.config import SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import SIBLING_KIND
from paceline.core.sampling import sequence_seed
from paceline.drafters.branches import DraftTree
from paceline.drafters.growth import candidates
from paceline.drafters.lookup import CopySources, SearchedRows, make_lookup
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import merged
from paceline.lengths.scores import ScoreCalibration, bins_of
from paceline.llm import LLM
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.tools.bench.sets import SETS, SetName

SEED, DEPTH = 1, 8
WIDTHS = (1, 2, 4)
BUDGETS = (1, 2, 3, 4, 6, 8)  # draft tokens verified per round
CHANCES = (0.6, 0.4, 0.25, 0.15, 0.1, 0.06, 0.03)  # lowest acceptance probability of a verified draft token


class Answer(NamedTuple):
    """An answer to one prompt; all in tokens."""

    prompts: str
    temperature: float
    prompt: list[int]
    references: list[list[int]]
    answer: list[int]


def record(options: argparse.Namespace) -> Any:
    """Generate the answers, one dictionary each."""
    llm = LLM(options.model, quantization=options.quantization, max_batch_size=8, max_model_len=2048)
    answers = []
    for name in get_args(SetName):
        asked = SETS[name][: options.prompts]
        prompts = [llm.tokens_of_chat(each.messages) for each in asked]
        texts = [[llm.requests.tokenizer.encode(text) for text in each.references] for each in asked]
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=options.max_tokens)
            references = [each.references for each in asked]
            outputs = llm.generate(prompts, params, references=references, use_tqdm=False)
            for prompt, beside, output in zip(prompts, texts, outputs, strict=True):
                answers.append(Answer(name, temperature, prompt, beside, output.outputs[0].token_ids)._asdict())
    return answers


# --- replaying answers ------------------------------------------------------------------------------------------------

MakeTree = Callable[[int, int], DraftTree]  # (tokens of the answer so far, greatest depth) -> the draft tree
Choose = Callable[[list[float]], list[int]]  # from acceptance probabilities to the indices of the verified draft tokens


@dataclass
class Totals:
    """Sums over rounds. saved: rounds whose accepted path left the first candidates."""

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0
    saved: int = 0

    @property
    def means(self) -> tuple[float, float]:
        """Means per round: draft tokens verified, tokens gained."""
        return self.nodes / self.rounds, self.tokens / self.rounds


def replay(drafts: Sequence[tuple[list[int], MakeTree]], choose: Choose) -> Totals:
    """Replay answers one after the other, with one belief."""
    belief, totals = ScoreCalibration(), Totals()
    for answer, make_tree in drafts:
        belief.rows.clear()
        place = 0
        while place < len(answer):
            left = len(answer) - place - 1
            tree = make_tree(place, min(DEPTH, left))
            bins = bins_of(len(tree.tokens), tree.scores, tree.parents, tree.kinds)
            verified = set(choose(belief.survivals(0, bins, tree.parents)))
            path = tree.path(answer[place : place + left])
            kept = next((n for n, each in enumerate(path) if each not in verified), len(path))
            checks = checked(tree, path[: kept + 1], answer, place, kept)
            belief.learn([[(bins[each], right) for each, right in checks]], [0])
            totals.rounds += 1
            totals.tokens += kept + 1
            totals.nodes += len(verified)
            totals.saved += any(tree.kinds[each] >= SIBLING_KIND for each in path[:kept])
            place += kept + 1
    return totals


def checked(
    tree: DraftTree, path: Sequence[int], answer: Sequence[int], place: int, kept: int
) -> Iterator[tuple[int, bool]]:
    """Draft tokens whose parent was accepted and gained, and whether each is right."""
    reached = [-1, *path[:kept]]
    for node, parent in enumerate(tree.parents):
        if parent in reached:
            yield node, tree.tokens[node] == answer[place + reached.index(parent)]


def best(count: int) -> Choose:
    """Verify the ``count`` draft tokens with the highest acceptance probability."""
    return lambda survivals: sorted(range(len(survivals)), key=lambda node: -survivals[node])[:count]


def likely(chance: float) -> Choose:
    """Verify the draft tokens with at least this acceptance probability."""
    return lambda survivals: [node for node, each in enumerate(survivals) if each >= chance]


def read_off(curve: Sequence[tuple[float, float]], nodes: float) -> float | None:
    """Interpolate between the points of a curve; None beyond its ends."""
    points = sorted(curve)
    for (a, low), (b, high) in pairwise(points):
        if a <= nodes <= b and a < b:
            return round(low + (high - low) * (nodes - a) / (b - a), 3)
    return None


def compared(drafts_of: Callable[[int], Sequence[tuple[list[int], MakeTree]]]) -> list[dict[str, Any]]:
    """By width: tokens per round at equal numbers of verified draft tokens."""
    lines = []
    for width in WIDTHS:
        drafts = drafts_of(width)
        apart = {n: replay(drafts, best(n)) for n in BUDGETS}
        curve = [replay(drafts, likely(chance)).means for chance in CHANCES]
        lines.append(
            {
                "width": width,
                "apart": {str(n): round(each.means[1], 3) for n, each in apart.items()},
                "saved_by_a_sibling": {str(n): round(each.saved / each.rounds, 3) for n, each in apart.items()},
                "together": {str(n): read_off(curve, n) for n in BUDGETS},
            }
        )
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    return lines


def by_set(answers: Sequence[Answer]) -> Iterator[tuple[dict[str, Any], list[Answer]]]:
    """The answers grouped by set and temperature, with a description of each group."""
    for name in get_args(SetName):
        for temperature in (0.0, 0.8):
            chosen = [each for each in answers if (each.prompts, each.temperature) == (name, temperature)]
            if chosen:
                tokens = sum(len(each.answer) for each in chosen)
                yield {"prompts": name, "temperature": temperature, "tokens": tokens}, chosen


# --- drafters --------------------------------------------------------------------------------------------------------


def lookup_trees(answer: Answer, width: int) -> MakeTree:
    """Trees by n-gram lookup in the row's own text and its references."""
    lookup: Any = make_lookup([])
    text, first = torch.tensor([[*answer.prompt, *answer.answer]]), len(answer.prompt)
    beside = [CopySources(lookup.texts(answer.references))] if answer.references else None

    def tree_at(place: int, depth: int) -> DraftTree:
        size = first + place
        if depth == 0:
            return DraftTree()
        return merged(lookup.find_all(SearchedRows(text, torch.tensor([size]), [0], beside), depth, width)[0])

    return tree_at


def ngram(options: argparse.Namespace) -> Any:
    """Results by set of prompts and temperature."""
    results = []
    for about, answers in by_set(read(options.answers)):
        print(about, file=sys.stderr)
        drafts = lambda width, chosen=answers: [(each.answer, lookup_trees(each, width)) for each in chosen]  # noqa: E731
        results.append(about | {"widths": compared(drafts)})
    return results


@dataclass
class Candidates:
    """The draft model's best tokens and their probabilities at each place of an answer, given the answer before it."""

    tokens: list[list[int]] = field(default_factory=list)
    chances: list[list[float]] = field(default_factory=list)

    def tree_maker(self, width: int) -> MakeTree:
        """Makes chains of the first candidates with the others beside them."""

        def tree(place: int, depth: int) -> DraftTree:
            made, parent = DraftTree(), -1
            for at in range(place, place + depth):
                chain = parent
                for rank, (token, chance) in enumerate(zip(self.tokens[at], self.chances[at], strict=True)):
                    if rank < width:
                        added = made.add(chain, token, chance, SIBLING_KIND if rank else 0)
                        parent = added if rank == 0 else parent
            return made

        return tree


def candidates_of(llm: LLM, answer: Answer) -> Candidates:
    """Compute the candidates in one pass over prompt and answer."""
    decoder, text, size = llm.engine.parts.target, [*answer.prompt, *answer.answer], len(answer.prompt)
    hidden = decoder.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.int64), len(text))
    logits = decoder.logits(hidden[0, size - 1 : -1])
    batch = Batch(1, len(text) + 1, decoder.vocab_size)
    params = SamplingParams(temperature=answer.temperature)
    batch.set_row(0, RowStart(text[:size], params, sequence_seed(SEED, 0)))
    batch.set_live(range(1))
    places = batch.after([(0, answer.answer[:place]) for place in range(len(answer.answer))])
    found = Candidates([[] for _ in answer.answer], [[] for _ in answer.answer])
    for tokens, chances in candidates(logits, places, max(WIDTHS)):
        for line, token in zip(found.tokens, tokens, strict=True):
            line.append(token)
        for scores, chance in zip(found.chances, chances, strict=True):
            scores.append(chance)
    return found


def draft(options: argparse.Namespace) -> Any:
    """Results by set of prompts and temperature."""
    llm = LLM(options.model, quantization=options.quantization, max_batch_size=1, max_model_len=2048, drafter=None)
    results = []
    for about, answers in by_set(read(options.answers)):
        print(about, file=sys.stderr)
        with torch.inference_mode():
            found = [candidates_of(llm, each) for each in answers]
        drafts = lambda width, a=answers, f=found: [  # noqa: E731
            (each.answer, known.tree_maker(width)) for each, known in zip(a, f, strict=True)
        ]
        results.append(about | {"ranks": ranks(answers, found), "widths": compared(drafts)})
    return results


def ranks(answers: Sequence[Answer], found: Sequence[Candidates]) -> dict[str, list[float]]:
    """By depth, given that all first candidates before were right: fractions of first, second ... candidates."""
    shares = {}
    for depth in range(4):
        hits, places = [0] * max(WIDTHS), 0
        for answer, known in zip(answers, found, strict=True):
            for start in range(len(answer.answer) - depth):
                way = range(start, start + depth)
                if all(known.tokens[at][0] == answer.answer[at] for at in way):
                    places += 1
                    at = start + depth
                    for rank, token in enumerate(known.tokens[at]):
                        hits[rank] += token == answer.answer[at]
        shares[f"depth {depth + 1}"] = [round(hit / max(1, places), 3) for hit in hits]
    return shares


# --- whole trees ------------------------------------------------------------------------------------------------------

WIDE, DEEP, HOPELESS = 4, 6, 0.01  # drafting stops when no draft token has such a chance of acceptance


class Grown:
    """The trees at the places of one answer, each drafted once."""

    def __init__(self, drafter: ModelDrafter, batch: Batch, row: int, answer: Answer, *, noise: bool) -> None:
        """row: of the batch and the cache. noise: rank candidates under the target's noise; else by probability."""
        self._drafter, self._batch, self._row = drafter, batch, row
        self._text, self._first = [*answer.prompt, *answer.answer], len(answer.prompt)
        self._params = SamplingParams(temperature=answer.temperature if noise else 0.0)
        self._trees: dict[int, DraftTree] = {}

    def tree(self, place: int, depth: int) -> DraftTree:
        """The tree after ``place`` tokens of the answer."""
        if place not in self._trees:
            self._trees[place] = self._grow(self._first + place)
        return cut(self._trees[place], lambda way: len(way) <= depth)

    def chain(self, place: int, depth: int) -> DraftTree:
        """The first candidates of the tree only."""
        return cut(self.tree(place, depth), lambda way: all(self._trees[place].kinds[at] < SIBLING_KIND for at in way))

    @torch.inference_mode()
    def _grow(self, size: int) -> DraftTree:
        self._batch.set_live(())
        self._batch.set_row(self._row, RowStart(self._text[:size], self._params, sequence_seed(SEED, 0)))
        self._drafter.decoders[0].cut_row(self._row, size - 1)  # draft tokens are written behind the text
        self._batch.set_live([self._row])
        draft = self._drafter.propose(self._batch, SpeculationPlan(DEEP, stop_drafting=_is_hopeless))
        follows = list(range(-1, draft.k - 1)) if draft.parents is None else draft.parents[0]
        assert draft.confidence is not None
        kinds = [0] * draft.k if draft.kinds is None else draft.kinds[0]
        return DraftTree(draft.draft_tokens[0], follows, list(draft.confidence[0]), list(kinds))


def _is_hopeless(_batch: Batch, scores: Sequence[Sequence[float]], follows: Any = None) -> bool:
    products = survivals_of(scores[0], follows[0])
    ends = [each for node, each in enumerate(products) if node not in follows[0]]
    return max(ends, default=0.0) < HOPELESS


def survivals_of(scores: Sequence[float], follows: Sequence[int]) -> list[float]:
    """Acceptance probabilities by the draft's own probabilities."""
    products: list[float] = []
    for score, parent in zip(scores, follows, strict=True):
        products.append(score if parent < 0 else score * products[parent])
    return products


def cut(tree: DraftTree, stays: Callable[[list[int]], bool]) -> DraftTree:
    """The part of a tree that ``stays`` keeps, called with the path to each node.

    Descendants of a removed node are removed, too.
    """
    made, new, ways = DraftTree(), {-1: -1}, dict[int, list[int]]({-1: []})
    for node, parent in enumerate(tree.parents):
        ways[node] = [*ways[parent], node]
        if parent in new and stays(ways[node]):
            new[node] = made.add(new[parent], tree.tokens[node], tree.scores[node], tree.kinds[node])
    return made


def likeliest(make_tree: MakeTree, count: int) -> MakeTree:
    """Cut each tree to the ``count`` best nodes by the draft's own probabilities."""

    def best_of(place: int, depth: int) -> DraftTree:
        tree = make_tree(place, depth)
        products = survivals_of(tree.scores, tree.parents)
        chosen = set(sorted(range(len(products)), key=lambda each: -products[each])[:count])
        return cut(tree, lambda way: way[-1] in chosen)

    return best_of


def rounds(options: argparse.Namespace) -> Any:
    """By set and temperature, and by temperature: tokens per round at equal numbers of verified draft tokens."""
    results = json.loads(options.output.read_text())["results"] if options.output and options.output.exists() else []
    results = [each for each in results if each["prompts"] != ALL]
    known = [(each["prompts"], each["temperature"]) for each in results]
    for about, answers in by_set(read(options.answers)):
        if about["prompts"] not in options.sets or (about["prompts"], about["temperature"]) in known:
            continue
        print(about, file=sys.stderr)
        answers = answers[: options.prompts]
        curves = _curves(_copied(answers) if options.model is None else _grown(options, answers))
        results.append(_counted(about | {"tokens": sum(len(each.answer) for each in answers)}, curves))
        print(json.dumps(results[-1]["tokens_a_round"]), file=sys.stderr, flush=True)
        _write(options, results)
    return results + [of_all(results, temperature) for temperature in sorted({each["temperature"] for each in results})]


ALL = "all"
Curve = list[tuple[float, float]]  # mean draft tokens verified and tokens gained per round


def _counted(about: dict[str, Any], curves: dict[str, Curve]) -> dict[str, Any]:
    read_offs = {name: {str(n): read_off(curve, n) for n in BUDGETS} for name, curve in curves.items()}
    return about | {"tokens_a_round": read_offs, "curves": curves}


def of_all(results: Sequence[dict[str, Any]], temperature: float) -> dict[str, Any]:
    """All sets together: each uses the same number of draft tokens, or the same lowest probability."""
    sets = [each for each in results if each["temperature"] == temperature]
    total = sum(each["tokens"] for each in sets)
    curves: dict[str, Curve] = {}
    for name in sets[0]["curves"]:
        curves[name] = []
        for points in zip(*(each["curves"][name] for each in sets), strict=True):
            counts = [
                each["tokens"] / tokens for each, (_, tokens) in zip(sets, points, strict=True)
            ]  # rounds of each set
            nodes = sum(count * nodes for count, (nodes, _) in zip(counts, points, strict=True))
            curves[name].append((nodes / sum(counts), total / sum(counts)))
    return _counted({"prompts": ALL, "temperature": temperature, "tokens": total}, curves)


class Drafts(NamedTuple):
    """Draft trees of one answer. shaped: the trees of which EAGLE-2 verifies the best nodes."""

    answer: list[int]
    chain: MakeTree
    tree: MakeTree
    shaped: MakeTree


def _curves(drafts: Sequence[Drafts]) -> dict[str, Curve]:
    """For each way of choosing: draft tokens verified and tokens gained per round."""
    chains = [(each.answer, each.chain) for each in drafts]
    trees = [(each.answer, each.tree) for each in drafts]
    shaped = [(each.answer, each.shaped) for each in drafts]
    every = best(WIDE * DEEP)
    return {
        "chain": [replay([(a, _at_most(make, n)) for a, make in chains], every).means for n in range(DEEP + 1)],
        "chain by survival": [replay(chains, likely(chance)).means for chance in _FINER],
        "tree by survival": [replay(trees, likely(chance)).means for chance in _FINER],
        "EAGLE-2's shape": [replay([(a, likeliest(make, n)) for a, make in shaped], every).means for n in _SIZES],
    }


_FINER = (1.0, 0.98, 0.95, 0.9, 0.8, 0.7, *CHANCES, 0.015)
_SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def _at_most(make_tree: MakeTree, count: int) -> MakeTree:
    """Limit the depth of the trees."""
    return lambda place, depth: make_tree(place, min(depth, count))


def _copied(answers: Sequence[Answer]) -> list[Drafts]:
    """Drafts without a model."""
    drafts = []
    for each in answers:
        chain, tree = (_at_most(lookup_trees(each, width), DEEP) for width in (1, WIDE))
        drafts.append(Drafts(each.answer, chain, tree, tree))
    return drafts


def _grown(options: argparse.Namespace, answers: Sequence[Answer]) -> list[Drafts]:
    """One row per answer, with a draft model, or with a head and the target whose hidden states it reads."""
    llm = _llm(options, len(answers))
    target, drafter = llm.engine.parts.target, llm.engine.parts.drafter
    if not isinstance(drafter, ModelDrafter):
        sizes = target.cache.rows, target.cache.positions, target.vocab_size
        drafter = ModelDrafter(DraftDecoder(target.model, target.backend, *sizes), "coupled", WIDE)
    batch = Batch(len(answers), target.cache.positions, target.vocab_size)
    drafts = []
    for row, answer in enumerate(answers):
        text = [*answer.prompt, *answer.answer]
        batch.set_row(row, RowStart(text, SamplingParams(), 0))
        if drafter.reader is not None:
            with torch.inference_mode():
                target.prefill(batch, [row], [0], [len(text)])
        noisy = Grown(drafter, batch, row, answer, noise=True)
        plain = Grown(drafter, batch, row, answer, noise=False) if answer.temperature else noisy
        drafts.append(Drafts(answer.answer, noisy.chain, noisy.tree, plain.tree))
    batch.set_live(range(len(answers)))
    return drafts


def _llm(options: argparse.Namespace, rows: int) -> LLM:
    common: dict[str, Any] = {"max_batch_size": rows, "max_model_len": 1024}
    if options.target is None:
        return LLM(options.model, quantization=options.quantization, drafter=None, **common)
    given = common | {"drafter": "feature", "speculation_width": WIDE, "dtype": "float32", "attention": "padded"}
    return LLM(options.target, options.model, num_speculative_tokens=DEEP, **given)


def read(path: Path) -> list[Answer]:
    """Recorded answers."""
    return [Answer(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "ngram", "draft", "rounds"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--target", help="for rounds with a trained head: its target")
    parser.add_argument("--sets", nargs="+", default=list(get_args(SetName)), choices=get_args(SetName))
    parser.add_argument("--prompts", type=int, default=8, help="of each set")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {"record": record, "ngram": ngram, "draft": draft, "rounds": rounds}[options.what](options)
    document = _write(options, found)
    print(json.dumps(document) if options.what != "record" else f"{len(found)} answers")


def _write(options: argparse.Namespace, found: Any) -> Any:
    """Write the results, with the command and its options."""
    document = found
    if options.what != "record":
        command = "python -m benchmarks.tree_gain " + " ".join(sys.argv[1:])
        document = {"benchmark": f"tree_gain {options.what}", "command": command, "results": found}
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


if __name__ == "__main__":
    main()
