"""Tokenizers: encoding, chat templates, incremental decoding, stop strings."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.config.inputs import check_message
from paceline.config.ranges import check_text
from paceline.errors import ModelFormatError, PacelineError, RequestError, VocabularyMismatchError
from paceline.models.families import gguf_config
from paceline.models.files.boundary import brief, is_failure, reading
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.hub import resolve_tokenizer
from paceline.models.files.json_files import read_configuration
from paceline.models.text.chat_template import CHARACTERS, ChatTemplate
from paceline.models.text.control_tokens import ControlTokens
from paceline.models.text.gguf_tokenizer import load_gguf_tokenizer
from paceline.models.text.response_template import ResponseTemplate, response_template
from paceline.models.text.tokenizer_growth import ORDINARY, check_backend, check_description
from paceline.models.text.vocabulary_files import check_packages, with_ends

T = TypeVar("T")
Written = tuple[list[dict[str, Any]], list[Mapping[str, Any]]]  # messages and tools


class Tokenizer:
    """A model's tokenizer.

    name: name for messages.
    eos_token_ids: tokens that end a text, as far as the tokenizer's files name them.
    vocab_size: number of tokens; the logits of the model may be padded to a larger size.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, eos_token_ids: tuple[int, ...]) -> None:
        self.huggingface = tokenizer
        self.name = name
        fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        self._growth = check_backend(tokenizer.backend_tokenizer, name) if fast else 1
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {index for index, token in added if token.special} | set(tokenizer.all_special_ids)
        self._renderer = cache(self._make_renderer)  # by template
        # Memoised per token id.
        self.bytes_in_text, self.bytes_spelled = cache(self._bytes_in_text), cache(self._bytes_spelled)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | PreTrainedTokenizerBase) -> Tokenizer:
        """Load the tokenizer of a directory, a .gguf file or a model name, or wrap a loaded one.

        Raises ModelNotFoundError, or ModelFormatError if there is no usable tokenizer.
        """
        if isinstance(source, PreTrainedTokenizerBase):
            return cls(source, source.name_or_path or type(source).__name__, _own_eos(source))
        path = resolve_tokenizer(source)
        with reading(path):
            if path.is_file():
                file = GGUFFile(path)
                return cls(load_gguf_tokenizer(file), str(source), gguf_config.eos_token_ids(file))
            loaded = _from_directory(path)
            return cls(loaded, str(source), _own_eos(loaded))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: whether to add the special tokens that the model expects around a text (BOS).
        Raises ParameterError for a lone surrogate, RequestError if the tokenizer fails or could make the text too long.
        """
        check_text("prompt", text)
        self._check_size(text)

        def encode() -> list[int]:
            return list(self.huggingface(text, verbose=False, add_special_tokens=add_special_tokens)["input_ids"])

        return self._run(encode, "encode a text")

    def _check_size(self, text: str) -> str:
        """The text. Raises RequestError if the tokenizer's steps, which are unusual, could make it too long."""
        if self._growth > ORDINARY and len(text) * self._growth > CHARACTERS:
            raise RequestError(
                f"a text of {len(text)} characters is too long for the tokenizer of {self.name}, whose steps can make "
                f"texts {self._growth} times longer: at most {CHARACTERS // self._growth} characters"
            )
        return text

    def _run(self, work: Callable[[], T], what: str) -> T:
        """Return ``work()``. Raises RequestError for any error of the library, also for a panic. what: for messages."""
        try:
            return work()
        except (PacelineError, RecursionError):  # messages may be nested too deeply, which ``chat`` tells
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            reason = f"{type(error).__name__}: {brief(error)}"
            raise RequestError(
                f"the tokenizer of {self.name} cannot {what}, check its file (such as tokenizer.json): {reason}"
            ) from error

    def encode_as_text(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens: a control token that it spells out is text, too.

        Raises ParameterError for a lone surrogate, RequestError if the tokenizer cannot encode a control token as text.
        """
        message = {"content": text}
        if not self._control_tokens.are_spelled_in([message]):
            return self.encode(text, add_special_tokens=False)
        check_text("prompt", text)
        return self._encode_hidden([message], lambda hidden: str(hidden[0]["content"]))

    def _encode_hidden(self, value: T, render: Callable[[T], str]) -> list[int]:
        """Token ids of a conversation in which a message spells a control token."""

        def encode() -> list[int]:
            return self._control_tokens.encode(value, lambda hidden: self._check_size(render(hidden)))

        return self._run(encode, "encode a text with a control token")

    def encode_inside(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the token ids of a text that follows another one.

        SentencePiece tokenizers put a space in front of a text that stands alone. encode: encodes such a text without
        special tokens.
        """
        if self.is_byte_level():
            return encode(text)
        for before in _ANCHORS:
            anchor, anchored = encode(before), encode(before + text)
            if anchored[: len(anchor)] == anchor:
                return anchored[len(anchor) :]
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens. Raises RequestError if the tokenizer fails."""
        return self._decode(ids, skip_special=True)

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens appear by their names. Raises RequestError as ``decode``."""
        return self._decode(ids, skip_special=False)

    def _decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        options = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return self._run(lambda: str(self.huggingface.decode(list(ids), **options)), "decode tokens")

    def chat_template(self, *, tools: bool = False) -> str:
        """Return the chat template; if there is one for conversations with ``tools`` ("tool_use"), that one.

        Raises RequestError if there is none, or several without a default.
        """
        if not self.huggingface.chat_template:
            raise RequestError(f"{self.name} has no chat template; give plain prompts instead of messages")
        try:
            return str(self.huggingface.get_chat_template(tools=[{}] if tools else None))
        except ValueError as error:  # several templates without a default one
            raise RequestError(brief(error)) from error

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the chat template with the generation prompt.

        A control token that a message or a tool spells out is encoded as text. Those of the template and of ``fields``
        are encoded as control tokens.
        fields: further template variables; see ``ChatTemplate.render``. tools: functions in OpenAI's form.
        Raises RequestError if the messages cannot be rendered, ParameterError for a lone surrogate.
        """
        checked = [dict(check_message(message)) for message in messages]
        if not checked:
            raise RequestError("a conversation must have at least one message")

        def render(written: Written) -> str:
            return self.render(written[0], {**(fields or {}), **({"tools": written[1]} if tools else {})})

        written = (checked, list(tools))
        try:
            if not self._control_tokens.are_spelled_in(written):
                return self.encode(render(written), add_special_tokens=False)
            return self._encode_hidden(written, render)
        except RecursionError as error:  # a call's arguments are text in requests, so that no limit of depth held
            raise RequestError("messages or tools are nested too deeply") from error

    def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as the text that ``chat`` encodes. Raises RequestError."""
        template = self.chat_template(tools=bool(fields and fields.get("tools")))
        try:
            return self._renderer(template).render(messages, fields)
        except RequestError as error:
            raise RequestError(f"the chat template of {self.name} refuses these messages: {error}") from error

    @cached_property
    def response_template(self) -> ResponseTemplate | None:
        """What reads answers by the response template of the tokenizer's files; None if they have none."""
        return response_template(getattr(self.huggingface, "response_template", None))

    def _make_renderer(self, template: str) -> ChatTemplate:
        return ChatTemplate(template, self.huggingface.special_tokens_map)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        fast = isinstance(self.huggingface, PreTrainedTokenizerFast)
        spellings = filter(None, (self.spelling(index) for index in self._special))
        return ControlTokens(self.huggingface.backend_tokenizer if fast else None, spellings)

    def token_text(self, token_id: int) -> str:
        """Return one token as it reads inside a text: with its first space, which SentencePiece hides from a beginning.

        Incomplete characters become U+FFFD. Special tokens appear by their names.
        """
        if self.is_special(token_id):
            return self.spell([token_id])
        before, text_before = self._text_before
        return self.spell([*before, token_id])[len(text_before) :]

    @cached_property
    def _text_before(self) -> tuple[list[int], str]:
        """A token that a text may begin with, and its text; no token if each is special or a byte."""
        texts = (token for token, spelled in enumerate(self.tokens()) if spelled is not None and self._is_text(token))
        before = [] if self.is_byte_level() else list(itertools.islice(texts, 1))
        return before, self.spell(before)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text: the name of a special token, no bytes for an unknown id."""
        spelling = self.spelling(token_id)
        if spelling is None:
            return b""
        if _BYTE_TOKEN.fullmatch(spelling):
            return bytes.fromhex(spelling[3:5])
        if self.is_byte_level() and not self.is_special(token_id):
            return self.bytes_in_text(token_id)
        return self.token_text(token_id).encode()

    def _bytes_in_text(self, token_id: int) -> bytes:
        """Return the bytes that a byte-level token adds to a text; none for special tokens and unknown ids."""
        return b"" if self.is_special(token_id) else self.bytes_spelled(token_id)

    def _bytes_spelled(self, token_id: int) -> bytes:
        """Return the bytes of a byte-level token, for a special token those of its name; none for unknown ids."""
        spelling = self.spelling(token_id)
        if spelling is None:
            return b""
        try:
            return spelling.translate(_BYTE_OF_LETTER).encode("latin-1")
        except UnicodeEncodeError:  # an added token that is spelled as plain text
            return spelling.encode()

    def tokens(self) -> list[str | None]:
        """Return the spelling of every token of the vocabulary; None for ids without a token."""
        return list(self.huggingface.convert_ids_to_tokens(list(range(self.vocab_size))))

    def fingerprint(self) -> str:
        """Return a hash of which text each token id stands for: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.tokens()).encode()).hexdigest()

    def special_in(self, text: str) -> set[int]:
        """Return the special tokens that a text spells out."""
        if not self._control_tokens.are_spelled_in(text):  # takes microseconds
            return set()
        tokens = filter(self.is_special, self.encode(text, add_special_tokens=False))
        return {token for token in tokens if self.token_text(token) in text}  # not <unk>

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, so that ``decode`` leaves it out."""
        return token_id in self._special

    def last_of_text(self, ids: Sequence[int]) -> int | None:
        """Return the last token that is neither special nor a byte (<0xE2>); None without one."""
        return next((token for token in reversed(ids) if self._is_text(token)), None)

    def _is_text(self, token_id: int) -> bool:
        known = 0 <= token_id < self.vocab_size and not self.is_special(token_id)
        return known and self.byte_of(token_id) is None

    def byte_of(self, token_id: int) -> bytes | None:
        """Return the byte that a token is (<0xE2>); None for other tokens."""
        spelling = self.spelling(token_id) or ""
        return bytes.fromhex(spelling[3:5]) if _BYTE_TOKEN.fullmatch(spelling) else None

    def is_byte_level(self) -> bool:
        """Whether the text of tokens is the concatenation of their bytes."""
        fast = isinstance(self.huggingface, PreTrainedTokenizerFast)
        return fast and isinstance(self.huggingface.backend_tokenizer.decoder, decoders.ByteLevel)

    def spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None if there is no such token."""
        return self.huggingface.convert_ids_to_tokens(token_id)  # type: ignore[no-any-return]


def _own_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def _from_directory(path: Path) -> PreTrainedTokenizerBase:
    if (path / "config.json").is_file():  # AutoTokenizer reads it to choose the class
        read_configuration(path / "config.json")
    with reading(path, "has no usable tokenizer"):
        for file in path.glob("tokenizer*.json"):  # before a library normalises the added tokens that it lists
            check_description(json.loads(file.read_text(encoding="utf-8")), str(file))
        check_packages(path)
        options = {"local_files_only": True, "trust_remote_code": False, "mistral_format": False}
        found = with_ends(AutoTokenizer.from_pretrained(str(path), **options), path)
        _check_vocabulary_file(found, path)
        found.decode(found("a text")["input_ids"])  # settings of a wrong type raise only when they are used
    return found


def _check_vocabulary_file(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Raise ModelFormatError if there is no vocabulary file.

    Without one, transformers may return a tokenizer that has only special tokens.
    """
    files = sorted({*tokenizer.vocab_files_names.values(), *_VOCABULARIES})
    if tokenizer.vocab_files_names and not any((path / file).is_file() for file in files):
        raise ModelFormatError(f"{path} has no usable tokenizer: none of {', '.join(files)} is there")


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise VocabularyMismatchError unless every id that both vocabularies have is the same token.

    One vocabulary may have more ids than the other (padding). Those are never proposed, or never accepted.
    """
    pairs = zip(target.tokens(), draft.tokens(), strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        if ours != theirs and ours is not None and theirs is not None:
            raise VocabularyMismatchError(
                f"{draft.name} cannot draft for {target.name}: token {index} is {theirs!r} in the draft model's "
                f"vocabulary ({draft.vocab_size} tokens) and {ours!r} in the target's ({target.vocab_size} tokens)"
            )


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_ANCHORS = "#", ".", "x"  # texts before another one, at least one of which does not merge with it


# GPT-2's spelling of bytes: printable bytes are spelled as themselves, the others as letters from U+0100 on. Characters
# with the code of an unprintable byte spell no byte, so they are mapped to U+0100, which latin-1 cannot encode.
_UNPRINTABLE = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
_BYTE_OF_LETTER = dict.fromkeys(_UNPRINTABLE, 0x100) | {0x100 + n: byte for n, byte in enumerate(_UNPRINTABLE)}
