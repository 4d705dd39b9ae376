"""Makes the data: the target asks itself, or is asked by a file, answers, and is read again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import DraftData, SamplingParams
from paceline.errors import PacelineError, ParameterError
from paceline.tools.training.hidden_states import HiddenStateReader
from paceline.tools.training.prompts import Question, beginning_of_text, opening_of, split, tokens_of
from paceline.tools.training.shards import HELD_OUT, Conversation, Shard, Shards, bytes_of_token

if TYPE_CHECKING:
    from paceline.llm import LLM

_GIB = 2**30
_ASKING = 0.9, 0.95  # temperature and nucleus  # of questions: small models lose their way at 1


class Collector:
    """Makes shards with a target. questions: of a file; None: the target writes its own.

    taps: the layers whose entering streams are kept. Raises RequestError, ParameterError.
    """

    def __init__(self, llm: LLM, data: DraftData, taps: Sequence[int], questions: Sequence[Question] | None) -> None:
        assert llm.tokenizer is not None, "models that have a name have a tokenizer"
        self.llm, self.data, self.tokenizer = llm, data, llm.tokenizer
        self.longest = llm.engine.max_model_len
        self._reader = HiddenStateReader(llm.engine.models.target, taps, self.longest, llm.engine.threads)
        self.left_out = 0  # questions that leave an answer no room
        self._given = None if questions is None else self._encoded(questions)
        self._opening = opening_of(self.tokenizer)
        self._known: set[str] = set()  # what was asked in the held-out texts

    def _encoded(self, questions: Sequence[Question]) -> tuple[list[list[int]], list[list[int]]]:
        """To learn from, and held out. What leaves an answer no room is left out."""
        room = self.longest - self.data.answer_tokens
        encoded = {q: tokens for q in questions if 0 < len(tokens := tokens_of(q, self.tokenizer)) <= room}
        if len(encoded) < 2:
            allowed = f"at least two prompts of at most {room} tokens; raise --max-model-len for longer ones"
            raise ParameterError("--prompts", f"{len(questions)} prompts", allowed)
        self.left_out = len(questions) - len(encoded)
        learn, held = split(list(encoded), self.data.seed)
        return [encoded[q] for q in learn], [encoded[q] for q in held]

    def shards(self, kept: Shards, made: Callable[[int], None]) -> Iterator[Shard]:
        """The held-out shard, then as many as give enough tokens; those that are there are not made again.

        made(tokens): is told how many each gives.
        """
        held = self._shard(kept, HELD_OUT)
        self._known = set(held.asked)
        yield held
        tokens, number = 0, 0
        while tokens < self.data.tokens:
            shard = self._shard(kept, number)
            yield shard
            tokens, number = tokens + sum(shard.lengths), number + 1
            made(sum(shard.lengths))

    def _shard(self, kept: Shards, number: int) -> Shard:
        shard = kept.open(number)
        if shard is None:
            texts = self._texts(number)
            if not texts:
                raise PacelineError("the target wrote nothing that can be learnt from: give it prompts with --prompts")
            kept.write(number, texts, list(self._reader.read([text.tokens for text in texts])))
            shard = kept.open(number)
            assert shard is not None
        return shard

    def _texts(self, number: int) -> list[Conversation]:
        size = self.data.held_out if number == HELD_OUT else self.data.shard
        if self._given is not None:
            questions = _in_turn(self._given[number == HELD_OUT], number, size)
        elif self._opening is None:
            questions = [beginning_of_text(self.tokenizer)] * size
        else:
            questions = self._written(number, size)
        return self._answered(questions, number, written=self._opening is None and self._given is None)

    def _written(self, number: int, size: int) -> list[list[int]]:
        """What the target says in a user's place, as it reads it; less what is in the held-out texts."""
        assert self._opening is not None
        ends, longest = self._opening.ends, self.data.prompt_tokens
        asking = SamplingParams(stop_token_ids=ends, max_tokens=longest, temperature=_ASKING[0], top_p=_ASKING[1])
        params = [replace(asking, seed=self._seed(number, i, "ask")) for i in range(size)]
        outputs = self.llm.generate([self._opening.tokens] * size, params, use_tqdm=False)
        texts = [self.tokenizer.decode(output.outputs[0].token_ids).strip() for output in outputs]
        encoded = [tokens_of((("user", text),), self.tokenizer) for text in texts if text]
        return [tokens for tokens in encoded if str(tokens) not in self._known]

    def _answered(self, questions: Sequence[list[int]], number: int, *, written: bool) -> list[Conversation]:
        """written: the whole text is the answer, and none is greedy: it would be the same each time."""
        params = [self._params(number, i, written) for i in range(len(questions))]
        outputs = self.llm.generate(questions, params, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        # a draft token is of the second
        pairs = [(q, a) for q, a in zip(questions, answers, strict=True) if len(a) > 1]
        return [Conversation([*q, *a], len(q), str([*q, *a] if written else q)) for q, a in pairs]

    def _params(self, number: int, index: int, written: bool) -> SamplingParams:
        turns = self.data.TEMPERATURES
        greedy = number == HELD_OUT and not written
        temperature = 0.0 if greedy else turns[index % len(turns)]
        return SamplingParams(
            temperature=1.0 if written else temperature,
            max_tokens=self.data.answer_tokens,
            seed=self._seed(number, index, "answer"),
        )

    def _seed(self, *what: object) -> int:
        return int.from_bytes(sha256(repr((self.data.seed, *what)).encode()).digest()[:8]) >> 1


def _in_turn(questions: Sequence[list[int]], number: int, size: int) -> list[list[int]]:
    """A shard's part of all questions, from the first again when all have been asked."""
    first = max(number, 0) * size
    count = min(size, len(questions)) if number == HELD_OUT else size
    return [questions[(first + i) % len(questions)] for i in range(count)]


def settings_of(llm: LLM, data: DraftData, taps: Sequence[int], questions: Sequence[Question] | None) -> dict[str, Any]:
    """Whatever the data depends on."""
    identity, config = llm.engine.identity(), llm.config
    asked = None if questions is None else sha256(repr(list(questions)).encode()).hexdigest()[:16]
    wanted = {name: value for name, value in asdict(data).items() if name not in ("tokens", "disk_budget")}
    return {
        "target": identity.target,
        "precision": identity.precision,
        "max_model_len": llm.engine.max_model_len,
        "taps": list(taps),
        "prompts": asked,
        **wanted,
        "rows": None if identity.attention == "native" else config.max_batch_size,  # the kernels' bits know no rows
    }


def check_disk(output: Path, data: DraftData, width: int, taps: int, checkpoint: int) -> int:
    """Bytes that a run will take. Raises ParameterError where they exceed the budget or what the disk has free.

    checkpoint: bytes of one; two are there for a moment.
    """
    conversation = data.prompt_tokens + data.answer_tokens
    tokens = data.tokens + (data.shard + data.held_out) * conversation
    needed = tokens * bytes_of_token(width, taps) + 2 * checkpoint
    what = f"{needed / _GIB:.2f} GiB, which {data.tokens} tokens and two checkpoints take; or take fewer --tokens"
    if needed > data.disk_budget * _GIB:
        raise ParameterError("--disk-budget", data.disk_budget, f"at least {what}")
    room = shutil.disk_usage(output).free + sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    if needed > room:
        raise ParameterError("--output", str(output), f"on a disk with {room / _GIB:.2f} GiB free; it needs {what}")
    return needed
