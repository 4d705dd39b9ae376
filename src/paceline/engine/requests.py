"""Makes the engine's requests from prompts and conversations: token ids, detokenizers and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from paceline.chat.options import ChatOptions
from paceline.chat.thinking import ThoughtsSplitter
from paceline.config import PoolingName, SamplingParams, StructuredOutputs
from paceline.config.inputs import Prompt, as_prompt, as_references
from paceline.core.processors import processed_row
from paceline.core.rows import Constraint
from paceline.engine.calls import check_params
from paceline.engine.chat import ChatPrompt, ChatRules, chat_prompt, check_beside_rules
from paceline.engine.engine import Request
from paceline.engine.prefixes import common_prefix_length
from paceline.engine.scoring import EMBEDDED, SCORED, PooledStates, PromptScores
from paceline.errors import EmptyPromptError, ParameterError, RequestError
from paceline.models.text.detokenizer import Detokenizer
from paceline.models.text.tokenizer import Tokenizer
from paceline.structured.grammars import Grammars

ConstraintFactory = Callable[[], Constraint]


class RequestMaker:
    """Makes requests for one model. Engines on the same weights share it, and so its compiled grammars. Thread-safe.

    tokenizer: None for a model whose prompts and answers are token ids. vocab_size: number of tokens of the model.
    eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which a model has that was loaded by its name. Raises ParameterError if there is none."""
        return needed(self._tokenizer, "a text")

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival: float | None = None,
        references: Sequence[Prompt] = (),
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
    ) -> Request:
        """Make the request of a prompt. See ``LLM.request``."""
        check_params(params)
        text = prompt if isinstance(prompt, str) else None
        tokens, make_stream = encoded(self._tokenizer, prompt), None
        if self._tokenizer is not None:
            make_stream = partial(self._make_detokenizer, after=self._tokenizer.last_of_text(tokens))
        texts = as_references("references", references)
        reference_ids = [encoded(self._tokenizer, reference, plain=True) for reference in texts]
        make_constraint = self.constraint(params)
        return Request(
            tokens, params, text, request_id, arrival, make_stream, make_constraint, client, priority, reference_ids
        )

    def score_request(self, prompt: object, continuation: object) -> Request:
        """Make the request that reads a continuation's log-probabilities; each text is a string or token ids.

        The first token to score is the first one that differs from the prompt's own tokens: where two strings join
        within a token, it begins before the continuation.
        Raises ParameterError, EmptyPromptError, and RequestError for a join that leaves no token before it.
        """
        before, text = as_prompt("prompts", prompt), as_prompt("continuations", continuation)
        tokens = prompt_tokens = encoded(self._tokenizer, before)
        if not tokens:
            raise EmptyPromptError("a prompt has no tokens, so its continuation has no context")
        if not isinstance(text, str):
            tokens = tokens + text
        elif isinstance(before, str):
            tokens = encoded(self._tokenizer, before + text)
        else:
            tokens = tokens + continued(self._tokenizer, before, text)
        first = common_prefix_length(prompt_tokens, tokens, len(tokens))
        if first == len(tokens):
            raise ParameterError("continuations", continuation, "texts of at least one token after the prompt's")
        if first == 0:
            raise RequestError(
                "the prompt's first token joins with its continuation, so that no token is left as context: begin the "
                "prompt with more text, or give prompt and continuation as token ids"
            )
        return Request(tokens, SCORED, reading=PromptScores(tokens, first=first), only_read=True)

    def embedding_request(self, text: object, pooling: PoolingName) -> Request:
        """Make the request that reads the embedding of a text, a string or token ids. Raises ParameterError."""
        tokens = encoded(self._tokenizer, as_prompt("prompts", text))
        return Request(tokens, EMBEDDED, reading=PooledStates(tokens, pooling), only_read=True)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> ChatPrompt:
        """Render a conversation as a prompt. Raises ParameterError, RequestError."""
        return chat_prompt(needed(self._tokenizer, "chat"), messages, options)

    def chat_request(
        self, prompt: ChatPrompt, params: SamplingParams, arrival: float, references: Sequence[Prompt]
    ) -> Request:
        """Make the request of a conversation. Raises what ``request`` and ``chat_constraint`` raise."""
        check_params(params)
        prompt = replace(prompt, structure=params.structured_outputs)
        make_constraint = self.chat_constraint(prompt, params)
        free = params if make_constraint is None else replace(params, structured_outputs=None)
        request = self.request(prompt.token_ids, free, arrival=arrival, references=references)
        request = self.of_chat(request, prompt)
        return request if make_constraint is None else replace(request, params=params, make_constraint=make_constraint)

    def of_chat(self, request: Request, prompt: ChatPrompt) -> Request:
        """Return the request with texts and messages as answers to this conversation have them."""
        make_stream = partial(self._make_detokenizer, kept_special=prompt.kept_special, splitter=prompt.splitter)
        return replace(request, make_stream=make_stream, read_message=prompt.parsed)

    def chat_constraint(
        self, prompt: ChatPrompt, params: SamplingParams, stopped: Callable[[], bool] = lambda: False
    ) -> ConstraintFactory | None:
        """Compile what tools, thoughts and structure require; returns a factory for the constraint of one answer.

        Returns None if the conversation requires nothing beside what ``params`` do without it. stopped: as in
        ``structure``. Raises StructureError, ParameterError, MissingPackageError.
        """
        factory = self._chat_rules.compile(prompt, stopped)
        if factory is not None:
            check_beside_rules(params)
        return factory

    def constraint(self, params: SamplingParams) -> ConstraintFactory | None:
        """Factory for the constraint of one answer; None if any token is allowed.

        Raises ParameterError, StructureError, MissingPackageError.
        """
        if params.structured_outputs is not None:
            return self.structure(params.structured_outputs)
        if not params.restriction:
            return None

        def encode(word: str) -> list[int]:
            tokenizer = needed(self._tokenizer, "bad_words")
            return tokenizer.encode_inside(word, partial(tokenizer.encode, add_special_tokens=False))

        eos = () if params.ignore_eos else self._eos_token_ids
        return processed_row(params, encode, (*eos, *params.stop_token_ids), self._vocab_size)

    def structure(self, wanted: StructuredOutputs, stopped: Callable[[], bool] = lambda: False) -> ConstraintFactory:
        """Compile a structure; returns a factory for the constraint of one answer. Any thread may call it.

        stopped: returns true once the result is no longer needed, which aborts the compilation.
        Raises StructureError, MissingPackageError.
        """
        return self._grammars.compile(wanted, stopped)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(needed(self._tokenizer, "structured_outputs"), self._vocab_size, self._eos_token_ids)

    @cached_property
    def _chat_rules(self) -> ChatRules:
        return ChatRules(needed(self._tokenizer, "chat"), self._eos_token_ids, lambda: self._grammars)

    def _make_detokenizer(
        self,
        params: SamplingParams,
        kept_special: frozenset[int] = frozenset(),
        after: int | None = None,
        splitter: Callable[[Sequence[str]], ThoughtsSplitter | None] = lambda _: None,
    ) -> Detokenizer:
        return Detokenizer(
            self.tokenizer,
            tuple(params.stop),
            params.include_stop_str_in_output,
            params.min_tokens,
            params.skip_special_tokens,
            kept_special,
            after,
            splitter(params.stop),
        )


def encoded(tokenizer: Tokenizer | None, prompt: Prompt, plain: bool = False) -> list[int]:
    """Token ids of a prompt. plain: without special tokens, for references and continuations.

    Raises ParameterError for a text without a tokenizer.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    return needed(tokenizer, "a text prompt").encode(prompt, add_special_tokens=not plain)


def continued(tokenizer: Tokenizer | None, before: Sequence[int], text: str) -> list[int]:
    """Token ids of a text, without special tokens, that continues the tokens ``before`` it.

    Raises ParameterError without a tokenizer.
    """
    tokenizer = needed(tokenizer, "a text")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return encode(text) if tokenizer.last_of_text(before) is None else tokenizer.encode_inside(text, encode)


def needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer. Raises ParameterError if there is none. what: the purpose, for the message."""
    if tokenizer is None:
        raise ParameterError("tokenizer", None, f"{what} needs one: pass tokenizer=..., or use token ids")
    return tokenizer
