"""Tokenizers: incremental decoding is exact, stop strings are cut exactly, GGUF files split text like the originals."""

import json
import os
import random
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline import SamplingParams
from paceline.chat.families import ChatFormat, chat_format
from paceline.chat.options import ChatOptions
from paceline.chat.thinking import KNOWN
from paceline.chat.values import ToolDefinition
from paceline.engine.chat import chat_prompt
from paceline.errors import ModelFormatError, ModelNotFoundError, ParameterError, RequestError, VocabularyMismatchError
from paceline.models.files import hub
from paceline.models.files.boundary import is_failure
from paceline.models.text.detokenizer import ByteDecoder, Detokenizer, WindowDecoder
from paceline.models.text.gguf_tokenizer import SPLITTINGS, _pre_tokenizer
from paceline.models.text.tokenizer import Tokenizer, check_same_vocabulary
from paceline.models.text.tokenizer_growth import ORDINARY, check_backend, check_description
from server_support import byte_tokenizer
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("no_requests")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SCRIPTS = ["naïve café", "日本語", "한국어", "مرحبا", "हिन्दी", "e\u0301"]
EMOJI = ["👩\u200d👩\u200d👧\u200d👦", "🇨🇭", "👋🏽", "\ufffd"]
TEXTS = ["The cat", " sat", "\n\n", "x = 1", *SCRIPTS, *EMOJI]


def smollm2_path() -> Path | None:
    """Return the path of the real model, in the tests' folder of models or paceline's cache; None if it is absent."""
    kept = Path(os.environ.get("PACELINE_TEST_MODELS") or "~/.cache/paceline-test-models").expanduser()
    candidates = [kept / "smollm2-135m.gguf", hub.embedded_path("smollm2-135m")]
    return next((path for path in candidates if path.is_file()), None)


@cache
def smollm2() -> Tokenizer:
    path = smollm2_path()
    assert path is not None
    return Tokenizer.load(path)


real_model = pytest.mark.skipif(smollm2_path() is None, reason="no smollm2-135m.gguf; run: paceline pull smollm2-135m")


def byte_level_backend(words: Sequence[str] = ()) -> Backend:
    """Return a backend of all 256 bytes, the merges that make ``words``, and two special tokens."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words:
        spelled = "".join(piece for piece, _ in pre.pre_tokenize_str(word))
        for end in range(2, len(spelled) + 1):
            merges.append((spelled[: end - 1], spelled[end - 1]))
            vocabulary.setdefault(spelled[:end], len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<tool call>")])
    backend.add_tokens([AddedToken("<thin king>", normalized=False)])
    return backend


def sentencepiece_backend() -> Backend:
    """Return a backend like Llama 2's: a leading space, and byte tokens for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.", "th", "▁th", "▁the", "▁c", "at", "▁cat", "é", "日"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "c"), ("a", "t"), ("▁c", "at")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def wrap(backend: Backend, **options: object) -> Tokenizer:
    return Tokenizer.load(PreTrainedTokenizerFast(tokenizer_object=backend, **options))


@cache
def byte_level() -> Tokenizer:
    return wrap(byte_level_backend(["hello", " world", "日本", "stop"]), eos_token="<eos>", chat_template=TEMPLATE)


@cache
def sentencepiece() -> Tokenizer:
    return wrap(sentencepiece_backend(), eos_token="</s>")


BOTH = pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte-level", "sentencepiece"])


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


# Files that are hostile

TWICE = normalizers.Replace(Regex("."), "ab")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
MULTIPLY: dict[str, tuple[str, Any]] = {
    "replacements": ("normalizer", normalizers.Sequence([TWICE] * 15)),
    "empty matches": ("normalizer", normalizers.Sequence([normalizers.Replace(Regex("x*"), "b")] * 15)),
    "one long replacement": ("normalizer", normalizers.Replace(" ", "b" * 20_000)),
    "beginnings": ("normalizer", normalizers.Sequence([normalizers.Prepend("b" * 20_000), TWICE])),
    "bytes of bytes": ("pre_tokenizer", pre_tokenizers.Sequence([BYTES] * 9)),
    "signs before letters": (
        "pre_tokenizer",
        pre_tokenizers.Sequence(
            [each for sign in "cdefghijklmnopq" for each in (pre_tokenizers.Metaspace(sign), pre_tokenizers.Digits())]
        ),
    ),
    "a template": ("post_processor", processors.TemplateProcessing(["$A"] * 20_000)),
    "templates": ("post_processor", processors.Sequence([processors.TemplateProcessing(["$A", "$A"])] * 15)),
    "decoders": ("decoder", decoders.Sequence([decoders.Replace(Regex("."), "ab")] * 15)),
}


@pytest.mark.parametrize("what", MULTIPLY)
def test_a_file_whose_steps_multiply_a_text_is_refused_by_name(what: str, tmp_path: Path) -> None:
    backend = byte_level_backend()
    setattr(backend, *MULTIPLY[what])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(ModelFormatError, match=rf"{re.escape(str(tmp_path / 'tokenizer.json'))}: .* times longer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelFormatError, match="times longer"):
        wrap(backend)


def test_a_table_of_replacements_is_as_long_as_its_longest_text() -> None:
    table = b64encode((8).to_bytes(4, "little") + bytes(8) + b"ab\0abcde\0\xc3\xa4bc\0").decode()
    steps = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}
    assert check_description(steps, "file") == 5


STEPS = [
    *(normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase()),
    *(normalizers.ByteLevel(), normalizers.BertNormalizer(), normalizers.StripAccents(), normalizers.Prepend("▁x")),
    *(normalizers.Replace(" ", "▁"), normalizers.Replace("ab", "abc")),
    *(normalizers.Replace(Regex(each), "Aﷺ") for each in (r"\s+", "a*", "(?=a)", r"a\K", "[^a]{0,2}", "[ab]", "a|")),
]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(STEPS), max_size=3), st.text(st.sampled_from("ab Aﷺ\U0001d160ᾂİȺ日 "), min_size=1))
def test_normalizers_make_no_text_longer_than_their_bound(steps: list[Any], text: str) -> None:
    backend = Backend(models.BPE())
    backend.normalizer = normalizer = normalizers.Sequence(steps)
    try:
        bound, longer = check_backend(backend, "file"), normalizer.normalize_str(text)
    except BaseException as error:
        assume(not is_failure(error))  # the bound is too large, or empty matches make the library panic
        raise
    assert len(longer) <= bound * len(text)


BOS = {"SpecialToken": {"id": "<s>"}}
LLAMA_2 = {
    "normalizer": {"normalizers": [{"prepend": "▁"}, {"pattern": {"String": " "}, "content": "▁"}]},
    "post_processor": {"single": [BOS, {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [1]}}},
    "model": {"byte_fallback": True},
}
QWEN = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"pretokenizers": [{"type": "Split", "pattern": {"Regex": "."}}, {"type": "ByteLevel"}]},
    "post_processor": {"type": "ByteLevel"},
}


def test_texts_of_usual_tokenizers_are_not_limited() -> None:
    assert check_description(LLAMA_2, "file") == 2 * 1 * 2 * 4 <= ORDINARY
    assert check_description(QWEN, "file") == 3 * 5 <= ORDINARY


def test_a_text_that_unusual_steps_could_make_too_long_is_refused_and_others_are_encoded() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.Sequence([TWICE] * 9)
    tokenizer = wrap(backend, name_or_path="the model", chat_template=TEMPLATE)  # 512 times, and 5 of ByteLevel
    most = (16 << 20) // (5 << 9)
    assert len(tokenizer.encode("x" * 10)) == 10 << 9
    for encode in (
        tokenizer.encode,
        tokenizer.encode_as_text,
        lambda text: tokenizer.chat([{"role": "user", "content": text}]),
    ):
        for begin in ("", "<eos>"):
            with pytest.raises(RequestError, match=rf"the model, .* at most {most} characters"):
                encode(begin + "x" * most + "y")


def test_a_panic_of_the_tokenizer_ends_its_request_and_names_the_file() -> None:
    backend = byte_level_backend()
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.decoder = decoders.Strip("x", 3, 3)
    tokenizer, panics = wrap(backend, name_or_path="the model", chat_template=TEMPLATE), "a" * 40 + "!"
    works: list[Callable[[], object]] = [
        lambda: tokenizer.encode(panics),
        lambda: tokenizer.encode_as_text("<eos>" + panics),
        lambda: tokenizer.chat([{"role": "user", "content": panics}]),
        lambda: tokenizer.decode(tokenizer.encode("x")),
        lambda: tokenizer.token_text(tokenizer.encode("x")[0]),
    ]
    for work in works:
        with pytest.raises(RequestError, match=r"the tokenizer of the model cannot .*tokenizer\.json.*PanicException"):
            work()
    backend.decoder = decoders.ByteLevel()
    llm = toy_llm(tokenizer=wrap(backend, name_or_path="the model"))
    refused, served = llm.generate([panics, "b"], SamplingParams(max_tokens=2), use_tqdm=False, on_error="skip")
    assert isinstance(refused.error, RequestError)
    assert len(served.outputs[0].token_ids) == 2


# Loading


def test_a_directory_gives_the_tokenizer_that_was_saved_there(tmp_path: Path) -> None:
    byte_level().huggingface.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("hello world 日本") == byte_level().encode("hello world 日本")
    assert loaded.eos_token_ids == byte_level().eos_token_ids
    assert loaded.name == str(tmp_path)


def test_a_file_of_mistrals_own_tokenizer_beside_it_changes_nothing(tmp_path: Path) -> None:
    """Such directories load with and without the package mistral-common."""
    byte_level().huggingface.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    assert Tokenizer.load(tmp_path).encode("hello") == byte_level().encode("hello")


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no usable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma3_text", "llama"])
def test_a_tokenizer_of_special_tokens_only_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelFormatError, match=r"no usable tokenizer"):
        Tokenizer.load(tmp_path)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ModelNotFoundError):
        Tokenizer.load("no-such-model")


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03")
    with pytest.raises(ModelFormatError, match="broken"):
        Tokenizer.load(path)


def write_gguf(
    path: Path,
    splitting: str | None,
    architecture: str = "llama",
    more: Mapping[str, int] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """Write a GGUF file without weights that has the byte-level vocabulary of these tests.

    more: types of further tokens, by name. metadata: of the tokenizer.
    """
    state = json.loads(byte_level_backend(["hello", " 12"]).to_str())
    vocabulary = state["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "<eos>", "<tool call>", "<pad>", *more]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - len(more) - 3) + [3, 4, 5, *more.values()])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_bos_token_id(tokens.index("<eos>"))
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        add = {list: writer.add_array, bool: writer.add_bool}.get(type(value), writer.add_string)
        add(f"tokenizer.{key.replace('__', '.')}", value)
    if splitting is not None:
        writer.add_tokenizer_pre(splitting)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("architecture", "strips"), [("llama", False), ("phi3", True)])
def test_control_tokens_of_phi3_strip_the_white_space_behind_them(
    architecture: str, strips: bool, tmp_path: Path
) -> None:
    """Those of its SentencePiece vocabularies, as in its tokenizer.json; GGUF files do not tell."""
    tokens = ["<unk>", "<s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i"]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([3, 3, 3, *[6] * 256, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(tmp_path / "tiny.gguf")
    bare, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("<|user|>hi", "<|user|>\n hi"))
    assert (bare == spaced) is strips
    assert tokenizer.encode("<s>\nh", add_special_tokens=False) != tokenizer.encode("<s>h", add_special_tokens=False)


def test_a_gguf_file_gives_special_tokens_template_and_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", "gpt-2"))
    eos, called = tokenizer.encode("<eos><tool call>")
    assert tokenizer.eos_token_ids == (eos,)
    assert tokenizer.decode([called, eos]) == "<tool call>"
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hello"}])) == "<user>hello<bot>"


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, ["<|return|>", "<|call|>"]),
        ({"<|return|>": 3, "<|end|>": 3}, ["<|return|>", "<|end|>"]),
        ({"<|end|>": 4}, ["<|end|>"]),
        ({"<|end|>": 1}, []),
        ({"<turn|>": 3, "<|tool_response>": 4, "<x>": 3}, ["<turn|>", "<|tool_response>"]),
    ],
    ids=["harmony", "half of it", "user-defined", "text", "gemma4"],
)
def test_known_tokens_of_a_gguf_file_end_a_text(tmp_path: Path, more: dict[str, int], ends: list[str]) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", "gpt-2", more=more))
    assert {tokenizer.spelling(token) for token in tokenizer.eos_token_ids} == {"<eos>", *ends}


def test_a_gguf_file_may_list_several_ends(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "gpt-2", ggml__eos_token_ids=[0, 3])
    assert {0, 3} < set(Tokenizer.load(path).eos_token_ids)
    path = write_gguf(tmp_path / "other.gguf", "gpt-2", ggml__eos_token_ids=[10**6])
    with pytest.raises(ModelFormatError, match="eos_token_ids=1000000 is not one of"):
        Tokenizer.load(path)


WITH_TOOLS = "{{ tools | length }} tools{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"


@pytest.mark.parametrize("how", ["gguf", "transformers"])
def test_conversations_with_tools_have_their_own_template_if_there_is_one(tmp_path: Path, how: str) -> None:
    if how == "gguf":
        tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", "gpt-2", chat_template__tool_use=WITH_TOOLS))
    else:
        made = byte_level()
        made.huggingface.chat_template = {"default": TEMPLATE, "tool_use": WITH_TOOLS}
        tokenizer = made
    talk = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert tokenizer.decode(tokenizer.chat(talk)) == "<user>hello<bot>"
    assert tokenizer.decode(tokenizer.chat(talk, tools=[tool])) == "1 tools<user>hello<bot>"
    prompt = chat_prompt(tokenizer, talk, ChatOptions(tools=(ToolDefinition("f"),), tool_parser="json"))
    assert tokenizer.decode(prompt.token_ids).startswith("1 tools")


@pytest.mark.parametrize(
    ("splitting", "expected"),
    [
        ("gpt-2", ["Ġ12", "3"]),
        ("refact", ["Ġ", "1", "2", "3"]),
        ("dbrx", ["Ġ", "1", "2", "3"]),
        ("smollm", ["Ġ", "1", "2", "3"]),
        ("qwen2", ["Ġ", "1", "2", "3"]),
    ],
)
def test_a_gguf_file_uses_its_pre_tokenizer(tmp_path: Path, splitting: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", splitting))
    assert [tokenizer.spelling(token) for token in tokenizer.encode(" 123")] == expected


def write_tekken(path: Path, special: list[str]) -> None:
    """Write a directory with a tekken.json alone: all bytes, two longer tokens and special ones."""
    entries = [bytes([byte]) for byte in range(256)] + [b"he", b"hello"]
    vocabulary = [{"rank": n, "token_bytes": b64encode(entry).decode()} for n, entry in enumerate(entries)]
    listed = [{"rank": n, "token_str": token, "is_control": True} for n, token in enumerate(special)]
    size = len(entries) + len(special)
    config = {
        "pattern": SPLITTINGS["tekken"].patterns[0],
        "num_vocab_tokens": len(entries),
        "default_vocab_size": size,
        "default_num_special_tokens": len(special),
        "version": "v7",
    }
    document = {"config": config, "vocab": vocabulary, "special_tokens": listed}
    (path / "tekken.json").write_text(json.dumps(document))
    (path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": size}))


def test_a_tekken_file_alone_gives_the_ends_of_texts(tmp_path: Path) -> None:
    write_tekken(tmp_path, ["<unk>", "<s>", "</s>", "[INST]"])
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (2,)
    assert [tokenizer.spelling(token) for token in tokenizer.encode("[INST]he 1")] == ["<s>", "[INST]", "he", "Ġ", "1"]
    assert tokenizer.decode(tokenizer.encode("he 1")) == "he 1"
    write_tekken(tmp_path, ["<unk>", "[INST]", "<x>", "<y>"])
    with pytest.raises(ModelFormatError, match=r"tekken\.json has no special token <s>"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_model_alone_names_the_packages_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setattr("paceline.models.text.vocabulary_files.find_spec", lambda _: None)
    with pytest.raises(ModelFormatError, match="pip install sentencepiece protobuf"):
        Tokenizer.load(tmp_path)


WORDS = {  # of "It's 12345 中文かなABC\n\n  x", as the original pre-tokenizers split it
    "gpt-2": ["It", "'s", " 12345", " 中文かなABC", "\n\n ", " x"],
    "command-r": ["It", "'s", " ", "1", "2", "3", "4", "5", " 中文かなABC", "\n\n ", " x"],
    "glm4": ["It", "'s", " ", "123", "45", " 中文かなABC", "\n\n", " ", " x"],
    "hunyuan": ["It", "'s", " ", "1", "2", "3", "4", "5", " 中文かなABC", "\n\n", " ", " x"],
    "deepseek-v3": ["It", "'s", " ", "123", "45", " ", "中文かな", "ABC", "\n\n", " ", " x"],
    "deepseek-llm": ["It", "'", "s", " ", "1", "2", "3", "4", "5", " ", "中文かな", "ABC", "\n", "\n", " ", " x"],
    "kimi-k2": ["It's", " ", "123", "45", " ", "中文", "かな", "ABC", "\n\n", " ", " x"],
    "minimax-m2": ["It's", " ", "123", "45", " 中文かな", "ABC", "\n\n", " ", " x"],
    "tiny_aya": ["It's", " ", "12", "345", " 中文かな", "ABC", "\n\n", " ", " x"],
    "youtu": ["It's", " ", "1", "2", "3", "4", "5", " ", "中文かな", "ABC", "\n\n", " ", " x"],
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_those_of_the_named_pre_tokenizer(name: str) -> None:
    text = "It's 12345 中文かなABC\n\n  x"
    words = _pre_tokenizer(SPLITTINGS[name]).pre_tokenize_str(text)
    assert [text[first:last] for _, (first, last) in words] == WORDS[name]


def test_every_pre_tokenizer_keeps_every_byte() -> None:
    text = "Don't parseJSONFile12345 //x\n\n  y'LL 한국어 नमस्ते 👩‍👩‍👧 ½²  "
    for name, splitting in SPLITTINGS.items():
        words = _pre_tokenizer(splitting).pre_tokenize_str(text)
        assert decoders.ByteLevel().decode([word for word, _ in words]) == text, name


def test_the_words_of_o200k_are_split_at_changes_of_case_and_every_three_digits() -> None:
    """The words that the published pattern of gpt-oss's vocabulary gives (tiktoken's o200k_base)."""
    text = "Don't parseJSONFile12345 //x\n\n  y'LL"
    words = [text[first:last] for _, (first, last) in _pre_tokenizer(SPLITTINGS["gpt-4o"]).pre_tokenize_str(text)]
    assert words == ["Don't", " parse", "JSONFile", "123", "45", " //", "x", "\n\n", " ", " y'LL"]


@pytest.mark.parametrize("splitting", ["llama-bpe", "lfm2"])
def test_a_gguf_tokenizer_adds_the_bos_token_of_its_original(tmp_path: Path, splitting: str) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", splitting))
    assert tokenizer.encode("hello")[0] == tokenizer.eos_token_ids[0]  # here the same token


@pytest.mark.parametrize("adds", [True, False])
def test_a_gguf_tokenizer_ends_texts_as_the_file_says(tmp_path: Path, adds: bool) -> None:
    """Embedding models read the end-of-text token: its state is the embedding."""
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", ggml__add_eos_token=adds, ggml__add_bos_token=False)
    tokenizer = Tokenizer.load(path)
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*hello, *(tokenizer.eos_token_ids if adds else ())]
    assert tokenizer.chat([{"role": "user", "content": "hello"}])[-1] not in tokenizer.eos_token_ids


def test_an_old_gguf_file_uses_the_pre_tokenizer_of_its_architecture(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", None, architecture="qwen2"))
    assert len(tokenizer.encode(" 123")) == 4


@pytest.mark.parametrize("splitting", ["someones-own", None])
def test_a_gguf_file_with_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, splitting: str | None) -> None:
    with pytest.raises(ModelFormatError, match=r"unknown pre-tokenizer .*known: gpt-2"):
        Tokenizer.load(write_gguf(tmp_path / "tiny.gguf", splitting))


# Chat


def test_chat_uses_the_template_with_the_generation_prompt() -> None:
    ids = byte_level().chat([{"role": "user", "content": "hello"}])
    assert byte_level().decode(ids) == "<user>hello<bot>"


def test_chat_without_template_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="has no chat template"):
        sentencepiece().chat([{"role": "user", "content": "hello"}])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ParameterError, match="half a character"):
        byte_level().encode("a\ud800")
    with pytest.raises(ParameterError, match=r"messages.content=.*half a character"):
        byte_level().chat([{"role": "user", "content": "\udfff"}])


@pytest.mark.parametrize("message", [{"role": "user"}, "hello", {"role": "user", "content": None}, {1: 2}, None])
def test_chat_refuses_invalid_messages(message: object) -> None:
    with pytest.raises(RequestError, match="role and content"):
        byte_level().chat([message])  # type: ignore[list-item]


def test_chat_passes_on_the_error_of_the_template() -> None:
    strict = wrap(byte_level_backend(), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        strict.chat([{"role": "user", "content": "hello"}])


# Vocabularies


def test_equal_vocabularies_with_different_padding_are_accepted() -> None:
    longer = byte_level_backend(["hello", " world", "日本", "stop"])
    longer.add_tokens(["<pad 1>", "<pad 2>"])
    check_same_vocabulary(byte_level(), wrap(longer))
    check_same_vocabulary(wrap(longer), byte_level())


def test_another_vocabulary_is_refused_with_both_names_and_the_first_difference() -> None:
    other = wrap(byte_level_backend(["hellish"]), name_or_path="the-draft")
    target = wrap(byte_level_backend(["hello"]), name_or_path="the-target")
    with pytest.raises(VocabularyMismatchError) as caught:
        check_same_vocabulary(target, other)
    message = str(caught.value)
    assert all(word in message for word in ("the-draft", "the-target", "token 259", "'helli'", "'hello'"))


# Incremental decoding


@BOTH
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_tokens_join_to_the_decoded_text(make: object, data: st.DataObject) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer)
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids) == detokenizer.text


@BOTH
@given(parts=st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=8)), max_size=10))
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_text_join_to_the_decoded_text(make: object, parts: list[str]) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode("".join(parts))
    assert "".join(stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


@BOTH
@given(parts=st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=8)), min_size=1, max_size=6), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_text_and_its_continuation_join_to_the_decoded_text(make: Any, parts: list[str], data: st.DataObject) -> None:
    """Cut anywhere between tokens, but not within a character."""
    tokenizer = make()
    ids = tokenizer.encode("the" + "".join(parts))
    cut = data.draw(st.integers(1, len(ids)))
    begun = tokenizer.decode(ids[:cut])
    assume("\ufffd" not in begun)
    detokenizer = Detokenizer(tokenizer, after=tokenizer.last_of_text(ids[:cut]))
    assert begun + "".join(stream(detokenizer, ids[cut:])) == tokenizer.decode(ids)


@BOTH
def test_a_continuation_has_the_tokens_that_it_has_in_the_whole_text(make: Any) -> None:
    tokenizer = make()
    for text in ("the", " the", "  the cat", "at"):
        assert tokenizer.encode("a.") + tokenizer.encode_inside(text, tokenizer.encode) == tokenizer.encode("a." + text)


@BOTH
def test_incomplete_characters_are_held_back(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    pieces = stream(Detokenizer(tokenizer), tokenizer.encode("the 👩‍👩‍👧 cat"))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == "the 👩‍👩‍👧 cat"


def test_a_character_is_released_with_its_last_byte() -> None:
    ids = byte_level().encode("é👋")
    pieces = [Detokenizer(byte_level()).push(ids[0])]
    detokenizer = Detokenizer(byte_level())
    pieces = [detokenizer.push(token) for token in ids]
    assert pieces == ["", "é", "", "", "", "👋"]


def test_an_incomplete_character_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(byte_level())
    assert detokenizer.push(byte_level().encode("é")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_left_out_but_added_text_tokens_are_not() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.huggingface.convert_tokens_to_ids(token) for token in ("<thin king>", "<tool call>", "<eos>")]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "<thin king>"


def test_a_marker_of_thoughts_may_be_a_special_token_and_letters() -> None:
    """As Gemma 4's are."""
    made = byte_tokenizer(["<|channel>", "<channel|>"])
    made.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if x %}<|channel>thought<channel|>{% endif %}"
    )
    tokenizer = Tokenizer.load(made)
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": "hello"}], ChatOptions())
    ids = tokenizer.encode("<|channel>thought\nhm<channel|>Hi")
    message = prompt.parsed("".join(stream(Detokenizer(tokenizer, kept_special=prompt.kept_special), ids)))
    assert (message.reasoning, message.text) == ("hm", "Hi")


def test_only_special_tokens_that_a_text_spells_out_are_found_in_it() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.special_in("<s>the 日本</s>") == {1, 2}
    assert tokenizer.special_in("the %") == set()


ODD = ["a b", "\xa0", "\xad", "\x7f\x80", "Ā", "ńĠ", "Ńń", "Ġ", "日本 Ġ", "\x00", "é"]


def test_bytes_of_added_tokens_are_those_that_the_tokenizer_decodes() -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ODD])
    tokenizer = wrap(backend)
    for token in range(tokenizer.vocab_size + 2):  # the last two ids do not exist
        text = tokenizer.decode([token])
        assert "".join(stream(Detokenizer(tokenizer), [token])) == text
        assert tokenizer.bytes_in_text(token).decode(errors="replace") == text


def metaspace() -> Tokenizer:
    """A tokenizer with the other decoder of SentencePiece vocabularies, which strips a text's first space, too."""
    backend = sentencepiece_backend()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrap(backend, eos_token="</s>")


@pytest.mark.parametrize("make", [byte_level, sentencepiece, metaspace])
def test_a_token_is_spelled_as_inside_a_text(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode("the the  cat日 x\n", add_special_tokens=False)
    inside = [token for token in ids if make is byte_level or tokenizer.byte_of(token) is None]
    assert "".join(tokenizer.token_text(token) for token in inside).strip() == "the the  cat日 x"
    assert b"".join(map(tokenizer.token_bytes, ids)).strip(b" ").decode() == "the the  cat日 x\n"
    assert tokenizer.token_text(tokenizer.eos_token_ids[0]) in ("</s>", "<eos>")
    assert (tokenizer.token_text(10**6), tokenizer.token_bytes(10**6)) == ("", b"")


def test_a_byte_level_token_takes_few_python_calls() -> None:
    """A generator over a token's letters once caused half of all Python calls of a decoding round."""
    ids, detokenizer = byte_level().encode("hello world 日本 stop" * 20), Detokenizer(byte_level())
    stream(Detokenizer(byte_level()), ids)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    for token in ids:
        detokenizer.push(token)
    sys.setprofile(None)
    assert calls <= 4 * len(ids)


def test_each_kind_of_vocabulary_gets_its_decoder() -> None:
    assert isinstance(Detokenizer(byte_level())._decoder, ByteDecoder)
    assert isinstance(Detokenizer(sentencepiece())._decoder, WindowDecoder)


# Stop strings


def expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Slow reference: extend the text character by character and cut it where a stop string first ends."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@BOTH
@given(
    text=st.text(alphabet="abé👋 ", max_size=30),
    stops=st.lists(st.text(alphabet="abé👋 ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_stop_strings_are_found_at_any_token_boundaries(
    make: object, text: str, stops: list[str], include: bool
) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, tuple(stops), include)
    shown = "".join(stream(detokenizer, ids))
    assert (shown, detokenizer.stopped) == expected(tokenizer.decode(ids), stops, include)
    assert detokenizer.text == shown


SPECIAL_STOPS = [
    ("the S cat", ["S"], {}, "the ", "S"),
    ("the S cat", ["S"], {"include_stop": True}, "the S", "S"),
    ("the\nS cat", ["\nS ca"], {}, "the", "\nS ca"),
    ("the SS cat S", ["SSS", "S t", "x"], {}, "the  cat ", None),
    ("the Scat S.", ["S"], {"min_tokens": 5}, "the cat ", "S"),
    ("the cat S", ["at S"], {"skip_special": False}, "the c", "at S"),
    ("the cat S", ["S"], {"kept_special": "S"}, "the cat ", "S"),
    ("the x cat S", ["x"], {}, "the ", "x"),
]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize(("text", "stops", "options", "shown", "stopped"), SPECIAL_STOPS)
def test_a_stop_string_may_spell_special_tokens(
    make: Any, text: str, stops: list[str], options: dict[str, Any], shown: str, stopped: str | None
) -> None:
    tokenizer, name = make(), "<tool call>" if make is byte_level else "<s>"
    if "kept_special" in options:
        options = {"kept_special": tokenizer.special_in(name)}
    ids = tokenizer.encode(text.replace("S", name))
    detokenizer = Detokenizer(tokenizer, tuple(stop.replace("S", name) for stop in stops), **options)
    assert "".join(stream(detokenizer, ids)) == detokenizer.text == shown.replace("S", name)
    assert detokenizer.stopped == (None if stopped is None else stopped.replace("S", name))


def test_a_special_token_that_is_a_stop_string_is_not_shown_in_thoughts() -> None:
    detokenizer = Detokenizer(byte_level(), ("<tool call>",), splitter=PLAIN.splitter(False))
    ids = byte_level().encode("<think>a<tool call>b</think>\nc<tool call>d")
    assert "".join(stream(detokenizer, ids)) == detokenizer.text == "<think>ab</think>\nc"
    assert detokenizer.stopped == "<tool call>"


@pytest.mark.parametrize("words", [[], ["stop"], ["st", "op"], ["xstopx"], ["xs", "topx"]])
def test_a_stop_string_is_found_with_any_tokenisation(words: list[str]) -> None:
    tokenizer = wrap(byte_level_backend(words))
    detokenizer = Detokenizer(tokenizer, ("stop",))
    assert "".join(stream(detokenizer, tokenizer.encode("xxstopxx"))) == "xx"
    assert detokenizer.stopped == "stop"


def test_the_match_that_ends_first_wins() -> None:
    tokenizer = wrap(byte_level_backend(["abcdef"]))
    assert len(tokenizer.encode("abcdef")) == 1
    detokenizer = Detokenizer(tokenizer, ("abcdef", "cd"))
    assert stream(detokenizer, tokenizer.encode("abcdef")) == ["ab", ""]
    assert detokenizer.stopped == "cd"


def test_a_possible_stop_string_is_held_back_until_it_is_ruled_out() -> None:
    detokenizer = Detokenizer(byte_level(), ("\n\nQ",))
    pieces = [detokenizer.push(token) for token in byte_level().encode("a\n\nb")]
    assert pieces == ["a", "", "", "\n\nb"]


def test_a_possible_stop_string_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(byte_level(), ("###",))
    assert stream(detokenizer, byte_level().encode("a##")) == ["a", "", "", "##"]
    assert detokenizer.stopped is None


def test_no_text_is_released_after_a_stop_string() -> None:
    detokenizer = Detokenizer(byte_level(), ("b",), include_stop=True)
    assert stream(detokenizer, byte_level().encode("abab")) == ["a", "b", "", "", ""]
    assert detokenizer.text == "ab"


PLAIN = ChatFormat(KNOWN[0], None)
IN_CHANNELS = chat_format("<|channel|>analysis<|message|>")
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "text", "shown"),
    [
        (PLAIN, "<think>a stop b</think>\n\nc stop d", "<think>a stop b</think>\n\nc "),
        (PLAIN, " \n<think>stop</think>", None),
        (PLAIN, "<think>never closed stop </thin", None),
        (PLAIN, "<think></think>stop", "<think></think>"),
        (PLAIN, "<think>x</think>\n\ny\n\nz", "<think>x</think>\n\ny"),
        (PLAIN, "<thin stop <think>", "<thin "),
        (PLAIN, " a stop <think>x</think>", " a "),
        (PLAIN, "<thi", None),
        (PLAIN, "<think>a</think>b <think>stop</think>", "<think>a</think>b <think>"),
        (IN_CHANNELS, f"<|channel|>analysis<|message|>stop{NEXT}<|channel|>final<|message|>a stop", "a "),
        (IN_CHANNELS, f"<|channel|>analysis<|message|>a{NEXT}<|channel|>analysis<|message|>stop", None),
        (IN_CHANNELS, "<|channel|>final<|message|>a stop", "a "),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_stop_strings_do_not_count_in_thoughts(form: ChatFormat, text: str, shown: str | None, inside: bool) -> None:
    if inside:
        begin = form.thinking.begin if form.thinking else ""
        if not text.startswith(begin):
            return
        text, shown = text[len(begin) :], shown and shown.removeprefix(begin)
    for words in ([], ["stop"], ["think>", "<|end|>", "<|message|>"], ["</think>\n\n", "xstop"], [text]):
        tokenizer = wrap(byte_level_backend(words))
        detokenizer = Detokenizer(tokenizer, ("\n\n", "stop"), splitter=form.splitter(inside))
        pieces = stream(detokenizer, tokenizer.encode(text))
        assert "".join(pieces) == detokenizer.text
        whole = text if shown is None else text[: text.rindex(shown) + len(shown)]
        assert (detokenizer.text, detokenizer.stopped is None) == (whole, shown is None), words


def test_a_stop_string_counts_once_thoughts_and_min_tokens_are_over() -> None:
    for count, text in ((0, "<think>b</think>"), (16, "<think>b</think>"), (17, "<think>b</think>bc")):
        detokenizer = Detokenizer(byte_level(), ("b",), min_tokens=count, splitter=PLAIN.splitter(False))
        stream(detokenizer, byte_level().encode("<think>b</think>bcb"))
        assert detokenizer.text == text


def test_stop_strings_are_not_searched_before_min_tokens() -> None:
    detokenizer = Detokenizer(byte_level(), ("b",), min_tokens=2)
    assert stream(detokenizer, byte_level().encode("abab")) == ["a", "b", "a", "", ""]
    assert detokenizer.stopped == "b"


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    detokenizer = Detokenizer(byte_level(), ("bcd", "ab"), min_tokens=2)
    assert stream(detokenizer, byte_level().encode("abcde")) == ["", "a", "", "", "", ""]
    assert detokenizer.stopped == "bcd"


@pytest.mark.parametrize(
    ("stop", "ids", "released", "stopped"),
    [
        (("ab", "abc"), "abx", "abx", None),
        (("ab", "abc"), "abc", "", "abc"),
        (("ab",), "ab", "ab", None),
        (("ab",), "abab", "ab", "ab"),
    ],
)
def test_no_stop_string_ends_within_min_tokens(
    stop: tuple[str, ...], ids: str, released: str, stopped: str | None
) -> None:
    detokenizer = Detokenizer(byte_level(), stop, min_tokens=2)
    assert "".join(stream(detokenizer, byte_level().encode(ids))) == released
    assert detokenizer.stopped == stopped


@pytest.mark.parametrize("last", [".", None])
def test_no_stop_string_of_bytes_ends_within_min_tokens(last: str | None) -> None:
    tokens = ["▁the", "<0x0A>", *([last] if last else [])]
    detokenizer = Detokenizer(sentencepiece(), ("\n",), min_tokens=2)
    stream(detokenizer, sentencepiece().huggingface.convert_tokens_to_ids(tokens))
    assert (detokenizer.stopped, detokenizer.text) == (None, f"the\n{last or ''}")


def test_a_character_after_min_tokens_stays_whole() -> None:
    """The text of the first tokens ends with a stop string and may begin a longer one."""
    detokenizer = Detokenizer(byte_level(), ("ab", "xabc"), min_tokens=3)
    assert "".join(stream(detokenizer, byte_level().encode("xabé"))) == "xabé"


def test_ids_outside_of_the_vocabulary_are_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        assert tokenizer.last_of_text([-1, 2**70]) is None


@pytest.mark.parametrize(("stop", "released"), [("\n", "the"), ("日", "the\n\n"), ("e\n\n", "th"), ("\n.", "the\n")])
def test_a_stop_string_of_byte_tokens_is_found_with_its_last_byte(stop: str, released: str) -> None:
    tokenizer = sentencepiece()
    unknown = [f"<0x{byte:02X}>" for byte in "\n\n日".encode()]
    ids = tokenizer.huggingface.convert_tokens_to_ids(["▁the", *unknown, "."])
    if stop == "\n.":  # ends after the run
        del ids[3:6]
    detokenizer, needed = Detokenizer(tokenizer, (stop,)), 0
    while detokenizer.stopped is None:
        detokenizer.push(ids[needed])
        needed += 1
    assert detokenizer.text == released
    assert needed == {"\n": 2, "日": 6, "e\n\n": 3, "\n.": 4}[stop]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_stop_strings_of_any_bytes_are_those_of_the_decoded_text(data: st.DataObject) -> None:
    tokenizer = sentencepiece()
    some = [*(f"<0x{byte:02X}>" for byte in "\né日\x80".encode()), "a", "▁"]
    drawn = data.draw(st.lists(st.sampled_from(some), max_size=12))
    ids = tokenizer.huggingface.convert_tokens_to_ids(drawn)
    detokenizer = Detokenizer(tokenizer, ("\n", "日"))
    for count, token in enumerate(ids, 1):
        detokenizer.push(token)
        if detokenizer.stopped is not None:
            whole = tokenizer.decode(ids[:count])
            assert whole.startswith(detokenizer.text + detokenizer.stopped)
            return
    detokenizer.finish()
    assert (detokenizer.stopped is not None) == ("\n" in tokenizer.decode(ids) or "日" in tokenizer.decode(ids))


def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    stream(Detokenizer(sentencepiece()), sentencepiece().encode("the cat " * 500))
    assert max(lengths) <= 2


# A real model


@real_model
def test_smollm2_special_tokens_are_single_ids() -> None:
    tokenizer = smollm2()
    for name, index in {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<repo_name>": 3}.items():
        assert tokenizer.encode(name) == [index]
    assert set(tokenizer.eos_token_ids) >= {2}
    assert tokenizer.vocab_size == 49152


@real_model
def test_smollm2_splits_text_like_the_original() -> None:
    """Digits are split off one by one before words are, so the spaces before a number stay together."""
    spelled = smollm2().huggingface.convert_ids_to_tokens(smollm2().encode("in 2024  x    17 "))
    assert spelled == ["in", "Ġ", "2", "0", "2", "4", "Ġ", "Ġx", "ĠĠĠĠ", "1", "7", "Ġ"]


@real_model
def test_smollm2_chat_template_in_the_file_is_used() -> None:
    ids = smollm2().chat([{"role": "user", "content": "Hi"}])
    text = smollm2().huggingface.decode(ids)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3


@real_model
@given(parts=st.lists(st.sampled_from(TEXTS), max_size=10))
@settings(max_examples=200, deadline=None)
def test_smollm2_text_survives_the_round_trip(parts: list[str]) -> None:
    text = "".join(parts)
    assert smollm2().decode(smollm2().encode(text)) == text


@real_model
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
@settings(max_examples=300, deadline=None)
def test_smollm2_pieces_join_to_the_decoded_text(ids: list[int]) -> None:
    assert "".join(stream(Detokenizer(smollm2()), ids)) == smollm2().decode(ids)


@real_model
def test_bytes_of_smollm2_tokens_are_those_that_the_tokenizer_decodes() -> None:
    tokenizer = smollm2()
    texts = tokenizer.huggingface.batch_decode(
        [[token] for token in range(tokenizer.vocab_size)], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    found = [tokenizer.bytes_in_text(token).decode(errors="replace") for token in range(tokenizer.vocab_size)]
    assert found == texts


@real_model
def test_random_smollm2_tokens_of_any_length_are_decoded_incrementally() -> None:
    chance, tokenizer = random.Random(7), smollm2()
    for _ in range(300):
        ids = chance.choices(range(tokenizer.vocab_size), k=chance.randrange(1, 200))
        assert "".join(stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)
