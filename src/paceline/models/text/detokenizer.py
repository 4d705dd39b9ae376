"""Incremental decoding: the text that an answer's tokens complete, and stop strings in it."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Collection, Mapping
from typing import Protocol

from paceline.chat.thinking import ThoughtsSplitter
from paceline.config.limits import MAX_STOP_CHARACTERS
from paceline.models.text.tokenizer import Tokenizer

_FIRST_SURROGATE = 0xD800  # of 2,048; stop strings have fewer characters than would name so many tokens


class TokenDecoder(Protocol):
    """Decodes tokens incrementally. The concatenation of all returned texts is the decoded whole.

    held: the end of the text that is held back although it may be complete.
    """

    @property
    def held(self) -> str: ...

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is complete now."""
        ...

    def finish(self) -> str:
        """Return the text that was held back."""
        ...


class ByteDecoder:
    """Incremental decoder for byte-level vocabularies, exact for any bytes."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, kept_special: Collection[int] = frozenset()
    ) -> None:
        self._bytes_of = tokenizer.bytes_in_text if skip_special else tokenizer.bytes_spelled
        self._bytes_spelled, self._kept_special = tokenizer.bytes_spelled, kept_special
        self._pending = b""  # the beginning of a character
        self.held = ""  # characters are released as soon as they are complete

    def push(self, token_id: int) -> str:
        bytes_of = self._bytes_spelled if token_id in self._kept_special else self._bytes_of
        encoded = self._pending + bytes_of(token_id)
        text, decoded = codecs.utf_8_decode(encoded, "replace")
        self._pending = encoded[decoded:]
        return text

    def finish(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode(errors="replace")


class WindowDecoder:
    """Incremental decoder for other vocabularies (SentencePiece).

    Decodes the tokens that were not released yet, with the last released one as context. A run of byte tokens (<0xE2>)
    is held back until it ends, because single bytes may be parts of a character, and because one that is not makes the
    whole run undecodable.

    after: a token before the first one, no byte; without one, the text begins here, and its first space is not shown.
    held: the end of the text of the run, if the run were complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        kept_special: Collection[int] = frozenset(),
        after: int | None = None,
    ) -> None:
        self._tokenizer, self._skip_special, self._kept_special = tokenizer, skip_special, kept_special
        self._decode = tokenizer.decode if skip_special else tokenizer.spell
        self._context: list[int] = [] if after is None else [after]
        self._pending: list[int] = []
        self._run = _ByteRun()

    @property
    def held(self) -> str:
        return self._run.text

    def push(self, token_id: int) -> str:
        if token_id in self._kept_special:
            return self.finish() + self._tokenizer.token_text(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._pending.append(token_id)
        byte = self._tokenizer.byte_of(token_id)
        if byte is None:
            return self.finish()
        self._run.push(byte)
        return ""

    def finish(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._pending])
        self._context, self._pending, self._run = self._pending[-1:], [], _ByteRun()
        return text[len(before) :]


class _ByteRun:
    """The last characters of a run of byte tokens. text: empty unless the run is UTF-8 and ends with a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._tail = ""
        self._broken = False

    @property
    def text(self) -> str:
        return "" if self._broken or self._decoder.getstate()[0] else self._tail

    def push(self, byte: bytes) -> None:
        try:
            self._tail = (self._tail + self._decoder.decode(byte))[-MAX_STOP_CHARACTERS:]
        except UnicodeDecodeError:
            self._broken = True


class Detokenizer:
    """Incremental decoder of one answer that also finds stop strings. The cost per token is constant.

    stop: strings that end the text. The one that ends first counts; of two with the same end, the longer one. They may
        spell special tokens, shown or not.
    include_stop: whether the text ends after the stop string instead of before it.
    min_tokens: number of first tokens in whose text no stop string ends.
    skip_special: whether special tokens are left out. kept_special: special tokens that are not, even then.
    after: a token before the answer (``Tokenizer.last_of_text``), if the answer continues a text. A SentencePiece
        vocabulary then keeps the space of the answer's first token.
    splitter: separates the thoughts, where stop strings do not count; None if they count everywhere.

    text: the text released so far. stopped: the stop string that was found; no text is released after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        kept_special: Collection[int] = frozenset(),
        after: int | None = None,
        splitter: ThoughtsSplitter | None = None,
    ) -> None:
        self._decoder: TokenDecoder
        if tokenizer.is_byte_level():
            self._decoder = ByteDecoder(tokenizer, skip_special, kept_special)
        else:
            self._decoder = WindowDecoder(tokenizer, skip_special, kept_special, after)
        self._stand_ins = _stand_ins(tokenizer, stop, kept_special) if skip_special else {}
        self._hidden = dict.fromkeys(map(ord, self._stand_ins.values()))  # for str.translate: deletes them
        self._stops = {each: each for each in stop}  # the spellings to search, with the stop strings that they are of
        self._stops |= {_with_stand_ins(tokenizer, each, self._stand_ins): each for each in stop}
        self._stop, self._include_stop, self._first_tokens = tuple(self._stops), include_stop, min_tokens
        self._splitter = splitter
        self._searched_from = 0  # index in the decoded text; no stop string ends before it
        self._released = 0  # characters of the decoded text that were released or left out
        self._pending = ""  # decoded text that may be the beginning of a stop string
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is released by it.

        The text is empty while a character or a stop string may be incomplete.
        """
        if self.stopped is not None:
            return ""
        hidden = token_id in self._stand_ins
        fresh, thoughts, undecided = self._stand_in(token_id) if hidden else self._decoder.push(token_id), "", ""
        if self._splitter is not None:
            thoughts, fresh = self._split(fresh)
            undecided = self._splitter.held
        held = self._decoder.held
        if self._first_tokens > 0:
            self._first_tokens -= 1
            self._searched_from = self._released + sum(map(len, (self._pending, fresh, held, undecided)))
            return thoughts + self._hold_back(self._pending + fresh)
        searches = self._stop and (self._splitter is None or self._splitter.over)
        if held and searches and (self._pending + held).endswith(self._stop):
            fresh += self._decoder.finish()
        return thoughts + self._scan(fresh)

    def finish(self) -> str:
        """End the answer; return the text that was held back."""
        if self.stopped is not None:
            return ""
        if self._first_tokens > 0:  # it has ended within them
            self._searched_from = sys.maxsize
        thoughts, fresh = self._split(self._decoder.finish())
        if self._splitter is not None:
            fresh = self._splitter.finish() + fresh
        released = thoughts + self._scan(fresh)
        pending, self._pending = self._pending, ""
        return released + self._release(pending)

    def _stand_in(self, token_id: int) -> str:
        """Return the character that stands for a hidden token, behind the decoder's text if that is complete."""
        return (self._decoder.finish() if self._decoder.held else "") + self._stand_ins[token_id]

    def _split(self, text: str) -> tuple[str, str]:
        """Release what belongs to thoughts. Returns it, and the rest."""
        thoughts, text = ("", text) if self._splitter is None else self._splitter.push(text)
        return self._release(thoughts), text

    def _release(self, text: str) -> str:
        self._released += len(text)
        if self._hidden:
            text = text.translate(self._hidden)
        self.text += text
        return text

    def _scan(self, fresh: str) -> str:
        if not self._stop:
            return self._release(fresh)
        text = self._pending + fresh
        found = _first_stop(text, self._stop, self._searched_from - self._released)
        if found is not None:
            start, spelled = found
            self.stopped, self._pending = self._stops[spelled], ""
            return self._release(text[:start] + self.stopped * self._include_stop)
        return self._hold_back(text)

    def _hold_back(self, text: str) -> str:
        """Release a text without the end that may begin a stop string."""
        end = len(text) - _open_stop(text, self._stop)
        self._pending = text[end:]
        return self._release(text[:end])


def _stand_ins(tokenizer: Tokenizer, stop: Collection[str], shown: Collection[int]) -> dict[int, str]:
    """Return a character for each special token that a stop string spells, but that the text leaves out.

    The characters are lone surrogates, which no decoded text and no stop string has.
    """
    tokens = sorted({token for each in stop for token in tokenizer.special_in(each)}.difference(shown))
    return {token: chr(_FIRST_SURROGATE + index) for index, token in enumerate(tokens)}


def _with_stand_ins(tokenizer: Tokenizer, stop: str, stand_ins: Mapping[int, str]) -> str:
    names = {tokenizer.token_text(token): stand_in for token, stand_in in stand_ins.items()}
    for name in sorted(names, key=len, reverse=True):
        stop = stop.replace(name, names[name])
    return stop


def _first_stop(text: str, stops: tuple[str, ...], after: int) -> tuple[int, str] | None:
    """Return (start, stop string) of the stop string that ends first, the longer of two with the same end.

    after: index in the text; none may end at it or before it.
    """
    starts = [(text.find(stop, max(0, after - len(stop) + 1)), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def _open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the number of characters at the end of ``text`` that may begin a stop string, but are none."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(_begins(stop, text[-size:]) for stop in stops)), 0)


def _begins(stop: str, text: str) -> bool:
    return len(text) < len(stop) and stop.startswith(text)
