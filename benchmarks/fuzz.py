r"""Compare random requests, batched and speculated, with plain decoding of each alone: tokens, texts, logprobs.

    python -m benchmarks.fuzz smollm2-135m --comparisons 1000 --precision int8
    python -m benchmarks.fuzz smollm2-135m --draft-model smollm2-135m-head --drafter hybrid \
        --precision float32 --tolerance 1e-4   # outside of the CPU kernels bits depend on the batch
    python -m benchmarks.fuzz qwen-coder-1.5b.gguf --draft-model qwen-coder-0.5b.gguf --comparisons 300

``bits.py`` varies only batches and draft lengths. This also draws sampling parameters (penalties, cuts, bias, stops,
minimum lengths, restrictions and structures, several samples, ranks, log-probabilities), prompts of one token and of
the maximum length, caches too small for all rows, and references, which n-gram lookup copies from: the prompt, parts of
it, damaged copies, other texts. Every difference is printed with the seed of its batch. The last line is one JSON
document; the exit code is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

from benchmarks.bits import LONGEST, TEXTS, RandomLength
from torch import Tensor

from paceline import LLM, SamplingParams, StructuredOutputs
from paceline.config import QuantizationName
from paceline.core.hardware import cpu_name
from paceline.core.outputs import CompletionOutput, RequestOutput, TokenLogprob
from paceline.engine.engine import Engine

Logprobs: TypeAlias = Sequence[TokenLogprob | None] | None
STRUCTURES = (
    StructuredOutputs(json_object=True),
    StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    StructuredOutputs(regex="(the|a|of) [a-z ]{3,30}\\."),
    StructuredOutputs(choice=["yes", "yesterday", "no"]),
    StructuredOutputs(grammar='start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,3}/'),
)
BESIDE_NO_STRUCTURE = ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "logits_processors")


def odd_tokens_are_less_likely(answer: list[int], logits: Tensor) -> Tensor:
    """Subtract from the logits of odd token ids, the more the longer the answer is."""
    changed = logits.clone()
    changed[1::2] -= 0.5 * (len(answer) % 4)
    return changed


@dataclass
class Case:
    """One request: its prompt, its parameters, and the texts that its answer may copy from."""

    prompt: list[int]
    params: SamplingParams
    references: list[str]


def random_params(chance: random.Random, vocabulary: int, max_tokens: int) -> SamplingParams:
    """Sampling parameters of which each is left at its default more often than not."""

    def maybe(name: str, *values: Any) -> dict[str, Any]:
        return {name: chance.choice(values)} if chance.random() < 0.25 else {}

    tokens = [chance.randrange(vocabulary) for _ in range(3)]
    fields: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.7]),
        "max_tokens": chance.randint(1, max_tokens),
        "seed": chance.randrange(2**31),
        **maybe("top_p", 0.5, 0.9, 0.99),
        **maybe("top_k", 1, 5, 50),
        **maybe("min_p", 0.02, 0.2),
        **maybe("typical_p", 0.3, 0.9),
        **maybe("epsilon_cutoff", 1e-4, 0.02),
        **maybe("eta_cutoff", 1e-3, 0.1),
        **maybe("top_n_sigma", 1.0, 3.0),
        **maybe("presence_penalty", -1.0, 0.7, 2.0),
        **maybe("frequency_penalty", -0.5, 0.4, 1.5),
        **maybe("repetition_penalty", 0.8, 1.1, 1.5),
        **maybe("logit_bias", {tokens[0]: 5.0, tokens[1]: -100.0}),
        **maybe("stop", "\n", ["the", "of"], ["e"]),
        **maybe("stop_token_ids", tokens),
        **maybe("ignore_eos", True),
        **maybe("n", 2, 3),
        **maybe("logprobs", 0, 1, 5),
        **maybe("bad_words", ["the"], [" and", "is"]),
        **maybe("num_speculative_tokens", 0, 1, 4),
        **maybe("include_stop_str_in_output", True),
        **maybe("allowed_token_ids", [chance.randrange(vocabulary) for _ in range(200)]),
        **maybe("logits_processors", [odd_tokens_are_less_likely]),
        **maybe("prompt_logprobs", 0, 3),
        **maybe("keep_prefix", False),
        **maybe("cache_salt", "salt"),
    }
    if chance.random() < 0.2:
        fields["min_tokens"] = chance.randint(0, fields["max_tokens"])
    if chance.random() < 0.1:
        fields |= {"best_of": 4, "rank_by": chance.choice(["logprob", "mean_logprob"])}
    if chance.random() < 0.2:
        fields = {name: value for name, value in fields.items() if name not in BESIDE_NO_STRUCTURE}
        fields["structured_outputs"] = chance.choice(STRUCTURES)
    return SamplingParams(**fields)


def random_references(chance: random.Random, text: str) -> list[str]:
    """Texts to copy from: the prompt itself, parts of it, damaged ones, others. Often none."""
    if chance.random() < 0.5:
        return []
    words = text.split()
    damaged = " ".join(word for word in words if chance.random() < 0.8) or text
    other = chance.choice(TEXTS)
    cut = text[chance.randrange(len(text)) :].strip() or text
    return chance.sample([text, damaged, other, cut, text * 2], chance.randint(1, 3))


def random_case(chance: random.Random, llm: LLM, max_tokens: int) -> Case:
    """A prompt cut at random, or random tokens, with random parameters and references."""
    tokenizer, text = llm.requests.tokenizer, chance.choice(TEXTS)
    text = text[: chance.randint(1, len(text))].strip() or text
    prompt = tokenizer.encode(text)
    if chance.random() < 0.1:
        prompt = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randint(1, 40))]
    longest = llm.engine.max_model_len - 1
    if chance.random() < 0.1:
        prompt = chance.choice([prompt[:1], (prompt * longest)[: longest - chance.randint(0, 3)]])
    prompt = prompt[:longest]
    params = random_params(chance, tokenizer.vocab_size, max_tokens)
    if not llm.engine.models.eos_token_ids:
        params = replace(params, structured_outputs=None)  # refused
    references = [] if params.num_speculative_tokens == 0 else random_references(chance, text)  # refused together
    return Case(prompt, params, references)


def answers(llm: LLM, cases: Sequence[Case]) -> list[RequestOutput]:
    """Each case's result, in one call. References only where the engine can copy."""
    references = [case.references for case in cases] if llm.config.looks_up else None
    params = [case.params for case in cases]
    return llm.generate([case.prompt for case in cases], params, references=references, use_tqdm=False)


def difference(one: CompletionOutput, other: CompletionOutput, tolerance: float) -> str | None:
    """The name of the first thing in which two answers differ; None: they are equal."""
    if one.token_ids != other.token_ids:
        return "token_ids"
    if one.text != other.text:
        return "text"
    if one.finish_reason != other.finish_reason:
        return "finish_reason"
    return None if equal_logprobs(one.logprobs, other.logprobs, tolerance) else "logprobs"


def equal_logprobs(one: Logprobs, other: Logprobs, tolerance: float) -> bool:
    """Whether the log-probabilities of two answers or prompts are equal, without a tolerance also the alternatives."""
    if one is None or other is None or tolerance == 0:
        return one == other
    return all(
        first is second or (first and second and abs(first.logprob - second.logprob) <= tolerance)
        for first, second in zip(one, other, strict=True)
    )


def batch_of(llm: LLM, chance: random.Random, widths: Sequence[int]) -> LLM:
    """An engine with a random shape and a random draft length every round."""
    mixed = llm.with_options(
        max_batch_size=chance.choice([1, 2, 3, 5, 8, 16]),
        prefill_chunk=chance.choice([16, 64, 512]),
        prefix_cache=chance.random() < 0.7,
        speculation_width=chance.choice(widths),
    )
    mixed.engine.use_policy(RandomLength(chance.randrange(2**31)))
    if chance.random() < 0.3:
        shrink_caches(mixed.engine, 1 + 2 * chance.random())
    return mixed


def shrink_caches(engine: Engine, longest_rows: float) -> None:
    """Limit the caches of an idle engine to so many rows of the maximum length: other requests wait."""
    slots = engine.slots
    slots.memory.room = replace(engine.room, limit=int(longest_rows * engine.room.bytes_for(engine.batch.positions)))
    slots.size_free_slots()


def compare(llm: LLM, arguments: argparse.Namespace) -> dict[str, int]:
    """Run batches until enough answers were compared; counts of answers, of those that differ, of draft tokens."""
    alone = llm.plain().with_options(max_batch_size=1)
    widths = [int(width) for width in arguments.widths.split(",")]
    counts = dict.fromkeys(("comparisons", "different", "with_references", "drafted", "accepted"), 0)
    seed = arguments.seed
    while counts["comparisons"] < arguments.comparisons:
        seed += 1
        chance = random.Random(seed)
        cases = [random_case(chance, llm, arguments.max_tokens) for _ in range(chance.randint(4, 24))]
        found = answers(batch_of(llm, chance, widths), cases)
        for case, mixed in zip(cases, found, strict=True):
            plain = answers(alone, [case])[0]
            if not equal_logprobs(mixed.prompt_logprobs, plain.prompt_logprobs, arguments.tolerance):
                counts["different"] += 1
                print(f"batch seed {seed}: prompt_logprobs differ: {case}", file=sys.stderr)
            for one, other in zip(mixed.outputs, plain.outputs, strict=True):
                counts["comparisons"] += 1
                counts["with_references"] += bool(case.references)
                counts["drafted"] += one.metrics.drafted
                counts["accepted"] += one.metrics.accepted
                if what := difference(one, other, arguments.tolerance):
                    counts["different"] += 1
                    print(f"batch seed {seed}: {what} differ: {case}\n  {one}\n  {other}", file=sys.stderr)
        print(f"after batch seed {seed}: {json.dumps(counts)}", file=sys.stderr, flush=True)
    return counts


def main() -> None:
    """Run the comparison that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", help="default: model with a draft model, else ngram")
    parser.add_argument("--precision", default="int8", help="int8, int4, bfloat16 or float32")
    parser.add_argument("--widths", default="1", help="draft tokens side by side, a list: 1,2,4")
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--tolerance", type=float, default=0.0, help="of log-probabilities; 0: the same bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="1 where other programs are busy: two wait for each other there")
    arguments = parser.parse_args()
    precision = arguments.precision
    llm = LLM(
        arguments.model,
        arguments.draft_model,
        drafter=arguments.drafter or ("model" if arguments.draft_model else "ngram"),
        num_speculative_tokens=LONGEST,
        dtype="float32" if precision == "float32" else "bfloat16",
        quantization=precision if precision in get_args(QuantizationName) else None,
        max_batch_size=16,
        max_model_len=arguments.max_model_len,
        threads=arguments.threads,
    )
    print(llm.engine.describe(), file=sys.stderr)
    counts = compare(llm, arguments)
    print(json.dumps({"command": sys.argv[1:], "cpu": cpu_name(), "runs": llm.engine.describe(), **counts}))
    sys.exit(counts["different"] > 0)


if __name__ == "__main__":
    main()
