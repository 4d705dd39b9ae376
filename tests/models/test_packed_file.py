"""The disk cache of packed weights: the second load reads what the first packed, and detects every change."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import real_models
from covering import in_turn
from model_support import NATIVE, VOCABULARY, packed, tiny
from paceline import LLM, SamplingParams
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.models.load import packed_copy, prepare
from paceline.models.load import packed_file as module
from paceline.models.load.packed_file import PackedFile, packed_file
from paceline.models.load.prepare import ModelOptions
from paceline.models.native.model import NativeModel, Quantization

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        native.select() is None, reason=f"only the native kernels use packed weights: {native.why_none()}"
    ),
]
CPU = torch.device("cpu")
SHAPE = {"hidden_size": 40, "intermediate_size": 50, "head_dim": 16}
FAMILIES = ["llama", "llama with tied embeddings", "mistral with a window", "qwen2", "qwen3 with biases"]
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of packed weights, in an empty cache that is turned on."""
    monkeypatch.setenv(packed_copy.VARIABLE, "on")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def write_checkpoint(path: Path, family: str = "llama", seed: int = 0) -> Path:
    kind, fields = NATIVE[family]
    tiny(kind, fields | SHAPE, seed=seed).save_pretrained(path)
    numbers = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=numbers).save_pretrained(path)
    return path


def file_of(source: Path, quantization: Quantization | None = "int8") -> PackedFile:
    found = packed_file(source, torch.bfloat16, quantization)
    assert found is not None
    return found


def packed_now(source: Path, quantization: Quantization | None = "int8") -> NativeModel:
    return packed(source, quantization, dtype=torch.bfloat16)


def written(source: Path, quantization: Quantization | None = "int8") -> PackedFile:
    """Write a checkpoint's packed weights."""
    written_file = file_of(source, quantization)
    written_file.save(packed_now(source, quantization))
    return written_file


def same(one: NativeModel, other: NativeModel) -> bool:
    ours, theirs = one.packed(), other.packed()
    assert ours is not None
    assert theirs is not None
    return torch.equal(ours, theirs)


def make(source: Path, **options: Any) -> LLM:
    common = {"quantization": "int8", "dtype": "bfloat16", "device": "cpu", "max_batch_size": 2, "max_model_len": 32}
    return LLM(source, **{"num_speculative_tokens": 0} | common | options)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def forbid_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the checkpoint's weights were loaded")

    monkeypatch.setattr(prepare, "open_checkpoint", refuse)


# Reading what was packed


@pytest.mark.parametrize(("family", "quantization"), in_turn(FAMILIES, [None, "int8", "int4"]))
def test_the_weights_read_are_those_that_were_packed(
    family: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "model", family)
    written_file, packed = written(source, quantization), packed_now(source, quantization)
    read = written_file.load()
    assert read is not None
    assert same(read, packed)
    assert (read.name, read.weight_bytes(), read.kernels) == (str(source), packed.weight_bytes(), packed.kernels)
    hidden = torch.randn(3, 40)
    assert torch.equal(read.logits(hidden), packed.logits(hidden))


def test_a_head_that_differs_from_the_embedding_is_not_tied(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    read = written(checkpoint).load()
    assert read is not None
    assert not read.tied
    assert same(read, packed_now(checkpoint))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_second_load_gives_the_same_answers_without_reading_the_checkpoint(
    quantization: Quantization | None, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "draft", seed=1)
    options: dict[str, Any] = {"draft_model": draft, "quantization": quantization}
    first = answers(make(target, **options))
    assert len(list(folder.iterdir())) == 2
    forbid_loading(monkeypatch)
    assert answers(make(target, **options)) == first
    assert answers(make(target, num_speculative_tokens=2, **options)) == first


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model, found before a test has its own cache directory."""
    return real_models.find("smollm2-135m")


def test_a_cached_gguf_model_gives_the_same_answers(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8)

    def texts() -> list[str]:
        llm = LLM(smollm2, quantization="int8", max_model_len=128, max_batch_size=2)
        outputs = llm.generate(["Once upon a time", "The capital of France is"], params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    first = texts()
    forbid_loading(monkeypatch)
    assert texts() == first


# Detecting changes and damage


def weights_of(checkpoint: Path) -> Path:
    return checkpoint / "model.safetensors"


def test_a_changed_checkpoint_is_packed_again_under_the_same_path(checkpoint: Path, folder: Path) -> None:
    written_file = written(checkpoint)
    shutil.rmtree(checkpoint)
    write_checkpoint(checkpoint, seed=1)
    assert file_of(checkpoint).path == written_file.path
    assert file_of(checkpoint).load() is None
    read = written(checkpoint).load()
    assert read is not None
    assert same(read, packed_now(checkpoint))
    assert list(folder.iterdir()) == [written_file.path]


def test_a_change_is_detected_even_with_the_same_size_and_time(checkpoint: Path) -> None:
    written_file, file = written(checkpoint), weights_of(checkpoint)
    before = file.stat()
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert file_of(checkpoint).path == written_file.path
    assert file_of(checkpoint).load() is None


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_new_modification_time_counts_as_a_change(checkpoint: Path, file: str) -> None:
    written(checkpoint)
    os.utime(checkpoint / file, ns=(0, 0))
    assert file_of(checkpoint).load() is None


def test_a_change_of_any_shard_is_detected(tmp_path: Path) -> None:
    kind, fields = NATIVE["llama"]
    tiny(kind, fields | SHAPE).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        assert written(tmp_path / "model").load() is not None
        os.utime(shard, ns=(0, 0))
        assert file_of(tmp_path / "model").load() is None


def test_each_precision_has_its_own_file(checkpoint: Path) -> None:
    places = [packed_file(checkpoint, dtype, q) for dtype, q in [(torch.bfloat16, "int8"), (torch.float32, "int8")]]
    places += [packed_file(checkpoint, torch.bfloat16, q) for q in (None, "int4")]
    assert len({written_file.path for written_file in places if written_file is not None}) == 4


def test_a_link_to_a_checkpoint_finds_the_same_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    assert file_of(tmp_path / "link").path == written(checkpoint).path
    assert file_of(tmp_path / "link").load() is not None


@pytest.mark.parametrize(("where", "what"), [(module, "LAYOUT_VERSION"), (packed_copy, "__version__")])
def test_another_version_warns_and_packs_again(
    where: ModuleType, what: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(checkpoint).path
    monkeypatch.setattr(where, what, "another")
    assert file_of(checkpoint).load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    assert written(checkpoint).load() is not None


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "no header": lambda content: content[:5],
    "half": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "one byte more": lambda content: content + b"0",
    "header broken": lambda content: b"?" * 16 + content[16:],
    "a bit in the middle": lambda content: flipped(content, len(content) // 2),
    "the last bit": lambda content: flipped(content, len(content) - 1),
    "pieces swapped": lambda content: content[:-128] + content[-64:] + content[-128:-64],
    "something else": lambda content: b"hello" * 1000,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_replaced_with_a_warning(
    how: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(checkpoint).path
    content = path.read_bytes()
    path.write_bytes(DAMAGE[how](content))
    assert path.read_bytes() != content
    first = answers(make(checkpoint))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    read = file_of(checkpoint).load()
    assert read is not None
    assert same(read, packed_now(checkpoint))
    assert answers(make(checkpoint)) == first


DEEP = "[" * 100_000
HEADERS: dict[str, dict[str, str | None]] = {
    "no tied": {"tied": None},
    "tied is a text": {"tied": '"no"'},
    "tied is a number": {"tied": "1"},
    "tied is no JSON": {"tied": "tru"},
    "tied is deep": {"tied": DEEP},
    "no crc32": {"crc32": None},
    "crc32 is a number": {"crc32": "7"},
    "crc32 is an object": {"crc32": "{}"},
    "crc32 holds texts": {"crc32": '["7"]'},
    "crc32 is empty": {"crc32": "[]"},
    "crc32 is no JSON": {"crc32": "[1, "},
    "crc32 is deep": {"crc32": DEEP},
    "no origin": {"origin": None},
    "nothing": {"origin": None, "tied": None, "crc32": None, "source": None},
}


@pytest.mark.parametrize("how", HEADERS)
def test_a_damaged_header_is_replaced_with_a_warning(
    how: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written_file = written(checkpoint)
    with safe_open(str(written_file.path), framework="pt") as file:
        metadata = file.metadata() | HEADERS[how]
    save_file(
        load_file(written_file.path),
        written_file.path,
        {name: text for name, text in metadata.items() if text is not None},
    )
    assert written_file.load() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(written_file.path) in caplog.text
    assert len(caplog.text) < 1000
    assert written(checkpoint).load() is not None


def test_large_weights_are_read_and_checked_in_blocks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "_BLOCK", 4096)
    monkeypatch.setattr(packed_copy, "_READ_BYTES", 1024)
    written_file = written(checkpoint)
    read = written_file.load()
    assert read is not None
    assert same(read, packed_now(checkpoint))
    content = bytearray(written_file.path.read_bytes())
    content[-9000] ^= 128
    written_file.path.write_bytes(content)
    assert written_file.load() is None


# Write errors


def test_an_unwritable_folder_gives_one_warning(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    first = answers(make(checkpoint))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "could not be cached" in caplog.text
    assert answers(make(checkpoint, attention="native")) == first


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_a_full_disk_gives_one_warning_and_leaves_no_file(
    when: str, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object, path: Path, __: object) -> None:
        path.write_bytes(b"a beginning")
        raise OSError(28, "No space left on device", str(path))

    if when == "before":
        usage = shutil.disk_usage("/")._replace(free=10)
        monkeypatch.setattr(packed_copy.shutil, "disk_usage", lambda _: usage)  # type: ignore[attr-defined]
    else:
        monkeypatch.setattr(module, "save_file", fail)
    assert answers(make(checkpoint))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "could not be cached in" in caplog.text
    assert list(folder.iterdir()) == []


def test_concurrent_reads_and_writes_are_safe(checkpoint: Path, folder: Path) -> None:
    written_file, model = written(checkpoint), packed_now(checkpoint)

    def work(turn: int) -> bool:
        if turn % 2:
            written_file.save(model)
            return True
        read = written_file.load()
        return read is not None and same(read, model)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))
    assert list(folder.iterdir()) == [written_file.path]


# Models that are cached


def test_the_cache_can_be_turned_off(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_copy.VARIABLE, "off")
    assert answers(make(checkpoint))
    assert not folder.exists()
    monkeypatch.setenv(packed_copy.VARIABLE, "of")
    with pytest.raises(ParameterError, match="PACELINE_PACKED_CACHE='of' is not allowed: 'on' or 'off'"):
        make(checkpoint)


@pytest.mark.parametrize(
    "options",
    [{"attention": "padded", "quantization": None}, {"dtype": "float32", "quantization": None}],
    ids=["padded", "float32"],
)
def test_models_that_do_not_run_on_the_kernels_are_not_cached(
    options: dict[str, Any], checkpoint: Path, folder: Path
) -> None:
    assert answers(make(checkpoint, **options))
    assert not folder.exists()


def test_gpus_and_machines_without_kernels_have_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(torch.bfloat16, CPU, "auto", "int8")
    assert options.suit_kernels
    assert not replace(options, device=torch.device("cuda")).suit_kernels
    assert not replace(options, quantization="fp8").suit_kernels
    monkeypatch.setattr(native, "select", lambda: None)
    assert not options.suit_kernels


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_loaded_model_is_packed_like_its_files(quantization: Quantization | None, tmp_path: Path) -> None:
    kind, fields = NATIVE["qwen3 with biases"]
    theirs = tiny(kind, fields | SHAPE)  # of float32 numbers that bfloat16 does not hold
    theirs.save_pretrained(tmp_path)
    assert same(packed(theirs, quantization, dtype=torch.bfloat16), packed_now(tmp_path, quantization))


def test_a_loaded_model_has_no_packed_file() -> None:
    kind, fields = NATIVE["llama"]
    assert packed_file(tiny(kind, fields), torch.bfloat16, "int8") is None


def test_families_that_the_kernels_do_not_support_are_not_cached(tmp_path: Path, folder: Path) -> None:
    source = write_checkpoint(tmp_path / "model", "gpt2")
    assert answers(make(source, quantization=None))
    assert not folder.exists()


def test_packed_weights_are_deleted_when_their_checkpoint_is_gone(tmp_path: Path, folder: Path) -> None:
    gone, stays = written(write_checkpoint(tmp_path / "a")), written(write_checkpoint(tmp_path / "b"))
    (folder / "broken.safetensors").write_bytes(b"?")
    shutil.rmtree(gone.source)
    last = written(write_checkpoint(tmp_path / "c"))
    assert sorted(folder.iterdir()) == sorted([stays.path, last.path, folder / "broken.safetensors"])


def test_the_header_names_the_checkpoint_and_the_precision(checkpoint: Path) -> None:
    written_file = written(checkpoint)
    with safe_open(str(written_file.path), framework="pt") as file:
        metadata = file.metadata()
    assert metadata["source"] == str(checkpoint)
    assert json.loads(metadata["origin"])[1:4] == [module.LAYOUT_VERSION, "torch.bfloat16", "int8"]  # type: ignore[attr-defined]
    assert written_file.path.name.startswith("model-int8-")
