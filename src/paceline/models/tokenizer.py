"""Text to tokens and back: chat templates, text that can be shown while it grows, stop strings."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.config.inputs import check_message
from paceline.config.ranges import check_text
from paceline.errors import ModelFormatError, RequestError, VocabularyMismatchError
from paceline.models import gguf_config
from paceline.models.boundary import brief, reading
from paceline.models.chat_template import ChatTemplate
from paceline.models.control_tokens import ControlTokens
from paceline.models.gguf import GGUFFile
from paceline.models.gguf_tokenizer import load_gguf_tokenizer
from paceline.models.hub import resolve
from paceline.models.json_files import read_configuration


class Tokenizer:
    """A model's tokenizer.

    name: for messages. eos_token_ids: the tokens that end a text, as far as the tokenizer knows them.
    vocab_size: the tokens it knows; a model's logits may be padded beyond.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, eos_token_ids: tuple[int, ...]) -> None:
        self.huggingface = tokenizer
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {index for index, token in added if token.special} | set(tokenizer.all_special_ids)
        # Tables that grow by the tokens that are asked for.
        self.bytes_in_text, self.bytes_spelled = cache(self._bytes_in_text), cache(self._bytes_spelled)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | PreTrainedTokenizerBase) -> Tokenizer:
        """From a directory, a .gguf file, an embedded or hub name, or a loaded tokenizer.

        Raises ModelNotFoundError, or ModelFormatError if there is no tokenizer in it that can be used.
        """
        if isinstance(source, PreTrainedTokenizerBase):
            return cls(source, source.name_or_path or type(source).__name__, _own_eos(source))
        path = resolve(source)
        with reading(path):
            if path.is_file():
                file = GGUFFile(path)
                return cls(load_gguf_tokenizer(file), str(source), gguf_config.eos_token_ids(file))
            loaded = _from_directory(path)
            return cls(loaded, str(source), _own_eos(loaded))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the model wants around a text (BOS) unless told otherwise.

        Raises ParameterError for half a character (a lone surrogate).
        """
        check_text("prompt", text)
        return list(self.huggingface(text, verbose=False, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens left out."""
        return str(self.huggingface.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def spell(self, ids: Sequence[int]) -> str:
        """The text of tokens, special tokens by their names."""
        return str(self.huggingface.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> list[int]:
        """A conversation through the model's chat template, ready for the answer unless ``fields`` say otherwise.

        fields: what the template may name besides the messages. A control token that a message spells out is text; the
        template's own are control, as those that ``fields`` spell are.
        Raises RequestError, and ParameterError for half a character (a lone surrogate).
        """
        if not self.huggingface.chat_template:
            raise RequestError(f"{self.name} has no chat template; give plain prompts instead of messages")
        checked = [dict(check_message(message)) for message in messages]
        if not checked:
            raise RequestError("a conversation has at least one message")
        if not self._control_tokens.are_spelled_in(checked):
            return self.encode(self.render(checked, fields), add_special_tokens=False)
        return self._control_tokens.encode(checked, lambda hidden: self.render(hidden, fields))

    def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> str:
        """The conversation as text, as ``chat`` reads it. Raises RequestError."""
        try:
            return self._chat_template.render(messages, fields)
        except RequestError as error:
            raise RequestError(f"the chat template of {self.name} refuses these messages: {error}") from error

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        try:
            template = self.huggingface.get_chat_template()
        except ValueError as error:  # several, and none of them the usual one
            raise RequestError(brief(error)) from error
        return ChatTemplate(template, self.huggingface.special_tokens_map)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        fast = isinstance(self.huggingface, PreTrainedTokenizerFast)
        spellings = filter(None, (self.spelling(index) for index in self._special))
        return ControlTokens(self.huggingface.backend_tokenizer if fast else None, spellings)

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens by their name; bytes that are no whole character show as U+FFFD."""
        return self.spell([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; special tokens by their name, unknown ids none."""
        spelling = self.spelling(token_id)
        if spelling is None:
            return b""
        if _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(spelling[3:5])
        if self.is_byte_level() and not self.is_special(token_id):
            return self.bytes_in_text(token_id)
        return self.token_text(token_id).encode()

    def _bytes_in_text(self, token_id: int) -> bytes:
        """Bytes that a token of a byte-level vocabulary adds to a text: none for special tokens and unknown ids."""
        return b"" if self.is_special(token_id) else self.bytes_spelled(token_id)

    def _bytes_spelled(self, token_id: int) -> bytes:
        """The same, with special tokens as they are spelled."""
        spelling = self.spelling(token_id)
        if spelling is None:
            return b""
        try:
            return spelling.translate(_BYTE_OF_LETTER).encode("latin-1")
        except UnicodeEncodeError:  # an added token with other letters is text as it stands
            return spelling.encode()

    def tokens(self) -> list[str | None]:
        """The whole vocabulary as the tokenizer spells it; None where an id has no token."""
        return list(self.huggingface.convert_ids_to_tokens(list(range(self.vocab_size))))

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text."""
        return token_id in self._special

    def is_byte_level(self) -> bool:
        """Whether every token stands for bytes of its own, so that a text is its tokens' bytes one after the other."""
        fast = isinstance(self.huggingface, PreTrainedTokenizerFast)
        return fast and isinstance(self.huggingface.backend_tokenizer.decoder, decoders.ByteLevel)

    def spelling(self, token_id: int) -> str | None:
        """A token as the tokenizer spells it; None if there is no such token."""
        return self.huggingface.convert_ids_to_tokens(token_id)  # type: ignore[no-any-return]


def _own_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _from_directory(path: Path) -> PreTrainedTokenizerBase:
    if (path / "config.json").is_file():  # it names the tokenizer's class
        read_configuration(path / "config.json")
    with reading(path, "has no tokenizer that can be used"):
        found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        _check_vocabulary_file(found, path)
        found.decode(found("a text")["input_ids"])  # settings of a wrong kind show when they are needed
    return found


def _check_vocabulary_file(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Where there is none, transformers may make a tokenizer that knows its special tokens and no text."""
    files = sorted({*tokenizer.vocab_files_names.values(), *_VOCABULARIES})
    if tokenizer.vocab_files_names and not any((path / file).is_file() for file in files):
        raise ModelFormatError(f"{path} has no tokenizer that can be used: none of {', '.join(files)} is there")


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise VocabularyMismatchError unless both give every id that both know the same token.

    One may know more ids than the other (padding to a round size): those are never proposed or never accepted.
    """
    pairs = zip(target.tokens(), draft.tokens(), strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs and ours is not None and theirs is not None:
            raise VocabularyMismatchError(
                f"{draft.name} cannot draft for {target.name}: token {index} is {theirs!r} in the draft model's "
                f"vocabulary ({draft.vocab_size} tokens) and {ours!r} in the target's ({target.vocab_size} tokens)"
            )


# Text that grows


class TokenDecoder(Protocol):
    """Turns tokens into text piece by piece; all pieces together are the decoded whole."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteDecoder:
    """For byte-level vocabularies: exact, whatever the bytes are."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._bytes_of = tokenizer.bytes_in_text if skip_special else tokenizer.bytes_spelled
        self._held = b""

    def push(self, token_id: int) -> str:
        whole = self._held + self._bytes_of(token_id)
        text, decoded = codecs.utf_8_decode(whole, "replace")
        self._held = whole[decoded:]
        return text

    def finish(self) -> str:
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")


class WindowDecoder:
    """For all others (SentencePiece): decodes the tokens since the last released one, that one as context.

    A run of byte tokens (<0xE2>) is held back until it ends: only as a whole does it mean something.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decode = tokenizer.decode if skip_special else tokenizer.spell
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._held.append(token_id)
        if _BYTE_TOKEN.fullmatch(self._tokenizer.spelling(token_id) or ""):
            return ""
        return self.finish()

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        self._context, self._held = self._held[-1:], []
        return text[len(before) :]


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


# GPT-2's spelling of bytes: printable ones as themselves, the others as the letters from U+0100 on. Where these others
# stand for themselves, they spell no byte: such a letter becomes one that has no place in a byte.
_UNPRINTABLE = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
_BYTE_OF_LETTER = dict.fromkeys(_UNPRINTABLE, 0x100) | {0x100 + n: byte for n, byte in enumerate(_UNPRINTABLE)}


class Detokenizer:
    """The text of one growing answer, and the stop string that ends it.

    stop: strings that end the text; the one whose end comes first counts (of two, the longer). The text is cut before
        it, or after it if ``include_stop``.
    min_tokens: stop strings are looked for only in the text of later tokens. skip_special: whether special tokens are
        left out.

    text: what has been released. stopped: the stop string that was found; nothing is released after it.
    Costs the same for every token, however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
    ) -> None:
        kind = ByteDecoder if tokenizer.is_byte_level() else WindowDecoder
        self._decoder: TokenDecoder = kind(tokenizer, skip_special)
        self._stop, self._include_stop, self._deaf = stop, include_stop, min_tokens
        self._pending = ""  # decoded, but perhaps the beginning of a stop string
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that may be shown now, "" while a character or stop string is open."""
        if self.stopped is not None:
            return ""
        fresh = self._decoder.push(token_id)
        if self._deaf > 0:
            self._deaf -= 1
            return self._release(fresh)
        return self._scan(fresh)

    def finish(self) -> str:
        """The answer is over: returns what was held back."""
        if self.stopped is not None:
            return ""
        shown = self._scan(self._decoder.finish())
        rest, self._pending = self._pending, ""
        return shown + self._release(rest)

    def _release(self, text: str) -> str:
        self.text += text
        return text

    def _scan(self, fresh: str) -> str:
        if not self._stop:
            return self._release(fresh)
        text = self._pending + fresh
        found = _first_stop(text, self._stop)
        if found is not None:
            start, self.stopped = found
            self._pending = ""
            return self._release(text[: start + len(self.stopped) * self._include_stop])
        keep = _open_stop(text, self._stop)
        cut = len(text) - keep
        self._pending = text[cut:]
        return self._release(text[:cut])


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the stop string begins whose end comes first; of two that end together the longer one."""
    starts = [(text.find(stop), stop) for stop in stops]
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def _open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Letters at the end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
