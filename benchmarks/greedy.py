"""Greedy answers to HumanEval's problems compared with transformers on the same checkpoint, in float32, token by token.

    PYTHONPATH=src:. python -m benchmarks.greedy MODEL.gguf --limit 40

Our answers are generated eight at a time: an answer's bits do not depend on its neighbours. Transformers computes each
    of them in one pass, which gives its own choice at every place; from the first difference on it generates its own
    answer. The two programs add in different orders, so answers may part where two tokens are nearly equally likely:
    the gap is reported. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.tools.evaluation.problems import STOP, human_eval, style_of, tokens_of

ROWS = 8
MOST_TOKENS = 1024  # of a prompt and its answer: the longest problem has less than half of that


@dataclass(frozen=True)
class Pair:
    """The answers to one problem.

    parted: index of the first different token, or None. gap: difference of transformers' two log-probabilities there,
    in nats. text_equal: whether the texts are equal, up to the end of the shorter one.
    """

    task_id: str
    tokens: int
    parted: int | None
    gap: float | None
    text_equal: bool


def compare(path: Path, limit: int, max_tokens: int) -> list[Pair]:
    """Compare the first problems."""
    llm = LLM(path, dtype="float32", max_batch_size=ROWS, max_model_len=MOST_TOKENS, drafter=None)
    tokenizer = llm.requests.tokenizer
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=STOP)
    problems = human_eval()[:limit]
    prompts = [tokens_of(problem, tokenizer, style_of(tokenizer)) for problem in problems]
    ours = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.close()
    del llm
    other = _in_transformers(path)
    pairs = []
    for problem, prompt, answer in zip(problems, prompts, ours, strict=True):
        parted, gap, theirs = _follow(other, prompt, answer.token_ids)
        text = _cut(tokenizer.decode(theirs))
        pairs.append(Pair(problem.task_id, len(answer.token_ids), parted, gap, text == answer.text))
    return pairs


def _in_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    dequantised = GgufConfig(dequantize=True)
    where = {"gguf_file": path.name, "quantization_config": dequantised}
    return AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where).eval()


@torch.inference_mode()
def _follow(model: Any, prompt: list[int], ours: Sequence[int]) -> tuple[int | None, float | None, list[int]]:
    """The place where transformers' greedy answer parts from ours, the gap there, and that answer, as long as ours."""
    logits = model(torch.tensor([[*prompt, *ours[:-1]]])).logits[0, len(prompt) - 1 :]
    own = logits.argmax(dim=1).tolist()
    parted = next((i for i, (a, b) in enumerate(zip(own, ours, strict=True)) if a != b), None)
    if parted is None:
        return None, None, own
    text = torch.tensor([[*prompt, *own[: parted + 1]]])
    if parted + 1 < len(ours):
        more = {"do_sample": False, "max_new_tokens": len(ours) - parted - 1, "pad_token_id": 0}
        text = model.generate(text, repetition_penalty=1.0, **more)
    likely = logits[parted].log_softmax(dim=0)
    return parted, float(likely[own[parted]] - likely[ours[parted]]), text[0, len(prompt) :].tolist()


def _cut(text: str) -> str:
    return text[: min(text.find(stop) if stop in text else len(text) for stop in STOP)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    pairs = compare(options.model, options.limit, options.max_tokens)
    for pair in pairs:
        print(pair)
    equal = sum(pair.text_equal for pair in pairs)
    print(json.dumps({"model": options.model.name, "equal": equal, "pairs": [asdict(pair) for pair in pairs]}))


if __name__ == "__main__":
    main()
