"""Data collection: the target answers questions, then a forward pass over the texts records its outputs."""

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
from paceline.tools.training.shards import HELD_OUT, Shard, Shards, TrainingConversation, bytes_of_token

if TYPE_CHECKING:
    from paceline.llm import LLM

_GIB = 2**30
_QUESTION_TEMPERATURE, _QUESTION_TOP_P = 0.9, 0.95  # at 1.0 small models write incoherent questions


class Collector:
    """Makes shards of training data with a target.

    taps: layers whose inputs are recorded. questions: from a file; if None, the target writes its own.
    Raises ParameterError if fewer than two questions leave room for an answer, RequestError for an invalid one.
    """

    def __init__(self, llm: LLM, data: DraftData, taps: Sequence[int], questions: Sequence[Question] | None) -> None:
        self.llm, self.data, self.tokenizer = llm, data, llm.requests.tokenizer
        self.longest = llm.engine.max_model_len
        self._room = self.longest - data.answer_tokens  # for a question
        if self._room < 1:
            raise ParameterError("--answer-tokens", data.answer_tokens, f"fewer than --max-model-len ({self.longest})")
        self._reader = HiddenStateReader(llm.engine.models.target, taps, self.longest, llm.engine.threads)
        self.left_out = 0  # questions too long to leave room for an answer
        self._from_file = None if questions is None else self._encoded(questions)
        self._opening = opening_of(self.tokenizer)
        self._held_out: set[str] = set()  # prompts of the held-out shard

    def _encoded(self, questions: Sequence[Question]) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of the training and the held-out questions, without those too long for an answer."""
        encoded = {q: tokens for q in questions if 0 < len(tokens := tokens_of(q, self.tokenizer)) <= self._room}
        if len(encoded) < 2:
            allowed = f"at least two prompts of at most {self._room} tokens; raise --max-model-len for longer ones"
            raise ParameterError("--prompts", f"{len(questions)} prompts", allowed)
        self.left_out = len(questions) - len(encoded)
        training, held_out = split(list(encoded), self.data.seed)
        return [encoded[q] for q in training], [encoded[q] for q in held_out]

    def shards(self, stored: Shards, on_shard: Callable[[int], None]) -> Iterator[Shard]:
        """Yield the held-out shard, then training shards until they have enough tokens.

        Shards that exist in ``stored`` are not made again. on_shard(tokens): called after each training shard.
        """
        held_out = self._shard(stored, HELD_OUT)
        self._held_out = set(held_out.prompt_keys)
        yield held_out
        tokens, number = 0, 0
        while tokens < self.data.tokens:
            shard = self._shard(stored, number)
            yield shard
            tokens, number = tokens + sum(shard.lengths), number + 1
            on_shard(sum(shard.lengths))

    def _shard(self, stored: Shards, number: int) -> Shard:
        shard = stored.open(number)
        if shard is None:
            texts = self._texts(number)
            if not texts:
                raise PacelineError(
                    "the target wrote no usable questions or answers: give prompts with --prompts, or raise "
                    "--max-model-len"
                )
            stored.write(number, texts, list(self._reader.read([text.tokens for text in texts])))
            shard = stored.open(number)
            assert shard is not None
        return shard

    def _texts(self, number: int) -> list[TrainingConversation]:
        size = self.data.held_out if number == HELD_OUT else self.data.shard
        if self._from_file is not None:
            questions = _in_turn(self._from_file[number == HELD_OUT], number, size)
        elif self._opening is None:
            questions = [beginning_of_text(self.tokenizer)] * size
            if number != HELD_OUT:
                return self._answered(questions, number, unprompted=True)
            questions = self._begun(questions)
        else:
            questions = self._written(number, size)
        return self._answered(questions, number)

    def _begun(self, questions: Sequence[list[int]]) -> list[list[int]]:
        """Each question with the first tokens of a text that the target writes, so that its greedy answers differ."""
        tokens = min(self.data.prompt_tokens, self._room - len(questions[0]))
        if tokens < 1:
            return list(questions)
        common = SamplingParams(max_tokens=tokens, ignore_eos=True)
        params = [replace(common, seed=self._seed(HELD_OUT, i, "begin")) for i in range(len(questions))]
        outputs = self.llm.generate(questions, params, use_tqdm=False)
        return [[*q, *output.outputs[0].token_ids] for q, output in zip(questions, outputs, strict=True)]

    def _written(self, number: int, size: int) -> list[list[int]]:
        """Prompts for user turns that the target writes, without those of the held-out shard."""
        assert self._opening is not None
        common = SamplingParams(
            stop_token_ids=self._opening.ends,
            max_tokens=self.data.prompt_tokens,
            temperature=_QUESTION_TEMPERATURE,
            top_p=_QUESTION_TOP_P,
        )
        params = [replace(common, seed=self._seed(number, i, "ask")) for i in range(size)]
        outputs = self.llm.generate([self._opening.tokens] * size, params, use_tqdm=False)
        texts = [self.tokenizer.decode(output.outputs[0].token_ids).strip() for output in outputs]
        encoded = [tokens_of((("user", text),), self.tokenizer) for text in texts if text]
        return [tokens for tokens in encoded if len(tokens) <= self._room and str(tokens) not in self._held_out]

    def _answered(
        self, questions: Sequence[list[int]], number: int, *, unprompted: bool = False
    ) -> list[TrainingConversation]:
        """Generate an answer to each question.

        unprompted: all questions are the same token that begins a text. Answers are sampled then, because greedy ones
        would all be the same, and the whole text serves as the prompt's identity.
        """
        params = [self._params(number, i, unprompted) for i in range(len(questions))]
        outputs = self.llm.generate(questions, params, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in outputs]
        # the first draft token is the answer's second token
        pairs = [(q, a) for q, a in zip(questions, answers, strict=True) if len(a) > 1]
        return [TrainingConversation([*q, *a], len(q), str([*q, *a] if unprompted else q)) for q, a in pairs]

    def _params(self, number: int, index: int, unprompted: bool) -> SamplingParams:
        temperatures = self.data.TEMPERATURES
        temperature = 0.0 if number == HELD_OUT else temperatures[index % len(temperatures)]
        return SamplingParams(
            temperature=1.0 if unprompted else temperature,
            max_tokens=self.data.answer_tokens,
            seed=self._seed(number, index, "answer"),
        )

    def _seed(self, *parts: object) -> int:
        return int.from_bytes(sha256(repr((self.data.seed, *parts)).encode()).digest()[:8]) >> 1


def _in_turn(questions: Sequence[list[int]], number: int, size: int) -> list[list[int]]:
    """The questions of a shard. They start over from the first one when all have been used."""
    first = max(number, 0) * size
    count = min(size, len(questions)) if number == HELD_OUT else size
    return [questions[(first + i) % len(questions)] for i in range(count)]


def settings_of(llm: LLM, data: DraftData, taps: Sequence[int], questions: Sequence[Question] | None) -> dict[str, Any]:
    """Everything that the content of a shard depends on, as JSON."""
    identity, config = llm.engine.identity(), llm.config
    digest = None if questions is None else sha256(repr(list(questions)).encode()).hexdigest()[:16]
    data_settings = {name: value for name, value in asdict(data).items() if name not in ("tokens", "disk_budget")}
    return {
        "target": identity.target,
        "precision": identity.precision,
        "max_model_len": llm.engine.max_model_len,
        "taps": list(taps),
        "prompts": digest,
        **data_settings,
        # results of the native kernels do not depend on the batch size
        "rows": None if identity.attention == "native" else config.rows,
    }


def check_disk(output: Path, data: DraftData, width: int, taps: int, checkpoint: int) -> int:
    """Return the bytes on disk that a run needs.

    width: of the hidden states. taps: their number. checkpoint: bytes of a checkpoint; two exist while one is replaced.
    Raises ParameterError if the need exceeds the budget or the free space.
    """
    conversation = data.prompt_tokens + data.answer_tokens
    tokens = data.tokens + (data.shard + data.held_out) * conversation
    needed = tokens * bytes_of_token(width, taps) + 2 * checkpoint
    need = f"{needed / _GIB:.2f} GiB, which {data.tokens} tokens and two checkpoints take; or take fewer --tokens"
    if needed > data.disk_budget * _GIB:
        raise ParameterError("--disk-budget", data.disk_budget, f"at least {need}")
    free = shutil.disk_usage(output).free + sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    if needed > free:
        raise ParameterError("--output", str(output), f"on a disk with {free / _GIB:.2f} GiB free; it needs {need}")
    return needed
