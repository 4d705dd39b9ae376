"""Tokenizers of GGUF files.

Byte-level tokenizers are built here. The file names its pre-tokenizer (``tokenizer.ggml.pre``), which must split text
as the original tokenizer does to give the same token ids. SentencePiece tokenizers (``llama``) are built from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline.errors import ModelFormatError
from paceline.models.families import gguf_config
from paceline.models.files.gguf import GGUFFile, TextArray

_CONTROL, _USER_DEFINED = 3, 4  # token types: special; ordinary, but never split
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's tokens
_LONGEST_TOKEN = 128  # characters; longer ones, which no real vocabulary has, are never joined


@dataclass(frozen=True)
class Splitting:
    """Settings of a pre-tokenizer, which splits text into words before byte pairs are merged.

    patterns: regular expressions of words; each splits what those before it left between their words. None: GPT-2's.
    digits: every digit is a word of its own.
    nfc: apply Unicode normalisation NFC first. ignore_merges: a word that is a token is not split.
    bos: whether a text begins with the BOS token, if the file does not specify it.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_LINES, _SPACES = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(end: str = "", less: str = "") -> str:
    """Words that end where capitals begin. end: behind a word. less: what their letters are not."""
    upper, lower = f"[{_UPPER}{less}]", f"[{_LOWER}{less}]"
    return f"{_BEFORE}{upper}*{lower}+{end}|{_BEFORE}{upper}+{lower}*{end}"


_NOT_HAN = r"&&[^\p{Han}]"
_HAN_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}"
)

_GPT2 = Splitting()
_DIGITS = Splitting(digits=True)
_GPT4 = Splitting((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_SPACES}",))
_LLAMA3 = replace(_GPT4, ignore_merges=True, bos=True)
_DIGIT_WORDS = Splitting((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}|{_SPACES}",))
_QWEN2 = replace(_DIGIT_WORDS, nfc=True)
_QWEN35 = Splitting(
    (rf"{_CONTRACTION}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}",),
    nfc=True,
)
_TEKKEN = Splitting(
    (rf"{_cased()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}",), ignore_merges=True, bos=True
)
_O200K_PATTERN = rf"{_cased(f'{_CONTRACTION}?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"
_O200K = Splitting((_O200K_PATTERN,))
_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK))
_BAILING = Splitting(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_LETTERS = rf"{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"  # words that are joined by single spaces, too
_EXAONE_MOE = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"

SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mellum", "trillion", "gigachat", "a.x-4.0"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _GPT4),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), _DIGIT_WORDS),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-llm": Splitting(
        (r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _ASIAN, r"\p{N}")
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    "kimi-k2": Splitting(
        (rf"\p{{Han}}+|{_cased(f'{_CONTRACTION}?', _NOT_HAN)}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|{_SPACES}",)
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K_PATTERN))),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": Splitting((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",)),
    "exaone-moe": Splitting((_EXAONE_MOE,)),
    "jais-2": Splitting(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s",
        )
    ),
    "youtu": Splitting(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_KANA,
            rf"{_cased(f'{_CONTRACTION}?')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "laguna": Splitting((r"[^\n]+|[\n]+", *_DIGIT_WORDS.patterns)),
}
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}  # behind them, where other control tokens strip it: as in llama.cpp
BY_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}  # for old files without tokenizer.ggml.pre


def load_gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """Return the file's tokenizer with its special tokens and chat template. Raises ModelFormatError."""
    gguf_config.check(file)
    if file.metadata.get("tokenizer.ggml.model") == "gpt2":
        return _byte_level(file)
    if file.metadata.get("tokenizer.ggml.model") == "llama" and "tokenizer.ggml.scores" in file.metadata:
        return _sentencepiece(file, _joins)
    if file.metadata.get("tokenizer.ggml.model") == "gemma4":
        return _sentencepiece(file, _listed_merges)
    return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name, local_files_only=True)


def _splitting(file: GGUFFile) -> Splitting:
    name = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if name == "default":
        name = BY_ARCHITECTURE.get(file.metadata.get("general.architecture", name), name)
    if name not in SPLITTINGS:
        raise ModelFormatError(
            f"{file.path}: unknown pre-tokenizer tokenizer.ggml.pre={name!r} (known: {', '.join(SPLITTINGS)}); "
            "use a directory with the model's tokenizer.json"
        )
    return SPLITTINGS[name]


def _byte_level(file: GGUFFile) -> PreTrainedTokenizerBase:
    splitting = _splitting(file)
    tokens, merges = _texts(file, "tokens"), [_pair(merge) for merge in _texts(file, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return _with_roles(file, tokenizer, tokens, bos=splitting.bos)


def _sentencepiece(
    file: GGUFFile, merges: Callable[[GGUFFile, Mapping[str, int]], list[tuple[str, str]]]
) -> PreTrainedTokenizerBase:
    """A BPE over characters. merges: the file and its vocabulary -> pairs in the order in which they are joined."""
    tokens = _texts(file, "tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = gguf_config.token_id(file, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges(file, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    last = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return _with_roles(file, tokenizer, tokens, bos=True, strips=gguf_config.form(file).strips)


def _listed_merges(file: GGUFFile, _: Mapping[str, int]) -> list[tuple[str, str]]:
    return [_pair(merge) for merge in _texts(file, "merges")]


def _joins(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, those to tokens with the highest scores first."""
    tokens, scores = _texts(file, "tokens"), gguf_config.listed(file, "scores")
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.scores is not one number for each of {len(tokens)} tokens")
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for at in range(1, min(len(token), _LONGEST_TOKEN)):
            left, right = vocabulary.get(token[:at]), vocabulary.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:at], token[at:])))
    return [pair for *_, pair in sorted(found)]


def _with_roles(
    file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, bos: bool, strips: bool = False
) -> PreTrainedTokenizerBase:
    """Complete a tokenizer with its control tokens and chat template.

    bos: whether texts begin with one by default. strips: whether control tokens remove white space behind them.
    """
    metadata, types = file.metadata, zip(tokens, gguf_config.listed(file, "token_type"), strict=False)
    kinds = [(token, kind) for token, kind in types if kind in (_CONTROL, _USER_DEFINED)]
    stripping = {token for token, kind in kinds if strips and kind == _CONTROL} - _KEEP_SPACE
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False, rstrip=token in stripping)
            for token, kind in kinds
        ]
    )
    roles = {role: gguf_config.token_id(file, role) for role in ("bos", "eos", "unknown", "padding")}
    named = {role: None if index is None else tokens[index] for role, index in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", bos)),
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,  # name_or_path is left out: transformers would look it up on the hub
    )


def _chat_template(file: GGUFFile) -> Any:
    """Return the chat template, or both by transformers' names if there is one for conversations with tools."""
    default, with_tools = (file.metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    return {"default": default, "tool_use": with_tools} if default and with_tools else default


def _texts(file: GGUFFile, key: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, TextArray):
        raise ModelFormatError(f"{file.path}: tokenizer.ggml.{key} is not a list of strings; the file is broken")
    return list(found)


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    return first, second


def _pre_tokenizer(splitting: Splitting) -> Any:
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.patterns))
    return pre_tokenizers.Sequence(steps)
