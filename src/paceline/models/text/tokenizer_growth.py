"""Upper bounds of how many times longer the steps of a tokenizer make a text.

A file may list any steps: forty that double a text turn ten letters into 10^13 characters, and the library that runs
them ends the process when memory runs out. The bounds are in characters, and for the last step in tokens.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from math import ceil, prod
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import ModelFormatError

ORDINARY = 32  # times; those of models that write text have at most 30
_MOST = 1 << 14  # times; ALBERT's, the most of a known family, have 3888
_MOST_DECODED = 32  # times
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}  # Unicode FAQ, Normalization: largest expansion in UTF-32
_BERT = 3 * _UNICODE["NFD"] * 2  # spaces around Chinese characters, accents apart, lower case
_STEPS: dict[str, dict[str, int]] = {
    "normalizer": {**_UNICODE, "Lowercase": 2, "StripAccents": 1, "Strip": 1, "Nmt": 1, "ByteLevel": 4}
    | {"BertNormalizer": _BERT},
    "pre_tokenizer": {"ByteLevel": 5, "Metaspace": 2}  # the bytes of a character, and a space in front of each piece
    | dict.fromkeys(("Split", "Digits", "Punctuation", "CharDelimiterSplit", "UnicodeScripts", "FixedLength"), 1)
    | dict.fromkeys(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"), 1),
    "post_processor": {"ByteLevel": 1, "BertProcessing": 3, "RobertaProcessing": 3},
    "decoder": dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace"), 1),
}
_ENCODING = "normalizer", "pre_tokenizer", "post_processor"
_LISTS = "normalizers", "pretokenizers", "processors", "decoders"
# A regular expression that begins so, without alternatives and \K, matches one character at least.
_FILLED = re.compile(
    r"(?:\.|\\[sdwSDW]|\\[pP]\{\^?\w+\}|[^\\^$.|?*+()\[\]{}]|\[\^?[^\[\]\\^]+\])(?![*?]|\{[0,])(?!.*(?:\||\\K))",
    re.DOTALL,
)


def check_description(description: Mapping[str, Any], file: str) -> int:
    """Return the bound for encoding with a tokenizer that is described as in ``tokenizer.json``.

    file: name for messages. Raises ModelFormatError if it is larger than any real one, or the bound for decoding is.
    """
    encoding = prod(_factor(description.get(role), _STEPS[role]) for role in _ENCODING) * _of_model(description)
    decoding = _factor(description.get("decoder"), _STEPS["decoder"])
    for bound, most, work in ((encoding, _MOST, "encode"), (decoding, _MOST_DECODED, "decode")):
        if bound > most:
            times = f"{bound} times" if bound < 10**9 else "more than 10^9 times"
            raise ModelFormatError(
                f"{file}: the steps by which the tokenizer {work}s can make a text {times} longer (at most {most} is "
                "allowed), which could use up all memory; the file is broken or hostile"
            )
    return encoding


def check_backend(backend: Tokenizer, file: str) -> int:
    """Return the bound for encoding with a loaded tokenizer; see ``check_description``."""
    model = backend.model
    names = "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"
    steps = {role: _described(getattr(backend, role)) for role in _STEPS}
    return check_description({**steps, "model": {name: getattr(model, name, None) for name in names}}, file)


def _described(step: Any) -> Any:
    """The description of a step; None for none, and for one that its caller wrote in Python."""
    if step is None:
        return None
    try:
        return json.loads(step.__getstate__())
    except Exception as error:
        if "Custom" in str(error):
            return None
        raise


def _factor(step: Any, known: Mapping[str, int]) -> int:
    if not isinstance(step, Mapping):
        return 1
    if any(name in step for name in _LISTS):
        return prod(_factor(inner, known) for name in _LISTS for inner in step.get(name) or ())
    if "pattern" in step and "content" in step:
        return _replaced(step["pattern"], len(step["content"]))
    if "prepend" in step:
        return 1 + len(step["prepend"])
    if "precompiled_charsmap" in step:
        return _longest_of_table(b64decode(step["precompiled_charsmap"] or ""))
    if "single" in step:
        pieces, special = step["single"], step.get("special_tokens", {})
        return sum(
            len(special[piece["SpecialToken"]["id"]]["ids"]) if "SpecialToken" in piece else 1 for piece in pieces
        )
    texts = [value for name, value in step.items() if name != "type" and isinstance(value, str)]
    return known.get(str(step.get("type")), 2 + sum(map(len, texts)))  # an unknown step may insert its texts


def _replaced(pattern: Mapping[str, str], inserted: int) -> int:
    """The factor of replacing each match by ``inserted`` characters. Empty matches are on both sides of each one."""
    if text := pattern.get("String"):
        return max(1, ceil(inserted / len(text)))
    return max(1, inserted) if _FILLED.match(pattern.get("Regex", "")) else 1 + 2 * inserted


def _longest_of_table(table: bytes) -> int:
    """The longest text in a SentencePiece table of replacements: a trie behind its size, then texts that end in 0."""
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _of_model(description: Mapping[str, Any]) -> int:
    """Tokens of a character: one, or its bytes and those of the texts that are put around it."""
    model = description.get("model") or {}
    if not model.get("byte_fallback"):
        return 1
    around = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    return 4 + sum(len(text.encode(errors="replace")) for text in around)
