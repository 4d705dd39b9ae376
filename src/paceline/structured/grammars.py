"""Grammars over a model's tokens, compiled and followed by xgrammar."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import MissingPackageError, StructureError
from paceline.params import StructuredOutputs
from paceline.rows import Constraint
from paceline.structured.schemas import check_pattern, enforceable
from paceline.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger("paceline")

_CACHE_BYTES = 256 * 2**20  # of compiled grammars
_MOST_SPACES = 8  # in a row between two parts of a JSON text: small models would add spaces for ever
_ANY_OBJECT = '{"type": "object"}'
_BYTES = frozenset(bytes([byte]) for byte in range(256))


class Grammars:
    """Compiles structures for one model. May be used by any thread.

    Raises MissingPackageError, or StructureError if the model's tokens cannot be held to a grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise MissingPackageError(error, "structured") from error
        _check_tokens(tokenizer, eos_token_ids)
        kind = xgrammar.VocabType.BYTE_LEVEL if tokenizer.is_byte_level() else xgrammar.VocabType.BYTE_FALLBACK
        tokens = xgrammar.TokenizerInfo(
            _spellings(tokenizer), kind, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(tokens, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, wanted: StructuredOutputs) -> Callable[[], Constraint]:
        """What makes a constraint for one answer. Raises StructureError."""
        try:
            grammar = self._compile(wanted)
        except (TypeError, AttributeError) as error:
            raise StructureError("the schema has a value of the wrong form, such as 'properties': 3") from error
        except RuntimeError as error:  # RecursionError is one
            raise StructureError(f"the structure asked for cannot be followed: {_reason(error)}") from error
        return lambda: GrammarConstraint(grammar)

    def _compile(self, wanted: StructuredOutputs) -> xgrammar.CompiledGrammar:
        if wanted.regex is not None:
            check_pattern(wanted.regex)
            return self._compiler.compile_regex(wanted.regex)
        schema = _ANY_OBJECT if wanted.json is None else json.dumps(enforceable(json.loads(str(wanted.json))))
        closed = wanted.json is not None  # properties that a schema does not name are left out
        return self._compiler.compile_json_schema(schema, strict_mode=closed, max_whitespace_cnt=_MOST_SPACES)


def _check_tokens(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
    if not eos_token_ids:
        raise StructureError("the model has no end-of-text token, with which a structured answer ends")
    spelled = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    if not spelled >= _BYTES:
        raise StructureError(f"{tokenizer.name} cannot spell every byte, which structured answers may need")


def _spellings(tokenizer: Tokenizer) -> list[str]:
    """Special tokens are no part of the text, so they spell nothing."""
    tokens = enumerate(tokenizer.tokens())
    return ["" if spelling is None or tokenizer.is_special(token) else spelling for token, spelling in tokens]


def _reason(error: RuntimeError) -> str:
    """xgrammar's own words without the place in its source."""
    return str(error).split(": ", 1)[-1].strip()


class GrammarConstraint:
    """One answer's place in a grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._matcher = xgrammar.GrammarMatcher(grammar)

    def mask(self, logits: Tensor, guesses: Sequence[int], first: int) -> None:
        """See ``Constraint``: walks along the guesses, and back."""
        places = first + len(logits)
        allowed = self._xgrammar.allocate_token_bitmask(places, logits.shape[-1])
        walked = sum(1 for _ in self._walk(guesses[: places - 1], allowed))
        self._matcher.rollback(walked)
        self._xgrammar.apply_token_bitmask_inplace(logits, allowed[first:].to(logits.device))

    def _walk(self, guesses: Sequence[int], allowed: Tensor) -> Iterator[int]:
        """Yields every guess that may stand where it does; allowed[j] becomes what may follow the first j of them."""
        for place in range(len(allowed)):
            if self._matcher.is_terminated():
                return
            self._fill(allowed, place)
            if place == len(guesses) or not _has(allowed[place], guesses[place]):
                return
            if not self._matcher.accept_token(guesses[place]):
                return
            yield guesses[place]

    def _fill(self, allowed: Tensor, place: int) -> None:
        self._matcher.fill_next_token_bitmask(allowed, place)
        if not allowed[place].any():
            log.warning("an answer cannot be completed as its structure wants: it ends as it is")
            for token in self._matcher.stop_token_ids:
                allowed[place, token // 32] |= _bit(token)

    def advance(self, tokens: Sequence[int]) -> None:
        """See ``Constraint``."""
        for token in tokens:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return


def _has(allowed: Tensor, token: int) -> bool:
    """Whether a token's bit is set in [V / 32] int32."""
    return bool(allowed[token // 32] & _bit(token))


def _bit(token: int) -> int:
    """As an int32."""
    return -(2**31) if token % 32 == 31 else 1 << token % 32
